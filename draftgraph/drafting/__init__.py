"""Who proposes continuations, and the level-by-level growth of a graph from what they propose."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from draftgraph.cost import DraftBudget
from draftgraph.drafting.model import Asked, ModelProposer, Told, answered
from draftgraph.drafting.pool import Pool, Proposal
from draftgraph.graph import Floats, Ints, Source, TokenGraph, TokenTree


class Proposer(Protocol):
    """Proposes children for nodes of a graph; one file each in this package."""

    source: Source
    free: bool  # costs nothing to ask

    def begin(self, text: list[int]) -> None:
        """A step starts at the last token of this text."""

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        """Children and acceptance estimates, each [frontier, k], best first, padded with NO_TOKEN."""


def grow(
    graph: TokenGraph,
    proposers: list[Proposer],
    floor: float = 0.0,
    budget: DraftBudget | None = None,
    pool: Pool | None = None,
) -> TokenTree:
    """Grows the graph until nothing is left to expand, or worth it, and returns its unrolled view.

    Level-wise and best-first growth differ in `TokenGraph.extend`: whether a better node may take another's place.
    """
    return answered(growing(graph, proposers, floor, budget, pool))


def growing(
    graph: TokenGraph,
    proposers: list[Proposer],
    floor: float = 0.0,
    budget: DraftBudget | None = None,
    pool: Pool | None = None,
) -> Generator[Asked, Told, TokenTree]:
    """The same, asking for each pass of the draft: whoever grows several graphs can make their passes together."""
    tree = graph.unroll(floor=floor)
    asked: set[int] = set()
    for _ in range(graph.max_depth):
        frontier, scores = graph.frontier(tree)
        drafted = len(frontier) if budget is None else budget.worth_drafting(tree, scores)
        new = [place for place, node in enumerate(frontier) if node not in asked]
        if not drafted and not new:
            break
        proposals = []
        for proposer in proposers:
            if places := new if proposer.free else list(range(drafted)):
                nodes = [frontier[place] for place in places]
                if isinstance(proposer, ModelProposer):
                    children = yield from proposer.proposing(graph, nodes)
                else:
                    children = proposer.propose(graph, nodes)
                proposals.append(Proposal(proposer.source, places, *children))
        for one in proposals if pool is None else pool.weigh(graph, frontier, proposals):
            nodes = [frontier[place] for place in one.places]
            graph.extend(nodes, scores[one.places], one.tokens, one.chances, one.source)
        asked.update(frontier)
        graph.close(frontier[:drafted])
        tree = graph.unroll(floor=floor)
    return tree
