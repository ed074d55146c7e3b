"""How much of a graph is checked: what pays, and nothing when nothing pays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftgraph import CostModel, GraphConfig, GraphDecoder, TokenTree
from draftgraph.cost import FlatCost, nodes_worth_checking


def tree_with(scores: list[float]) -> TokenTree:
    count = len(scores)
    chain = np.arange(count)
    return TokenTree(chain, chain - 1, chain, chain, np.array(scores), ["root"] + ["copied"] * (count - 1))


def test_a_free_pass_checks_the_whole_budget() -> None:
    assert nodes_worth_checking(tree_with([1.0, 0.5, 0.2, 0.01]), FlatCost()) == 4


def test_nothing_is_checked_when_nothing_pays() -> None:
    assert nodes_worth_checking(tree_with([1.0, 0.2, 0.1]), FlatCost(node=0.05, entry=0.4)) == 1


def test_nodes_are_checked_down_to_their_price() -> None:
    assert nodes_worth_checking(tree_with([1.0, 0.9, 0.7, 0.05, 0.04]), FlatCost(node=0.1)) == 3


@pytest.mark.parametrize("price", [0.0, 0.05, 0.5])
def test_the_choice_is_the_best_of_all_sizes(price: float) -> None:
    rng = np.random.default_rng(3)
    for _ in range(50):
        scores = np.cumprod(np.concatenate([[1.0], rng.uniform(0.3, 1.0, 12)]))
        cost = FlatCost(price, entry=price)
        rates = [scores[:n].sum() / float(cost.of_pass(np.array([n]))[0]) for n in range(1, 14)]
        assert rates[nodes_worth_checking(tree_with(scores.tolist()), cost) - 1] == pytest.approx(max(rates))


def test_one_may_inject_a_cost_model_of_ones_own() -> None:
    class TwoNodes:
        def of_pass(self, nodes: np.ndarray) -> np.ndarray:
            return np.where(nodes > 2, 1e9, 1.0)

        def floor(self) -> float:
            return 0.0

    from families import target_of

    assert isinstance(TwoNodes(), CostModel)
    decoder = GraphDecoder(target_of("llama"), config=GraphConfig(cost=TwoNodes()))
    sizes: list[int] = []
    decoder.observer = lambda step: sizes.append(len(step.tree))
    decoder.generate(torch.tensor([[1, 2, 3] * 6]), max_new_tokens=20)
    assert set(sizes) <= {1, 2} and 2 in sizes
