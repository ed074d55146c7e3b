"""What sampling is told on a device, and the choice at every node of a pass, recorded right behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftgraph.engine.capture import Captured, host_memory
from draftgraph.kernels.sampling import sample
from draftgraph.noise import signed

# In the order of `generate`: each sees what the one before it has left.
FIELDS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True)
class Warping:
    """What `sample` can do to scores."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warping | None:
        """What these processors do; None if that is anything else, or in another order."""
        kinds = [type(processor) for processor in processors]
        if kinds != [kind for kind in FIELDS if kind in kinds] or any(map(unusual, processors)):
            return None
        return cls(**{FIELDS[type(processor)]: getattr(processor, FIELDS[type(processor)]) for processor in processors})


def unusual(processor: Any) -> bool:
    filter_value = getattr(processor, "filter_value", -torch.inf)
    return bool(filter_value != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) != 1)


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
