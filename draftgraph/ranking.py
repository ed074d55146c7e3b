"""What the host reads of the target's logits: the best tokens of every node, in one transfer."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from draftgraph.graph import Floats, Ints
from draftgraph.kernels.best import best_logits

KEPT = 16  # tokens of a node; noise may put any of them first


@dataclass(frozen=True)
class Ranking:
    """The target's best tokens at each node of a tree, best first."""

    tokens: Ints  # [nodes, kept]
    logits: Floats

    @classmethod
    def of(cls, logits: Tensor, kept: int = KEPT) -> Ranking:
        return cls.read(packed(logits, kept).cpu().numpy())

    @classmethod
    def read(cls, packed: Floats) -> Ranking:
        return cls(packed[:, 0].astype(np.int64), packed[:, 1].copy())

    def best(self, node: int, logits: Tensor) -> int:
        """The argmax of a node: of equals the first, of which `topk` may have kept another."""
        values = self.logits[node]
        if len(values) > 1 and values[0] > values[1]:
            return int(self.tokens[node, 0])
        ties = values == values[0]
        ties[0] = True  # also where it is no number
        return int(logits[node].argmax()) if ties.all() else int(self.tokens[node][ties].min())

    def finite(self, nodes: list[int]) -> bool:
        """Whether these nodes have a best token at all."""
        return all(isfinite(self.logits[node, 0]) for node in nodes)


def packed(logits: Tensor, kept: int = KEPT) -> Tensor:
    """What a ranking holds, on the device. # [nodes, 2, kept] float64"""
    tokens, values = best_logits(logits, kept)
    return torch.stack([tokens.double(), values.double()], dim=1)
