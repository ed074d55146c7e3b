"""All that is known about the next tokens at once: a row for each node that somebody proposed children for.

A draft that grows on its device goes on without asking, so no level has to be decided on before the next. While it is
at work rows are made of what the text alone says, then of every level as it arrives; the best nodes are those with the
best products of chances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from draftgraph.compiled.calibrating import outcomes
from draftgraph.compiled.opinions import CHOICES
from draftgraph.compiled.rankings import LONGEST
from draftgraph.compiled.selecting import NODE, PARENT, TOKEN, aliases_in, merge, select
from draftgraph.compiled.sheet import Memories, Rows, add, begin, rows_for
from draftgraph.config import GraphConfig
from draftgraph.drafting.calibration import BEST, ORDER, PLACES, VOICES, Calibration, Voice
from draftgraph.drafting.device import WIDTH, room_for
from draftgraph.drafting.recycle import RecycleProposer
from draftgraph.drafting.suffix import SuffixProposer
from draftgraph.graph import Floats, Ints, State, TokenGraph, TokenTree

NAMES = np.array(["root", *ORDER, "merged"], dtype=object)  # of sources, by number


class Sheet:
    """The rows of one step: see `compiled.sheet`. Those of the step before are still there, to be learnt from."""

    def __init__(
        self, copied: SuffixProposer, recycled: RecycleProposer, calibration: Calibration, config: GraphConfig
    ) -> None:
        self.copied, self.recycled, self.calibration, self.config = copied, recycled, calibration, config
        ends = np.cumsum((config.k, CHOICES, CHOICES)).tolist()
        starts = [0, *ends]
        self.columns: dict[Voice, slice] = {
            source: slice(starts[place], ends[place]) for place, source in enumerate(ORDER)
        }
        room = WIDTH * room_for(config.levels)
        self._rows, self._before = rows_for(room, config.k), rows_for(room, config.k)

    def begin(self, text: list[int], max_depth: int, ends: frozenset[int]) -> None:
        """The root's row, and those that the memories lead to. Both have begun this step."""
        self._rows, self._before = self._before, self._rows
        self.max_depth, self.ends = min(max_depth, self.config.levels), ends
        memory, recycled = self.recycled.memory, self.recycled
        known, past = self.copied.automaton.known, self.copied.past_roots
        newer, older = [*(match.half.known for match in past), known, known][:2]
        roots = np.array([match.match for match in past], dtype=np.int64).reshape(-1, 2)
        said = memory.known, memory.noted, recycled.noise, recycled.position
        self._memories = Memories(known, *said, newer, older, roots)
        last, stops = np.array(text[-LONGEST:]), np.array(list(ends), dtype=np.int64)
        begin(self._rows, self._memories, self.config.k, last, self.copied.root, self.max_depth, stops)

    def add(self, report: Floats) -> None:
        """A level of the draft: see `Growth.report`."""
        add(self._rows, self._memories, self.config.k, report, PLACES, self.calibration.curves)

    def select(self, floor: float) -> Selection:
        """The likeliest nodes, best first, each with the product of the chances on its path."""
        config, rows, floor = self.config, self._rows, max(floor, 0.0)
        curves = self.calibration.curves
        plain, scores = select(rows, config.k, PLACES, curves, floor, self.max_depth, config.nodes)
        aliases = aliases_in(plain[PARENT], plain[TOKEN], config.tau)
        whole = merge(plain, scores, aliases, self.max_depth, config.nodes)
        return Selection(self, tree_of(*whole), plain, scores, aliases, rows, self.max_depth)


@dataclass(frozen=True)
class Selection:
    """What was chosen of a sheet. The sheet itself goes on to the next step."""

    sheet: Sheet
    tree: TokenTree
    plain: Ints  # nodes, before leaves borrowed from each other: see `compiled.selecting`
    scores: Floats
    aliases: Ints  # by node: itself, or the one that it borrows from
    rows: Rows
    max_depth: int

    def first(self, nodes: int) -> Selection:
        return replace(self, tree=self.tree.first(nodes))

    def graph(self) -> TokenGraph:
        """What was chosen as a graph, in which an alias shares the children of the node that it repeats."""
        tokens, parents, depths, rows, sources = self.plain
        graph = TokenGraph(int(tokens[0]), self.sheet.config, self.max_depth, self.sheet.ends)
        graph.tokens, graph.parents, graph.depths = tokens.tolist(), parents.tolist(), depths.tolist()
        graph.probs = (self.scores / self.scores[np.maximum(parents, 0)]).tolist()
        graph.sources = NAMES[sources].tolist()
        graph.canonical = self.aliases.tolist()
        for alias, node in enumerate(graph.canonical):
            if alias != node:
                graph.aliases.setdefault(node, []).append(alias)
        expanded, opened = State.EXPANDED, State.OPEN
        graph.states = [expanded if row >= 0 else opened for row in rows.tolist()]
        graph.drafted = set(np.flatnonzero((rows >= 0) & (self.rows.rows["drafted"][rows] > 0)).tolist())
        children: list[dict[int, int]] = [{} for _ in graph.tokens]
        for node, (parent, token) in enumerate(zip(graph.parents[1:], graph.tokens[1:], strict=True), start=1):
            children[parent][token] = node
        graph.children = children
        return graph

    def settle(self, visited: list[int], chosen: list[int]) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""
        rows = self.plain[NODE, self.tree.nodes[visited]].tolist()
        choices = np.array([(row, token) for row, token in zip(rows, chosen, strict=True) if row >= 0], dtype=np.int64)
        known, right = choices[:, 0].copy(), choices[:, 1].copy()
        k, columns = self.sheet.config.k, self.sheet.columns
        for voice in VOICES:
            here = columns["draft" if voice == BEST else voice]
            told = self.rows.named, self.rows.estimates, known, right, here.start, here.stop
            said = outcomes(*told, k, voice == BEST)
            if len(said[0]):
                self.sheet.calibration.observe(voice, *said)


def tree_of(nodes: Ints, scores: Floats) -> TokenTree:
    tokens, parents, depths, rows, sources = nodes
    return TokenTree(tokens, parents, depths, rows, scores, NAMES[sources].tolist())
