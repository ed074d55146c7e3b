"""Threads that run one compiled function together: it is told which of them it is, and where they meet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from threading import Lock, Thread, local
from typing import Any

import numpy as np
import torch

from draftgraph.compiled import compiled
from draftgraph.kernels.vectors import cycles

Function = Callable[..., None]  # (thread, threads, address of what `vectors.meet` counts in, ...)
Job = tuple[Function, int, tuple[Any, ...]]  # with so many threads, and what the function is given

WAITED = 1  # place of the cycles that were waited for long: see `vectors.meet`
LEAST_WAIT = 1.5e-4  # seconds: waking a thread that sleeps may take as long
SHORTEST, LONGEST = 0.005, 1.0  # seconds with fewer threads, at first and at most
RECOVERY = 0.9  # of these seconds after a run that was not kept waiting


class Team:
    """So many threads, the caller among them. Between two runs the others sleep.

    A thread whose processor is given to another program keeps all others waiting wherever they meet. Where that takes
    half of a run, half of the threads would be as quick: so many are used for a while, then all are tried again.
    """

    def __init__(self, threads: int) -> None:
        self.threads = self._used = threads
        # For each number of threads a cache line of its own, in which they count how often they have met.
        self._shared = np.zeros((threads + 1, 16), dtype=np.int64)
        self._busy = Lock()
        self._first_address: int = self._shared.ctypes.data
        self._until, self._pause = 0.0, SHORTEST
        self._jobs: list[SimpleQueue[Job]] = [SimpleQueue() for _ in range(threads - 1)]
        for number, jobs in enumerate(self._jobs, start=1):
            Thread(target=self._work, args=(number, jobs), daemon=True, name=f"draftgraph-{number}").start()

    def run(self, function: Function, *given: Any) -> None:
        """Returns when all are done: the function's last act must be to meet, and its results must be the same for any
        number of threads."""
        with self._busy:
            start = time.monotonic()
            if start >= self._until:
                self._used = self.threads
            shared = self._shared[self._used]
            first, shared[WAITED] = clock(), 0
            self._together(function, self._used, given)
            if self._used > 1:
                self._judge(int(shared[WAITED]) / max(1, clock() - first), start)

    def _together(self, function: Function, threads: int, given: tuple[Any, ...]) -> None:
        for jobs in self._jobs[: threads - 1]:
            jobs.put((function, threads, given))
        function(0, threads, self._address(threads), *given)

    def _address(self, threads: int) -> int:
        return self._first_address + threads * self._shared.strides[0]

    def _judge(self, waited: float, start: float) -> None:
        """`waited`: by all of them together, in times of the run."""
        now, each = time.monotonic(), waited / (self._used - 1)
        if each > 0.5 and each * (now - start) > LEAST_WAIT:
            self._used //= 2
            self._until, self._pause = now + self._pause, min(2 * self._pause, LONGEST)
        elif self._used == self.threads:
            self._pause = max(SHORTEST, RECOVERY * self._pause)

    def _work(self, number: int, jobs: SimpleQueue[Job]) -> None:
        while True:
            function, threads, given = jobs.get()
            function(number, threads, self._address(threads), *given)


@compiled
def clock() -> int:
    return cycles()  # type: ignore[no-any-return]


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
