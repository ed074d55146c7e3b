"""The token graph: hypotheses that share sequences, and its unrolling into a token tree.

Knows nothing of models: whoever proposes continuations hands in arrays of tokens and probabilities.
Three of the method's six steps live here: `prune`, `merge` and `unroll` (flatten).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled.passes import WORD, ancestor_bits
from draftgraph.config import GraphConfig

Source = Literal["root", "draft", "merged", "copied", "recycled"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = 0
NO_TOKEN = -1  # fills proposals that have fewer than k children


class State(IntEnum):
    OPEN = 0  # may be expanded
    EXPANDED = 1  # its children have been proposed
    LEAF = 2  # pruned by probability: kept, never expanded


@dataclass(frozen=True)
class TokenTree:
    """An unrolled graph: what the target checks in one pass. Node 0 is the root, parents come before children."""

    tokens: Ints
    parents: Ints  # -1 for the root
    depths: Ints
    nodes: Ints  # the graph node that each tree node repeats
    scores: Floats  # product of the estimates along the path
    sources: list[Source]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def mask(self) -> Bools:
        """[nodes, nodes]: row i marks node i and its ancestors."""
        bits = np.unpackbits(self.ancestors(-(-len(self) // WORD)).view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(self)].astype(bool)

    def ancestors(self, words: int) -> Ints:
        """The same as bits, WORD of them in a number. # [nodes, words]"""
        return ancestor_bits(self.parents, words)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    def index(self) -> None:
        """Makes `child` quick; else its first call does."""
        _ = self._children

    def child(self, node: int, token: int) -> int | None:
        return self._children.get((node, token))

    def first(self, nodes: int) -> TokenTree:
        """The tree of the best nodes alone."""
        return TokenTree(
            self.tokens[:nodes],
            self.parents[:nodes],
            self.depths[:nodes],
            self.nodes[:nodes],
            self.scores[:nodes],
            self.sources[:nodes],
        )


class TokenGraph:
    """A directed acyclic graph of tokens, grown from the last token of the text.

    A merged node is an alias of the first node with its n-gram and shares that node's children, now and later.
    """

    def __init__(
        self, root_token: int, config: GraphConfig, max_depth: int | None = None, ends: frozenset[int] = frozenset()
    ) -> None:
        self.config = config
        self.ends = ends  # tokens that nothing follows
        self.max_nodes = config.nodes
        self.max_depth = config.levels if max_depth is None else min(config.levels, max_depth)
        self.tokens = [root_token]
        self.parents = [-1]
        self.depths = [0]
        self.probs = [1.0]
        self.sources: list[Source] = ["root"]
        self.states = [State.OPEN]
        self.children: list[dict[int, int]] = [{}]  # token -> node
        self.canonical = [ROOT]  # itself, or the node that it is an alias of
        self.aliases: dict[int, list[int]] = {}
        self.dropped: set[tuple[int, int]] = set()  # (parent, token) cut by sibling pruning
        self.crowded_out: set[tuple[int, int]] = set()  # (parent, token) cut by the bound on nodes
        self.weak_siblings: set[int] = set()  # leaves by sibling pruning
        self.drafted: set[int] = set()  # expanded by a draft model, which ranks every token
        self._first_with: dict[tuple[int, ...], int] = {}
        if config.merges:
            self.merge(ROOT)

    def __len__(self) -> int:
        return len(self.tokens)

    def is_alias(self, node: int) -> bool:
        return self.canonical[node] != node

    def children_of(self, node: int) -> dict[int, int]:
        return self.children[self.canonical[node]]

    def frontier(self, tree: TokenTree) -> tuple[list[int], Floats]:
        """The open nodes of an unrolled view, best first, and the score of the best path to each."""
        best: dict[int, float] = {}
        deep = tree.depths >= self.max_depth
        for node, score in zip(tree.nodes[~deep].tolist(), tree.scores[~deep].tolist(), strict=True):
            node = self.canonical[node]
            if self.states[node] is State.OPEN and node not in best:
                best[node] = score
        return list(best), np.array(list(best.values()))

    def extend(self, frontier: list[int], scores: Floats, tokens: Ints, probs: Floats, source: Source) -> None:
        """Adds proposed children, `tokens` and `probs` of shape [frontier, k], best first across the frontier."""
        drafted = source == "draft"
        probs = np.where(tokens == NO_TOKEN, 0.0, probs)
        pruned = self.prune(probs) if drafted else (np.zeros(probs.shape, dtype=bool),) * 2
        columns = (column.tolist() for column in (tokens, probs, *pruned))
        children = [
            (score * prob, parent, token, prob, is_weak, is_improbable)
            for parent, score, *row in zip(frontier, scores.tolist(), *columns, strict=True)
            for token, prob, is_weak, is_improbable in zip(*row, strict=True)
            if prob > 0.0
        ]
        if drafted:
            self.drafted.update(child[1] for child in children)
        room = self.max_nodes - (len(self) if self.config.growth == "level" else 0)
        for _, parent, token, prob, is_weak, is_improbable in sorted(children, key=lambda child: -child[0]):
            if is_weak and self.config.sibling_pruning == "drop":
                self.dropped.add((parent, token))
            elif room <= 0:
                self.crowded_out.add((parent, token))
            elif self.add(parent, token, prob, source, leaf=is_weak or is_improbable):
                room -= 1
                if is_weak:
                    self.weak_siblings.add(len(self) - 1)

    def prune(self, probs: Floats) -> tuple[Bools, Bools]:
        """Which children [frontier, k] are far behind their best sibling, and which are improbable by themselves."""
        best = probs.max(axis=1, initial=0.0, keepdims=True)
        return probs < self.config.theta_sib * best, probs < self.config.theta_prob

    def add(self, parent: int, token: int, prob: float, source: Source, leaf: bool = False) -> bool:
        """Adds one child, merging it where its n-gram is known; False if the token is there or the parent is full."""
        leaf = leaf or token in self.ends
        siblings = self.children_of(parent)
        if token in siblings:
            self._confirm(siblings[token], prob, source, leaf)
            return False
        if len(siblings) >= self.config.k:
            return False
        parent = self.canonical[parent]
        node = siblings[token] = len(self)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.probs.append(prob)
        self.sources.append(source)
        self.states.append(State.LEAF if leaf else State.OPEN)
        self.children.append({})
        self.canonical.append(node)
        if self.config.merges and not leaf:
            self.merge(node)
        return True

    def _confirm(self, node: int, prob: float, source: Source, leaf: bool) -> None:
        """A second source proposes a node that is there: the better chance counts, and a draft before others."""
        self.probs[node] = max(self.probs[node], prob)
        self.sources[node] = source if source == "draft" else self.sources[node]
        if self.states[node] is State.LEAF and not leaf:
            self.states[node] = State.OPEN
            if self.config.merges:
                self.merge(node)

    def merge(self, node: int) -> None:
        """Makes the node an alias of the first node with its last tau tokens, unless that would close a cycle."""
        gram = self.ngram(node)
        if gram is None:
            return
        first = self._first_with.setdefault(gram, node)
        if first != node and not self.reaches(first, node):
            self.canonical[node] = first
            self.aliases.setdefault(first, []).append(node)

    def ngram(self, node: int) -> tuple[int, ...] | None:
        """The last tau tokens of the path to a node; None where the graph is not that deep yet."""
        if self.depths[node] + 1 < self.config.tau:
            return None
        gram = []
        for _ in range(self.config.tau):
            gram.append(self.tokens[node])
            node = self.parents[node]
        return tuple(gram)

    def reaches(self, start: int, goal: int) -> bool:
        """Whether a path leads from start to goal; walks back from goal, through every alias of its ancestors."""
        seen = {goal}
        stack = [goal]
        while stack:
            parent = self.parents[stack.pop()]
            for above in (parent, *self.aliases.get(parent, ())):
                if above >= ROOT and above not in seen:
                    seen.add(above)
                    stack.append(above)
        return start in seen

    def may_grow(self, node: int) -> bool:
        return self.states[node] is State.OPEN and self.depths[node] < self.max_depth

    def close(self, frontier: list[int]) -> None:
        for node in frontier:
            self.states[node] = State.EXPANDED

    def unroll(self, max_nodes: int | None = None, max_depth: int | None = None, floor: float = 0.0) -> TokenTree:
        """Flattens the graph into a token tree, a merged continuation repeated under every parent, best first."""
        max_nodes = self.max_nodes if max_nodes is None else max_nodes
        max_depth = self.max_depth if max_depth is None else max_depth
        nodes: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        scores: list[float] = []
        sources: list[Source] = []
        # (-score, order of arrival, graph node, tree parent, depth, whether an alias was passed)
        heap: list[tuple[float, int, int, int, int, bool]] = [(-1.0, 0, ROOT, -1, 0, False)]
        arrivals = 0
        while heap and len(nodes) < max_nodes:
            negative, _, node, parent, depth, borrowed = heapq.heappop(heap)
            if -negative < floor:
                break
            here = len(nodes)
            nodes.append(node)
            parents.append(parent)
            depths.append(depth)
            scores.append(-negative)
            source = self.sources[node]
            sources.append("merged" if borrowed and source == "draft" else source)
            if depth < max_depth:
                borrowed = borrowed or self.is_alias(node)
                for child in self.children_of(node).values():
                    arrivals += 1
                    heapq.heappush(heap, (negative * self.probs[child], arrivals, child, here, depth + 1, borrowed))
        ids = np.array(nodes)
        tokens = np.array(self.tokens)[ids]
        return TokenTree(tokens, np.array(parents), np.array(depths), ids, np.array(scores), sources)
