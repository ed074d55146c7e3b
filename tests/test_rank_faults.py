"""What becomes of ranks, and of the process that leads them, when something goes wrong."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cli_tools import save_tiny_model
from rank_tools import RANKS, ended, meeting_places, start

from draftgraph.errors import RankError
from draftgraph.models import ranks

SECONDS = 150.0  # for a process and its ranks on a busy machine; none of them waits so long


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    save_tiny_model(folder / "tiny")
    shutil.copytree(folder / "tiny", folder / "broken")
    weights = folder / "broken" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


@pytest.fixture(scope="module")
def found(place: Path) -> dict[str, Any]:
    """What one process found, by fault."""
    return {name: what for line in ended(start("failing", place), SECONDS) for name, what in line.items()}


def test_a_follower_that_ends_before_it_is_met_is_named_and_the_next_load_starts_another(found: Any) -> None:
    assert found["early"] == f"RankError: rank 1 of {RANKS} was ended by signal 9" and found["failed_loads"]


def test_a_follower_that_never_starts_is_not_awaited_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "STARTING", 0.1)
    ours, theirs = socket.socketpair()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with ours, theirs, tempfile.TemporaryFile() as errors, pytest.raises(RankError, match="rank 1 of 2 does not"):
            ranks.await_here(ranks.Started(1, process, ours, errors), 2)
    finally:
        process.kill()
        process.wait()


def test_a_load_that_fails_on_one_rank_fails_on_all_and_leaves_them_able_to_go_on(found: Any) -> None:
    (everywhere, follower, leader), (before, after) = found["failed_loads"]
    assert everywhere.startswith("LoadError: ") and "broken" in everywhere and "rank" not in everywhere
    assert follower == f"LoadError: rank 1 of {RANKS}: no memory"
    assert leader == f"LoadError: rank 0 of {RANKS}: no memory"
    assert len(before) == 4 and before == after


def test_a_process_ends_after_a_load_that_was_interrupted(place: Path) -> None:
    (found,) = ended(start("interrupted", place), SECONDS)
    assert "interrupted" in found["said"]


def test_another_thread_may_check_a_model_of_its_own_while_the_ranks_compute(found: Any) -> None:
    kind, before, after = found["threads"]
    assert kind == "PagedEngine" and len(before) == 4 and before == after


def test_a_rank_that_is_short_of_memory_in_a_check_is_named(found: Any) -> None:
    said, lost = found["short"]
    assert f"rank 1 of {RANKS} failed: OutOfMemoryError: CUDA out of memory" in lost and said == f"RankError: {lost}"


def test_ranks_that_end_with_their_process_leave_no_folder_behind(place: Path, tmp_path: Path) -> None:
    (found,) = ended(start("left", place, TMPDIR=str(tmp_path)), SECONDS)
    assert "signal 6" in found["lost"] and not meeting_places(tmp_path)
