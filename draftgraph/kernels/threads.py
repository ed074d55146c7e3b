"""Threads that run one compiled function together: it is told which of them it is, and where they meet."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import Any

import numpy as np
import torch

Function = Callable[..., None]  # (thread, threads, address of what `vectors.meet` counts in, ...)


class Team:
    """So many threads, the caller among them. Between two runs the others sleep."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._met = np.zeros(16, dtype=np.int64)  # a cache line that nobody else writes into
        self._busy = Lock()
        self._jobs: list[SimpleQueue[tuple[Function, tuple[Any, ...]]]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, start=1):
            Thread(target=self._work, args=(number, jobs), daemon=True, name=f"draftgraph-{number}").start()

    def run(self, function: Function, *given: Any) -> None:
        """Returns when all are done: the function's last act must be to meet."""
        with self._busy:
            for jobs in self._jobs:
                jobs.put((function, given))
            function(0, self.threads, self._met.ctypes.data, *given)

    def _work(self, number: int, jobs: SimpleQueue[tuple[Function, tuple[Any, ...]]]) -> None:
        while True:
            function, given = jobs.get()
            function(number, self.threads, self._met.ctypes.data, *given)


_torch = local()


@contextmanager
def torch_alone() -> Iterator[None]:
    """PyTorch computes in the calling thread: its other threads would keep processors busy that ours need, waiting for
    work for a millisecond after each operation."""
    outer, before = getattr(_torch, "threads", None), torch.get_num_threads()
    _torch.threads = outer or before
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _torch.threads = outer


def thread_count() -> int:
    """As many as PyTorch uses, `torch_alone` aside."""
    return getattr(_torch, "threads", None) or torch.get_num_threads()


@cache
def _team(threads: int, process: int) -> Team:
    return Team(threads)


def team_of(threads: int) -> Team:
    """All users of one process share a team; a process that was forked has none of its parent's threads."""
    return _team(threads, os.getpid())
