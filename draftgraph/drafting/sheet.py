"""All that is known about the next tokens at once: a row for each node that somebody proposed children for.

A draft that grows on its device goes on without asking, so no level has to be decided on before the next. While it is
at work rows are made of what the text alone says, then of every level as it arrives; opinions are pooled when only the
last levels are missing, and the best nodes are those with the best products of chances.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from draftgraph.config import GraphConfig
from draftgraph.drafting.calibration import Calibration
from draftgraph.drafting.device import DraftedNodes
from draftgraph.drafting.merging import merged
from draftgraph.drafting.pool import ORDER, weighed, weighed_alone
from draftgraph.drafting.recycle import CONTEXTS, Context, RecycleProposer
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.graph import NO_TOKEN, Bools, Floats, Ints, State, TokenGraph, TokenTree

CHOICES = 4  # of each memory at a node
MEMORY_ROWS = 16  # made while the draft is at work
ROWS = 128  # to begin with
LEAST = 0.02  # of nodes that are less likely no memory is asked

Pooled = tuple[Ints, Floats, Floats]  # tokens, estimates, and what those are worth; [columns, rows] each


class Opinions:
    """What is said at every row: tokens and their chances, each in its column."""

    def __init__(self, columns: int) -> None:
        self.tokens = np.full((ROWS, columns), NO_TOKEN)
        self.chances = np.zeros((ROWS, columns))

    def reserve(self, rows: int) -> None:
        while rows > len(self.tokens):
            self.tokens, self.chances = (np.concatenate([part, part]) for part in (self.tokens, self.chances))

    def side_by_side(self, first: int, last: int) -> tuple[Ints, Floats]:
        """Of rows from the first to before the last. # [columns, rows]"""
        return np.ascontiguousarray(self.tokens[first:last].T), np.ascontiguousarray(self.chances[first:last].T)


class Sheet:
    """The rows of one step. In arrays they stand side by side, and what is proposed at each below one another: first
    what the draft says, then what was copied, then what was recycled."""

    def __init__(
        self, copied: SuffixProposer, recycled: RecycleProposer, calibration: Calibration, config: GraphConfig
    ) -> None:
        self.copied, self.recycled, self.calibration, self.config = copied, recycled, calibration, config
        counts = (config.k, CHOICES, CHOICES)
        ends = np.cumsum(counts)
        self.columns = {source: slice(end - count, end) for source, end, count in zip(ORDER, ends, counts, strict=True)}
        self._names = [source for source, count in zip(ORDER, counts, strict=True) for _ in range(count)]
        self._drafts, self._memories = Opinions(config.k), Opinions(2 * CHOICES)

    def begin(self, text: list[int], max_depth: int, ends: frozenset[int]) -> None:
        """The root's row, and those that the memories lead to. Both have begun this step."""
        self.max_depth, self.ends = min(max_depth, self.config.levels), ends
        self.parents, self.tokens, self.depths = [-1], [text[-1]], [0]
        self._reach = [1.0]  # how likely a row is, as whoever proposed it first said
        self._rows: dict[tuple[int, int], int] = {}  # parent's row, token -> row
        self._matches = [self.copied.root]
        self._contexts: list[Context] = [tuple(text[-max(CONTEXTS) :])]
        self._asked = 0  # rows, of the memories
        self._closed = False  # no memory is asked any more
        self._pooled: Pooled | None = None
        self._row_of: list[int | None] = []  # by expansion of the draft
        self._proposed: list[int] = []  # tokens, by node of the draft
        self._hopes: list[float] = []  # and their chances
        self.drafted: set[int] = set()  # rows
        heap: list[tuple[float, int, int, float]] = []  # -chance, parent's row, token, its chance there
        self._push_likely(heap, 0)
        while heap and len(self.parents) <= MEMORY_ROWS:
            _, parent, token, chance = heapq.heappop(heap)
            self._push_likely(heap, self._row(parent, token, chance))
        self._ask()

    def _push_likely(self, heap: list[tuple[float, int, int, float]], row: int) -> None:
        """What the text says behind a row."""
        if self.depths[row] < self.max_depth:
            for token, chance in self.copied.continuations(self._matches[row], CHOICES):
                hope = self._reach[row] * chance
                if hope > LEAST and token not in self.ends:
                    heapq.heappush(heap, (-hope, row, token, chance))

    def add(self, level: DraftedNodes) -> None:
        """Rows for the nodes that a draft has expanded, the root first, and what it says there. A node is known by
        where it was proposed: its number is k times the expansion, plus its rank there. Where opinions have been
        pooled already, no memory is asked about new rows."""
        k, rows, expansions = level.tokens.shape[1], [], []
        for expansion, node in enumerate(level.nodes):
            row: int | None = None if self._proposed else 0
            if node >= 0 and (above := self._row_of[node // k]) is not None:
                row = self._row(above, self._proposed[node], self._hopes[node])
            self._row_of.append(row)
            if row is not None:
                rows.append(row)
                expansions.append(expansion)
        self._proposed += level.tokens.ravel().tolist()
        self._hopes += level.probs.ravel().tolist()
        if self._pooled is not None and min(rows, default=self._asked) < self._asked:
            self._pooled = None  # a memory's row after all: what was said there must be pooled with this
        self._ask()
        self._drafts.tokens[rows, :k], self._drafts.chances[rows, :k] = (
            level.tokens[expansions],
            level.probs[expansions],
        )
        self.drafted.update(rows)

    def _row(self, parent: int, token: int, chance: float) -> int:
        row = self._rows.get((parent, token))
        if row is None:
            row = self._rows[parent, token] = len(self.parents)
            self.parents.append(parent)
            self.tokens.append(token)
            self.depths.append(self.depths[parent] + 1)
            self._reach.append(self._reach[parent] * chance)
            if not self._closed:
                self._matches.append(self.copied.follow(self._matches[parent], token))
                self._contexts.append((*self._contexts[parent], token)[-max(CONTEXTS) :])
        return row

    def _ask(self) -> None:
        """What the memories say at new rows that are likely, each in its places, and every token once: the louder of
        both counts."""
        new = range(self._asked, len(self.parents))
        self._asked = len(self.parents)
        for opinions in (self._drafts, self._memories):
            opinions.reserve(self._asked)
            opinions.tokens[new.start : new.stop], opinions.chances[new.start : new.stop] = NO_TOKEN, 0.0
        if self._closed:
            return
        rows = [row for row in new if self._reach[row] > LEAST]
        found = self.recycled.likeliest([self._contexts[row] for row in rows], [self.depths[row] for row in rows])
        for row, recycled in zip(rows, found, strict=True):
            copied = self.copied.continuations(self._matches[row], CHOICES)
            if not copied and not recycled:
                continue
            tokens, chances = [NO_TOKEN] * (2 * CHOICES), [0.0] * (2 * CHOICES)
            for place, (token, chance) in enumerate(copied):
                tokens[place], chances[place] = token, chance
            for place, (token, chance) in enumerate(recycled, start=CHOICES):
                here = tokens.index(token) if token in tokens else place
                tokens[here], chances[here] = token, max(chance, chances[here])
            self._memories.tokens[row], self._memories.chances[row] = tokens, chances

    def select(self, floor: float) -> Selection:
        """The likeliest nodes, best first, each with the product of the chances on its path."""
        named, estimates, chances = self._all_pooled()
        parents, tokens, depths = np.array(self.parents), np.array(self.tokens), np.array(self.depths)
        matching = named[:, parents] == tokens
        matching[:, 0] = False  # the root is nobody's child
        places, rows = matching.nonzero()  # of the rows that are somebody's child
        steps = np.zeros(len(parents))
        steps[rows] = chances[places, parents[rows]]
        above, columns, scores = self._best(chances, steps.tolist(), depths < self.max_depth, floor)
        child_rows = np.full(named.shape, -1)
        child_rows[places, parents[rows]] = rows
        row_of = np.concatenate([[0], child_rows[columns, above]])
        node_of = np.zeros(len(parents) + 1, dtype=np.int64)  # by row, and one for those that are none
        node_of[row_of] = np.arange(len(row_of))
        plain = TokenTree(
            tokens=np.concatenate([tokens[:1], named[columns, above]]),
            parents=np.concatenate([[-1], node_of[above]]),
            depths=np.concatenate([[0], depths[above] + 1]),
            nodes=np.arange(len(row_of)),
            scores=np.concatenate([[1.0], scores]),
            sources=["root", *(self._names[column] for column in columns.tolist())],
        )
        whole = merged(plain, self.config.tau, self.max_depth, self.config.nodes)
        return Selection(self, whole.tree, plain, whole.aliases, row_of, named, estimates, self.drafted, self.max_depth)

    def pool(self) -> None:
        """Every token that anybody names, what all together say of it, and what that is worth. # [columns, rows]"""
        k, count = self.config.k, len(self.parents)
        drafted, sure = self._drafts.side_by_side(0, count)
        names, said = self._memories.side_by_side(0, count)
        estimates = np.concatenate(weighed(drafted, sure, names, said))
        named = np.where(estimates > 0, np.concatenate([drafted, names]), NO_TOKEN)
        chances = np.empty(estimates.shape)
        for source, here in self.columns.items():
            chances[here] = self.calibration.corrected(source, estimates[here])
        least = np.partition(chances, -k, axis=0)[-k]
        chances[chances < least] = 0.0  # k children at most
        self._closed, self._pooled = True, (named, estimates, chances)

    def _all_pooled(self) -> Pooled:
        """With the rows that came too late for the memories."""
        if self._pooled is None:
            self.pool()
        assert self._pooled is not None
        known, count = self._pooled[0].shape[1], len(self.parents)
        if known == count:
            return self._pooled
        drafted, sure = self._drafts.side_by_side(known, count)
        estimates = weighed_alone(sure)
        named = beside(self._pooled[0], np.where(sure > 0, drafted, NO_TOKEN), NO_TOKEN)
        worth = self.calibration.corrected("draft", estimates)
        return named, beside(self._pooled[1], estimates, 0.0), beside(self._pooled[2], worth, 0.0)

    def _best(self, chances: Floats, steps: list[float], open_rows: Bools, floor: float) -> tuple[Ints, Ints, Floats]:
        """Rows, columns and scores of the best children of open rows, best first; `steps` are the rows' own chances."""
        paths = [1.0]
        for parent, step in zip(self.parents[1:], steps[1:], strict=True):
            paths.append(paths[parent] * step)
        scores = (np.where(open_rows, paths, 0.0) * chances).T  # a parent's row stands before its child's
        above, columns = np.nonzero(scores > max(floor, 0.0))
        found = scores[above, columns]
        order = np.argsort(-found, kind="stable")[: self.config.nodes - 1]
        return above[order], columns[order], found[order]


@dataclass(frozen=True)
class Selection:
    """What was chosen of a sheet. The sheet itself goes on to the next step."""

    sheet: Sheet
    tree: TokenTree
    plain: TokenTree  # before leaves borrowed from each other
    aliases: dict[int, int]
    rows: Ints  # of the nodes of the plain tree, -1: none
    named: Ints  # [columns, rows]
    estimates: Floats
    drafted: set[int]  # rows
    max_depth: int

    def first(self, nodes: int) -> Selection:
        return replace(self, tree=self.tree.first(nodes))

    def graph(self) -> TokenGraph:
        """What was chosen as a graph, in which an alias shares the children of the node that it repeats."""
        plain, rows = self.plain, self.rows.tolist()
        graph = TokenGraph(int(plain.tokens[0]), self.sheet.config, self.max_depth, self.sheet.ends)
        graph.tokens, graph.parents, graph.depths = plain.tokens.tolist(), plain.parents.tolist(), plain.depths.tolist()
        graph.probs = (plain.scores / plain.scores[np.maximum(plain.parents, 0)]).tolist()
        graph.sources = list(plain.sources)
        graph.canonical = [self.aliases.get(node, node) for node in range(len(plain))]
        for alias, node in self.aliases.items():
            graph.aliases.setdefault(node, []).append(alias)
        graph.states = [State.EXPANDED if row >= 0 else State.OPEN for row in rows]
        graph.drafted = {node for node, row in enumerate(rows) if row in self.drafted}
        graph.children = [{} for _ in rows]
        for node, (parent, token) in enumerate(zip(graph.parents[1:], graph.tokens[1:], strict=True), start=1):
            graph.children[parent][token] = node
        return graph

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""
        rows = self.rows[self.tree.nodes[visited]].tolist()
        outcomes = [(row, token) for row, token in zip(rows, chosen, strict=True) if row >= 0]
        known, right = (np.array(column, dtype=np.int64) for column in zip(*outcomes, strict=True))
        for source, here in self.sheet.columns.items():
            estimates = self.estimates[here, known]
            named = estimates > 0
            if named.any():
                accepted = self.named[here, known] == right
                self.sheet.calibration.observe(source, estimates[named], accepted[named])


def beside(early: Any, late: Any, nothing: float) -> Any:
    """Late rows beside early ones: they have fewer columns."""
    known = early.shape[1]
    whole = np.full((len(early), known + late.shape[1]), nothing, dtype=early.dtype)
    whole[:, :known], whole[: len(late), known:] = early, late
    return whole
