"""What passes cost, and so how much of a graph is worth drafting and checking."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from draftgraph.config import CostModel
from draftgraph.graph import Floats, Ints, TokenTree

if TYPE_CHECKING:
    import torch

    from draftgraph.stats import Step

HIT = 0.8  # how likely the best child of a node is to be accepted, before any outcome is known
HIT_WEIGHT = 4.0  # outcomes that this counts for
NEARLY = 0.95  # of the best rate: no price is known better
KEPT = 0.98  # how much of what is known about the draft a step leaves


class Computed(dict[Any, Any]):
    """What was computed from prices that never change; a cost model with such prices keeps it as `computed`."""


def kept(cost: CostModel, what: Any, compute: Callable[[], Any]) -> Any:
    """What follows from prices: computed once where they never change. A model of the user's own is asked anew."""
    computed = getattr(cost, "computed", None)
    if not isinstance(computed, Computed):
        return compute()
    if what not in computed:
        computed[what] = compute()
    return computed[what]


class FlatCost:
    """A pass costs one; a pass that checks more than the root costs `entry` more, and `node` for every further node.
    A pass of the draft costs `draft` times as much.

    With all zero the whole budget of the configuration is used: a GPU checks 64 nodes for the price of about one.
    A CPU leaves its fast path for single tokens and then pays for arithmetic.
    """

    def __init__(self, node: float = 0.0, entry: float = 0.0, draft: float = 0.0) -> None:
        self.node = node
        self.entry = entry
        self.draft = draft

    @classmethod
    def for_device(cls, device: torch.device, draft: float = 0.0) -> FlatCost:
        """Prices on a kind of device; `draft` is the draft's size, the target being 1."""
        return cls(node=0.11, draft=draft) if device.type == "cpu" else cls(draft=draft)

    def of_pass(self, nodes: Ints) -> Floats:
        return np.where(nodes > 1, 1.0 + self.entry + self.node * (nodes - 1), 1.0)

    def of_level(self, nodes: Ints) -> Floats:
        return self.draft * self.of_pass(nodes)

    def floor(self) -> float:
        return self.node


def nodes_worth_checking(tree: TokenTree, cost: CostModel, spent: float = 0.0) -> int:
    """How many of a tree's nodes, best first, give the most expected tokens for their cost and what was spent; of
    those that give nearly as many the most, if it beats plain decoding: a step also costs what no price tells."""
    expected = tree.scores.cumsum()  # the root's token is certain: it counts for the one that the target adds
    most = 1 << (len(tree) - 1).bit_length()
    prices: Floats = kept(cost, ("passes", most), lambda: cost.of_pass(np.arange(1, most + 1)))  # of one node, two, ...
    rates = expected / (spent + prices[: len(tree)])
    return int((rates >= max(NEARLY * rates.max(), rates[0])).nonzero()[0][-1]) + 1


def price_of_level(cost: CostModel, nodes: int) -> float:
    return float(kept(cost, ("level", nodes), lambda: cost.of_level(np.array([nodes]))[0]))


def price_of_levels(cost: CostModel, levels: int, width: int, block: int = 0) -> float:
    """Of so many levels, or of the one pass over a block that drafts them all."""
    return (min(levels, 1) if block else levels) * price_of_level(cost, block or width)


class HitRate:
    """How often the best child of a drafted node was the target's token, of late.

    Forgets with every step, also with those that drafted nothing: a draft that was left alone is tried again some
    day, if it is cheap enough to be tried at all.
    """

    def __init__(self) -> None:
        self._hits = 0.0
        self._tries = 0.0

    @property
    def rate(self) -> float:
        return (HIT_WEIGHT * HIT + self._hits) / (HIT_WEIGHT + self._tries)

    def count(self, step: Step) -> None:
        self._hits *= KEPT
        self._tries *= KEPT
        graph = step.graph
        for place, token in zip([0, *step.path], step.tokens, strict=False):
            node = int(graph.canonical[step.tree.nodes[place]])
            if graph.is_drafted(node) and (children := graph.children_of(node)):
                self._tries += 1
                self._hits += token == max(children, key=lambda child: graph.probs[children[child]])


class Budget(Protocol):
    """How much is drafted in one step."""

    @property
    def spent(self) -> float:
        """What that costs."""

    def worth_drafting(self, tree: TokenTree, scores: Floats) -> int:
        """On how many open nodes, best first."""


class DraftBudget:
    """Decides level by level, in one step, how many nodes are worth a pass of the draft.

    `hit` is the chance of a node's best child, `nodes` the most that the target may be given, the root counted,
    `block` the nodes of a pass that drafts all levels; 0: each level has a pass of its own.
    """

    def __init__(self, cost: CostModel, levels: int, hit: float = HIT, nodes: int = 64, block: int = 0) -> None:
        self.cost = cost
        self.levels = levels
        self.hit = hit
        self.nodes = nodes
        self.block = block
        self.spent = 0.0

    def worth_drafting(self, tree: TokenTree, scores: Floats) -> int:
        """How many open nodes, best first: none if going on, however far, gives fewer expected tokens for its cost."""
        if not len(scores) or not self.levels:
            return 0
        checked = nodes_worth_checking(tree, self.cost, self.spent)
        expected = np.cumsum(tree.scores)
        now = expected[checked - 1] / (self.spent + float(self.cost.of_pass(np.array([checked]))[0]))
        width, below, added = plans(len(scores), self.nodes)
        if not len(width):
            return 0
        room = np.array([[checked], [self.nodes]])  # new nodes come in place of the worst, or beside all
        kept = np.minimum(np.maximum(room - added, 1), checked)  # [rooms, plans]
        gained = np.cumsum(scores)[width - 1] * gains_below(round(20 * self.hit) / 20, self.levels)[:, below]
        passes = np.ones(self.levels) if self.block else np.arange(1, self.levels + 1)
        prices = self.cost.of_level(np.full_like(width, self.block) if self.block else width)
        drafting = self.spent + passes[:, None] * prices  # [levels, plans]
        checking = self.cost.of_pass(kept + added)
        rates = (expected[kept - 1][:, None] + gained) / (checking[:, None] + drafting)  # [rooms, levels, plans]
        best = int(np.argmax(rates))
        if rates.flat[best] <= now:
            return 0
        chosen = int(width[best % len(width)])
        self.spent += float(self.cost.of_level(np.array([self.block or chosen]))[0])
        self.levels -= 1
        return chosen


@dataclass(frozen=True)
class PlannedBudget:
    """Decided on before the first level: so many, as wide as this."""

    levels: int
    width: int
    floor: float
    spent: float

    def worth_drafting(self, tree: TokenTree, scores: Floats) -> int:
        return min(self.width, len(scores))


def levels_ahead(
    cost: CostModel, most: int, width: int, hit: float, nodes: int, block: int = 0, pace: float = 1.0, host: float = 0.0
) -> int:
    """How many levels of this width, all drafted before the first is seen, give the most expected tokens for their
    cost: none if plain decoding gives more. `block`: see `DraftBudget`; then all of them, or none. `pace`: passes of
    the draft for a level; `host`: what drafting costs besides."""
    if most <= 0:
        return 0
    given = most, width, round(20 * hit) / 20, nodes, block, pace, host
    return int(kept(cost, ("levels", *given), lambda: _levels_ahead(cost, *given)))


def _levels_ahead(
    cost: CostModel, most: int, width: int, hit: float, nodes: int, block: int, pace: float, host: float
) -> int:
    fitting = [place for place, size in enumerate(SIZES) if size < nodes]
    checked = cost.of_pass(np.array([1 + SIZES[place] for place in fitting]))
    levels = np.array([most]) if block else np.arange(1, most + 1)
    drafting = host + (np.ones(1) if block else pace * levels) * cost.of_level(np.array([block or width]))
    tokens = 1.0 + gains_below(hit, most)[levels - 1][:, fitting]
    rates = tokens / (drafting[:, None] + checked)  # [levels, sizes]
    plain = 1.0 / float(cost.of_pass(np.array([1]))[0])
    return int(levels[rates.max(axis=1).argmax()]) if rates.size and rates.max() > plain else 0


SIZES = (1, 2, 3, 5, 7, 11, 15, 23, 31, 47, 63)  # of levels, and of what is put below one node


@cache
def plans(open_nodes: int, most: int) -> tuple[Ints, Ints, Ints]:
    """Nodes to draft on, what is to come below each, as a place in SIZES, and how many nodes that makes. # [plans]"""
    widths = np.array([*(size for size in SIZES if size < open_nodes), open_nodes])
    width, below = (grid.ravel() for grid in np.meshgrid(widths, np.arange(len(SIZES)), indexing="ij"))
    added = width * np.array(SIZES)[below]
    fits = added < most
    return width[fits], below[fits], added[fits]


@cache
def gains_below(hit: float, levels: int) -> Floats:
    """Tokens that the best nodes below one node are expected to add, if the chances of its children, and of theirs,
    are `hit`, the same share of the rest, and so on. # [levels, SIZES]"""
    table = np.zeros((levels, len(SIZES)))
    for depth in range(1, levels + 1):
        found: list[float] = []
        heap = [(-hit, 1)]
        while len(found) < SIZES[-1]:
            chance, at = heapq.heappop(heap)
            found.append(-chance)
            heapq.heappush(heap, (chance * (1.0 - hit), at))  # its next sibling
            if at < depth:
                heapq.heappush(heap, (chance * hit, at + 1))  # its first child
        table[depth - 1] = np.cumsum(found)[np.array(SIZES) - 1]
    return table
