"""How the graph of a step comes about: nothing, level by level on the host, or from what a draft grew on its device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from draftgraph.compiled import compiled
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.budget import HitRate, levels_ahead, nodes_worth_checking, price_of_levels
from draftgraph.graph import Floats, Ints, TokenGraph, TokenTree
from draftgraph.graph.nodes import DRAFT, EXPANDED, LEAF, NONE, OPEN, Nodes, append, lone_root, nodes_for
from draftgraph.graph.token_graph import array_of
from draftgraph.graph.unroll import ABOVE, CERTAIN, FIRST
from draftgraph.proposers.candidates import Candidates
from draftgraph.proposers.copying import SuffixProposer
from draftgraph.proposers.growth import Growing, Proposer, growing
from draftgraph.proposers.pooling import Calibration, Pool
from draftgraph.proposers.recycling import RecycleProposer


@dataclass
class Sources:
    """Who proposes for a sequence."""

    draft: Any  # a ModelProposer, a TextProposer, a DeviceDraft, or None
    copied: SuffixProposer | None
    recycled: RecycleProposer | None

    @property
    def memories(self) -> list[Proposer]:
        return [memory for memory in (self.copied, self.recycled) if memory is not None]


class Guide(Protocol):
    """Knows of tokens that cannot be chosen, or must be."""

    def shape(self, graph: TokenGraph, tree: TokenTree, text: list[int]) -> TokenTree:
        """The unrolled view of a graph behind this text, without what cannot be, and with what must."""


@dataclass
class Limits:
    """What the graphs of a sequence keep to, and what is learnt about them."""

    config: GraphConfig
    ends: frozenset[int]  # tokens that nothing follows
    hits: HitRate
    calibration: Calibration
    guide: Guide | None = None

    def shaped(self, graph: TokenGraph, tree: TokenTree, text: list[int]) -> TokenTree:
        return tree if self.guide is None else self.guide.shape(graph, tree, text)


class Proposed(Protocol):
    """What was proposed in a step, kept until the target has chosen."""

    def settle(self, calibration: Calibration, graph: TokenGraph, tree: TokenTree, visited: Any, chosen: Any) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""


@dataclass(frozen=True)
class Hypotheses:
    """The graph of one step, and the part of its unrolled view that is worth checking."""

    graph: TokenGraph
    tree: TokenTree
    proposed: Proposed | None = None


class Policy(Protocol):
    """Grows the graph of one step after another. The order of the calls is that of `step.py`."""

    limits: Limits
    proposes: bool  # anything, ever

    def plan(self, cost: CostModel) -> None:
        """Decides how far the draft is to go in the next step; may be asked while the target is at work."""

    def begin(self, text: list[int], depth: int) -> None:
        """The next step is behind this text, and may reach so deep. A draft on a device notes that it is to go on:
        `Engines.launch_drafts` launches those of all sequences together."""

    def recall(self, text: list[int], depth: int) -> None:
        """The memories begin the same step."""

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Growing[Hypotheses]:
        """Grow, prune, merge and flatten."""

    def commit(self, hypotheses: Hypotheses, path: list[int]) -> None:
        """The target accepted this path of the tree (the root left out); the text has not grown yet."""


class PlainPolicy:
    """Nobody proposes anything: the last token alone."""

    proposes = False

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    def plan(self, cost: CostModel) -> None: ...

    def begin(self, text: list[int], depth: int) -> None: ...

    def recall(self, text: list[int], depth: int) -> None: ...

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Growing[Hypotheses]:
        return root_alone(text, self.limits)
        yield  # a generator, as those of the other policies are

    def commit(self, hypotheses: Hypotheses, path: list[int]) -> None: ...


class LevelPolicy:
    """All sources are asked for each level, the draft only for what is worth its pass."""

    proposes = True

    def __init__(self, sources: Sources, limits: Limits) -> None:
        self.sources, self.limits = sources, limits
        self.proposers = [*sources.memories, *([] if sources.draft is None else [sources.draft])]
        self.pool = Pool(limits.config.k, limits.calibration)

    def plan(self, cost: CostModel) -> None:
        """That is decided level by level."""

    def begin(self, text: list[int], depth: int) -> None:
        if self.sources.draft is not None:
            self.sources.draft.begin(text)

    def recall(self, text: list[int], depth: int) -> None:
        for memory in self.sources.memories:
            memory.begin(text)

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Growing[Hypotheses]:
        graph = TokenGraph(text[-1], self.limits.config, depth, self.limits.ends)
        if self.limits.config.mode != "auto":
            return Hypotheses(graph, self.limits.shaped(graph, (yield from growing(graph, self.proposers)), text))
        self.pool.begin()
        draft = self.sources.draft
        budget = None if draft is None else draft.budget(graph, cost, self.limits.hits.rate)
        tree = yield from growing(graph, self.proposers, cost.floor(), budget, self.pool)
        tree = self.limits.shaped(graph, tree, text)
        worth = nodes_worth_checking(tree, cost, budget.spent if budget else 0.0)
        return Hypotheses(graph, tree.first(worth), self.pool.weighed)

    def commit(self, hypotheses: Hypotheses, path: list[int]) -> None:
        if self.sources.draft is not None:
            self.sources.draft.commit(hypotheses.tree, path, hypotheses.graph)


class ChainPolicy:
    """The draft writes one token behind the other on the device."""

    proposes = True

    def __init__(self, draft: Any, limits: Limits) -> None:
        self.draft, self.limits = draft, limits

    def plan(self, cost: CostModel) -> None:
        """All of the chain's length, always."""

    def begin(self, text: list[int], depth: int) -> None:
        self.draft.levels = min(self.limits.config.levels, depth)
        self.draft.begin(text)

    def recall(self, text: list[int], depth: int) -> None: ...

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Growing[Hypotheses]:
        config, k = self.limits.config, self.draft.k
        nodes, levels = nodes_for(config.nodes), list(self.draft.arriving())
        report = np.concatenate(levels)[: min(depth, self.draft.levels)] if levels else np.zeros((0, 2 * k + 1))
        append_chain(nodes, text[-1], report[:, 0].astype(np.int64), np.exp(report[:, k]), array_of(self.limits.ends))
        graph = TokenGraph.of_nodes(nodes, config, depth, self.limits.ends)
        return Hypotheses(graph, self.limits.shaped(graph, graph.unroll(), text))
        yield  # a generator, as those of the other policies are

    def commit(self, hypotheses: Hypotheses, path: list[int]) -> None:
        """Nothing is kept: see `DevicePolicy.commit`."""


class DevicePolicy:
    """The draft grows its levels on the device; while it does, the memories are asked, and then all is pooled."""

    proposes = True

    def __init__(self, draft: Any, candidates: Candidates, limits: Limits) -> None:
        self.draft, self.candidates, self.limits = draft, candidates, limits
        self._levels = 0  # planned

    def plan(self, cost: CostModel) -> None:
        draft, config = self.draft, self.limits.config
        most, rate = min(config.levels, draft.deepest), self.limits.hits.rate
        self._levels = levels_ahead(cost, most, draft.width, rate, config.nodes, draft.block)

    def begin(self, text: list[int], depth: int) -> None:
        self.draft.levels, self.draft.odds = min(self._levels, depth), self.limits.calibration.odds
        self.draft.begin(text)

    def recall(self, text: list[int], depth: int) -> None:
        self.candidates.copied.begin(text)
        self.candidates.recycled.begin(text)
        self.candidates.begin(text, depth, self.limits.ends)

    def grow(self, text: list[int], depth: int, cost: CostModel) -> Growing[Hypotheses]:
        draft, floor = self.draft, cost.floor()
        spent = price_of_levels(cost, draft.levels, draft.width, draft.block)
        levels: Iterator[Floats] = self.draft.arriving()
        for early in levels:
            self.candidates.add(early)
            break
        yield None  # other sequences take in what has arrived for them before any waits for the rest
        for late in levels:
            self.candidates.add(late)
        selection = self.candidates.graph(floor)
        tree = self.limits.shaped(selection.graph, selection.graph.unroll(), text)
        return Hypotheses(selection.graph, tree.first(nodes_worth_checking(tree, cost, spent)), selection)

    def commit(self, hypotheses: Hypotheses, path: list[int]) -> None:
        """Nothing is kept: the next step reads all that was accepted, for the price of a level that it needs anyway."""


def root_alone(text: list[int], limits: Limits) -> Hypotheses:
    graph = TokenGraph.of_nodes(lone_root(text[-1]), limits.config, 0, limits.ends)
    return Hypotheses(graph, TokenTree(np.array(text[-1:]), ABOVE, FIRST, FIRST, CERTAIN, ["root"]))


@compiled
def append_chain(graph: Nodes, root: int, tokens: Ints, chances: Floats, ends: Ints) -> None:
    """The root and one token behind the other, up to the first that is impossible, or that nothing follows."""
    node = append(graph, NONE, root, 1.0, 0, OPEN)
    for place in range(len(tokens)):
        if not chances[place] > 0.0:
            return
        graph.node["drafted"][node], graph.node["state"][node] = 1, EXPANDED
        node = append(graph, node, tokens[place], chances[place], DRAFT, OPEN)
        for end in ends:
            if tokens[place] == end:
                graph.node["state"][node] = LEAF
                return


def policy_for(sources: Sources, limits: Limits) -> Policy:
    draft, copied, recycled = sources.draft, sources.copied, sources.recycled
    on_device = draft is not None and draft.on_device
    if on_device and copied is not None and recycled is not None:
        limit = draft.expansions, draft.block > 0
        candidates = Candidates(copied, recycled, limits.calibration, limits.config, *limit)
        return DevicePolicy(draft, candidates, limits)
    if on_device and limits.config.mode == "chain":
        return ChainPolicy(draft, limits)
    if draft is None and not sources.memories:
        return PlainPolicy(limits)
    return LevelPolicy(sources, limits)
