"""All that is proposed for one step at once: a row for each node that somebody proposed children for.

A draft that grows on its device goes on without asking, so no level has to be decided on before the next. While it is
at work rows are made of what the text alone says, then of every level as it arrives; the graph of the step is made of
the nodes with the best products of chances.
"""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.config import GraphConfig
from draftgraph.graph import NO_TOKEN, Floats, Ints, TokenGraph, TokenTree
from draftgraph.graph.merge import merge_leaves
from draftgraph.graph.nodes import DRAFT, EXPANDED, NONE, OPEN, ROOT, Nodes, append, nodes_for
from draftgraph.graph.token_graph import array_of
from draftgraph.graph.unroll import THING, pop, push
from draftgraph.proposers.copying import CHOICES, Automaton, SuffixProposer, copies, follow
from draftgraph.proposers.pooling import PLACES, Calibration, correct, find, observe_outcomes, pool
from draftgraph.proposers.recycling import LONGEST, Noise, Rankings, RecycleProposer, context_of, longer, recall
from draftgraph.proposers.recycling import find as find_ranking

MEMORY_ROWS = 16  # made while the draft is at work
LEAST = 0.02  # of nodes that are less likely no memory is asked
NO_ROW = -1
AUTOMATA = 3  # of the text, and of two halves of past answers
ROW = np.dtype(
    [
        ("parent", np.int64),
        ("token", np.int64),
        ("depth", np.int64),
        ("context", np.int64),  # the last tokens of the path
        ("length", np.int64),
        ("drafted", np.int64),
        ("reach", np.float64),  # how likely it is, as whoever proposed it first said
    ]
)
DRAFTED = np.dtype([("token", np.int64), ("chance", np.float64)])
COUNTS = np.dtype([("rows", np.int64), ("expansions", np.int64)])


class Table(NamedTuple):
    """A row for each node that somebody proposed children for."""

    rows: NDArray[np.void]
    matches: Ints  # [rows, automata, 2]: where the path leads to in each, and how many tokens match there
    named: Ints  # [rows, columns]: see `pooling`
    said: Floats
    estimates: Floats  # what all together say
    chances: Floats  # what that is worth
    drafted: NDArray[np.void]  # nodes of the draft, by their numbers
    expansions: Ints  # their rows
    counts: NDArray[np.void]  # [1]


class Memories(NamedTuple):
    """What is known of the text, for one step."""

    automata: tuple[Automaton, Automaton, Automaton]  # of the text, and of two halves of past answers
    roots: Ints  # [automata that are there, 2]: the root's matches
    rankings: Rankings
    noted: int  # rankings, ever
    noise: Noise
    position: int  # of the root's next token


def table_for(rows: int, k: int) -> Table:
    """With room for so many rows, apart from those of the memories."""
    rows += 1 + MEMORY_ROWS
    shape = rows, k + 2 * CHOICES
    said, estimates, chances = np.zeros((3, *shape))
    return Table(
        np.zeros(rows, dtype=ROW),
        np.zeros((rows, AUTOMATA, 2), dtype=np.int64),
        np.zeros(shape, dtype=np.int64),
        said,
        estimates,
        chances,
        np.zeros(rows * k, dtype=DRAFTED),
        np.zeros(rows, dtype=np.int64),
        np.zeros(1, dtype=COUNTS),
    )


@compiled
def begin(table: Table, memories: Memories, k: int, last_tokens: Ints, max_depth: int, ends: Ints) -> None:
    """The root's row, and those that the text leads to."""
    table.counts["rows"][0] = table.counts["expansions"][0] = 0
    rows = table.rows
    rows["parent"][0], rows["token"][0], rows["depth"][0], rows["reach"][0] = NO_ROW, last_tokens[-1], 0, 1.0
    for place in range(len(memories.roots)):
        table.matches[0, place] = memories.roots[place]
    rows["context"][0], rows["length"][0] = context_of(last_tokens), len(last_tokens)
    likely, size = np.empty((1 + MEMORY_ROWS) * CHOICES, dtype=THING), 0
    row = open_row(table, memories, k)
    while True:
        if rows["depth"][row] < max_depth:
            for place in range(k, k + CHOICES):
                hope = rows["reach"][row] * table.said[row, place]
                if hope > LEAST and find(ends, table.named[row, place]) == NO_TOKEN:
                    size = push(likely, size, hope, row * table.named.shape[1] + place)
        if not size or table.counts["rows"][0] > MEMORY_ROWS:
            return
        size = pop(likely, size)
        parent, place = divmod(likely["number"][size], table.named.shape[1])
        row = row_of(table, memories, k, parent, table.named[parent, place], table.said[parent, place])


@compiled
def row_of(table: Table, memories: Memories, k: int, parent: int, token: int, chance: float) -> int:
    """The row of a child: a new one, if need be."""
    rows, row = table.rows, table.counts["rows"][0]
    for known in range(parent + 1, row):
        if rows["parent"][known] == parent and rows["token"][known] == token:
            return known
    rows["parent"][row], rows["token"][row] = parent, token
    rows["depth"][row], rows["reach"][row] = rows["depth"][parent] + 1, rows["reach"][parent] * chance
    for place in range(len(memories.roots)):
        state, matched = table.matches[parent, place]
        table.matches[row, place, 0], table.matches[row, place, 1] = follow(
            memories.automata[place], state, matched, token
        )
    rows["context"][row] = longer(rows["context"][parent], token)
    rows["length"][row] = min(rows["length"][parent] + 1, LONGEST)
    return open_row(table, memories, k)


@compiled
def open_row(table: Table, memories: Memories, k: int) -> int:
    """The next row: what the memories say there, if it is likely, every token once; the louder of both counts."""
    row = table.counts["rows"][0]
    table.counts["rows"][0] += 1
    one = table.rows[row]
    one["drafted"] = 0
    named, said = table.named[row], table.said[row]
    for place in range(len(named)):
        named[place], said[place] = NO_TOKEN, 0.0
    if not one["reach"] > LEAST:
        return row  # type: ignore[no-any-return]
    copied, recycled = named[k : k + CHOICES], named[k + CHOICES :]
    longest = 0  # match: of equals the text itself, then the newer answers
    for place in range(1, len(memories.roots)):
        longest = place if table.matches[row, place, 1] > table.matches[row, longest, 1] else longest
    state, matched = table.matches[row, longest]
    copies(memories.automata[longest], state, matched, copied, said[k : k + CHOICES])
    found, matched = find_ranking(memories.rankings, memories.noted, one["context"], one["length"])
    if matched:
        position = memories.position + one["depth"]
        recall(memories.rankings, found, matched, memories.noise, position, recycled, said[k + CHOICES :])
        for place in range(k + CHOICES, len(named)):
            same = find(copied, named[place])
            if named[place] != NO_TOKEN and same != NO_TOKEN:
                said[k + same] = max(said[k + same], said[place])
                named[place], said[place] = NO_TOKEN, 0.0
    return row  # type: ignore[no-any-return]


@compiled
def add(table: Table, memories: Memories, k: int, report: Floats, places: Floats, curves: Floats) -> None:
    """Rows for the nodes that a draft has expanded, the root first, and what it says there: see `kernels.growth`. A
    node is known by where it was proposed: its number is the draft's k times the expansion, plus its rank there."""
    ranks = report.shape[1] // 2
    for place in range(len(report)):
        one = report[place]
        expansion, node = table.counts["expansions"][0], int(one[2 * ranks])
        table.counts["expansions"][0] += 1
        row = 0 if expansion == 0 else NO_ROW
        if node >= 0 and table.expansions[node // ranks] != NO_ROW:
            above, drafted = table.expansions[node // ranks], table.drafted[node]
            row = row_of(table, memories, k, above, drafted["token"], drafted["chance"])
        table.expansions[expansion] = row
        for rank in range(ranks):
            drafted = table.drafted[expansion * ranks + rank]
            drafted["token"], drafted["chance"] = int(one[rank]), exp(one[ranks + rank])
            if row != NO_ROW:
                table.named[row, rank], table.said[row, rank] = drafted["token"], drafted["chance"]
        if row != NO_ROW:
            table.rows["drafted"][row] = 1
            weigh(table, k, row, places, curves)


@compiled
def weigh(table: Table, k: int, row: int, places: Floats, curves: Floats) -> None:
    pool(table.named[row], table.said[row], k, table.estimates[row])
    correct(table.estimates[row], k, places, curves, table.chances[row])


@compiled
def share_depths(table: Table, k: int, places: Floats, curves: Floats) -> None:
    """What a draft says at all nodes of a depth it says at those that it did not expand too."""
    rows, count = table.rows, table.counts["rows"][0]
    asked = np.full(rows["depth"][:count].max() + 1, NO_ROW)
    for row in range(count):
        if rows["drafted"][row]:
            asked[rows["depth"][row]] = row
    for row in range(count):
        like = asked[rows["depth"][row]]
        if like != NO_ROW and not rows["drafted"][row]:
            table.named[row, :k], table.said[row, :k] = table.named[like, :k], table.said[like, :k]
            rows["drafted"][row] = 1
            weigh(table, k, row, places, curves)


@compiled
def select(
    table: Table,
    graph: Nodes,
    k: int,
    places: Floats,
    curves: Floats,
    floor: float,
    max_depth: int,
    max_nodes: int,
    by_depth: bool,
) -> Ints:
    """Makes the graph of the root and the nodes with the best products of chances on their paths, over a floor, in that
    order; the row of each, NO_ROW for those without. # [nodes]"""
    rows, count, columns = table.rows, table.counts["rows"][0], table.named.shape[1]
    if by_depth:
        share_depths(table, k, places, curves)
    child = np.empty((count, columns), dtype=np.int64)
    for row in range(count):
        for column in range(columns):
            child[row, column] = NO_ROW
        if not rows["drafted"][row]:
            weigh(table, k, row, places, curves)
    for row in range(1, count):
        column = find(table.named[rows["parent"][row]], rows["token"][row])
        if column >= 0:
            child[rows["parent"][row], column] = row
    append(graph, NONE, rows["token"][0], 1.0, 0, EXPANDED)
    graph.node["drafted"][ROOT] = rows["drafted"][0]
    node_of, row_by_node = np.zeros(count, dtype=np.int64), np.zeros(max_nodes, dtype=np.int64)
    best, size, chosen, row, path = np.empty(count * columns, dtype=THING), 0, 1, 0, 1.0
    while True:
        if row != NO_ROW and rows["depth"][row] < max_depth:
            for column in range(columns):
                score = path * table.chances[row, column]
                if score > floor:
                    size = push(best, size, score, row * columns + column)
        if not size or chosen >= max_nodes:
            break
        size = pop(best, size)
        path = best["score"][size]
        above, column = divmod(best["number"][size], columns)
        row = child[above, column]
        source = DRAFT if column < k else DRAFT + 1 + (column - k) // CHOICES
        chance, state = table.chances[above, column], OPEN if row == NO_ROW else EXPANDED
        node = append(graph, node_of[above], table.named[above, column], chance, source, state)
        if row != NO_ROW:
            node_of[row] = node
            graph.node["drafted"][node] = rows["drafted"][row]
        row_by_node[node] = row
        chosen += 1
    return row_by_node[:chosen]


class Candidates:
    """The candidates of one step. Those of the step before are still there, to be learnt from."""

    def __init__(
        self,
        copied: SuffixProposer,
        recycled: RecycleProposer,
        calibration: Calibration,
        config: GraphConfig,
        expansions: int,
        by_depth: bool = False,
    ) -> None:
        """`expansions`: nodes that a draft may expand in one step; `by_depth`: it says the same at all nodes of a
        depth."""
        self.copied, self.recycled, self.calibration, self.config = copied, recycled, calibration, config
        self._by_depth = by_depth
        self._table, self._before = table_for(expansions, config.k), table_for(expansions, config.k)

    def begin(self, text: list[int], max_depth: int, ends: frozenset[int]) -> None:
        """The root's row, and those that the memories lead to. Both have begun this step."""
        self._table, self._before = self._before, self._table
        self.max_depth, self.ends = min(max_depth, self.config.levels), ends
        memory, recycled = self.recycled.memory, self.recycled
        known = [automaton.known for automaton, _ in self.copied.roots]
        text_alone = [known[0]] * (AUTOMATA - len(known))
        roots = np.array([match for _, match in self.copied.roots], dtype=np.int64)
        said = memory.known, memory.noted, recycled.noise, recycled.position
        self._memories = Memories((*known, *text_alone), roots, *said)  # type: ignore[arg-type]
        last = np.array(text[-LONGEST:])
        begin(self._table, self._memories, self.config.k, last, self.max_depth, array_of(ends))

    def add(self, report: Floats) -> None:
        """A level of the draft: see `kernels.growth`."""
        add(self._table, self._memories, self.config.k, report, PLACES, self.calibration.curves)

    def graph(self, floor: float) -> Selection:
        """The graph of the likeliest nodes; leaves that complete a known n-gram are merged."""
        config, nodes = self.config, nodes_for(self.config.nodes)
        rules = config.k, PLACES, self.calibration.curves, max(floor, 0.0), self.max_depth, config.nodes
        rows = select(self._table, nodes, *rules, self._by_depth)
        if config.merges:
            merge_leaves(nodes, config.tau)
        return Selection(TokenGraph.of_nodes(nodes, config, self.max_depth, self.ends), rows, self._table)


class Selection(NamedTuple):
    """The graph of a step, and the rows that its nodes were chosen from: good until the step after the next."""

    graph: TokenGraph
    rows: Ints  # by graph node
    table: Table

    def settle(self, calibration: Calibration, graph: TokenGraph, tree: TokenTree, visited: Any, chosen: Any) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""
        rows = [self.rows[node] if node < len(self.rows) else NO_ROW for node in tree.nodes[visited]]
        found = [(row, token) for row, token in zip(rows, chosen, strict=True) if row != NO_ROW]
        if found:
            observe_outcomes(calibration, self.table.named, self.table.estimates, found, graph.config.k)
