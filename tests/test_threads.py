"""Threads of our own: they meet, and PyTorch's keep still beside them."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from draftgraph.compiled import compiled
from draftgraph.kernels.threads import LONGEST, RECOVERY, SHORTEST, Team, clock, team_of, thread_count, torch_alone
from draftgraph.kernels.vectors import cycles, meet, pause


@compiled
def relay(thread: int, threads: int, shared: int, seen: np.ndarray, rounds: int) -> None:
    """Each thread reads what its neighbour wrote in the round before: wrong unless all have met."""
    for number in range(rounds):
        seen[number + 1, thread] = seen[number, (thread + 1) % threads] + 1
        meet(shared, threads)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_nobody_goes_on_before_all_have_met(threads: int) -> None:
    team, rounds = team_of(threads), 300
    for _ in range(5):
        seen = np.zeros((rounds + 1, threads), dtype=np.int64)
        team._together(relay, threads, (seen, rounds))  # on a busy machine `run` may leave some out
        assert (seen == np.arange(rounds + 1)[:, None]).all()


def test_so_many_meet_as_run_whoever_ran_before() -> None:
    team, rounds = Team(5), 101  # times an odd number, so that what two threads count begins with an odd one
    for threads in (5, 2, 5, 2, 1, 2, 5) * 5:
        seen = np.zeros((rounds + 1, threads), dtype=np.int64)
        team._together(relay, threads, (seen, rounds))
        assert (seen == np.arange(rounds + 1)[:, None]).all()


@compiled
def uneven(thread: int, threads: int, shared: int, seen: np.ndarray, late: int) -> None:
    """How many ran it. One of them comes late, as if its processor had been given to another program."""
    seen[0] = threads
    if thread == 1:
        start = cycles()
        while cycles() - start < late:
            pause()
    meet(shared, threads)


def test_who_keeps_others_waiting_is_left_out_for_a_while() -> None:
    team, second = team_of(2), clock()
    time.sleep(0.1)
    second = 10 * (clock() - second)

    def runs(late: float) -> int:
        seen = np.zeros(1, dtype=np.int64)
        team.run(uneven, seen, int(late * second))
        return int(seen[0])

    runs(0.0)  # compiles
    team._until = 0.0
    assert [runs(0.02), runs(0.0)] == [2, 1]
    time.sleep(max(0.0, team._until - time.monotonic()))
    assert runs(0.02) == 2, "tried again"


def test_half_of_the_threads_go_on_where_half_of_a_run_is_waited_for() -> None:
    team = Team(5)

    def judged(waited: float) -> tuple[int, float]:
        team._judge((team._used - 1) * waited, time.monotonic() - 1.0)
        return team._used, team._pause

    assert judged(0.4) == (5, SHORTEST)
    assert [judged(0.6), judged(0.4), judged(0.9)] == [(2, 2 * SHORTEST), (2, 2 * SHORTEST), (1, 4 * SHORTEST)]
    for _ in range(20):
        team._used = 5
        judged(0.9)
    assert team._pause == LONGEST
    team._used = 5
    assert judged(0.0) == (5, RECOVERY * LONGEST)


def test_pytorch_has_its_threads_back_afterwards() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch_alone():
            assert torch.get_num_threads() == 1 and thread_count() == 2
            with torch_alone():
                assert torch.get_num_threads() == 1 and thread_count() == 2
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == thread_count() == 2
    finally:
        torch.set_num_threads(before)
