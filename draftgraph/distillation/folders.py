"""The folders of a run: whether they can be used, by it alone, and gone again if nothing was written there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftgraph.errors import UsageError

LOCK = ".lock"


@contextmanager
def claimed(folder: Path, option: str) -> Iterator[None]:
    """Before hours of work: refuses a folder that could not be written at their end."""
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


def refuse_other_content(folder: Path) -> None:
    """What is there must be a draft, or a training on its way: everything else is somebody's."""
    if (folder / "config.json").exists():
        from draftgraph.models.draft_folder import is_draft_folder

        if not is_draft_folder(folder):
            raise UsageError(f"--out {folder} holds a model that is no draft: name another folder")
    found = folder.iterdir() if folder.is_dir() else ()
    names = {file.name for file in found if file.suffix != ".partial" and file.name != LOCK}
    if names and not names & {"checkpoint.safetensors", "config.json", "training.json"}:
        raise UsageError(f"--out {folder} holds other files ({min(names)}): name a new or an empty folder")
