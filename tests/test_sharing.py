"""How much texts draft that share their passes: prices grow with the batch, and what does not pay is left."""

import numpy as np
import pytest

from draftgraph.batching.sharing import LONGEST_PAUSE, Appetite, Experience, SharedCost, Took
from draftgraph.cost import FlatCost
from draftgraph.tuning.latency import Curve, Latencies, MeasuredCost


@pytest.fixture
def cost():
    """A device that is full at 32 nodes: from there on a node costs what a pass over one costs."""
    nodes = [1, 8, 16, 32, 64]
    curve = Curve.of([0], nodes, [[0.010, 0.011, 0.012, 0.014, 0.028]])
    draft = Curve.of([0], nodes, [[0.001, 0.001, 0.001, 0.0015, 0.003]])
    return MeasuredCost(Latencies(curve, draft, 64, 1.0))


def test_a_text_pays_its_part_of_what_all_cost(cost):
    prices = SharedCost(cost, 4)
    assert prices.of_pass(np.array([1, 8])) == pytest.approx(cost.of_pass(np.array([4, 32])) / 4)
    assert prices.of_level(np.array([2])) == pytest.approx(cost.of_level(np.array([8])) / 4)


def test_nodes_cost_more_the_more_texts_there_are(cost):
    floors = [SharedCost(cost, texts).floor() for texts in (1, 4, 16, 64)]
    assert floors == sorted(floors) and floors[0] < 0.1 and floors[-1] > 0.9
    assert all(0.0 <= floor < 1.0 for floor in floors)  # the root itself is always checked


def test_what_was_seen_corrects_what_was_measured(cost):
    experience = Experience()
    before = experience.prices(cost, 8).of_pass(np.array([1]))[0]
    for _ in range(50):
        experience.learn(cost, 8, 8, [], Took(verify=0.033), 0)
    assert experience.prices(cost, 8).of_pass(np.array([1]))[0] == pytest.approx(3 * before, rel=0.05)
    assert experience.prices(cost, 2).of_pass(np.array([1]))[0] == pytest.approx(cost.of_pass(np.array([2]))[0] / 2)


def test_alone_and_without_seconds_nothing_is_corrected(cost):
    experience, flat = Experience(), FlatCost(0.1)
    experience.learn(flat, 4, 4, [2], Took(verify=9.0), 4)
    assert experience.prices(cost, 1) is cost
    assert experience.prices(flat, 4).of_pass(np.array([2]))[0] == pytest.approx(flat.of_pass(np.array([8]))[0] / 4)


def test_a_graph_that_does_not_pay_is_tried_more_and_more_rarely(cost):
    prices, appetite, tries = SharedCost(cost, 64), Appetite(), 0
    for _ in range(200):
        if appetite.wants():
            tries += 1
            appetite.learn(0, 4, 0.001, prices)
    assert appetite.pausing and tries < 5


def test_what_hardly_loses_is_tried_more_often_than_what_loses_much(cost):
    prices = SharedCost(cost, 4)
    alone = prices.of_pass(np.array([1]))[0]
    pauses = []
    for seconds in (0.5 * alone, 1.1 * alone, 3.0 * alone):
        appetite = Appetite()
        for _ in range(50):
            appetite.learn(1, 2, seconds, prices)
        pauses.append(appetite.pause)
    assert pauses[0] == 0 < pauses[1] < pauses[2]


def test_a_graph_that_pays_is_grown_every_time(cost):
    prices, appetite = SharedCost(cost, 2), Appetite()
    for _ in range(50):
        assert appetite.wants()
        appetite.learn(3, 8, 0.0005, prices)
    assert not appetite.pausing


def test_a_new_text_begins_with_what_others_have_seen(cost):
    experience, prices = Experience(), SharedCost(cost, 64)
    assert experience.appetite(64).wants()
    for _ in range(60):
        experience.typical(64).learn(0, 4, 0.001, prices)
    beginning = [experience.appetite(64) for _ in range(20)]
    firsts = [next(step for step in range(LONGEST_PAUSE) if one.wants()) for one in beginning]
    assert len(set(firsts)) == 20 and max(firsts) > 100, "not all of them at once"
    assert experience.appetite(2).wants()
