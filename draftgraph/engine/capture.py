"""A computation over fixed buffers, recorded once as a CUDA graph and replayed; elsewhere it is simply run again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from draftgraph.garbage import without_garbage_collection

WARM_UPS = 2  # kernels are compiled and chosen before they are recorded


class Captured:
    """Call it after its buffers were filled: `output` holds the result, until the next call. What it copies to the
    host is there after `wait`."""

    def __init__(self, compute: Callable[[], Any], device: torch.device, pool: Any = None) -> None:
        self._compute = compute
        self._graph: torch.cuda.CUDAGraph | None = None
        self._done: torch.cuda.Event | None = None
        self.output: Any = None
        if device.type == "cuda":
            self._record(device, pool)

    def _record(self, device: torch.device, pool: Any) -> None:
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


def host_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that this device can read and write by itself."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
