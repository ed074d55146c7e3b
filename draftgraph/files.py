"""Files and folders that outlive a run: the cache, digests, locks, and files that are written as a whole."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftgraph.errors import DraftGraphError, LoadError, UsageError, causes, one_line
from draftgraph.notices import notice

TRUE = {"1", "ON", "YES", "TRUE"}  # as huggingface_hub reads its own variables
LOCK = ".lock"
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
PACKED = "packed.safetensors"  # weights of 4 or 8 bits, in a folder that we made of a file
ANOTHER_CACHE = "set DRAFTGRAPH_CACHE to a folder"
ANOTHER_OUT = "give --out a folder"


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
def writing(what: str, folder: Path, elsewhere: str = ANOTHER_CACHE) -> Iterator[None]:
    """Says which folder is full or cannot be written when `what` fails to be kept there, and how to name another."""
    try:
        yield
    except DraftGraphError:
        raise
    except Exception as error:
        if is_disk_full(error):
            raise LoadError(disk_full(what, folder, elsewhere=elsewhere)) from error
        raise LoadError(
            f"cannot keep {what} in {folder} ({one_line(error)}): {elsewhere} that can be written"
        ) from error


def is_disk_full(error: BaseException) -> bool:
    # safetensors writes from Rust, where the number is only in the text.
    return any(
        (isinstance(cause, OSError) and cause.errno in DISK_FULL) or "No space left on device" in str(cause)
        for cause in causes(error)
    )


def disk_full(what: str, folder: Path, needed: int | None = None, elsewhere: str = ANOTHER_CACHE) -> str:
    size = f"{needed / 1e9:.1f} GB of" if needed else "more"
    return f"the disk is full: {what} needs {size} room in {folder}; free some space or {elsewhere} on another disk"


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
            f"cannot write to the cache folder {path.parent} ({reason}): {ANOTHER_CACHE} that can be written"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def claimed(folder: Path, option: str) -> Iterator[None]:
    """Before hours of work: refuses a folder that could not be written at their end, and leaves no empty one behind."""
    made = [place for place in (folder, *folder.parents) if not os.path.lexists(place)]
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(f"{option} {folder} cannot be written ({reason}): name another folder") from error
        yield
    finally:
        with suppress(OSError):  # there is something in it
            for place in made:
                place.rmdir()


@contextmanager
def held_alone(folder: Path, command: str = "distill") -> Iterator[None]:
    """Refuses a folder that another run works in. The system frees the lock of a run that was killed."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise UsageError(
            f"another run of {command} works in --out {folder}: wait for it, or name another folder"
        ) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):  # Windows removes no open file
                (folder / LOCK).unlink()
        lock.release()
