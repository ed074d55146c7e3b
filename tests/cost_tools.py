"""For tests of prices: a clock that one moves, and latencies that one chooses."""

from __future__ import annotations

import numpy as np

from draftgraph import CostModel
from draftgraph.cost import Curve, Latencies


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def latencies(draft: float, nodes: tuple[int, ...] = (1, 8, 64), target: tuple[float, ...] = (10, 11, 12)) -> Latencies:
    """A draft's level costs so many passes of the target over one token, whatever its width."""
    passes = Curve.of([128], list(nodes), [[seconds / 1000 for seconds in target]])
    levels = Curve.of([128], list(nodes), [[draft * target[0] / 1000] * len(nodes)])
    return Latencies(passes, levels, 64, 1.0)


def at(cost: CostModel, nodes: int) -> float:
    return float(cost.of_pass(np.array([nodes]))[0])
