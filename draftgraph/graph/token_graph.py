"""The token graph: hypotheses that share sequences, grown from the last token of the text."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from draftgraph.compiled import compiled
from draftgraph.config import GraphConfig
from draftgraph.graph import unroll
from draftgraph.graph.merge import merge, reaches
from draftgraph.graph.nodes import (
    DRAFT,
    EXPANDED,
    LEAF,
    NO_TOKEN,
    NONE,
    OPEN,
    ROOT,
    SOURCES,
    Bools,
    Floats,
    Ints,
    Nodes,
    Source,
    State,
    append,
    child_of,
    nodes_for,
)
from draftgraph.graph.unroll import TokenTree

ADDED, KNOWN, FULL, DROPPED, CROWDED_OUT, NOTHING = range(6)  # what became of a proposed child
NAMES = np.array(SOURCES, dtype=object)
ROOM = 256  # nodes, to begin with


class TokenGraph:
    """A directed acyclic graph of tokens. Whoever proposes continuations hands in arrays of tokens and probabilities.

    A merged node is an alias of the first node with its n-gram and shares that node's children, now and later.

    Examples:
        >>> graph = TokenGraph(7, GraphConfig(mode="graph"))
        >>> graph.add(ROOT, 8, 0.9, "draft"), graph.add(ROOT, 8, 0.9, "draft"), graph.unroll().tokens.tolist()
        (True, False, [7, 8])
    """

    def __init__(
        self, root_token: int, config: GraphConfig, max_depth: int | None = None, ends: frozenset[int] = frozenset()
    ) -> None:
        self._begin(nodes_for(ROOM), config, max_depth, ends)
        append(self._nodes, NONE, root_token, 1.0, 0, OPEN)
        if config.merges:
            merge(self._nodes, ROOT, config.tau)

    @classmethod
    def of_nodes(cls, nodes: Nodes, config: GraphConfig, max_depth: int, ends: frozenset[int]) -> TokenGraph:
        """A graph that compiled code has built."""
        graph = cls.__new__(cls)
        graph._begin(nodes, config, max_depth, ends)
        return graph

    def _begin(self, nodes: Nodes, config: GraphConfig, max_depth: int | None, ends: frozenset[int]) -> None:
        self.config, self.ends = config, ends  # ends: tokens that nothing follows
        self.max_nodes = config.nodes
        self.max_depth = config.levels if max_depth is None else min(config.levels, max_depth)
        self._nodes, self._ends = nodes, array_of(ends)
        self._outcomes: list[tuple[Ints, Ints, Ints]] = []  # parents, tokens and what became of them

    def __len__(self) -> int:
        return int(self._nodes.size[0])

    def _column(self, name: str) -> Any:
        return self._nodes.node[name][: len(self)]

    @property
    def tokens(self) -> Ints:
        return self._column("token")  # type: ignore[no-any-return]

    @property
    def parents(self) -> Ints:
        return self._column("parent")  # type: ignore[no-any-return]

    @property
    def depths(self) -> Ints:
        return self._column("depth")  # type: ignore[no-any-return]

    @property
    def probs(self) -> Floats:
        return self._column("prob")  # type: ignore[no-any-return]

    @property
    def canonical(self) -> Ints:
        """By node: itself, or the node that it is an alias of."""
        return self._column("canonical")  # type: ignore[no-any-return]

    @property
    def states(self) -> list[State]:
        return [State(state) for state in self._column("state").tolist()]

    @property
    def sources(self) -> list[Source]:
        return NAMES[self._column("source")].tolist()  # type: ignore[no-any-return]

    @property
    def children(self) -> list[dict[int, int]]:
        """By node: token -> child. An alias has those of the node that it stands for, and none of its own."""
        return [self._children(node) for node in range(len(self))]

    @property
    def aliases(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for alias, node in enumerate(self.canonical.tolist()):
            if alias != node:
                found.setdefault(node, []).append(alias)
        return found

    @property
    def drafted(self) -> set[int]:
        """Nodes expanded by a draft model, which ranks every token."""
        return set(np.flatnonzero(self._column("drafted")).tolist())

    @property
    def weak_siblings(self) -> set[int]:
        """Leaves by sibling pruning."""
        return set(np.flatnonzero(self._column("weak")).tolist())

    @property
    def dropped(self) -> set[tuple[int, int]]:
        """(parent, token) cut by sibling pruning."""
        return self._with_outcome(DROPPED)

    @property
    def crowded_out(self) -> set[tuple[int, int]]:
        """(parent, token) cut by the bound on nodes."""
        return self._with_outcome(CROWDED_OUT)

    def _with_outcome(self, outcome: int) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for parents, tokens, outcomes in self._outcomes:
            is_so = outcomes == outcome
            found.update(zip(parents[is_so].tolist(), tokens[is_so].tolist(), strict=True))
        return found

    def _children(self, node: int) -> dict[int, int]:
        found, child = {}, int(self._nodes.node["first_child"][node])
        while child != NONE:
            found[int(self._nodes.node["token"][child])] = child
            child = int(self._nodes.node["next_sibling"][child])
        return found

    def children_of(self, node: int) -> dict[int, int]:
        return self._children(int(self.canonical[node]))

    def state_of(self, node: int) -> State:
        return State(self._nodes.node["state"][node])

    def is_drafted(self, node: int) -> bool:
        """Whether a draft model, which ranks every token, proposed its children."""
        return bool(self._nodes.node["drafted"][node])

    def is_alias(self, node: int) -> bool:
        return bool(self.canonical[node] != node)

    def frontier(self, tree: TokenTree) -> tuple[list[int], Floats]:
        """The open nodes of an unrolled view, best first, and the score of the best path to each."""
        nodes, scores = unroll.frontier(self._nodes, tree.nodes, tree.depths, tree.scores, self.max_depth)
        return nodes.tolist(), scores

    def extend(self, frontier: list[int], scores: Floats, tokens: Ints, probs: Floats, source: Source) -> None:
        """Adds proposed children, `tokens` and `probs` of shape [frontier, k], best first across the frontier."""
        probs, drafted = np.where(tokens == NO_TOKEN, 0.0, probs), source == "draft"
        pruned = self.prune(probs) if drafted else (np.zeros(probs.shape, dtype=bool),) * 2
        config, parents = self.config, np.repeat(np.array(frontier, dtype=np.int64), tokens.shape[1])
        self._reserve(tokens.size)
        room = self.max_nodes - (len(self) if config.growth == "level" else 0)
        columns: Any = (tokens, probs, *pruned, scores[:, None] * probs)
        given: Any = [np.ascontiguousarray(column).ravel() for column in columns]
        rules: Any = (SOURCES.index(source), self._ends, config.k, config.tau if config.merges else 0)
        add_all: Any = extend
        outcomes = add_all(self._nodes, parents, *given, *rules, config.sibling_pruning == "drop", room)
        self._outcomes.append((parents, given[0], outcomes))

    def prune(self, probs: Floats) -> tuple[Bools, Bools]:
        """Which children [frontier, k] are far behind their best sibling, and which are improbable by themselves."""
        best = probs.max(axis=1, initial=0.0, keepdims=True)
        return probs < self.config.theta_sib * best, probs < self.config.theta_prob

    def add(self, parent: int, token: int, prob: float, source: Source, leaf: bool = False) -> bool:
        """Adds one child, merging it where its n-gram is known; False if the token is there or the parent is full."""
        self._reserve(1)
        tau = self.config.tau if self.config.merges else 0
        rules = SOURCES.index(source), leaf, self._ends, self.config.k, tau
        return bool(add(self._nodes, parent, token, float(prob), *rules) == ADDED)

    def force(self, node: int, tokens: list[int], prob: float) -> bool:
        """One token after another behind a node, beside its other children; whether any of them is new."""
        known = len(self)
        self._reserve(len(tokens))
        for token in tokens:
            child = child_of(self._nodes, node, token)
            if child == NONE:
                state = LEAF if token in self.ends else OPEN
                child = append(self._nodes, int(self.canonical[node]), token, prob, SOURCES.index("forced"), state)
            self._nodes.node["prob"][child] = max(self._nodes.node["prob"][child], prob)
            node = child
        return len(self) > known

    def reaches(self, start: int, goal: int) -> bool:
        return bool(reaches(self._nodes, start, goal))

    def revise(self, node: int, probs: dict[int, float]) -> None:
        """New estimates for children that were proposed before, by token."""
        for token, child in self.children_of(node).items():
            if token in probs and token != NO_TOKEN:
                self._nodes.node["prob"][child] = probs[token]

    def close(self, frontier: list[int]) -> None:
        self._nodes.node["state"][frontier] = EXPANDED

    def unroll(self, max_nodes: int | None = None, max_depth: int | None = None, floor: float = 0.0) -> TokenTree:
        """Flattens the graph into a token tree, a merged continuation repeated under every parent, best first."""
        max_nodes = self.max_nodes if max_nodes is None else max_nodes
        max_depth = self.max_depth if max_depth is None else max_depth
        (nodes, parents, depths, sources), scores = unroll.unroll(self._nodes, max_nodes, max_depth, floor)
        return TokenTree(self.tokens[nodes], parents, depths, nodes, scores, NAMES[sources].tolist())

    def _reserve(self, more: int) -> None:
        known, count = self._nodes.node, len(self)
        if count + more > len(known):
            larger = nodes_for(2 * (count + more))
            larger.node[:count], larger.size[0] = known[:count], count
            larger.buckets[:] = self._nodes.buckets
            self._nodes = larger


@cache
def array_of(tokens: frozenset[int]) -> Ints:
    return np.array(sorted(tokens), dtype=np.int64)


@compiled
def extend(
    graph: Nodes,
    parents: Ints,
    tokens: Ints,
    probs: Floats,
    is_weak: Bools,
    is_improbable: Bools,
    scores: Floats,  # of the children's paths
    source: int,
    ends: Ints,
    k: int,
    tau: int,  # 0: nothing is merged
    drops: bool,  # weak siblings are dropped, not kept as leaves
    room: int,
) -> Ints:
    """Adds children, those of the best paths first; what became of each."""
    outcomes = np.full(len(tokens), NOTHING)
    for place in np.argsort(-scores, kind="mergesort"):
        if probs[place] <= 0.0:
            continue
        if source == DRAFT:
            graph.node["drafted"][parents[place]] = 1
        if is_weak[place] and drops:
            outcomes[place] = DROPPED
        elif room <= 0:
            outcomes[place] = CROWDED_OUT
        else:
            leaf = is_weak[place] or is_improbable[place]
            outcomes[place] = add(graph, parents[place], tokens[place], probs[place], source, leaf, ends, k, tau)
            if outcomes[place] == ADDED:
                room -= 1
                graph.node["weak"][graph.size[0] - 1] = is_weak[place]
    return outcomes


@compiled
def add(
    graph: Nodes, parent: int, token: int, prob: float, source: int, leaf: bool, ends: Ints, k: int, tau: int
) -> int:
    """Adds one child, merging it where its n-gram is known."""
    for end in ends:
        leaf = leaf or token == end
    parent = graph.node["canonical"][parent]
    known = child_of(graph, parent, token)
    if known != NONE:
        confirm(graph, known, prob, source, leaf, tau)
        return KNOWN
    if graph.node["children"][parent] >= k:
        return FULL
    node = append(graph, parent, token, prob, source, LEAF if leaf else OPEN)
    if tau > 0 and not leaf:
        merge(graph, node, tau)
    return ADDED


@compiled
def confirm(graph: Nodes, node: int, prob: float, source: int, leaf: bool, tau: int) -> None:
    """A second source proposes a node that is there: the better chance counts, and a draft before others."""
    graph.node["prob"][node] = max(graph.node["prob"][node], prob)
    if source == DRAFT:
        graph.node["source"][node] = source
    if graph.node["state"][node] == LEAF and not leaf:
        graph.node["state"][node] = OPEN
        if tau > 0:
            merge(graph, node, tau)
