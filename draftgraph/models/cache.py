"""Where files are kept between starts, and what the user is told meanwhile."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftgraph.errors import LoadError

TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads its own variables


def cache_dir() -> Path:
    """The folder for converted models: `DRAFTGRAPH_CACHE`, or the platform's cache folder of the user."""
    chosen = os.environ.get("DRAFTGRAPH_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    from platformdirs import user_cache_path

    return user_cache_path("draftgraph", appauthor=False)


def offline() -> bool:
    """Whether the user forbade all fetching."""
    return any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "DRAFTGRAPH_OFFLINE"))


def notice(line: str) -> None:
    print(f"draftgraph: {line}", file=sys.stderr, flush=True)


def sha256_of(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def remembered_sha256(file: Path) -> str:
    """The file's SHA-256, read again only when its path, size or time of change is new."""
    stat = file.stat()
    key = hashlib.sha256(f"{file}\n{stat.st_size}\n{stat.st_mtime_ns}".encode()).hexdigest()
    memo = cache_dir() / "digests" / key
    with suppress(OSError):
        digest = memo.read_text()
        if len(digest) == 64:
            return digest
    digest = sha256_of(file)
    with suppress(OSError):  # only speed is lost
        memo.parent.mkdir(parents=True, exist_ok=True)
        memo.write_text(digest)
    return digest


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `file` once all is written: no reader ever finds half of it."""
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors writes for the owner alone
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def only_one(path: Path, waiting: str) -> Iterator[None]:
    """Hold the lock of `path`; a process that finds it taken says `waiting` and waits. A killed holder frees it."""
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f".{path.name}.lock"))
        try:
            lock.acquire(blocking=False)
        except Timeout:
            notice(waiting)
            lock.acquire()
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise LoadError(
            f"cannot write to the cache folder {path.parent} ({reason}): "
            "set DRAFTGRAPH_CACHE to a folder that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()
