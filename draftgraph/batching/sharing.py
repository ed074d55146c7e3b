"""What passes cost a text that shares them with others, and so how much it may draft: much when it is nearly alone,
little among many, nothing when the device is full."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from draftgraph.batching.custom import Custom
from draftgraph.cost import Computed
from draftgraph.graph import Floats, Ints
from draftgraph.tuning.latency import MeasuredCost

MOST = 64  # nodes that a floor is looked for among
NEW = 0.1  # weight of the newest of many
STEP = 1.05  # ratios nearer to each other than this are one
FEW = 4  # texts that draft before anything is known
SIZES_PER_DOUBLING = 2  # of numbers of nodes

Ratios = tuple[tuple[int, float], ...]  # size of a pass, and how many times its price it costs
Known = dict[int, dict[int, float]]  # the same for texts in powers of two


class SharedCost:
    """Of a pass that all texts share, each pays its part, as if the others drafted as much as it does.

    Passes over several texts may cost more than was measured of one (`checks`, `levels`: how many times as much, by
    size), and the host goes from text to text: that costs each of them `step` besides, and with a graph `host` more.
    """

    def __init__(
        self, cost: Any, texts: int, checks: Ratios = (), levels: Ratios = (), step: float = 0.0, host: float = 0.0
    ) -> None:
        self.cost, self.texts, self.step, self.host = cost, texts, step, host
        self._checks, self._levels = checks, levels
        self.computed = Computed() if isinstance(cost, MeasuredCost) else None
        prices = self.of_pass(np.arange(1, MOST + 1))
        more = (prices[1:] - prices[0] - host) / np.arange(1, MOST)
        self._floor = float(min(0.99, max(0.0, more.min() / prices[0])))

    def of_pass(self, nodes: Ints) -> Floats:
        together = nodes * self.texts
        passes: Floats = ratio_at(self._checks, together) * self.cost.of_pass(together)
        return passes / self.texts + self.step + np.where(nodes > 1, self.host, 0.0)

    def of_level(self, nodes: Ints) -> Floats:
        together = nodes * self.texts
        levels: Floats = ratio_at(self._levels, together) * self.cost.of_level(together)
        return levels / self.texts

    def floor(self) -> float:
        return self._floor


def ratio_at(ratios: Ratios, nodes: Ints) -> Floats:
    """Between the sizes that are known, and as at the nearest beyond them."""
    if not ratios:
        return np.ones(nodes.shape)
    sizes, values = np.array(ratios).T
    found: Floats = np.interp(size_of(nodes), sizes, values)
    return found


def size_of(nodes: Any) -> Any:
    return SIZES_PER_DOUBLING * np.log2(nodes)


@lru_cache(512)
def shared(cost: MeasuredCost, texts: int, checks: Ratios, levels: Ratios, step: float, host: float) -> SharedCost:
    """The same object for the same prices, which never change: what was computed from them is found again."""
    return SharedCost(cost, texts, checks, levels, step, host)


@dataclass
class Took:
    """Where the seconds of a step went."""

    grow: float = 0.0  # graphs, on the host
    levels: float = 0.0  # passes of the draft
    verify: float = 0.0
    other: float = 0.0

    @property
    def in_all(self) -> float:
        return self.grow + self.levels + self.verify + self.other


@dataclass
class Experience:
    """How passes of so many texts have compared with their prices, of late. Texts are counted in powers of two."""

    _checks: Known = field(default_factory=dict)
    _levels: Known = field(default_factory=dict)
    _step: float | None = None  # of the host's seconds, for every text
    _host: float | None = None  # more, for one that drafts
    _customs: dict[int, Custom] = field(default_factory=dict)
    _ratios: dict[int, tuple[Ratios, Ratios, float, float]] = field(
        default_factory=dict
    )  # by texts, since it last learnt

    def prices(self, cost: Any, texts: int) -> Any:
        """For one of so many."""
        if texts == 1:
            return cost
        if not isinstance(cost, MeasuredCost):  # not in seconds: nothing can be compared with it
            return SharedCost(cost, texts)
        size = texts.bit_length()
        if size not in self._ratios:
            checks, levels = (ratios_of(known.get(size, {})) for known in (self._checks, self._levels))
            self._ratios[size] = checks, levels, rounded(self._step or 0.0), rounded(self._host or 0.0)
        return shared(cost, texts, *self._ratios[size])

    def custom(self, texts: int) -> Custom:
        """Whether so many draft. Those that have never been so many do as those who were more; else many do not."""
        size = texts.bit_length()
        if size not in self._customs:
            more = [self._customs[known].drafts for known in sorted(self._customs) if known > size]
            self._customs[size] = Custom(more[0] if more else texts <= FEW)
        return self._customs[size]

    def learn(self, cost: Any, texts: int, nodes: int, levels: list[int], took: Took, grown: int) -> None:
        """A step of so many texts checked so many nodes; its draft was fed so many in each pass."""
        if not isinstance(cost, MeasuredCost):
            return
        self._ratios.clear()
        checks, drafts = (known.setdefault(texts.bit_length(), {}) for known in (self._checks, self._levels))
        mix(checks, nodes, took.verify / float(cost.of_pass(np.array([nodes]))[0]))
        if levels:
            mix(drafts, round(sum(levels) / len(levels)), took.levels / float(cost.of_level(np.array(levels)).sum()))
        if grown:
            usual = (self._step or 0.0) * texts
            self._host = mean(self._host, (took.grow + max(0.0, took.other - usual)) / grown)
        else:
            self._step = mean(self._step, (took.grow + took.other) / texts)


def mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEW * (newest - before)


def mix(known: dict[int, float], nodes: int, newest: float) -> None:
    size = round(size_of(nodes))
    known[size] = mean(known.get(size), newest)


def ratios_of(known: dict[int, float]) -> Ratios:
    return tuple((size, rounded(known[size])) for size in sorted(known))


def rounded(ratio: float) -> float:
    return float(STEP ** round(np.log(ratio) / np.log(STEP))) if ratio > 0 else 0.0
