"""How the tree of a step comes about: level by level, or at once from what a draft has grown on its device."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from draftgraph.config import GraphConfig
from draftgraph.cost import CostModel, DraftBudget, HitRate, levels_ahead, nodes_worth_checking, price_of_level
from draftgraph.drafting import Proposer, growing
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import DeviceDraft
from draftgraph.drafting.device_batch import SeatDraft
from draftgraph.drafting.model import Asked, ModelProposer, Told, answered
from draftgraph.drafting.pool import Pool, Weighed
from draftgraph.drafting.recycle import RecycleProposer
from draftgraph.drafting.sheet import Selection, Sheet
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.graph import Floats, Source, TokenGraph, TokenTree


@dataclass
class Sources:
    """Who proposes in a text."""

    draft: ModelProposer | DeviceDraft | SeatDraft | None
    copied: SuffixProposer | None
    recycled: RecycleProposer | None

    @property
    def memories(self) -> list[Proposer]:
        return [memory for memory in (self.copied, self.recycled) if memory is not None]

    @property
    def all(self) -> list[Proposer]:
        return [*self.memories, *([self.draft] if isinstance(self.draft, ModelProposer) else [])]


@dataclass
class Limits:
    """What the trees of a text keep to."""

    config: GraphConfig
    ends: frozenset[int]  # tokens that nothing follows
    hits: HitRate
    calibration: Calibration


class Grown(Protocol):
    """The tree of one step, to be settled when there is time."""

    @property
    def tree(self) -> TokenTree: ...

    def graph(self) -> TokenGraph:
        """What the tree is an unrolled view of."""

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """The target chose these tokens at these tree nodes."""


class Grower(Protocol):
    """Grows the tree of one step after another."""

    limits: Limits

    def plan(self, cost: CostModel) -> None:
        """How far is the draft to go in the next step? May be asked while the target is at work."""

    def draft_ahead(self, text: list[int], depth: int) -> None:
        """The next step starts at the end of this text, and may reach so deep. A draft on a device sets off at once."""

    def remember(self, text: list[int], depth: int) -> None:
        """The memories begin the same step."""

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Grown:
        """Grow, prune, merge and flatten."""

    def commit(self, grown: Grown, path: list[int]) -> None:
        """The target accepted this path of the tree (the root left out); the text has not grown yet."""


FIRST, CERTAIN = np.zeros(1, dtype=np.int64), np.ones(1)


@dataclass(frozen=True)
class Ungrown:
    """The last token alone."""

    tree: TokenTree
    limits: Limits

    @classmethod
    def behind(cls, text: list[int], limits: Limits) -> Ungrown:
        return cls(TokenTree(np.array(text[-1:]), FIRST - 1, FIRST, FIRST, CERTAIN, ["root"]), limits)

    def graph(self) -> TokenGraph:
        return TokenGraph(int(self.tree.tokens[0]), self.limits.config, 0, self.limits.ends)

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """Nothing was foretold."""


class PlainGrower:
    """Nobody proposes anything."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def plan(self, cost: CostModel) -> None: ...

    def draft_ahead(self, text: list[int], depth: int) -> None: ...

    def remember(self, text: list[int], depth: int) -> None: ...

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Ungrown:
        return Ungrown.behind(text, self.limits)

    def commit(self, grown: Grown, path: list[int]) -> None: ...


@dataclass(frozen=True)
class GrownByLevels:
    tree: TokenTree
    known: TokenGraph
    pool: Pool
    weighed: Weighed

    def graph(self) -> TokenGraph:
        return self.known

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        self.pool.settle(self.weighed, self.known, self.tree, visited, chosen)


class LevelGrower:
    """All sources are asked for each level, the draft only for what is worth its pass."""

    def __init__(self, sources: Sources, limits: Limits) -> None:
        self.sources, self.limits = sources, limits
        self.pool = Pool(limits.config.k, limits.calibration)

    def plan(self, cost: CostModel) -> None:
        """That is decided level by level."""

    def draft_ahead(self, text: list[int], depth: int) -> None:
        if self.sources.draft is not None:
            self.sources.draft.begin(text)

    def remember(self, text: list[int], depth: int) -> None:
        for memory in self.sources.memories:
            memory.begin(text)

    def grow(self, text: list[int], depth: int, cost: CostModel) -> GrownByLevels:
        return answered(self.growing(text, depth, cost))

    def growing(self, text: list[int], depth: int, cost: CostModel) -> Generator[Asked, Told, GrownByLevels]:
        """The same, asking for each pass of the draft."""
        graph = TokenGraph(text[-1], self.limits.config, depth, self.limits.ends)
        self.pool.begin()
        tree = yield from self._tree(graph, cost)
        return GrownByLevels(tree, graph, self.pool, self.pool.weighed)

    def _tree(self, graph: TokenGraph, cost: CostModel) -> Generator[Asked, Told, TokenTree]:
        sources = self.sources
        if self.limits.config.mode != "auto":
            return (yield from growing(graph, sources.all))
        rate = self.limits.hits.rate
        budget = DraftBudget(cost, graph.max_depth, rate, graph.max_nodes) if sources.draft else None
        tree = yield from growing(graph, sources.all, cost.floor(), budget, self.pool)
        return tree.first(nodes_worth_checking(tree, cost, budget.spent if budget else 0.0))

    def commit(self, grown: Grown, path: list[int]) -> None:
        if isinstance(self.sources.draft, ModelProposer):
            self.sources.draft.commit(grown.tree, path, grown.graph())


@dataclass(frozen=True)
class GrownChain:
    tree: TokenTree
    chances: list[float]  # of each token behind those before it
    depth: int  # that it might have had
    limits: Limits

    @classmethod
    def behind(cls, text: list[int], drafted: list[tuple[int, float]], depth: int, limits: Limits) -> GrownChain:
        tokens: list[int] = [text[-1]]
        chances: list[float] = []
        for token, chance in drafted[:depth]:
            if chance <= 0.0 or (chances and tokens[-1] in limits.ends):
                break
            tokens.append(token)
            chances.append(chance)
        places = np.arange(len(tokens))
        scores: Floats = np.cumprod(np.array([1.0, *chances]))
        sources: list[Source] = ["root", *(["draft"] * len(chances))]  # type: ignore[list-item]
        return cls(TokenTree(np.array(tokens), places - 1, places, places, scores, sources), chances, depth, limits)

    def graph(self) -> TokenGraph:
        tokens, scores = self.tree.tokens, self.tree.scores
        graph = TokenGraph(int(tokens[0]), self.limits.config, self.depth, self.limits.ends)
        for node, chance in enumerate(self.chances):
            child = tokens[node + 1 : node + 2]
            graph.extend([node], scores[node : node + 1], child[None], np.array([[chance]]), "draft")
        graph.close([node for node in range(len(graph)) if graph.may_grow(node)])
        return graph

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """Only mode auto learns."""


class ChainGrower:
    """The draft writes one token behind the other on the device."""

    def __init__(self, draft: DeviceDraft, limits: Limits) -> None:
        self.draft, self.limits = draft, limits

    def plan(self, cost: CostModel) -> None:
        """All of the chain's length, always."""

    def draft_ahead(self, text: list[int], depth: int) -> None:
        self.draft.levels = min(self.limits.config.levels, depth)
        self.draft.begin(text)

    def remember(self, text: list[int], depth: int) -> None: ...

    def grow(self, text: list[int], depth: int, cost: CostModel) -> GrownChain:
        drafted = self.draft.drafted()
        best = [] if drafted is None else zip(drafted.tokens[:, 0].tolist(), drafted.probs[:, 0].tolist(), strict=True)
        return GrownChain.behind(text, list(best), min(depth, self.limits.config.levels), self.limits)

    def commit(self, grown: Grown, path: list[int]) -> None:
        """Nothing is kept: see `SheetGrower.commit`."""


class SheetGrower:
    """The draft grows its levels on the device; while it does, the memories are asked, and then all is pooled."""

    def __init__(self, draft: DeviceDraft | SeatDraft, sheet: Sheet, limits: Limits) -> None:
        self.draft, self.sheet, self.limits = draft, sheet, limits
        self._levels = 0  # planned
        self._arriving: Iterator[Floats] | None = None

    def plan(self, cost: CostModel) -> None:
        config = self.limits.config
        self._levels = levels_ahead(cost, config.levels, self.draft.width, self.limits.hits.rate, config.nodes)

    def draft_ahead(self, text: list[int], depth: int) -> None:
        self._arriving = None
        self.draft.levels, self.draft.odds = min(self._levels, depth), self.limits.calibration.odds
        self.draft.begin(text)

    def remember(self, text: list[int], depth: int) -> None:
        self.sheet.copied.begin(text)
        self.sheet.recycled.begin(text)
        self.sheet.begin(text, depth, self.limits.ends)

    def listen(self) -> None:
        """Takes in what the draft has to say first: many texts can, before any of them has to wait for the rest."""
        self._arriving = self.draft.arriving()
        for levels in self._arriving:
            self.sheet.add(levels)
            return

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Selection:
        spent = self.draft.levels * price_of_level(cost, self.draft.width)
        floor = cost.floor()
        for levels in self._arriving or self.draft.arriving():
            self.sheet.add(levels)
        selection = self.sheet.select(floor)
        return selection.first(nodes_worth_checking(selection.tree, cost, spent))

    def commit(self, grown: Grown, path: list[int]) -> None:
        """Nothing is kept: the next step reads all that was accepted, for the price of a level that it needs anyway."""


def grower_for(sources: Sources, limits: Limits) -> Grower:
    draft, copied, recycled = sources.draft, sources.copied, sources.recycled
    if isinstance(draft, DeviceDraft | SeatDraft) and copied is not None and recycled is not None:
        return SheetGrower(draft, Sheet(copied, recycled, limits.calibration, limits.config), limits)
    if isinstance(draft, DeviceDraft):
        return ChainGrower(draft, limits)
    if not sources.all:
        return PlainGrower(limits)
    return LevelGrower(sources, limits)
