"""A computation over fixed buffers, recorded once as a CUDA graph and replayed; elsewhere it is simply run again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from draftgraph.garbage import without_garbage_collection

WARM_UPS = 2  # kernels are compiled and chosen before they are recorded


class Captured:
    """Call it after its buffers were filled: `output` holds the result, until the next call. What it copies to the
    host is there after `wait`."""

    made: ClassVar[int] = 0  # recordings so far: they take far longer than what they record

    def __init__(self, compute: Callable[[], Any], device: torch.device, pool: Any = None) -> None:
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done: torch.cuda.Event | None = None
        self.output: Any = None
        if device.type == "cuda":
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
        with without_garbage_collection(), torch.cuda.graph(graph, pool=pool):
            self.output = self._compute()
        self._graph, self._done = graph, torch.cuda.Event()

    def __call__(self) -> Any:
        if self._graph is None or self._done is None:
            self.output = self._compute()
        else:
            self._graph.replay()
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
