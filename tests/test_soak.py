"""A server under load, at small size: `make soak` is the same for half an hour."""

import runpy

import pytest
from conftest import REPOSITORY

import draftgraph

SOAK = runpy.run_path(str(REPOSITORY / "benchmarks" / "soak.py"))


def test_many_clients_get_what_plain_decoding_gives(tmp_path):
    target, draft = SOAK["save_tiny_pair"](tmp_path)
    asked = SOAK["questions"](draftgraph.load(str(target), draft="none", dtype="float64"), count=24, longest=24)
    assert len({question.expected for question in asked}) > 12
    with SOAK["server"]([str(target), "--draft", str(draft), "--dtype", "float64"]) as (url, process):
        outcome = SOAK["soak"](url, process, asked, clients=12, requests=60, minutes=0)
    assert not outcome.problems
    assert outcome.counts["same"] >= 30 and outcome.counts["left"] >= 3


@pytest.mark.parametrize(("late", "grown"), [(1.01, False), (1.05, True)])
def test_memory_that_grows_is_noticed(late, grown):
    sizes = [10**9] * 60 + [int(late * 10**9)] * 20
    memory = [(30.0 * place, size) for place, size in enumerate(sizes)]
    assert bool(SOAK["Outcome"](memory=memory).problems) is grown


def test_a_wrong_answer_a_failure_and_a_leak_are_noticed():
    outcome = SOAK["Outcome"](wrong=[{"told": "something else"}], slots_left=16.0)
    outcome.counts.update({"same": 5, "left": 2, "status 500: oh": 1})
    assert len(outcome.problems) == 3
