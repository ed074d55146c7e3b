"""What the target's last layer said, kept where there is room: from the second pass over a text on it need not run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from draftgraph.graph import Ints

MEMORY_SHARE = 0.5  # of what is free on a GPU
CPU_BYTES = 1 << 30


class TargetMemory:
    """States [positions, width] of every learnt position of every text, or of none if they do not all fit."""

    def __init__(self, positions: Ints, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._ends = np.cumsum(positions)
        self._starts = self._ends - positions
        self._known = np.zeros(len(positions), dtype=bool)
        total = int(self._ends[-1])
        fits = total * width * dtype.itemsize <= room_on(device)
        self._states = torch.empty((total, width), dtype=dtype, device=device) if fits else None

    def recall(self, rows: list[int]) -> Tensor | None:
        """The states of these texts, one text after the other; None unless all are known."""
        if self._states is None or not self._known[rows].all():
            return None
        return self._states[self._index(rows)]

    def keep(self, rows: list[int], states: Tensor) -> None:
        if self._states is not None:
            self._states[self._index(rows)] = states
            self._known[rows] = True

    @property
    def empty(self) -> bool:
        return not self._known.any()

    def give_up(self) -> None:
        self._states = None

    def _index(self, rows: list[int]) -> Tensor:
        assert self._states is not None
        index = np.concatenate([np.arange(self._starts[row], self._ends[row]) for row in rows])
        return torch.from_numpy(index).to(self._states.device, non_blocking=True)


def room_on(device: torch.device) -> float:
    if device.type != "cuda":
        return CPU_BYTES
    torch.cuda.empty_cache()
    return MEMORY_SHARE * torch.cuda.mem_get_info(device)[0]
