"""What sampling is told on a device, and the choice at every node of a pass, recorded right behind it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftgraph.engine.capture import Captured, host_memory
from draftgraph.engine.sampling import Warping, sample
from draftgraph.noise import signed


@dataclass(frozen=True)
class Sampling:
    """How a request is sampled."""

    key: int  # of its noise: see `KeyedNoise.stream_key`
    warping: Warping


class SamplingData:
    """The same as numbers on a device, which takes them over as part of a recorded computation."""

    def __init__(self, device: torch.device) -> None:
        self._host = host_memory((4,), torch.float64, device)
        self._device = torch.zeros_like(self._host, device=device)
        self._told: Sampling | None = None
        self.key = self._device[:1].view(torch.long)
        self.temperature, self.top_p, self.min_p = (self._device[place : place + 1] for place in (1, 2, 3))

    def tell(self, sampling: Sampling) -> None:
        if sampling == self._told:
            return
        self._told = sampling
        warping = sampling.warping
        self._host[:1].view(torch.long).fill_(signed(sampling.key))
        self._host[1:].copy_(torch.tensor([warping.temperature, warping.top_p, warping.min_p], dtype=torch.float64))

    def arrive(self) -> None:
        self._device.copy_(self._host, non_blocking=True)


class NodeSampler:
    """Chooses at the nodes of one recorded pass, whose output are logits, at their positions."""

    def __init__(self, scored: Captured, positions: Tensor, top_k: int) -> None:
        self._scored, self._positions, self._top_k = scored, positions, top_k
        self._data = SamplingData(positions.device)
        self._tokens = host_memory(positions.shape, torch.long, positions.device)
        self._run = Captured(self._compute, positions.device)

    def tokens(self, sampling: Sampling) -> list[int]:
        """Waits for the device."""
        self._data.tell(sampling)
        self._run()
        self._run.wait()
        return self._tokens.tolist()

    def _compute(self) -> None:
        data, logits, following = self._data, self._scored.output, self._positions + 1
        data.arrive()
        chosen = sample(logits, data.key, following, data.temperature, data.top_p, data.min_p, self._top_k)
        self._tokens.copy_(chosen, non_blocking=True)
