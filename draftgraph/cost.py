"""What a pass costs, and so how much of a graph is worth checking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

    from draftgraph.graph import Floats, Ints, TokenTree


@runtime_checkable
class CostModel(Protocol):
    """The price of a target pass, in any unit."""

    def of_pass(self, nodes: Ints) -> Floats:
        """What passes over so many nodes cost, the root counted."""

    def floor(self) -> float:
        """The acceptance estimate under which a node is not worth drafting on."""


class FlatCost:
    """A pass costs one; a pass that checks more than the root costs `entry` more, and `node` for every further node.

    With both zero the whole budget of the configuration is used: a GPU checks 64 nodes for the price of about one.
    A CPU leaves its fast path for single tokens and then pays for arithmetic.
    """

    def __init__(self, node: float = 0.0, entry: float = 0.0) -> None:
        self.node = node
        self.entry = entry

    @classmethod
    def for_device(cls, device: torch.device) -> FlatCost:
        return cls(node=0.03, entry=0.6) if device.type == "cpu" else cls()

    def of_pass(self, nodes: Ints) -> Floats:
        return np.where(nodes > 1, 1.0 + self.entry + self.node * (nodes - 1), 1.0)

    def floor(self) -> float:
        return self.node


def nodes_worth_checking(tree: TokenTree, cost: CostModel) -> int:
    """How many of a tree's nodes, best first, give the most expected tokens for their cost."""
    expected = np.cumsum(tree.scores)  # the root's token is certain: it counts for the one that the target adds
    return int(np.argmax(expected / cost.of_pass(np.arange(1, len(tree) + 1)))) + 1
