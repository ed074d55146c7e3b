"""The best few tokens of a draft at every node of a pass, recorded as a part of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.best import best_tokens
from draftgraph.engine.capture import host_memory
from draftgraph.engine.sampler import Sampling, SamplingData
from draftgraph.engine.sampling import perturbed
from draftgraph.graph import NO_TOKEN, Floats, Ints


@dataclass(frozen=True)
class Wanted:
    """What a draft is asked for at every node."""

    tokens: Tensor  # that its columns stand for
    k: int
    sampling: Sampling | None  # whose noise it adds; None: none

    @property
    def kind(self) -> tuple[int, bool]:
        """What is recorded; the rest is data."""
        return self.k, self.sampling is not None


class Proposals:
    """Those of one recorded pass."""

    def __init__(self, nodes: int, columns: int, wanted: Wanted, device: torch.device) -> None:
        self._noise = None if wanted.sampling is None else SamplingData(device)
        self._tokens = wanted.tokens[:columns]
        self._report = host_memory((nodes, 2, min(wanted.k, len(self._tokens))), torch.float64, device)

    def tell(self, sampling: Sampling | None) -> None:
        if self._noise is not None and sampling is not None:
            self._noise.tell(sampling)

    def compute(self, logits: Tensor, positions: Tensor) -> None:
        """At nodes of these positions: the noise is that of the next ones. # [nodes, columns], [nodes]"""
        logits = logits[:, : len(self._tokens)]
        if self._noise is not None:
            self._noise.arrive()
            logits = perturbed(logits, self._noise.key, positions + 1, self._tokens, self._noise.temperature)
        best, chances = best_tokens(logits, self._report.shape[2])
        self._report.copy_(torch.stack([self._tokens[best].double(), chances.double()], dim=1), non_blocking=True)

    def read(self, nodes: int) -> tuple[Ints, Floats]:
        """Tokens and probabilities at the first so many, best first, once the pass is done. # [nodes, k] each"""
        report: Floats = self._report.numpy()[:nodes]
        probs = np.exp(report[:, 1])
        possible = probs > 0  # what is no number is not
        return np.where(possible, report[:, 0], NO_TOKEN).astype(np.int64), np.where(possible, probs, 0.0)
