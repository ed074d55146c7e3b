"""A computation over fixed buffers, recorded once as a CUDA graph and replayed; elsewhere it is simply run again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed

WORD_BYTES = 8
WARM_UPS = 2  # kernels are compiled and chosen before they are recorded


class Captured:
    """Call it after its buffers were filled: `output` holds the result, until the next call. What it copies to the
    host is there after `wait`."""

    made: ClassVar[int] = 0  # recordings so far: they take far longer than what they record

    def __init__(
        self, compute: Callable[[], Any], device: torch.device, pool: Any = None, recorded: bool = True
    ) -> None:
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self.output: Any = None
        if device.type == "cuda" and recorded:
            self._record(device, pool)

    def _record(self, device: torch.device, pool: Any) -> None:
        Captured.made += 1
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                self._compute()
        torch.cuda.current_stream(device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # an old recording that is thrown away while a new one is made breaks it
        # Where there are ranks, a thread of NCCL asks for its own events meanwhile, which may not break the recording.
        mode = "thread_local" if distributed.is_available() and distributed.is_initialized() else "global"
        with without_garbage_collection(), torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            self.output = self._compute()
        self._graph = graph

    def __call__(self) -> Any:
        if self._graph is None:
            self.output = self._compute()
        else:
            self._graph.replay()
        if self._done is not None:
            self._done.record()
        return self.output

    def wait(self) -> None:
        """Until the last call is done."""
        if self._done is not None:
            self._done.synchronize()


def graph_memory(device: torch.device) -> Any:
    """Memory that recordings may share, if none of them leaves anything there. When all of them are gone the next ones
    need another: it cannot be used again while somebody holds a result."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that this device can read and write by itself."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")


Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shapes and number formats, by name


class Buffer:
    """Named arrays in one piece of the host's memory, and the same on the device: one copy hands them over. On a CPU
    both are one, unless the host has several sides."""

    def __init__(self, parts: Parts, device: torch.device, sides: int = 1) -> None:
        """`sides`: of the host's memory; it may write into one while another is on its way."""
        size = sum(words_of(*part) for part in parts.values())
        self._sides = [host_memory((size,), torch.int64, device) for _ in range(sides)]
        self._side = 0
        apart = device.type != "cpu" or sides > 1
        self._device = torch.zeros_like(self._sides[0], device=device) if apart else self._sides[0]
        self._arrays = [{name: one.numpy() for name, one in split(side, parts).items()} for side in self._sides]
        self.device = split(self._device, parts)

    @property
    def host(self) -> dict[str, Any]:
        """NumPy arrays, of the side that is written now."""
        return self._arrays[self._side]

    def turn(self) -> int:
        """To the next side."""
        self._side = (self._side + 1) % len(self._sides)
        return self._side

    def arrive(self, unused: int = 0) -> None:
        """The device takes over what the host has written, but for so many numbers of 64 bits at the end; the host may
        write there again when that is done."""
        host = self._sides[self._side]
        if self._device is not host:
            size = len(host) - unused
            self._device[:size].copy_(host[:size], non_blocking=True)


def words_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return -(-prod(shape) * dtype.itemsize // WORD_BYTES)


def split(memory: Tensor, parts: Parts) -> dict[str, Tensor]:
    """The parts, one after the other."""
    found, start = {}, 0
    for name, (shape, dtype) in parts.items():
        end = start + words_of(shape, dtype)
        found[name], start = memory[start:end].view(dtype)[: prod(shape)].view(shape), end
    return found


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
