"""Who proposes continuations, and the level-by-level growth of a graph from what they propose."""

from __future__ import annotations

from typing import Protocol

from draftgraph.graph import Floats, Ints, Source, TokenGraph, TokenTree


class Proposer(Protocol):
    """Proposes children for nodes of a graph; one file each in this package."""

    source: Source

    def begin(self, text: list[int]) -> None:
        """A step starts at the last token of this text."""

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        """Children and acceptance estimates, each [frontier, k], best first, padded with NO_TOKEN."""

    def commit(self, tree: TokenTree, path: list[int], graph: TokenGraph) -> None:
        """The target accepted this path of the tree (the root left out)."""


def grow(graph: TokenGraph, proposers: list[Proposer], floor: float = 0.0) -> TokenTree:
    """Grows the graph until nothing is left to expand, and returns its unrolled view.

    Level-wise and best-first growth differ in `TokenGraph.extend`: whether a better node may take another's place.
    """
    tree = graph.unroll(floor=floor)
    for _ in range(graph.max_depth):
        frontier, scores = graph.frontier(tree)
        if not frontier:
            break
        for proposer in proposers:
            tokens, probs = proposer.propose(graph, frontier)
            graph.extend(frontier, scores, tokens, probs, proposer.source)
        graph.close(frontier)
        tree = graph.unroll(floor=floor)
    return tree
