"""All that is known about the next tokens at once: a row for each node that somebody proposed children for.

A draft that grows on its device hands over all its levels together, so nothing has to be asked level by level: the
opinions of all sources are pooled in one go, and the best nodes are those with the best products of chances. While the
draft is at work, rows are made of what the memories alone say.
"""

from __future__ import annotations

import heapq

import numpy as np

from draftgraph.config import GraphConfig
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import DraftedNodes
from draftgraph.drafting.merging import merged
from draftgraph.drafting.pool import ORDER, pooled
from draftgraph.drafting.recycle import CONTEXTS, Context, RecycleProposer
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.graph import NO_TOKEN, Floats, Ints, Source, State, TokenGraph, TokenTree

CHOICES = 4  # of each memory at a node
MEMORY_ROWS = 16  # made while the draft is at work
LEAST = 0.02  # a node that is less likely is no row of a memory

Opinions = tuple[list[int], list[float]]  # tokens and chances, a column each


class Sheet:
    """The rows of one step."""

    def __init__(
        self, copied: SuffixProposer, recycled: RecycleProposer, calibration: Calibration, config: GraphConfig
    ) -> None:
        self.copied, self.recycled, self.calibration, self.config = copied, recycled, calibration, config
        self.width = 2 * CHOICES + config.k
        counts = (config.k, CHOICES, CHOICES)
        ends = np.cumsum(counts)
        self.columns = {source: slice(end - count, end) for source, end, count in zip(ORDER, ends, counts, strict=True)}
        self._source_of = np.repeat(np.arange(len(ORDER)), counts)

    def begin(self, text: list[int], max_depth: int, ends: frozenset[int]) -> None:
        """The root's row, and those that the memories lead to. Both have begun this step."""
        self.max_depth, self.ends = min(max_depth, self.config.levels), ends
        self.parents, self.tokens, self.depths = [-1], [text[-1]], [0]
        self._rows: dict[tuple[int, int], int] = {}  # parent's row, token -> row
        self._matches = [self.copied.root]
        self._contexts: list[Context] = [tuple(text[-max(CONTEXTS) :])]
        self._memories: list[Opinions] = [self._asked(0)]
        self._drafts: tuple[list[int], Ints, Floats] | None = None  # rows, tokens, chances
        heap: list[tuple[float, int, int]] = []  # -chance, parent's row, token
        self._push_likely(heap, 0, 1.0)
        while heap and len(self.parents) <= MEMORY_ROWS:
            negative, parent, token = heapq.heappop(heap)
            self._push_likely(heap, self._row(parent, token), -negative)

    def _push_likely(self, heap: list[tuple[float, int, int]], row: int, chance: float) -> None:
        if self.depths[row] >= self.max_depth:
            return
        best: dict[int, float] = {}
        for token, said in zip(*self._memories[row], strict=True):
            best[token] = max(said, best.get(token, 0.0))
        total = max(sum(best.values()), 1.0)
        for token, said in best.items():
            if chance * said > LEAST * total and token not in self.ends:
                heapq.heappush(heap, (-chance * said / total, row, token))

    def add(self, drafted: DraftedNodes) -> None:
        """What a draft proposed."""
        tokens, k = drafted.tokens.tolist(), drafted.tokens.shape[1]
        row_of = {0: 0}  # expansion -> row
        for expansion, node in enumerate(drafted.nodes):
            if node >= 0 and (above := row_of.get(node // k)) is not None:
                row_of[expansion] = self._row(above, tokens[node // k][node % k])
        expansions = list(row_of)
        self._drafts = list(row_of.values()), drafted.tokens[expansions], drafted.probs[expansions]

    def _row(self, parent: int, token: int) -> int:
        row = self._rows.get((parent, token))
        if row is None:
            row = self._rows[parent, token] = len(self.parents)
            self.parents.append(parent)
            self.tokens.append(token)
            self.depths.append(self.depths[parent] + 1)
            self._matches.append(self.copied.follow(self._matches[parent], token))
            self._contexts.append((*self._contexts[parent], token)[-max(CONTEXTS) :])
            self._memories.append(self._asked(row))
        return row

    def _asked(self, row: int) -> Opinions:
        """What the memories say, each in its columns."""
        copied = self.copied.continuations(self._matches[row], CHOICES)
        recycled = self.recycled.likeliest(self._contexts[row], self.depths[row])
        tokens, chances = [NO_TOKEN] * (2 * CHOICES), [0.0] * (2 * CHOICES)
        for first, found in ((0, copied), (CHOICES, recycled)):
            for place, (token, chance) in enumerate(found, start=first):
                tokens[place], chances[place] = token, chance
        return tokens, chances

    def tree(self, floor: float) -> TokenTree:
        """The likeliest nodes, best first, each with the product of the chances on its path."""
        k = self.config.k
        self.named, said = np.full((len(self.parents), self.width), NO_TOKEN), np.zeros((len(self.parents), self.width))
        self.named[:, k:], said[:, k:] = (np.array(part) for part in zip(*self._memories, strict=True))
        self.drafted: set[int] = set()
        if self._drafts is not None:
            rows, tokens, chances = self._drafts
            self.named[rows, : tokens.shape[1]] = np.where(chances > 0, tokens, NO_TOKEN)
            said[rows, : tokens.shape[1]] = chances
            self.drafted = set(rows)
        self.estimates = pooled(self.named, said, k)
        self.named = np.where(self.estimates > 0, self.named, NO_TOKEN)
        self.chances = self._chances()
        scores, self._child_rows = self._scores()
        flat = scores.ravel()
        order = np.argsort(-flat, kind="stable")[: self.config.nodes - 1]
        order = order[flat[order] > max(floor, 0.0)]
        self.plain = self._tree_of(order, flat)
        self.merged = merged(self.plain, self.config.tau, self.max_depth, self.config.nodes)
        return self.merged.tree

    def _chances(self) -> Floats:
        chances = np.empty(self.estimates.shape)
        for source, here in self.columns.items():
            chances[:, here] = self.calibration.corrected(source, self.estimates[:, here])
        if self.config.k < self.width:
            least = np.partition(chances, -self.config.k, axis=1)[:, -self.config.k]
            chances[chances < least[:, None]] = 0.0
        return chances

    def _scores(self) -> tuple[Floats, Ints]:
        """Of all children of all rows, and which of them are rows themselves. # [rows, columns] each"""
        parents, tokens = np.array(self.parents), np.array(self.tokens)
        matching = self.named[parents] == tokens[:, None]
        columns, named = matching.argmax(axis=1), matching.any(axis=1)
        named[0] = False  # the root is nobody's child
        steps = np.where(named, self.chances[parents, columns], 0.0).tolist()
        paths = [1.0]
        for parent, step in zip(self.parents[1:], steps[1:], strict=True):
            paths.append(paths[parent] * step)
        deep = np.array(self.depths) >= self.max_depth
        child_rows = np.full(self.named.shape, -1)
        child_rows[parents[named], columns[named]] = np.flatnonzero(named)
        return np.where(deep, 0.0, paths)[:, None] * self.chances, child_rows

    def _tree_of(self, order: Ints, flat: Floats) -> TokenTree:
        above = order // self.width
        rows = np.concatenate([[0], self._child_rows.ravel()[order]])  # of the tree's nodes, -1: none
        places = np.zeros(len(self.parents), dtype=np.int64)
        places[rows[rows >= 0]] = np.flatnonzero(rows >= 0)
        names = self._source_of[order % self.width].tolist()
        sources: list[Source] = ["root", *(ORDER[name] for name in names)]
        self.rows = rows
        return TokenTree(
            tokens=np.concatenate([[self.tokens[0]], self.named.ravel()[order]]),
            parents=np.concatenate([[-1], places[above]]),
            depths=np.concatenate([[0], np.array(self.depths)[above] + 1]),
            nodes=np.arange(len(order) + 1),
            scores=np.concatenate([[1.0], flat[order]]),
            sources=sources,
        )

    def graph(self) -> TokenGraph:
        """What was chosen as a graph, in which an alias shares the children of the node that it repeats."""
        plain, rows = self.plain, self.rows.tolist()
        graph = TokenGraph(int(plain.tokens[0]), self.config, self.max_depth, self.ends)
        graph.tokens, graph.parents, graph.depths = plain.tokens.tolist(), plain.parents.tolist(), plain.depths.tolist()
        graph.probs = (plain.scores / plain.scores[np.maximum(plain.parents, 0)]).tolist()
        graph.sources = list(plain.sources)
        graph.canonical = [self.merged.aliases.get(node, node) for node in range(len(plain))]
        for alias, node in self.merged.aliases.items():
            graph.aliases.setdefault(node, []).append(alias)
        graph.states = [State.EXPANDED if row >= 0 else State.OPEN for row in rows]
        graph.drafted = {node for node, row in enumerate(rows) if row in self.drafted}
        graph.children = [{} for _ in rows]
        for node, (parent, token) in enumerate(zip(graph.parents[1:], graph.tokens[1:], strict=True), start=1):
            graph.children[parent][token] = node
        return graph

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""
        rows = self.rows[self.merged.tree.nodes[visited]].tolist()
        outcomes = list(zip(rows, chosen, strict=True))
        known = np.array([row for row, _ in outcomes if row >= 0])
        right = np.array([token for row, token in outcomes if row >= 0])
        for source, here in self.columns.items():
            estimates = self.estimates[known, here] if len(known) else np.zeros((0, 1))
            named = estimates > 0
            if named.any():
                accepted = self.named[known, here] == right[:, None]
                self.calibration.observe(source, estimates[named], accepted[named])
