"""Host work that a device would wait for, as plain loops over arrays: machine code after the first call.

What is compiled is kept on disk for these very files: a change in one of them compiles all of them anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba

from draftgraph.files import cache_dir
from draftgraph.notices import notice

PLACES = ("graph", "engine", "kernels", "proposers")  # folders with compiled functions
Function = TypeVar("Function", bound=Callable[..., object])


@cache
def folder() -> Path:
    """What was compiled of these files: in our cache, unless Numba has been given another place."""
    settings: Any = numba.config
    place = Path(settings.CACHE_DIR) if settings.CACHE_DIR else cache_dir() / "compiled"
    package = Path(__file__).parent
    files = sorted(file for name in PLACES for file in (package / name).glob("*.py"))
    contents = [content for file in files if b"@compiled" in (content := file.read_bytes())]
    return place / hashlib.sha256(b"".join(contents)).hexdigest()[:16]


@cache
def announce() -> None:
    """One line, if nothing has been compiled yet: the first step will take its time."""
    if not any(folder().rglob("*.nbi")):
        notice("compiling its graph work for this machine, once (10 to 40 seconds)")


def compiled(function: Function) -> Function:
    """Compiles a function when it is first called, unless that is known from before."""
    settings: Any = numba.config
    machine_code: Any = numba.njit(error_model="numpy", nogil=True)(function)
    elsewhere, settings.CACHE_DIR = settings.CACHE_DIR, str(folder())
    try:
        machine_code.enable_caching()
    except (RuntimeError, OSError):  # there is no place for it: only time is lost
        pass
    finally:
        settings.CACHE_DIR = elsewhere
    return machine_code  # type: ignore[no-any-return]
