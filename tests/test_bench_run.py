"""`bench run`: measurements are kept one by one and never mixed; the figures of a report are right."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_tools import pair_in, write_tasks
from cli_tools import Runner, refused, with_window
from families import VOCAB, perturbed, target_of

from draftgraph import GraphConfig, UsageError
from draftgraph.bench import bench_run, inflation, runs
from draftgraph.bench.inflation import Shape
from draftgraph.bench.runs import FILE, Deadline, Place, Record, Runs, all_places, read_records
from draftgraph.bench.sameness import STEPS_OF_A_TIE, difference, first_difference
from draftgraph.bench.speed_report import SpeedReport
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.bench.structures import BEST_FIRST, MODES, mode_named
from draftgraph.cli.bench import SHAPES
from draftgraph.pair import Pair
from draftgraph.stats import SOURCES

TASKS = {"cats": ["the cat sat", "a cat"], "mats": ["on the mat", "the mat and the cat"]}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_tasks(tmp_path / "data", TASKS)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def measured(out: Path) -> list[Place]:
    return [Place.of(record) for record in read_records(out) if record["kind"] == "run"]


def small(pair: Pair, out: Path, **changes: Any) -> SpeedReport:
    settings: dict[str, Any] = {"modes": ["chain-2", "auto"], "max_new_tokens": 6, "repeats": 2}
    return bench_run(pair, TASKS, out, **settings | changes)


# What is measured, and in which order


def test_all_modes_are_timed_in_turn_for_every_prompt_and_repeat(pair: Pair, tmp_path: Path) -> None:
    report = small(pair, tmp_path / "out")
    modes = ("off", "chain-2", "auto")
    prompts = [("cats", 0), ("mats", 0), ("cats", 1), ("mats", 1)]
    expected = [Place(*prompt, mode, repeat) for repeat in range(2) for prompt in prompts for mode in modes]
    assert measured(tmp_path / "out") == expected == all_places(TASKS, modes, 2)
    assert report.measured == report.planned == 24
    assert [mode.mode for mode in report.modes] == list(modes)


def test_tasks_of_different_lengths_are_measured_to_their_ends() -> None:
    places = all_places({"long": ["a", "b", "c"], "short": ["d"]}, ["off"], 1)
    assert [(place.task, place.prompt) for place in places] == [("long", 0), ("short", 0), ("long", 1), ("long", 2)]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3}])
def test_a_measurement_tells_what_happened(pair: Pair, tmp_path: Path, sampling: dict[str, Any]) -> None:
    small(pair, tmp_path, max_new_tokens=12, **sampling)
    records = read_records(tmp_path)
    turns = ["warm-up", "run"] * 3  # each mode is warmed up once, before its first answer
    assert [record["kind"] for record in records[:9]] == ["configuration", "session", *turns, "run"]
    assert records[0]["engine"] == type(pair.decoder.engines.target).__name__ and records[0]["dtype"] == "float32"
    runs = [record for record in records if record["kind"] == "run"]
    for run in runs:
        assert run["same"] and run["first_difference"] is None and not run["tie"]
        assert run["new_tokens"] == 12 and run["ms_per_token"] == pytest.approx(1000 * run["seconds"] / 12)
        assert run["seconds"] > 0 and run["first_token_seconds"] > run["phases"]["prefill"] > 0
        assert run["tokens_per_pass"] == pytest.approx(12 / run["steps"])
        assert run["nodes"] >= run["steps"] and "extra_bytes" not in run
        accepted, checked = run["accepted_by_source"], run["checked_by_source"]
        assert sum(accepted.values()) == sum(run["accepted_by_depth"]) >= 12 - run["steps"] - 1
        assert sum(checked.values()) == run["nodes"] - run["steps"]
        assert all(accepted[source] <= checked[source] for source in SOURCES)
        assert run["resident_bytes"] > 50_000_000 and "joules" not in run
        assert ("tokens" in run) == (run["repeat"] == 0)
    assert len({run["tokens_digest"] for run in runs}) == 4, "one for each prompt"
    plain = [run for run in runs if run["mode"] == "off"]
    assert all(run["nodes"] == run["steps"] == 12 and not run["draft_passes"] for run in plain)
    given = {"max_new_tokens": 12, "config": GraphConfig(mode="off"), **sampling}
    assert plain[0]["tokens"] == pair.generate(TASKS["cats"][0], **given).token_ids


def test_a_warm_up_fixes_the_prices(pair: Pair) -> None:
    watch = Stopwatch(pair, {"auto": mode_named("auto")}, {"max_new_tokens": 4})
    warmed = watch.warm_up("auto", "the cat")
    assert warmed["prices"] == "flat" and warmed["seconds"] > 0
    assert watch.modes["auto"].cost is pair.decoder.flat_cost


@pytest.mark.parametrize(
    ("word", "config"),
    [
        ("off", GraphConfig(mode="off")),
        ("chain-6", GraphConfig(mode="chain", chain_length=6)),
        ("tree", GraphConfig(mode="tree")),
        ("tree-32", GraphConfig(mode="tree", max_nodes=32, **BEST_FIRST)),
        ("graph", GraphConfig(mode="graph", k=4, tau=2, theta_prob=0.2, theta_sib=0.3)),
        ("auto-16", GraphConfig(max_nodes=16)),
    ],
)
def test_a_mode_may_carry_a_size(word: str, config: GraphConfig) -> None:
    assert mode_named(word) == config


# Going on


class Killed(BaseException):
    pass


def test_a_run_that_was_killed_goes_on_where_it_was(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Stopwatch.run
    done = 0

    def dying(self: Any, *arguments: Any) -> Record:
        nonlocal done
        done += 1
        if done == 8:
            raise Killed
        return honest(self, *arguments)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Stopwatch, "run", dying)
        small(pair, tmp_path)
    kept = read_records(tmp_path)
    assert len(measured(tmp_path)) == 7
    report = small(pair, tmp_path)
    assert read_records(tmp_path)[: len(kept)] == kept
    places = measured(tmp_path)
    assert len(places) == len(set(places)) == 24 == report.measured
    assert all(mode.same == mode.answers == 8 for mode in report.modes), "also with what was measured before"
    before = (tmp_path / FILE).read_bytes()
    small(pair, tmp_path)
    assert measured(tmp_path) == places and (tmp_path / FILE).read_bytes().startswith(before)


def test_a_half_written_line_is_ignored_and_overwritten(pair: Pair, tmp_path: Path) -> None:
    small(pair, tmp_path)
    file = tmp_path / FILE
    content = file.read_bytes()
    file.write_bytes(content[:-40])
    assert len(measured(tmp_path)) == 23
    small(pair, tmp_path)
    assert len(measured(tmp_path)) == 24
    file.write_bytes(content[:50])
    small(pair, tmp_path)
    assert len(measured(tmp_path)) == 24, "not even the configuration was whole"


def test_every_line_is_on_disk_before_the_next_is_measured(tmp_path: Path) -> None:
    with Runs(tmp_path, {"seed": 1}) as runs:
        runs.append("run", {"task": "cats"})
        assert (
            tmp_path / FILE
        ).read_bytes() == b'{"kind": "configuration", "seed": 1}\n{"kind": "run", "task": "cats"}\n'


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_new_tokens": 7}, "max new tokens 6, not 7"),
        ({"modes": ["auto"]}, "modes off,chain-2,auto, not off,auto"),
        ({"temperature": 0.5}, "temperature none, not 0.5"),
        ({"names": {"target": "other"}}, "target tiny, not other"),
    ],
)
def test_measurements_of_another_configuration_are_refused(
    pair: Pair, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    small(pair, tmp_path, repeats=1)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(UsageError, match=words):
        small(pair, tmp_path, **changes)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_draft_that_was_trained_again_is_another_one(pair: Pair, tmp_path: Path) -> None:
    small(pair, tmp_path, repeats=1)
    other = Pair(pair.target, perturbed(pair.target, 0.1, seed=9), pair.tokenizer)
    with pytest.raises(UsageError, match="draft weights"):
        small(other, tmp_path)


def test_other_prompts_are_refused_and_more_are_added(pair: Pair, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"modes": ["chain-2"], "max_new_tokens": 4, "repeats": 1}
    bench_run(pair, {"cats": ["the cat"]}, tmp_path, **settings)
    with pytest.raises(UsageError, match="prompt 1 of cats is not the one"):
        bench_run(pair, {"cats": ["a dog"]}, tmp_path, **settings)
    report = bench_run(pair, {"cats": ["the cat", "a cat"], "mats": ["the mat"]}, tmp_path, **settings)
    assert report.measured == 6 and [task.prompts for task in report.modes[1].tasks] == [2, 1]


def test_a_damaged_line_is_named(pair: Pair, tmp_path: Path) -> None:
    small(pair, tmp_path, repeats=1)
    lines = (tmp_path / FILE).read_text().splitlines()
    (tmp_path / FILE).write_text("\n".join([*lines[:3], lines[3][:20], *lines[4:], ""]))
    with pytest.raises(UsageError, match="line 4 is damaged"):
        small(pair, tmp_path)
    with pytest.raises(UsageError, match="line 4 is damaged"):
        read_records(tmp_path)


def test_nothing_is_begun_that_would_not_be_done_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(runs.time, "monotonic", lambda: now)
    deadline = Deadline(100.0)
    now = 60.0
    assert not deadline.is_near
    with deadline.watch():
        now = 75.0
    assert not deadline.is_near
    now = 85.0
    assert deadline.is_near and not Deadline(None).is_near


# Same tokens


def test_the_first_difference_is_a_place() -> None:
    assert first_difference([[1, 2], [1, 2]]) is None
    assert first_difference([[1, 2], [1, 3]]) == 1
    assert first_difference([[1, 2], [1, 2, 3]]) == 2


def letters() -> Pair:
    target = target_of("llama")
    return Pair(target, None, lambda text: {"input_ids": [ord(letter) % VOCAB for letter in text]})


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
def test_a_wrong_token_is_no_tie_and_a_rounded_one_is(sampling: dict[str, Any]) -> None:
    pair = letters()
    decoding = pair.start("abcdef", max_new_tokens=8, **sampling)
    for _ in decoding:
        pass
    tokens = decoding.new_tokens
    assert difference(decoding, tokens) is None
    wrong = difference(decoding, [*tokens[:3], (tokens[3] + 1) % VOCAB, *tokens[4:]])
    assert wrong is not None and wrong.place == 3 and not wrong.is_tie
    ended = difference(decoding, tokens[:5])
    assert ended is not None and (ended.place, ended.rounding_steps, ended.is_tie) == (5, None, False)


def test_tokens_within_two_rounding_steps_are_a_tie() -> None:
    pair = letters()
    head = pair.target.get_output_embeddings().weight
    decoding = pair.start("abcdef", max_new_tokens=4)
    for _ in decoding:
        pass
    best = decoding.new_tokens[0]
    other = (best + 1) % VOCAB
    with torch.no_grad():
        head[other] = head[best] * (1 - torch.finfo(torch.float32).eps)
    found = difference(decoding, [other, *decoding.new_tokens[1:]])
    assert found is not None and found.place == 0 and found.is_tie
    assert found.rounding_steps is not None and found.rounding_steps <= STEPS_OF_A_TIE


def test_an_inflated_target_is_labelled_in_every_row(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inflation.SHAPES, "llama-1b", Shape(64, 96, 3, 4))
    report = small(pair, tmp_path, inflate="llama-1b", modes=["chain-2", "auto", "hf", "hf-assisted"], repeats=1)
    records = read_records(tmp_path)
    rows = [record for record in records if record["kind"] == "run"]
    assert len(rows) == 20 and all(row["inflated"] == "1B-cost, inflated" for row in rows)
    assert report.label == records[0]["inflated"] == "1B-cost, inflated"
    assert all(row["same"] for row in rows) and not report.failed
    with pytest.raises(UsageError, match="inflated 1B-cost, inflated, not none"):
        small(pair, tmp_path)
    assert set(SHAPES) == set(inflation.SHAPES) - {"llama-1b"}


# The command


def test_the_command_measures_reports_and_goes_on(run: Runner, folder: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "speed"
    common = ("bench", "run", "--data", data, "--target", folder, "--draft", "self", "--out", out)
    common += ("--new-tokens", 6, "--modes", "chain-4,auto", "--prompts", 2)
    done = run(*common, "--repeats", 1)
    assert done.status == 0 and done.err == "", done
    for word in ("cats", "mats", "all", "off", "chain-4", "auto", "4 of 4", "Milliseconds per token", "12 of 12"):
        assert word in done.out
    assert {file.name for file in out.iterdir()} == {FILE, "report.json", "report.md", "report.png", "report.html"}
    text = (out / "report.md").read_text()
    assert text.startswith("# Speed of tiny, draft: self") and "| auto |" in text and "](report.png)" in text

    done = run(*common, "--repeats", 2, "--json")
    assert done.status == 0 and json.loads(done.out)["measured"] == 24
    assert json.loads((out / "report.json").read_text()) == json.loads(done.out)

    done = run("bench", "report", out)
    assert done.status == 0 and "8 of 8" in done.out and "24 of 24 measurements" in done.out
    refused(run(*common, "--seed", 4), "holds measurements with seed 0, not 4")


def test_a_time_limit_stops_it_and_says_how_to_go_on(
    run: Runner, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = ("bench", "run", "--data", data, "--target", folder, "--out", tmp_path / "out", "--new-tokens", 4)
    common += ("--modes", "chain-4", "--repeats", 1)
    near = Deadline.is_near
    asked: list[int] = []

    def after_a_few(self: Deadline) -> bool:
        asked.append(0)
        return len(asked) > 3

    monkeypatch.setattr(Deadline, "is_near", property(after_a_few))
    done = run(*common, "--seconds", 60)
    assert done.status == 0 and "3 of 8 measurements are in" in done.err and "the same command goes on" in done.err
    assert "cats" in done.out
    monkeypatch.setattr(Deadline, "is_near", near)
    assert "8 of 8 measurements" in run(*common, "--seconds", 60).out
    done = run(*(tmp_path / "none" if part == tmp_path / "out" else part for part in common), "--seconds", 1e-9)
    refused(done, "seconds must be")


def test_ctrl_c_leaves_what_was_measured(
    run: Runner, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, asked = Stopwatch.run, []

    def interrupted(self: Any, *arguments: Any) -> Record:
        asked.append(arguments)
        if len(asked) == 4:
            raise KeyboardInterrupt
        return honest(self, *arguments)

    monkeypatch.setattr(Stopwatch, "run", interrupted)
    out = tmp_path / "out"
    common = ("bench", "run", "--data", data, "--target", folder, "--out", out, "--new-tokens", 4, "--modes", "chain-4")
    assert run(*common).status == 130
    assert len(measured(out)) == 3 and "3 of 24 measurements" in run("bench", "report", out).out
    assert run(*common).status == 0 and len(measured(out)) == 24


def test_wrong_use_is_one_line(run: Runner, folder: Path, data: Path, tmp_path: Path) -> None:
    bench = ("bench", "run", "--target", folder, "--out", tmp_path / "out")
    refused(run("bench", "run", "--data", data), "--out")
    refused(run(*bench, "--data", data, "--tasks", "dogs"), "no task dogs")
    for word in ("bush", "chain-", "chain-x", "off-2", "tree-2-3"):
        refused(run(*bench, "--data", data, "--modes", word), f"there is no mode {word}")
    refused(run(*bench, "--data", data, "--modes", "chain-0"), "chain_length must be")
    refused(run(*bench, "--data", data, "--modes", ","), "modes must name")
    refused(run(*bench, "--data", data, "--inflate", "llama-9t"), "no shape llama-9t", "llama-2-7b")
    refused(run(*bench, "--data", data, "--repeats", 0), "repeats must be")
    refused(run(*bench, "--data", data, "--top-p", 2), "top_p must be")
    refused(run("bench", "run", "--target", folder, "--data", data, "--out", data / "cats.jsonl"), "cannot be written")
    refused(run("bench", "report", tmp_path / "nowhere"), "no measurements in")
    assert not (tmp_path / "out").exists()


def test_a_prompt_past_the_window_is_named(run: Runner, folder: Path, data: Path, tmp_path: Path) -> None:
    short = with_window(folder, tmp_path / "short", 64)
    (data / "mats.jsonl").write_text(json.dumps({"prompt": "the cat sat " * 40}))
    done = run("bench", "run", "--data", data, "--target", short, "--out", tmp_path / "out", "--new-tokens", 8)
    refused(done, "prompt 1 of mats", "context window of 64")


def test_without_matplotlib_there_is_no_plot(
    run: Runner, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    out = tmp_path / "out"
    common = ("--modes", "off", "--repeats", 1, "--new-tokens", 4, "--prompts", 1)
    assert run("bench", "run", "--data", data, "--target", folder, "--out", out, *common).status == 0
    assert {file.name for file in out.iterdir()} == {FILE, "report.html", "report.json", "report.md"}
    assert "report.png" not in (out / "report.md").read_text()


def test_every_mode_is_timed_if_none_is_named() -> None:
    assert MODES == ("off", "chain-4", "chain-8", "tree", "graph", "auto")
    assert [mode_named(word).mode for word in MODES] == ["off", "chain", "chain", "tree", "graph", "auto"]
