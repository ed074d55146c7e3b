"""The best few tokens of a draft at every node of a pass, recorded as a part of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.capture import host_memory
from draftgraph.engine.sampler import Sampling, SamplingData
from draftgraph.graph import NO_TOKEN, Floats, Ints
from draftgraph.kernels.best import best_tokens
from draftgraph.kernels.noise import perturbed


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


def best_words(
    logits: Tensor, tokens: Tensor, k: int, positions: Tensor, noise: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """The k best of the tokens that columns stand for and their log-probabilities, best first; with noise of this key
    and temperature at these positions, if any. # [rows, k] each"""
    logits, tokens = logits[:, : len(tokens)], tokens[: logits.shape[1]]
    if noise is not None:
        logits = perturbed(logits, noise[0], positions, tokens, noise[1])
    best, chances = best_tokens(logits, k)
    return tokens[best], chances


def possible(tokens: Ints, probs: Floats) -> tuple[Ints, Floats]:
    """The same, with NO_TOKEN and 0 where a probability is none, or no number."""
    likely = probs > 0
    return np.where(likely, tokens, NO_TOKEN), np.where(likely, probs, 0.0)


class Proposals:
    """Those of one recorded pass."""

    def __init__(self, nodes: int, columns: int, wanted: Wanted, device: torch.device) -> None:
        self._noise = None if wanted.sampling is None else SamplingData(device)
        self._tokens = wanted.tokens
        self._report = host_memory((nodes, 2, min(wanted.k, len(wanted.tokens), columns)), torch.float64, device)

    def tell(self, sampling: Sampling | None) -> None:
        if self._noise is not None and sampling is not None:
            self._noise.tell(sampling)

    def compute(self, logits: Tensor, positions: Tensor) -> None:
        """At nodes of these positions: the noise is that of the next ones. # [nodes, columns], [nodes]"""
        noise = None
        if self._noise is not None:
            self._noise.arrive()
            noise = self._noise.key, self._noise.temperature
        tokens, chances = best_words(logits, self._tokens, self._report.shape[2], positions + 1, noise)
        self._report.copy_(torch.stack([tokens.double(), chances.double()], dim=1), non_blocking=True)

    def read(self, nodes: int) -> tuple[Ints, Floats]:
        """Tokens and probabilities at the first so many, best first, once the pass is done. # [nodes, k] each"""
        report: Floats = self._report.numpy()[:nodes]
        return possible(report[:, 0].astype(np.int64), np.exp(report[:, 1]))
