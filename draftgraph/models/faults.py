"""What transformers and the hub report: errors in one line that says what to do, warnings and bars kept quiet."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftgraph.errors import DraftGraphError, LoadError, UsageError, causes, one_line
from draftgraph.files import is_disk_full

LINES: dict[str, dict[str, str]] = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))


def explain(error: Exception, name: str, part: str = "") -> DraftGraphError:
    """The line for a model, or a part of one, that could not be loaded, from whatever transformers raised."""
    if isinstance(error, DraftGraphError):
        return error
    if is_disk_full(error):
        return LoadError(f"the disk is full: {name} could not be kept; free some space or set HF_HOME to another disk")
    for cause in causes(error):
        for kind in type(cause).__mro__:
            if line := LINES["types"].get(kind.__name__):
                return LoadError(line.format(name=name, reason=one_line(cause)))
    text = " ".join(str(error).split())
    for known, line in LINES["texts"].items():
        if known in text:
            return LoadError(line.format(name=name))
    if isinstance(error, FileNotFoundError):
        return LoadError(f"{name} is incomplete, {one_line(error)}: fetch it again")
    if isinstance(error, TypeError) and "unexpected keyword argument" in text:
        return UsageError(f"{name} does not take this argument: {one_line(error)}")
    return LoadError(f"cannot load {part}{name}: {one_line(error)} ({type(error).__name__})")


@contextmanager
def quiet_transformers(bars: bool = False) -> Iterator[None]:
    """No warnings from transformers, unless TRANSFORMERS_VERBOSITY is set, and bars only where wanted."""
    from transformers.utils import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    if not (bars and sys.stderr.isatty()):
        logging.disable_progress_bar()
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()
