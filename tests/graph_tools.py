"""For tests of graphs: growing one with proposers that make no passes, and looking for cycles."""

from __future__ import annotations

from typing import Any

from draftgraph import TokenGraph, TokenTree
from draftgraph.cost.budget import DraftBudget
from draftgraph.graph import ROOT
from draftgraph.proposers.growth import grow_together, growing


def grow(graph: TokenGraph, proposers: list[Any], floor: float = 0.0, budget: DraftBudget | None = None) -> TokenTree:
    def no_pass(segments: list[Any]) -> Any:
        raise AssertionError("a proposer asks for a pass")

    return grow_together([growing(graph, proposers, floor, budget)], no_pass)[0]


def successors(graph: TokenGraph, node: int) -> list[int]:
    return list(graph.children_of(node).values())


def assert_acyclic(graph: TokenGraph) -> None:
    """No path through nodes and aliases comes back to where it was."""
    done: set[int] = set()

    def visit(node: int, above: frozenset[int]) -> None:
        assert node not in above, "a cycle"
        if node not in done:
            for child in successors(graph, node):
                visit(int(graph.canonical[child]), above | {node})
            done.add(node)

    visit(ROOT, frozenset())
