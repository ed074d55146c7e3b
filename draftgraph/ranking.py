"""What the host reads of the target's logits: the best tokens of every node, in one transfer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.best import best_logits
from draftgraph.graph import Bools, Floats, Ints

KEPT = 16  # tokens of a node; noise may put any of them first
HUGE = 1e30  # for logits that are no numbers


@dataclass(frozen=True)
class Ranking:
    """The target's best tokens at each node of a tree, best first."""

    tokens: Ints  # [nodes, kept]
    logits: Floats

    @classmethod
    def of(cls, logits: Tensor, kept: int = KEPT) -> Ranking:
        return cls.read(packed(logits, kept))

    @classmethod
    def read(cls, packed: Tensor) -> Ranking:
        """Waits for the device."""
        found = packed.cpu().numpy()
        return cls(found[:, 0].astype(np.int64), found[:, 1].copy())

    def best(self, logits: Tensor) -> list[int]:
        """The argmax of every node: of equals the first, of which `topk` may have kept another."""
        ties = self.logits == self.logits[:, :1]
        ties[:, 0] = True  # also where it is no number
        if not ties.all(axis=1).any():
            tokens: list[int] = np.where(ties, self.tokens, np.iinfo(np.int64).max).min(axis=1).tolist()
            return tokens
        return logits.argmax(dim=-1).tolist()

    @property
    def finite(self) -> Bools:
        """Which nodes have a best token at all. # [nodes]"""
        finite: Bools = np.isfinite(self.logits[:, 0])
        return finite

    @property
    def usable(self) -> Floats:
        """Logits that can be compared and subtracted, whatever the model said."""
        return np.nan_to_num(self.logits, nan=-HUGE, posinf=HUGE, neginf=-HUGE)


def packed(logits: Tensor, kept: int = KEPT) -> Tensor:
    """What a ranking holds, on the device. # [nodes, 2, kept] float64"""
    tokens, values = best_logits(logits, kept)
    return torch.stack([tokens.double(), values.double()], dim=1)
