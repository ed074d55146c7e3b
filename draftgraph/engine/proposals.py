"""The best few tokens of a draft at every node of a pass, recorded right behind it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.best import best_tokens
from draftgraph.engine.capture import Captured, host_memory
from draftgraph.engine.sampler import Sampling, SamplingData
from draftgraph.engine.sampling import perturbed
from draftgraph.graph import NO_TOKEN, Floats, Ints


@dataclass(frozen=True)
class Wanted:
    """What a draft is asked for at every node."""

    tokens: Tensor  # that its columns stand for
    k: int
    sampling: Sampling | None  # whose noise it adds; None: none


class NodeProposer:
    """Proposes at the nodes of one recorded pass, whose output are logits, at their positions."""

    def __init__(self, scored: Captured, positions: Tensor, wanted: Wanted) -> None:
        self._scored, self._positions, self._wanted = scored, positions, wanted
        self._data = SamplingData(positions.device)
        columns = min(len(wanted.tokens), scored.output.shape[1])
        self._tokens = wanted.tokens[:columns]
        self._report = host_memory((len(positions), 2, min(wanted.k, columns)), torch.float64, positions.device)
        self._told: Floats = self._report.numpy()
        self._run = Captured(self._compute, positions.device)

    def children(self, nodes: int, sampling: Sampling | None) -> tuple[Ints, Floats]:
        """Tokens and probabilities at the first so many nodes, best first. Waits for the device. # [nodes, k] each"""
        if sampling is not None:
            self._data.tell(sampling)
        self._run()
        self._run.wait()
        tokens, probs = self._told[:nodes, 0], np.exp(self._told[:nodes, 1])
        possible = probs > 0  # what is no number is not
        return np.where(possible, tokens, NO_TOKEN).astype(np.int64), np.where(possible, probs, 0.0)

    def _compute(self) -> None:
        data, logits = self._data, self._scored.output[:, : len(self._tokens)]
        if self._wanted.sampling is not None:
            data.arrive()
            logits = perturbed(logits, data.key, self._positions + 1, self._tokens, data.temperature)
        best, chances = best_tokens(logits, self._report.shape[2])
        self._report.copy_(torch.stack([self._tokens[best].double(), chances.double()], dim=1), non_blocking=True)
