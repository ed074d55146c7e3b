"""Seconds of passes as they were measured, and the prices that follow from them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from draftgraph.cost.budget import Computed
from draftgraph.graph import Floats, Ints

MOST_CONTEXTS = 256  # whose prices are kept
CONTEXT_STEP = 64  # texts whose lengths differ by less have the same prices


@dataclass(frozen=True)
class Curve:
    """How long a pass of one model takes, by the length of the text and the number of nodes."""

    contexts: tuple[int, ...]
    nodes: tuple[int, ...]  # from 1 on
    seconds: tuple[tuple[float, ...], ...]  # [contexts, nodes]
    padded: bool = False  # the engine computes no other numbers of nodes: those between cost what the next one does

    def __post_init__(self) -> None:
        for places in (self.contexts, self.nodes):
            if not places or any(one >= other for one, other in pairwise(places)):
                raise ValueError(f"the places of a curve must grow: {places}")
        if self.nodes[0] != 1:
            raise ValueError(f"a curve starts at one node, not at {self.nodes[0]}")
        table = np.array(self.seconds, dtype=float)
        if table.shape != (len(self.contexts), len(self.nodes)) or not (np.isfinite(table) & (table > 0)).all():
            raise ValueError("a curve needs the seconds of every pass")

    @classmethod
    def of(cls, contexts: list[int], nodes: list[int], seconds: list[list[float]], padded: bool = False) -> Curve:
        return cls(tuple(contexts), tuple(nodes), tuple(tuple(map(float, row)) for row in seconds), padded)

    @cached_property
    def _table(self) -> Floats:
        """[contexts, nodes]; a longer text is never cheaper: where it seems so, that is noise."""
        table: Floats = np.maximum.accumulate(np.array(self.seconds, dtype=float), axis=0)
        return table

    def measured(self, context: int, nodes: int) -> float:
        return self.seconds[self.contexts.index(context)][self.nodes.index(nodes)]

    def at(self, context: int) -> Floats:
        """Seconds for the measured numbers of nodes: linear in the text's length, also past the longest."""
        here: Floats = self._table[0]
        if len(self.contexts) > 1 and context > self.contexts[0]:
            after = min(int(np.searchsorted(self.contexts, context)), len(self.contexts) - 1)
            low, high = self.contexts[after - 1], self.contexts[after]
            before = self._table[after - 1]
            here = before + (context - low) / (high - low) * (self._table[after] - before)
        return here

    def prices(self, context: int) -> Floats:
        """Seconds by number of nodes, from none to the most that were measured."""
        wanted = np.arange(self.nodes[-1] + 1)
        here = self.at(context)
        if self.padded:
            return here[np.searchsorted(self.nodes, wanted)]
        return np.interp(wanted, self.nodes, here)


@dataclass(frozen=True)
class Latencies:
    """What was measured of a pair, once."""

    target: Curve
    draft: Curve | None
    bound: int  # the number of nodes up to which passes were asked for; dear ones are left out
    took: float  # seconds

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Latencies:
        target, draft = (None if found[name] is None else Curve.of(**found[name]) for name in ("target", "draft"))
        if target is None:
            raise ValueError("the target's curve is missing")
        return cls(target, draft, int(found["bound"]), float(found["took"]))


class MeasuredCost:
    """Prices in seconds, for a text of one length; `at` gives those for another."""

    in_seconds = True

    def __init__(self, latencies: Latencies, context: int = 0, family: dict[int, MeasuredCost] | None = None) -> None:
        self.latencies = latencies
        self.context = context
        self._passes = PriceList(latencies.target.prices(context))
        self._levels = PriceList(np.zeros(2) if latencies.draft is None else latencies.draft.prices(context))
        self._floor = self._cheapest_node()
        self.computed = Computed()
        self._family = {} if family is None else family  # by length of the text, shared by all of them

    def at(self, context: int) -> MeasuredCost:
        context = context // CONTEXT_STEP * CONTEXT_STEP
        if context not in self._family:
            if len(self._family) >= MOST_CONTEXTS:
                del self._family[next(iter(self._family))]
            self._family[context] = MeasuredCost(self.latencies, context, self._family)
        return self._family[context]

    def of_pass(self, nodes: Ints) -> Floats:
        return self._passes.of(nodes)

    def of_level(self, nodes: Ints) -> Floats:
        return self._levels.of(nodes)

    def floor(self) -> float:
        """A node adds its chance to the tokens of a pass: too little, if plain decoding gives more in the time of a
        node at its cheapest."""
        return self._floor

    def _cheapest_node(self) -> float:
        """In passes over one."""
        prices = self._passes.known
        first, more = prices[1], prices[2:] - prices[1]
        return float(max(0.0, (more / np.arange(1, len(more) + 1)).min() / first)) if len(more) else 0.0

    def of_step(self, passes: int, fed: int, checked: int) -> float:
        """What one step costs whose draft was fed so many tokens in so many passes."""
        level = float(self.of_level(np.array([round(fed / passes)]))[0]) if passes else 0.0
        return passes * level + float(self.of_pass(np.array([checked]))[0])


class PriceList:
    """Prices by number of nodes; past the last they grow as they did before it, of late or half as fast as on average,
    whichever is more."""

    def __init__(self, known: Floats) -> None:
        self.known = known
        self._last = len(known) - 1
        half = self._last // 2
        late = (known[self._last] - known[half]) / (self._last - half)
        average = (known[self._last] - known[1]) / max(self._last - 1, 1)
        self._slope = max(0.0, float(late), float(average) / 2) if self._last > 1 else float(known[1])

    def of(self, nodes: Ints) -> Floats:
        if nodes.max() <= self._last:
            return self.known[nodes]
        return self.known[np.minimum(nodes, self._last)] + self._slope * np.maximum(nodes - self._last, 0)
