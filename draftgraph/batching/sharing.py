"""What passes cost a text that shares them with others, and so how much it may draft: much when it is nearly alone,
little among many, nothing when the device is full."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np

from draftgraph.cost import price_of_pass
from draftgraph.graph import Floats, Ints
from draftgraph.tuning.latency import MeasuredCost

MOST = 64  # nodes that a floor is looked for among
NEW = 0.1  # weight of the newest of many
STEP = 1.05  # ratios nearer to each other than this are one
TRYING = 0.01  # of the time may go into graphs that are not expected to pay
LONGEST_PAUSE = 1000  # steps
FEW = 4  # tries of its own outweigh what a text was told of others
GOLDEN = 0.618  # texts that begin with the same pause do not end it together
SIZES_PER_DOUBLING = 2  # of numbers of nodes

Ratios = tuple[tuple[int, float], ...]  # size of a pass, and how many times its price it costs
Known = dict[int, dict[int, float]]  # the same for texts in powers of two


class SharedCost:
    """Of a pass that all texts share, each pays its part, as if the others drafted as much as it does.

    Passes over several texts may cost more than was measured of one (`checks`, `levels`: how many times as much, by
    size), and graphs are grown one after the other: that costs each text `host` besides.
    """

    def __init__(self, cost: Any, texts: int, checks: Ratios = (), levels: Ratios = (), host: float = 0.0) -> None:
        self.cost, self.texts, self.host = cost, texts, host
        self._checks, self._levels = checks, levels
        prices = self.of_pass(np.arange(1, MOST + 1))
        more = (prices[1:] - prices[0] - host) / np.arange(1, MOST)
        self._floor = float(min(0.99, max(0.0, more.min() / prices[0])))

    def of_pass(self, nodes: Ints) -> Floats:
        together = nodes * self.texts
        passes: Floats = ratio_at(self._checks, together) * self.cost.of_pass(together)
        return passes / self.texts + np.where(nodes > 1, self.host, 0.0)

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
def shared(cost: Any, texts: int, checks: Ratios, levels: Ratios, host: float) -> SharedCost:
    """The same object for the same prices: what was computed from them is found again."""
    return SharedCost(cost, texts, checks, levels, host)


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
    _host: float | None = None
    _appetites: dict[int, Appetite] = field(default_factory=dict)
    _begun: int = 0  # texts
    _ratios: dict[int, tuple[Ratios, Ratios, float]] = field(default_factory=dict)  # by texts, since it last learnt

    def prices(self, cost: Any, texts: int) -> Any:
        """For one of so many."""
        if texts == 1:
            return cost
        if not isinstance(cost, MeasuredCost):  # not in seconds: nothing can be compared with it
            return shared(cost, texts, (), (), 0.0)
        size = texts.bit_length()
        if size not in self._ratios:
            checks, levels = (ratios_of(known.get(size, {})) for known in (self._checks, self._levels))
            self._ratios[size] = checks, levels, rounded(self._host or 0.0)
        return shared(cost, texts, *self._ratios[size])

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
            self._host = mean(self._host, took.grow / grown)

    def appetite(self, texts: int) -> Appetite:
        """What a new text among so many begins with: what was seen of others."""
        known = self.typical(texts)
        self._begun += 1
        return replace(known, tries=min(known.tries, FEW), _left=int(self._begun * GOLDEN % 1 * known.pause))

    def typical(self, texts: int) -> Appetite:
        """Of all texts that were so many."""
        return self._appetites.setdefault(texts.bit_length(), Appetite())


def mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + NEW * (newest - before)


def mix(known: dict[int, float], nodes: int, newest: float) -> None:
    size = round(size_of(nodes))
    known[size] = mean(known.get(size), newest)


def ratios_of(known: dict[int, float]) -> Ratios:
    return tuple((size, rounded(known[size])) for size in sorted(known))


def rounded(ratio: float) -> float:
    return float(STEP ** round(np.log(ratio) / np.log(STEP))) if ratio > 0 else 0.0


@dataclass
class Appetite:
    """Whether graphs have paid for a text of late. If not, one is tried now and then: the rarer the more it costs."""

    gain: float = 1.0  # tokens that a graph added to its step
    price: float = 0.0  # seconds that it added to the text's part
    tries: int = 0
    pause: int = 0  # steps from one graph to the next
    _left: int = 0

    @property
    def pausing(self) -> bool:
        return self.pause > 1

    def wants(self) -> bool:
        """Now?"""
        self._left -= 1
        return self._left < 0

    def learn(self, added: int, nodes: int, spent: float, prices: Any) -> None:
        """A graph of so many nodes, for which the draft took so long, added so many tokens."""
        alone, checked = price_of_pass(prices, 1), price_of_pass(prices, max(2, nodes))
        self.tries += 1
        newest = max(NEW, 1 / (1 + self.tries))  # the first ones count for more
        self.gain += newest * (added - self.gain)
        self.price += newest * (spent + checked - alone - self.price)
        loss = self.price / alone - self.gain  # in steps
        self.pause = self._left = min(LONGEST_PAUSE, ceil(loss / TRYING)) if loss > 0 else 0
