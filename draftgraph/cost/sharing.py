"""What passes cost a sequence that shares them with others, and so how much it may draft: much when it is nearly alone,
little among many, nothing when the device is full. Prices alone do not decide it: whether sequences draft at all is
what gives more tokens per second, by the clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from statistics import median
from typing import Any

import numpy as np

from draftgraph.cost.budget import Computed
from draftgraph.cost.latency import MeasuredCost
from draftgraph.graph import Floats, Ints

KEPT = 0.98  # of what was seen, with every step that is seen after it
SPELL = 6  # steps that the other way is tried for
TRYING = 0.01  # of the time may be lost by that, and less if it was in vain
RAREST = 8  # times as rarely, after several times in vain
STALL = 4.0  # times as long as usual: more has other reasons
WORSE = 0.97  # of the other way's rate: less is no luck


@dataclass
class Rate:
    """Tokens per second, of late."""

    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.steps:
            seconds = min(seconds, STALL * self.seconds / self.steps)
        self.tokens, self.seconds = KEPT * self.tokens + tokens, KEPT * self.seconds + seconds
        self.steps = KEPT * self.steps + 1

    @property
    def value(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Habit:
    """Whether so many sequences draft, all or none: what has given more tokens per second. Now and then the other way
    is tried for a few steps, the more rarely the more that costs."""

    drafts: bool
    _rates: dict[bool, Rate] = field(default_factory=lambda: {True: Rate(), False: Rate()})
    _tried: list[tuple[int, float]] | None = field(default_factory=list)  # steps; None: nothing is being tried
    _pause: float = 0.0  # seconds until the other way is tried
    _in_vain: int = 0  # how often it was tried, since the habit was changed

    def learn(self, tokens: int, seconds: float) -> None:
        """A step of theirs."""
        if self._tried is not None:
            self._tried.append((tokens, seconds))
            if len(self._tried) == SPELL:
                self._judge(self._tried)
            return
        here, other = self._rates[self.drafts], self._rates[not self.drafts]
        here.add(tokens, seconds)
        self._pause -= seconds
        if here.value < WORSE * other.value:
            self.drafts, self._pause = not self.drafts, SPELL * seconds / TRYING
        elif self._pause <= 0:
            self._try_other()

    def _try_other(self) -> None:
        self.drafts, self._tried = not self.drafts, []

    def _judge(self, tried: list[tuple[int, float]]) -> None:
        """The first step of a spell has to begin things, and is no measure."""
        usual = median(seconds for _, seconds in tried)
        tried = [(tokens, min(seconds, STALL * usual)) for tokens, seconds in tried]
        here, other = self._rates[self.drafts], self._rates[not self.drafts]
        for tokens, seconds in tried[1:]:
            here.add(tokens, seconds)
        if not other.steps:
            return self._try_other()
        spent, gained = sum(seconds for _, seconds in tried), sum(tokens for tokens, _ in tried)
        self._tried = None
        if here.value >= other.value:
            self._pause, self._in_vain = spent / TRYING, 0
            return
        self.drafts = not self.drafts
        self._pause = max(0.0, spent - gained / other.value) / TRYING * min(RAREST, 2**self._in_vain)
        self._in_vain += 1


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
        self.computed = Computed() if in_seconds(cost) else None
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
class Seconds:
    """Where the seconds of a step went."""

    grow: float = 0.0  # graphs, on the host
    levels: float = 0.0  # passes of the draft
    verify: float = 0.0
    other: float = 0.0

    @property
    def in_all(self) -> float:
        return self.grow + self.levels + self.verify + self.other

    def spent_on(self, seconds: dict[str, float]) -> None:
        """Adds them to those of a sequence."""
        seconds["draft"] += self.grow + self.levels
        seconds["verify"] += self.verify
        seconds["other"] += self.other


@dataclass
class Experience:
    """How passes of so many texts have compared with their prices, of late. Texts are counted in powers of two."""

    _checks: Known = field(default_factory=dict)
    _levels: Known = field(default_factory=dict)
    _step: float | None = None  # of the host's seconds, for every text
    _host: float | None = None  # more, for one that drafts
    _habits: dict[int, Habit] = field(default_factory=dict)
    _ratios: dict[int, tuple[Ratios, Ratios, float, float]] = field(
        default_factory=dict
    )  # by texts, since it last learnt

    def prices(self, cost: Any, texts: int) -> Any:
        """For one of so many."""
        if texts == 1:
            return cost
        if not in_seconds(cost):  # nothing can be compared with it
            return SharedCost(cost, texts)
        size = texts.bit_length()
        if size not in self._ratios:
            checks, levels = (ratios_of(known.get(size, {})) for known in (self._checks, self._levels))
            self._ratios[size] = checks, levels, rounded(self._step or 0.0), rounded(self._host or 0.0)
        return shared(cost, texts, *self._ratios[size])

    def habit(self, texts: int) -> Habit:
        """Whether so many sequences draft. Where that is not known: as more of them did; else a few do, many do not.
        One alone always does, as far as its prices say: no clock compares its ways."""
        size = texts.bit_length()
        if size not in self._habits:
            more = [self._habits[known].drafts for known in sorted(self._habits) if known > size]
            self._habits[size] = Habit(texts == 1 or (more[0] if more else texts <= FEW))
        return self._habits[size]

    def learn(self, cost: Any, texts: int, nodes: int, levels: list[int], took: Seconds, grown: int) -> None:
        """A step of so many texts checked so many nodes; its draft was fed so many in each pass."""
        if not in_seconds(cost):
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


def in_seconds(cost: Any) -> bool:
    """Whether prices are measured ones, so that the time of steps can be compared with them."""
    return bool(getattr(cost, "in_seconds", False))
