"""Transformers' own bars and warnings: followed, or kept quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from draftgraph.notices import Report


@contextmanager
def watch_gguf_tensors(report: Report) -> Iterator[None]:
    """Follow transformers' loop over the tensors of a GGUF file, which has no callback but a tqdm of its own."""
    loader: Any = import_module("transformers.modeling_gguf_pytorch_utils")

    def watched(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            report(index / len(tensors))
            yield tensor

    original = getattr(loader, "tqdm", None)
    loader.tqdm = watched
    try:
        yield
    finally:
        loader.tqdm = original


@contextmanager
def quiet_transformers(bars: bool = False) -> Iterator[None]:
    """No warnings from transformers, unless asked for by TRANSFORMERS_VERBOSITY, and bars only where wanted."""
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
