"""Triton's kernels without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

import pytest


@contextmanager
def interpreter(**options: Any) -> Iterator[Callable[..., Any]]:
    """Calls functions where Triton interprets its kernels: that is decided when it is imported, so in a process of its
    own, which `options` are for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **options) as process:
            yield lambda *given, **named: process.submit(*given, **named).result()
