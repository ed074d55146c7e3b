"""Grow: level by level, sources propose children for the open nodes of a graph, until nothing more is worth a pass.

This is the rule of growth: which nodes are expanded, and when to stop. Best first is the order of `graph.unroll`, which
`frontier` keeps. Level-wise and best-first growth differ in `TokenGraph.extend`: whether `room` counts the nodes that
are there, or a better node may take another's place. `kernels.growth` is the same rule on a device, with levels of a
fixed width and nothing merged; `candidates` joins what it drafted with what the text proposes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from draftgraph.cost.budget import Budget
from draftgraph.engine.protocol import PassResult, Segment
from draftgraph.graph import Source, TokenGraph, TokenTree
from draftgraph.proposers.pooling import Pool, Proposal

Grown = TypeVar("Grown")
Growing = Generator[Segment | None, PassResult | None, Grown]  # asks for each pass of the draft; None: for another turn


class Proposer(Protocol):
    """Proposes children for nodes of a graph: `propose(graph, frontier)` gives tokens and acceptance estimates, each
    [frontier, k], best first, padded with NO_TOKEN; at once if it is free, else as a generator that asks for passes."""

    source: Source
    free: bool  # costs nothing to ask, from now on in this step

    def begin(self, text: list[int]) -> None:
        """A step starts at the last token of this text."""

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any: ...


def growing(
    graph: TokenGraph,
    proposers: Sequence[Proposer],
    floor: float = 0.0,
    budget: Budget | None = None,
    pool: Pool | None = None,
) -> Growing[TokenTree]:
    """Grows the graph until nothing is left to expand, or worth it, and returns its unrolled view."""
    tree = graph.unroll(floor=floor)
    asked: set[int] = set()
    for _ in range(graph.max_depth):
        frontier, scores = graph.frontier(tree)
        priced = None if all(proposer.free for proposer in proposers) else budget
        drafted = len(frontier) if priced is None else priced.worth_drafting(tree, scores)
        new = [place for place, node in enumerate(frontier) if node not in asked]
        if not drafted and not new:
            break
        proposals = []
        for proposer in proposers:
            if places := new if proposer.free else list(range(drafted)):
                children = proposer.propose(graph, [frontier[place] for place in places])
                tokens, chances = children if proposer.free else (yield from children)
                proposals.append(Proposal(proposer.source, places, tokens, chances))
        for one in proposals if pool is None else pool.weigh(graph, frontier, proposals):
            nodes = [frontier[place] for place in one.places]
            graph.extend(nodes, scores[one.places], one.tokens, one.chances, one.source)
        asked.update(frontier)
        graph.close(frontier[:drafted])
        tree = graph.unroll(floor=floor)
    return tree


def grow_together(graphs: Sequence[Growing[Grown]], run: Callable[[list[Any]], Sequence[Any]]) -> list[Grown]:
    """Grows graphs side by side: what all of them ask for goes through the draft in one pass."""
    grown: dict[int, Grown] = {}
    answers: dict[int, PassResult | None] = dict.fromkeys(range(len(graphs)))
    while answers:
        asked: dict[int, Segment | None] = {}
        for place, answer in answers.items():
            try:
                asked[place] = graphs[place].send(answer)
            except StopIteration as done:
                grown[place] = done.value
        passes = {place: segment for place, segment in asked.items() if segment is not None}
        results = run(list(passes.values())) if passes else []
        answers = dict.fromkeys(asked) | dict(zip(passes, results, strict=True))
    return [grown[place] for place in range(len(graphs))]
