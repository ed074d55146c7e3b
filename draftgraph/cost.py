"""What passes cost, and so how much of a graph is worth drafting and checking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

if TYPE_CHECKING:
    import torch

    from draftgraph.graph import Floats, Ints, TokenTree

HIT = 0.8  # how likely the best child of a node is to be accepted, before the draft has been asked


@runtime_checkable
class CostModel(Protocol):
    """The prices of passes, in any one unit."""

    def of_pass(self, nodes: Ints) -> Floats:
        """What passes of the target over so many nodes cost, the root counted."""

    def of_level(self, nodes: Ints) -> Floats:
        """What passes of the draft over so many nodes cost."""

    def floor(self) -> float:
        """The acceptance estimate under which a node is not worth drafting on."""


class FlatCost:
    """A pass costs one; a pass that checks more than the root costs `entry` more, and `node` for every further node.
    A pass of the draft costs `draft` times as much.

    With all zero the whole budget of the configuration is used: a GPU checks 64 nodes for the price of about one.
    A CPU leaves its fast path for single tokens and then pays for arithmetic.
    """

    def __init__(self, node: float = 0.0, entry: float = 0.0, draft: float = 0.0) -> None:
        self.node = node
        self.entry = entry
        self.draft = draft

    @classmethod
    def for_device(cls, device: torch.device, draft: float = 0.0) -> FlatCost:
        """Prices on a kind of device; `draft` is the draft's size, the target being 1."""
        return cls(node=0.11, draft=draft) if device.type == "cpu" else cls(draft=draft)

    def of_pass(self, nodes: Ints) -> Floats:
        return np.where(nodes > 1, 1.0 + self.entry + self.node * (nodes - 1), 1.0)

    def of_level(self, nodes: Ints) -> Floats:
        return self.draft * self.of_pass(nodes)

    def floor(self) -> float:
        return self.node


def nodes_worth_checking(tree: TokenTree, cost: CostModel, spent: float = 0.0) -> int:
    """How many of a tree's nodes, best first, give the most expected tokens for their cost and what was spent."""
    expected = np.cumsum(tree.scores)  # the root's token is certain: it counts for the one that the target adds
    return int(np.argmax(expected / (spent + cost.of_pass(np.arange(1, len(tree) + 1))))) + 1


class DraftBudget:
    """Decides level by level, in one step, how many nodes are worth a pass of the draft."""

    def __init__(self, cost: CostModel, levels: int) -> None:
        self.cost = cost
        self.levels = levels
        self.spent = 0.0

    def worth_drafting(self, tree: TokenTree, scores: Floats) -> int:
        """How many open nodes, best first: none if going on, however far, gives fewer expected tokens for its cost."""
        if not len(scores) or not self.levels:
            return 0
        checked = nodes_worth_checking(tree, self.cost, self.spent)
        tokens = float(tree.scores[:checked].sum())
        now = tokens / (self.spent + float(self.cost.of_pass(np.array([checked]))[0]))
        width, ahead = np.arange(1, len(scores) + 1)[:, None], np.arange(1, self.levels + 1)[None, :]
        gained = np.cumsum(scores)[:, None] * np.cumsum(HIT**ahead, axis=1)
        price = self.spent + ahead * self.cost.of_level(width) + self.cost.of_pass(checked + width * ahead)
        rates = (tokens + gained) / price  # [nodes drafted on, further levels]
        if rates.max() <= now:
            return 0
        chosen = int(np.argmax(rates.max(axis=1))) + 1
        self.spent += float(self.cost.of_level(np.array([chosen]))[0])
        self.levels -= 1
        return chosen
