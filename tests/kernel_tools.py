"""Triton's kernels without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import numpy as np
import pytest
import torch


@contextmanager
def interpreter(**options: Any) -> Iterator[Callable[..., Any]]:
    """Calls functions where Triton interprets its kernels: that is decided when it is imported, so in a process of its
    own, which `options` are for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), **options) as process:
            yield lambda *given, **named: process.submit(*given, **named).result()


@contextmanager
def strict_interpreter() -> Iterator[Callable[..., Any]]:
    """The same; memory that is allocated and never written is not a number."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if version("triton") < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.7 needs NumPy before 2.4")
    with interpreter(initializer=torch.use_deterministic_algorithms, initargs=(True,)) as call:
        yield call
