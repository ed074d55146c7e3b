"""The simulation that says how many GPUs are needed: a replica by hand, users, ranks, and what an H200 measured."""

import sys
from dataclasses import replace

import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))
import capacity
from capacity import H200, Costs, Habits, Link, Plan, Replica, Request, Target, closed_loop, over_ranks, replayed

# 10 ms a step whatever is in it; with drafts 20 ms and four tokens for one text, as good as none for four.
FLAT = Costs((1, 4), (10.0, 10.0), (20.0, 40.0), (4.0, 4.0), begin_ms=5.0, token_ms=0.1, pass_ms=(8.0, 8.0))


def test_a_request_alone_waits_for_its_prompt_and_a_step():
    (one,) = replayed(Replica(FLAT, False), [Request(1.0, prompt=100, answer=11)])
    assert one.wait == pytest.approx(0.010 + 0.005 + 0.010 + 0.010)  # a pass, the prompt, 100 tokens, the first step
    assert one.per_token == pytest.approx(0.010)


def test_drafts_count_where_they_pay():
    (alone,) = replayed(Replica(FLAT, True), [Request(0.0, 10, 41)])
    assert alone.per_token == pytest.approx(10 * 0.020 / 40)
    four = replayed(Replica(FLAT, True), [Request(0.0, 10, 41) for _ in range(4)])
    assert {round(one.per_token, 6) for one in four} == {0.010}


def test_more_requests_than_texts_wait_for_one_to_end():
    found = replayed(Replica(FLAT, False, texts=2), [Request(0.0, 1, 10) for _ in range(3)])
    third = max(found, key=lambda one: one.first)
    assert third.wait > min(one.ended for one in found) and len(found) == 3


def test_a_closed_loop_gives_what_steps_and_prompts_leave():
    taken = 0.010 + 0.005 + 8 * 0.1e-3 + 100 * 0.010  # of an answer of 100 tokens, behind a known prompt
    assert closed_loop(Replica(FLAT, False), clients=1, rounds=3, prompt=50, answer=100) == pytest.approx(100 / taken)


def test_what_is_known_of_a_conversation_is_not_read_again_until_others_need_its_place():
    replica = Replica(replace(FLAT, slots=300), False)
    first = Request(0.0, 100, 20, "a")
    replayed(replica, [first, Request(9.0, 150, 20, "a")])
    assert (replica.skipped, replica.read) == (120, 130)
    replayed(replica, [Request(0.0, 100, 20, "b"), Request(9.0, 100, 20, "c"), Request(18.0, 200, 20, "a")])
    assert replica.skipped == 120  # of "a" nothing was left


def test_ranks_share_a_pass_and_wait_for_each_other():
    two = over_ranks(FLAT, 2, Link(latency_us=10.0, gigabytes=1e9))
    assert two.plain_ms == pytest.approx((2 + 4 + 0.64,) * 2)  # the host's part, half of a pass, 64 sums of 10 us
    assert over_ranks(FLAT, 1, Link()) is FLAT
    slow = over_ranks(FLAT, 2, Link(latency_us=1000.0))
    assert slow.plain_ms[0] > FLAT.plain_ms[0]


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(capacity, "WARM", 20.0)
    monkeypatch.setattr(capacity, "MEASURED", 20.0)
    monkeypatch.setattr(capacity, "SIMULATED", 4)


HABITS = Habits(seconds_between=5.0, answer=50.0)


def test_a_plan_is_the_least_number_that_meets_its_target(short):
    plan = Plan(FLAT, False, Target("", wait=0.2, per_token=0.015), HABITS)
    least = plan.replicas(150)
    assert least is not None and least > 1
    assert plan.target.met(plan.outcome(150, least)) and not plan.target.met(plan.outcome(150, least - 1))
    assert Plan(FLAT, False, Target("", 0.2, 0.009), HABITS).replicas(150) is None  # a step takes longer


def test_users_without_end_need_replicas_in_proportion(short):
    plan = Plan(FLAT, False, Target("", wait=0.5, per_token=0.020), HABITS)
    few, many = plan.replicas(200), plan.replicas(2000)
    assert few is not None and many is not None and 8 < many / few < 12


def test_conversations_find_their_pages_where_they_are_sent_back(short):
    def outcome(by_conversation: bool) -> capacity.Outcome:
        return Plan(FLAT, False, Target("", 1.0, 1.0), HABITS, by_conversation).outcome(20, 4)

    assert outcome(True).hits > 2 * outcome(False).hits
    assert outcome(True).wait < outcome(False).wait


def test_loads_of_16_and_64_clients_are_foreseen_from_1_and_4_within_a_tenth():
    found = {one["texts"]: one["predicted"] / one["measured"] for one in H200().check()}
    assert found[1] == pytest.approx(1, abs=0.01) and found[4] == pytest.approx(1, abs=0.01)
    assert found[16] == pytest.approx(1, abs=0.1) and found[64] == pytest.approx(1, abs=0.1)
