"""Threads of our own: they meet, and PyTorch's keep still beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftgraph.compiled import compiled
from draftgraph.kernels.threads import team_of, thread_count, torch_alone
from draftgraph.kernels.vectors import meet


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
        team.run(relay, seen, rounds)
        assert (seen == np.arange(rounds + 1)[:, None]).all()


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
