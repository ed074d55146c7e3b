"""What happened in one step, kept whole for whoever wants to look: statistics, `inspect`, the playground."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from draftgraph.graph import State, TokenGraph, TokenTree

Reason = Literal["k", "theta_prob", "theta_sib", "budget", "not drafted"]


@dataclass(frozen=True)
class Step:
    """One draft-and-verify step."""

    position: int  # of the root, in the text
    grown: TokenGraph | Callable[[], TokenGraph]  # what the tree is an unrolled view of
    tree: TokenTree
    path: list[int]  # accepted tree nodes, the root left out
    tokens: list[int]  # what the target chose: the accepted tokens and one more
    finish_reason: str | None = None  # the text ended inside this step

    @cached_property
    def graph(self) -> TokenGraph:
        return self.grown() if callable(self.grown) else self.grown

    @property
    def stopped(self) -> bool:
        return self.finish_reason is not None

    @property
    def rejection(self) -> Reason | None:
        """Why the target's last token was not in the tree; None if it was."""
        node, token = (self.path[-1] if self.path else 0), self.tokens[-1]
        if len(self.path) == len(self.tokens):
            return None
        graph = self.graph
        here = graph.canonical[int(self.tree.nodes[node])]
        if token in graph.children[here] or (here, token) in graph.crowded_out:
            return "budget"
        if (here, token) in graph.dropped:
            return "theta_sib"
        if graph.states[here] is State.LEAF:
            return "theta_sib" if here in graph.weak_siblings else "theta_prob"
        if graph.states[here] is State.OPEN:
            return "budget"
        return "k" if here in graph.drafted else "not drafted"


Observer = Callable[[Step], None]
