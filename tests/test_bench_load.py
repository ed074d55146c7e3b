"""`bench load`: many clients at a time, in turns between modes and vLLM."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bench_tools import pair_in, write_tasks
from cli_tools import Runner, refused

from draftgraph.bench import bench_load
from draftgraph.bench.load import Promise, arrivals_named, figures_of, settings_of
from draftgraph.bench.load_report import LoadReport
from draftgraph.bench.runs import of_kind, records_in
from draftgraph.bench.worker import drive
from draftgraph.errors import UsageError
from draftgraph.pair import Pair

TASKS = {"cats": ["the cat sat", "a cat"], "mats": ["on the mat and the cat"]}
STAND_IN = """
import os, time
__version__ = "9.9"
if os.environ.get("VLLM_STAND_IN") == "broken":
    raise RuntimeError("Engine core initialization failed: no memory")

class SamplingParams:
    def __init__(self, **given):
        assert given["ignore_eos"] and given["stop_token_ids"] == [] and given["temperature"] == 0.0
        self.most = given["max_tokens"]

class Told:
    def __init__(self, name, tokens, finished):
        self.request_id, self.finished = name, finished
        self.outputs = [type("", (), {"token_ids": tokens})]

class LLM:
    def __init__(self, **options):
        assert options["enable_prefix_caching"] is False
        self.most, self.active, self.llm_engine = options["max_num_seqs"], {}, self
        draft = options.get("speculative_config", {}).get("num_speculative_tokens", 0)
        self.at_once = 1 + draft

    def add_request(self, name, prompt, sampling):
        assert name not in self.active and len(self.active) < self.most and prompt["prompt_token_ids"]
        self.active[name] = ([], sampling.most)

    def step(self):
        time.sleep(0.002)
        told = []
        for name, (tokens, most) in list(self.active.items()):
            tokens += range(len(tokens), min(most, len(tokens) + self.at_once))
            told.append(Told(name, list(tokens), len(tokens) == most))
            if len(tokens) == most:
                del self.active[name]
        return told
"""

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def small(pair: Pair, out: Path, **changes: Any) -> LoadReport:
    given: dict[str, Any] = {"clients": [1, 3], "max_new_tokens": 5, "repeats": 2} | changes
    return bench_load(pair, TASKS, out, **given)


class Counter:
    """An engine that takes a second of its own clock for a step and gives two tokens to everybody in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
        self.now, self.length, self.active, self.most = 0.0, length, dict[int, int](), 0
        monkeypatch.setattr("draftgraph.bench.worker.time.perf_counter", lambda: self.now)
        monkeypatch.setattr("draftgraph.bench.worker.time.sleep", self.pass_by)

    def pass_by(self, seconds: float) -> None:
        self.now += seconds

    def add(self, number: int, prompt: list[int]) -> None:
        self.active[number] = 0
        self.most = max(self.most, len(self.active))

    def step(self) -> Iterator[tuple[int, list[int], bool]]:
        self.now += 1.0
        for number in list(self.active):
            new = range(self.active[number], min(self.length, self.active[number] + 2))
            self.active[number] = new.stop
            yield number, list(new), new.stop == self.length
            if new.stop == self.length:
                del self.active[number]


def test_clients_of_a_closed_load_ask_again_once_they_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counter(monkeypatch, length=5)
    found = drive({"prompts": [[1]] * 7, "clients": 3}, engine.add, engine.step)
    assert engine.most == 3 and found["seconds"] == 9.0
    assert found["due"] == [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0]
    assert found["came"][3] == [(4.0, 2), (5.0, 2), (6.0, 1)] and found["tokens"][3] == [0, 1, 2, 3, 4]


def test_an_open_load_waits_for_no_answer_and_counts_from_when_it_was_due(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counter(monkeypatch, length=4)
    found = drive({"prompts": [[1]] * 4, "clients": 9, "arrivals": [0.0, 0.5, 1.5, 9.0]}, engine.add, engine.step)
    assert engine.most == 2
    assert found["due"] == [0.0, 0.5, 1.5, 9.0]
    assert [came[0][0] for came in found["came"]] == [1.0, 2.0, 3.0, 10.0]  # idle until the last one is due


def test_an_open_load_has_as_many_places_as_clients_whatever_else_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Counter(monkeypatch, length=4)
    found = drive({"prompts": [[1]] * 4, "clients": 1, "arrivals": [0.0, 0.5, 1.5, 9.0]}, engine.add, engine.step)
    assert engine.most == 1 and found["due"] == [0.0, 0.5, 1.5, 9.0]
    assert [came[0][0] for came in found["came"]] == [1.0, 3.0, 5.0, 10.0]


def test_figures_count_from_the_request_to_the_first_token_and_between_deliveries() -> None:
    came = [[(1.0, 2), (1.5, 2)], [(2.0, 1), (2.2, 3)]]
    found = {"due": [0.5, 0.0], "came": came, "tokens": [[1, 2, 3, 4], [5, 6, 7, 8]], "seconds": 2.2}
    figures = figures_of(found, Promise(first_ms=600.0, token_ms=300.0), prompts=1)
    assert figures["first_ms"][0] == pytest.approx(1250.0) and figures["between_ms"][0] == pytest.approx(350.0)
    assert figures["token_ms"][0] == pytest.approx((250.0 + 200.0 / 3) / 2)
    assert figures["good_tokens"] == 4 and figures["tokens"] == 8 and figures["requests"] == 2
    assert [prompt for prompt, _ in figures["answers"]] == [0, 0]


def test_modes_are_measured_in_turns_and_give_the_same_answers(pair: Pair, tmp_path: Path) -> None:
    report = small(pair, tmp_path, arrivals=["closed", "50%"])
    records = of_kind(records_in(tmp_path / "runs.jsonl"), "load")
    turns = [(one["clients"], one["arrivals"], one["mode"]) for one in records]
    assert turns == [*itertools.product([1, 3], ["closed", "50%"], ["off", "auto"])] * 2
    assert {one["tokens"] for one in records} == {16 * 5}
    assert report.measured == report.planned == 16 and set(report.cells) == set(turns)
    for (_, arrivals, mode), cell in report.cells.items():
        assert cell.same == cell.answers == 2 * 16 and cell.repeats == 2
        assert cell.tokens_per_second > 0 and (mode != "off" or arrivals != "closed" or cell.ratio == 1.0)
        assert cell.first_ms == sorted(cell.first_ms) and cell.between_ms == sorted(cell.between_ms)
    written = json.loads((tmp_path / "report.json").read_text())
    assert len(written["cells"]) == 8 and written["failed"] == {}
    assert "| 3 | auto |" in (tmp_path / "report.md").read_text() and "<svg" in (tmp_path / "report.html").read_text()


def test_no_prompt_is_answered_from_pages_of_an_earlier_one(pair: Pair, tmp_path: Path, monkeypatch: Any) -> None:
    reused = []
    monkeypatch.setattr(
        "draftgraph.batching.scheduler.Scheduler._stats",
        lambda self, task: reused.append(task.sequence.reused) or {},
    )
    long = {"cats": ["the cat sat on the mat " * 20]}
    bench_load(pair, long, tmp_path, clients=[2], max_new_tokens=2, repeats=1)
    assert len(reused) >= 32 and not any(reused)


def test_a_load_that_was_stopped_goes_on(pair: Pair, tmp_path: Path) -> None:
    whole = small(pair, tmp_path, clients=[1], repeats=1)
    assert whole.measured == whole.planned == 2
    more = small(pair, tmp_path, clients=[1, 2], repeats=1)
    records = of_kind(records_in(tmp_path / "runs.jsonl"), "load")
    assert more.measured == len(records) == 4 and [one["clients"] for one in records] == [1, 1, 2, 2]
    with pytest.raises(UsageError, match=r"first ms 1000\.0, not 5"):
        small(pair, tmp_path, promise=Promise(first_ms=5.0))
    none = small(pair, tmp_path / "late", seconds=0.0)
    assert none.measured == 0 and none.planned == 8


def test_vllm_is_put_under_the_same_load(pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    modes = ["vllm", "vllm-draft-3"]
    report = small(pair, tmp_path / "out", modes=modes, clients=[3], repeats=1, vllm=sys.executable)
    plain, drafted = (report.cells[3, "closed", mode] for mode in modes)
    assert plain.answers == drafted.answers == 16 and plain.same == drafted.same == 0
    assert drafted.tokens_per_second > 1.5 * plain.tokens_per_second  # 4 and 1 tokens behind 5 steps of one
    assert report.best_of_vllm(3, "closed") == drafted.tokens_per_second
    monkeypatch.setenv("VLLM_STAND_IN", "broken")
    failed = small(pair, tmp_path / "broken", modes=["auto", "vllm"], clients=[1], repeats=1, vllm=sys.executable)
    assert "no memory" in failed.failed["vllm"] and (1, "closed", "auto") in failed.cells


def test_the_command_measures_and_reports_again(run: Runner, folder: Path, tmp_path: Path) -> None:
    data, out = write_tasks(tmp_path / "data", TASKS), tmp_path / "out"
    asked = ["bench", "load", "--target", str(folder), "--draft", "none", "--data", str(data), "--out", str(out)]
    done = run(*asked, "--clients", "2", "--new-tokens", "4", "--repeats", "1", "--modes", "auto", "--json")
    assert done.status == 0, done.err
    told = json.loads(done.out)
    assert [(cell["clients"], cell["mode"]) for cell in told["cells"]] == [(2, "off"), (2, "auto")]
    page = tmp_path / "page.html"
    again = run("bench", "report", out, out, "--out", page)
    assert again.status == 0 and "Clients who ask again" in again.out and "Gap between" in page.read_text()
    for option, value, words in (
        ("--clients", "0", "clients must be a number of at least 1"),
        ("--clients", "1.5", "clients must be whole numbers with commas between, as in 1,4, not 1.5"),
        ("--arrivals", "often", "arrivals must be closed"),
        ("--modes", "tree-64", "cannot ask for mode tree-64"),
    ):
        refused(run(*asked, option, value), words)


@pytest.mark.parametrize("word", ["-1", "0%", "nan", "inf", "", "70 %%"])
def test_arrivals_that_mean_nothing_are_refused(word: str) -> None:
    with pytest.raises(UsageError, match="arrivals must be"):
        arrivals_named(word)


def test_settings_of_a_mode_are_those_of_a_job() -> None:
    assert settings_of("chain-6")["chain_length"] == 6 and settings_of("graph:k=2")["k"] == 2
