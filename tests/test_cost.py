"""How much of a graph is checked: what pays, and nothing when nothing pays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch

from draftgraph import CostModel, GraphConfig, GraphDecoder, TokenTree
from draftgraph.cost import Curve, FlatCost, Latencies, MeasuredCost
from draftgraph.cost.budget import (
    NEARLY,
    DraftBudget,
    levels_ahead,
    nodes_worth_checking,
    price_of_level,
    price_of_levels,
)
from draftgraph.cost.sharing import Experience


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
        chosen = nodes_worth_checking(tree_with(scores.tolist()), cost)
        near = [size for size, rate in enumerate(rates, start=1) if rate >= max(NEARLY * max(rates), rates[0])]
        assert chosen == max(near), "the most nodes of those that are nearly as good as the best"


def open_nodes(*scores: float) -> np.ndarray:
    return np.array(scores)


def test_a_free_draft_is_asked_for_every_node() -> None:
    budget = DraftBudget(FlatCost(), levels=8)
    assert budget.worth_drafting(tree_with([1.0, 0.5, 0.1]), open_nodes(0.5, 0.1)) == 2


def test_a_draft_as_dear_as_its_target_is_never_asked() -> None:
    budget = DraftBudget(FlatCost(draft=1.0), levels=8)
    assert budget.worth_drafting(tree_with([1.0]), open_nodes(1.0)) == 0


def test_drafting_stops_when_the_path_has_become_unlikely() -> None:
    likely, unlikely = (DraftBudget(FlatCost(node=0.03, entry=0.6, draft=0.15), levels=8) for _ in range(2))
    assert likely.worth_drafting(tree_with([1.0, 0.9, 0.85]), open_nodes(0.85)) == 1
    assert unlikely.worth_drafting(tree_with([1.0, 0.9, 0.1]), open_nodes(0.1)) == 0


def test_a_wide_level_is_cut_where_its_nodes_stop_paying() -> None:
    budget = DraftBudget(FlatCost(node=0.05, draft=0.3), levels=8)
    scores = [0.9, 0.6, 0.05, 0.04, 0.03]
    assert 1 <= budget.worth_drafting(tree_with([1.0, *scores]), open_nodes(*scores)) < 5


def test_what_was_spent_counts_against_going_on() -> None:
    budget = DraftBudget(FlatCost(draft=0.4), levels=8)
    tree, path = [1.0], 1.0
    levels = 0
    while budget.worth_drafting(tree_with(tree), open_nodes(path)):
        path *= 0.8
        tree.append(path)
        levels += 1
    assert 1 <= levels < 8
    assert budget.spent == pytest.approx(0.4 * levels)


def test_a_dear_draft_is_left_alone_by_auto_and_the_tokens_stay() -> None:
    from families import perturbed, target_of

    target = target_of("llama")
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    results = {}
    for price in (0.0, 5.0):
        config = GraphConfig(cost=FlatCost(draft=price))
        decoder = GraphDecoder(target, perturbed(target, 0.02), config=config)
        results[price] = decoder.generate(ids, max_new_tokens=24, do_sample=False)
    assert results[0.0].stats.draft_passes > 0 == results[5.0].stats.draft_passes
    assert results[0.0].sequences.tolist() == results[5.0].sequences.tolist()


def test_one_may_inject_a_cost_model_of_ones_own() -> None:
    class TwoNodes:
        def of_pass(self, nodes: np.ndarray) -> np.ndarray:
            return np.where(nodes > 2, 1e9, 1.0)

        def of_level(self, nodes: np.ndarray) -> np.ndarray:
            return np.zeros(nodes.shape)

        def floor(self) -> float:
            return 0.0

    from families import target_of

    assert isinstance(TwoNodes(), CostModel)
    decoder = GraphDecoder(target_of("llama"), config=GraphConfig(cost=TwoNodes()))
    sizes: list[int] = []
    decoder.observer = lambda step: sizes.append(len(step.tree))
    decoder.generate(torch.tensor([[1, 2, 3] * 6]), max_new_tokens=20)
    assert set(sizes) <= {1, 2} and 2 in sizes


@dataclass
class OwnPrices:
    """As a user would write it: a plain dataclass, which has no hash, and whose prices may change."""

    pass_price: float = 1.0
    node_price: float = 0.0
    level_price: float = 0.1

    def of_pass(self, nodes: np.ndarray) -> np.ndarray:
        return self.pass_price + self.node_price * (nodes - 1)

    def of_level(self, nodes: np.ndarray) -> np.ndarray:
        return np.full(nodes.shape, self.level_price)

    def floor(self) -> float:
        return 0.0


def test_a_cost_model_need_not_be_hashable_and_is_asked_anew() -> None:
    prices, tree = OwnPrices(), tree_with([1.0, 0.5, 0.2, 0.01])
    ahead = partial(levels_ahead, prices, 8, 4, 0.8, 64)
    assert (nodes_worth_checking(tree, prices), price_of_level(prices, 4)) == (4, 0.1)
    assert ahead() > 0
    prices.node_price, prices.level_price = 5.0, 3.0
    assert (nodes_worth_checking(tree, prices), price_of_level(prices, 4)) == (1, 3.0)
    assert ahead() == 0


def test_a_block_is_drafted_whole_for_the_price_of_one_pass_or_not_at_all() -> None:
    cheap, dear = OwnPrices(level_price=0.1), OwnPrices(level_price=3.0)
    assert levels_ahead(cheap, 15, 1, 0.8, 64, block=16) == 15 > levels_ahead(cheap, 15, 8, 0.3, 64) > 0
    assert levels_ahead(cheap, 15, 1, 0.3, 64, block=16) == 15
    assert levels_ahead(dear, 15, 8, 0.8, 64) == 0 < levels_ahead(dear, 15, 1, 0.8, 64, block=16)
    assert levels_ahead(dear, 15, 1, 0.3, 64, block=16) == 0
    assert [price_of_levels(dear, levels, 1, 16) for levels in (0, 1, 15)] == [0.0, 3.0, 3.0]
    assert price_of_levels(dear, 15, 8) == 45.0


def test_many_texts_share_prices_that_change() -> None:
    prices, several = OwnPrices(), np.array([1, 2, 3])
    assert Experience().prices(prices, 4).of_pass(several).tolist() == [0.25, 0.25, 0.25]
    prices.pass_price = 8.0
    assert Experience().prices(prices, 4).of_pass(several).tolist() == [2.0, 2.0, 2.0]
    assert nodes_worth_checking(tree_with([1.0, 0.5]), Experience().prices(prices, 4)) == 2
    prices.node_price = 100.0
    assert nodes_worth_checking(tree_with([1.0, 0.5]), Experience().prices(prices, 4)) == 1


def test_measured_prices_are_computed_once() -> None:
    asked: list[int] = []

    class Counted(MeasuredCost):
        def of_pass(self, nodes: np.ndarray) -> np.ndarray:
            asked.append(len(nodes))
            return super().of_pass(nodes)

    prices = Counted(Latencies(Curve.of([0], [1, 64], [[1.0, 2.0]]), None, 64, 0.0))
    tree = tree_with([1.0, 0.5, 0.2, 0.01])
    assert nodes_worth_checking(tree, prices) == nodes_worth_checking(tree, prices)
    assert asked == [4]


def test_decoding_takes_prices_without_a_hash() -> None:
    from families import perturbed, target_of

    target = target_of("llama")
    decoder = GraphDecoder(target, perturbed(target, 0.02), config=GraphConfig(cost=OwnPrices()))
    found = decoder.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=12, do_sample=False)
    plain = target.generate(torch.tensor([[3, 1, 4, 1, 5]]), max_new_tokens=12, do_sample=False)
    assert found.sequences.tolist() == plain.tolist()
