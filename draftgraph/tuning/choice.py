"""What `auto` does with given prices, for a draft that is right so often: a step is grown without any model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from draftgraph.config import GraphConfig
from draftgraph.cost import CostModel, DraftBudget, nodes_worth_checking
from draftgraph.drafting import grow
from draftgraph.graph import Floats, Ints, Source, TokenGraph


@dataclass(frozen=True)
class Choice:
    """One step, as it is expected to go."""

    hit: float  # how often the draft's best token is the target's
    levels: int
    nodes: int  # that the target checks, the root counted
    tokens: float
    ratio: float  # against plain decoding, in tokens per second


class SureProposer:
    """A draft whose best token is right with one probability everywhere, and so is the next best of the rest."""

    source: Source = "draft"
    free = False

    def __init__(self, hit: float, k: int) -> None:
        self.levels = 0
        self._chances = hit * (1.0 - hit) ** np.arange(k)
        self._token = 0

    def begin(self, text: list[int]) -> None: ...

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        """Tokens that stand nowhere else."""
        shape = (len(frontier), len(self._chances))
        tokens = self._token + 1 + np.arange(shape[0] * shape[1]).reshape(shape)
        self._token = int(tokens.max())
        self.levels += 1
        return tokens, np.broadcast_to(self._chances, shape)


def choice(cost: CostModel, hit: float, config: GraphConfig) -> Choice:
    """What a step of `auto` would be, with nothing to copy."""
    graph, proposer = TokenGraph(0, config), SureProposer(hit, config.k)
    budget = DraftBudget(cost, graph.max_depth, hit, graph.max_nodes)
    tree = grow(graph, [proposer], cost.floor(), budget)
    nodes = nodes_worth_checking(tree, cost, budget.spent)
    tokens = float(tree.scores[:nodes].sum())
    price = budget.spent + float(cost.of_pass(np.array([nodes]))[0])
    return Choice(hit, proposer.levels, nodes, tokens, tokens / price * float(cost.of_pass(np.array([1]))[0]))
