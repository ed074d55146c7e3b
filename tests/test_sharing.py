"""How much texts draft that share their passes: prices grow with the batch, and what does not pay is left."""

import numpy as np
import pytest

from draftgraph.cost import FlatCost
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.cost.sharing import Experience, Habit, Seconds, SharedCost


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


def test_what_the_host_does_for_each_text_is_part_of_its_price(cost):
    experience = Experience()
    before = experience.prices(cost, 8).of_pass(np.array([1, 4]))
    for _ in range(50):
        experience.learn(cost, 8, 8, [], Seconds(verify=0.011, other=0.008), 0)
        experience.learn(cost, 8, 32, [], Seconds(grow=0.004, verify=0.014, other=0.012), 2)
    more = experience.prices(cost, 8).of_pass(np.array([1, 4])) - before
    assert more == pytest.approx([0.001, 0.001 + (0.004 + 0.004) / 2], rel=0.1)


def test_what_was_seen_corrects_what_was_measured(cost):
    experience = Experience()
    before = experience.prices(cost, 8).of_pass(np.array([1]))[0]
    for _ in range(50):
        experience.learn(cost, 8, 8, [], Seconds(verify=0.033), 0)
    assert experience.prices(cost, 8).of_pass(np.array([1]))[0] == pytest.approx(3 * before, rel=0.05)
    assert experience.prices(cost, 2).of_pass(np.array([1]))[0] == pytest.approx(cost.of_pass(np.array([2]))[0] / 2)


def test_alone_and_without_seconds_nothing_is_corrected(cost):
    experience, flat = Experience(), FlatCost(0.1)
    experience.learn(flat, 4, 4, [2], Seconds(verify=9.0), 4)
    assert experience.prices(cost, 1) is cost
    assert experience.prices(flat, 4).of_pass(np.array([2]))[0] == pytest.approx(flat.of_pass(np.array([8]))[0] / 4)


def steps_of(habit, seconds, drafting, plain):
    """Goes on for so long with steps that take, and give, so much; which of them drafted."""
    drafted, now = [], 0.0
    while now < seconds:
        tokens, took = drafting(now) if habit.drafts else plain(now)
        drafted.append(habit.drafts)
        habit.learn(tokens, took)
        now += took
    return drafted


def test_many_draft_if_that_gives_more_tokens_per_second():
    drafted = steps_of(Habit(True), 60, lambda now: (150, 0.020), lambda now: (64, 0.014))
    assert sum(drafted) > 0.97 * len(drafted)


def test_they_do_not_if_it_does_not_and_trying_takes_a_hundredth_of_the_time():
    tokens = {True: 0, False: 0}
    habit, now = Habit(True), 0.0
    while now < 120:
        given, took = (100, 0.045) if habit.drafts else (64, 0.014)
        tokens[habit.drafts] += given
        habit.learn(given, took)
        now += took
    assert sum(tokens.values()) > 0.99 * 64 / 0.014 * now
    assert tokens[True] > 0, "it was tried"


def test_what_pays_may_change():
    drafted = steps_of(Habit(True), 400, lambda now: (100, 0.045 if now < 100 else 0.010), lambda now: (64, 0.014))
    early, late = drafted[:1000], drafted[-1000:]
    assert sum(early) < 100 and sum(late) > 900


@pytest.mark.parametrize("when", range(8))
def test_a_stall_is_no_reason_for_long(when):
    """As when something is compiled that was not needed before."""
    steps = iter(range(10**6))
    drafted = steps_of(
        Habit(True), 60, lambda now: (150, 5.0 if next(steps) == when else 0.020), lambda now: (64, 0.014)
    )
    assert sum(drafted[-500:]) > 480


def test_every_number_of_texts_has_a_habit_of_its_own():
    experience = Experience()
    for _ in range(100):
        experience.habit(64).learn(*((100, 0.045) if experience.habit(64).drafts else (64, 0.014)))
    assert not experience.habit(64).drafts and experience.habit(100) is experience.habit(64)
    assert not experience.habit(40).drafts, "as those who are more"
    assert experience.habit(1).drafts, "one alone is never compared with others"
    assert Experience().habit(4).drafts and not Experience().habit(16).drafts
