"""`bench paper`: every item is measured once, resumes, and is answered in a sentence."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from bench_tools import pair_in, write_tasks
from cli_tools import Runner, refused
from families import perturbed

from draftgraph import UsageError
from draftgraph.bench import inflation, searching
from draftgraph.bench.inflation import Shape
from draftgraph.bench.paper import findings, items, probes
from draftgraph.bench.paper import study as study_module
from draftgraph.bench.paper.findings import Finding, PaperReport, known_sizes, measured
from draftgraph.bench.paper.items import CHAINS, ITEMS, SIZES, Item, Size, grid_modes
from draftgraph.bench.paper.probes import Looks, probed, scored_probes
from draftgraph.bench.paper.study import Study, bench_paper
from draftgraph.bench.runs import FILE, Deadline, Record, read_records
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import TaskPrompt
from draftgraph.decoder import weights_read
from draftgraph.extras import install_command
from draftgraph.pair import Pair

PROBLEM = TaskPrompt("the cat sat", "1 + 1 = 2 #### 2", "math")
TASKS = {"gsm8k": [PROBLEM, "a cat"], "poetry": ["on the mat"], "wmt14_ende": ["the mat and the cat"]}
SIZE = Size(
    prompts=1,
    new_tokens=8,
    repeats=1,
    long_answers=1,
    long_tokens=24,
    scored_answers=2,
    scored_tokens=12,
    trials=2,
    searched_prompts=1,
)

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    return pair_in(folder)


@pytest.fixture(scope="module")
def study(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "paper"
    assert bench_paper(pair, TASKS, out, size=SIZE, drafts={"worse": perturbed(pair.target, 0.4)})
    return out


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def lines(folder: Path) -> int:
    kinds = ("run", "borrowing", "overlap", "masks", "accuracy")
    starts = tuple(f'{{"kind": "{kind}"' for kind in kinds)
    return sum(line.startswith(starts) for file in folder.rglob(FILE) for line in file.open())


class Once(dict[str, Shape]):
    """Each shape may be asked for one time."""

    def __getitem__(self, name: str) -> Shape:
        return self.pop(name)


def found(folder: Path, name: str) -> Finding:
    report = PaperReport.of(folder)
    assert report is not None
    return next(one for one in report.findings if one.name == name)


def test_every_item_is_answered(pair: Pair, study: Path) -> None:
    report = PaperReport.of(study)
    assert report is not None and PaperReport.of(study / "none") is None
    assert [one.name for one in report.findings] == [
        "main",
        "claims",
        "experiment-1",
        "experiment-2",
        "experiment-3",
        "check-1",
        "check-3",
        "foreign",
        "draft-sizes",
        "question-2",
        "question-3",
        "experiment-2-borrowed",
        "question-1",
        "check-2",
        "check-2-accuracy",
    ]
    assert all(measured(study / item.name) for item in ITEMS)
    report.save(study)
    text = (study / "paper.md").read_text()
    assert all(one.question in text and one.answer in text for one in report.findings)


def test_nothing_is_measured_twice(pair: Pair, study: Path) -> None:
    before, searched = lines(study), (study / "search" / "search.json").read_text()
    assert bench_paper(pair, TASKS, study, size=SIZE)
    assert lines(study) == before > 100 and (study / "search" / "search.json").read_text() == searched
    assert "worse" in found(study, "draft-sizes").figures, "a call without that draft forgets nothing"


def test_a_wrong_mask_at_the_draft_changes_nothing_and_at_the_target_it_may(pair: Pair, study: Path) -> None:
    parted = {record["setting"]: record["first_difference"] for record in probed(study, "masks")}
    assert parted["draft 0.5"] is None and parted["target 0.0"] is None
    arguments = {"max_new_tokens": 40, "min_new_tokens": 40}
    right = probes.answer_with_wrong_masks(pair, "the cat sat on", arguments).new_tokens
    assert probes.answer_with_wrong_masks(pair, "the cat sat on", arguments, draft=1.0).new_tokens == right
    engines = pair.decoder.engines.target, pair.decoder.engines.draft
    assert not any("run" in vars(engine) for engine in engines), "put back"


def test_strangers_are_no_ancestors_and_nobody_sees_the_future() -> None:
    visible = np.array([[True, True, False, False], [True, False, True, False], [True, True, False, True]])
    changed = probes.with_strangers(visible, 1.0, np.random.default_rng(0))
    assert (changed | visible == changed).all()
    assert changed.sum(axis=1).tolist() == [2, 3, 4]  # the first sees all that is before it anyway


def test_what_a_merged_node_borrows_is_compared_with_its_own(pair: Pair) -> None:
    mode = "graph:tau=1:theta_prob=0:theta_sib=0"
    text, steps = probes.steps_of(pair, "the cat sat on the mat", mode, {"max_new_tokens": 12})
    merges = [merge for one in probes.seen(pair, text, steps) for merge in probes.borrowing(one, Random(0))]
    merged = sum(step.graph.is_alias(node) for step in steps for node in range(len(step.graph)))
    assert 0 < len(merges) <= merged and all(merge["divergence"] >= -1e-6 for merge in merges)


def test_hypotheses_are_compared_behind_the_place_where_they_part() -> None:
    assert probes.behind_parting([1, 2, 3, 4], [1, 9, 3, 4]) == ([3, 4], [3, 4])
    assert probes.behind_parting([1, 2, 3], [1, 2, 3, 4]) is None and probes.behind_parting([1, 2], [3, 4]) is None
    assert probes.compared([3, 4], [3, 4]) == {"tokens": 1.0, "bigrams": 1.0, "edits": 0.0}
    assert probes.compared([3, 4, 5], [4, 5]) == {"tokens": 1.0, "bigrams": 1.0, "edits": pytest.approx(1 / 3)}


def test_settings_are_named_in_a_mode() -> None:
    config = mode_named("graph:theta_prob=0.1:sibling_pruning=leaf")
    assert (config.theta_prob, config.sibling_pruning, config.k) == (0.1, "leaf", 4)
    assert all(mode_named(mode).mode == "graph" for mode in grid_modes().values())
    for wrong in ("graph:kk=2", "graph:k=two", "graph:mode=tree", "graph:k=0"):
        with pytest.raises(UsageError):
            mode_named(wrong)


def test_a_study_needs_a_draft_and_its_tasks(pair: Pair, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a draft"):
        bench_paper(Pair(pair.target, None, pair.tokenizer), TASKS, tmp_path)
    with pytest.raises(UsageError, match="none of the paper's tasks"):
        bench_paper(pair, {"cats": ["a cat"]}, tmp_path)


def test_what_is_finished_is_opened_only_if_more_is_asked_for(pair: Pair, study: Path) -> None:
    def finished(item: Item, size: Size = SIZE, drafting: Pair = pair, **here: Any) -> bool:
        known = Study(pair, TASKS, study, size, None, 0, {}, Deadline(None))
        known.here = {name: value for name, value in read_records(study / "main")[0].items() if name != "kind"} | here
        return known.is_finished(item, item.prompts_of(TASKS, size.prompts), size.repeats, drafting, {})

    main, hot = ITEMS[0], next(item for item in ITEMS if item.temperature)
    assert finished(main) and finished(hot)
    assert not finished(main, replace(SIZE, prompts=2)) and not finished(main, replace(SIZE, repeats=2))
    assert not finished(replace(main, modes=("tree",))) and not finished(replace(hot, temperature=0.5))
    assert not finished(main, target_weights="others") and not finished(main, threads=99)
    assert not finished(main, drafting=Pair(pair.target, pair.target, pair.tokenizer))


def test_another_draft_of_the_same_name_is_refused(pair: Pair, study: Path) -> None:
    with pytest.raises(UsageError, match="draft weights"):
        bench_paper(pair, TASKS, study, size=SIZE, drafts={"worse": perturbed(pair.target, 0.2)})


# The best setting


def test_the_best_setting_stands_beside_the_papers_and_auto(study: Path) -> None:
    one, report = found(study, "question-3"), json.loads((study / "search" / "search.json").read_text())
    speeds = {each["name"]: each["outcome"]["speed"]["ratio"] for each in report["compared"]}
    assert len(report["trials"]) == SIZE.trials and report["rounds"] == searching.ROUNDS
    assert report["configuration"]["prompts"] == 1 and report["configuration"]["max_new_tokens"] == SIZE.new_tokens
    assert one.figures == {"best": max(list(speeds.values())[:-1]), "paper": speeds["trial 1"], "auto": speeds["auto"]}
    assert one.table is not None and len(one.table.lines) == 3 and "(best" in str(one.table.lines)
    for words in (f"Of {SIZE.trials} settings", f"{one.figures['auto']:.2f}x", f"{one.figures['best']:.2f}x", "k="):
        assert words in one.answer


def test_which_values_mattered_is_told(study: Path) -> None:
    report = json.loads((study / "search" / "search.json").read_text())
    weights = {"k": 0.1, "max_nodes": 0.5, "tau": 0.05, "growth": 0.35}
    answer = findings.best_setting_in(report | {"importance": weights}).answer
    assert answer.endswith("What mattered most: max_nodes (50%), growth (35%), k (10%).")


def test_without_optuna_the_study_says_so_and_goes_on(
    pair: Pair,
    study: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert found(study, "question-3").figures, "what was found before is shown all the same"
    shutil.copytree(study, tmp_path / "copy", ignore=shutil.ignore_patterns("search"))
    assert bench_paper(pair, TASKS, tmp_path / "copy", size=SIZE)
    told = capsys.readouterr().err.splitlines()
    assert [line for line in told if "optuna" in line and install_command("tune") in line] == told[:1]
    assert install_command("tune") in found(tmp_path / "copy", "question-3").answer
    assert not (tmp_path / "copy" / "search").exists()


def test_the_best_are_compared_when_all_trials_are_done(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = iter([True, False])
    monkeypatch.setattr(searching.Deadline, "allows", lambda *_: next(allowed))
    arguments: dict[str, Any] = {"trials": 2, "max_new_tokens": 6, "compare_early": False}
    first = searching.search(pair, {"gsm8k": ["a cat"]}, tmp_path, **arguments)
    assert (len(first.trials), first.rounds) == (1, 0) and findings.best_setting(tmp_path) is None
    monkeypatch.undo()
    second = searching.search(pair, {"gsm8k": ["a cat"]}, tmp_path, **arguments)
    assert (len(second.trials), second.rounds) == (2, searching.ROUNDS) and second.trials[0] == first.trials[0]


# Accuracy under wrong masks


def test_only_prompts_with_one_right_result_are_scored(pair: Pair) -> None:
    tasks = {"xsum": [TaskPrompt("x", "A short text, 2024.")], "gsm8k": ["a", PROBLEM, PROBLEM], "math": [PROBLEM]}
    places = [(probe.task, probe.prompt) for probe in scored_probes(tasks, SIZE) if probe.setting == "draft 0.5"]
    assert places == [("gsm8k", 1), ("gsm8k", 2)] and not list(scored_probes({"gsm8k": ["a cat"]}, SIZE))
    assert len(list(scored_probes(tasks, SIZE))) == 2 * len(probes.SETTINGS)


def test_an_answer_is_right_if_its_last_number_is(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(pair, {"gsm8k": [PROBLEM]}, SIZE, 0)
    looked = looks.accuracy(PROBLEM, "draft 0.5")
    assert looked["first_difference"] is None and not looked["tie"]
    assert looked["right"] is looked["plain_right"] is False, "the tiny model knows no numbers"
    monkeypatch.setattr(Looks, "_text", lambda *_: "It was 1, now it is 2.0")
    assert looks.accuracy(PROBLEM, "target 0.5")["right"] is True


def test_wrong_masks_at_the_draft_are_plain_decoding_and_one_that_is_not_is_told(study: Path) -> None:
    records = probed(study, "accuracy")
    assert [record["setting"] for record in records] == list(probes.SETTINGS)
    one = found(study, "check-2-accuracy")
    assert one.agrees and one.table is not None and one.table.lines[-1][:3] == ["draft 0.5", "0%", "100%"]
    changed: list[Record] = [record | {"first_difference": 3, "right": True, "plain_right": True} for record in records]
    other = findings.accuracy(changed)
    assert (
        other is not None
        and other.agrees is False
        and "CHANGE answers" in other.answer
        and other.figures["plain"] == 1.0
    )
    at_ties = findings.accuracy([record | {"tie": True} for record in changed])
    assert at_ties is not None and at_ties.agrees and at_ties.table is not None
    assert at_ties.table.lines[-1][2] == "0% (1 part at a tie)"
    assert "but at ties (1 of 1; right masks, which also round: 1)" in at_ties.answer


def test_a_prompt_that_was_answered_at_some_settings_only_is_left_out(study: Path) -> None:
    records = probed(study, "accuracy")
    half = [record | {"prompt": 1, "plain_right": True} for record in records[:2]]
    assert findings.accuracy(records + half) == findings.accuracy(records)
    assert findings.accuracy(half) is None
    assert findings.wrong_masks(probed(study, "masks")[:-1]) is None, "nothing is known of the draft yet"


# Drafts of several sizes


def test_drafts_of_several_sizes_answer_the_same_prompts(pair: Pair, study: Path) -> None:
    modes = {name: read_records(study / "drafts" / name)[0]["modes"][1:] for name in ("none", "pair", "self", "worse")}
    assert modes.pop("none") == ["auto"] and all(each == [*CHAINS, "graph", "auto"] for each in modes.values())
    sizes = known_sizes(study)
    assert sizes == {"none": 0, "pair": weights_read(pair.draft), "self": sizes["pair"], "worse": sizes["pair"]}
    digests = {
        run["prompt_digest"] for name in sizes for run in read_records(study / "drafts" / name) if run["kind"] == "run"
    }
    assert len(digests) == 1
    one = found(study, "draft-sizes")
    assert set(one.figures) == set(sizes) and one.table is not None and len(one.table.lines) == 1 + 3 * 3
    assert all(f"{speed:.2f}x" in one.answer for speed in one.figures.values())
    itself = measured(study / "drafts" / "self")
    assert itself is not None and itself.modes["chain-3"].per_pass > 3.0, "a draft that always agrees"


def test_names_of_drafts_are_folders(pair: Pair, tmp_path: Path) -> None:
    for wrong in ("self", "none", "pair", "../up", "..", ""):
        with pytest.raises(UsageError, match="named"):
            bench_paper(pair, TASKS, tmp_path, drafts={wrong: pair.target})
    assert not list(tmp_path.iterdir())


def test_the_command_takes_further_drafts(run: Runner, folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(study_module, "bench_paper", lambda *_, **given: asked.update(given) or True)
    data = write_tasks(tmp_path / "data", {"gsm8k": ["a cat"]})
    (tmp_path / "other").symlink_to(folder)
    command = ["bench", "paper", "--target", folder, "--draft", "self", "--data", data, "--out", tmp_path / "out"]
    done = run(*command, "--size", "small", "--also-draft", folder, "--also-draft", tmp_path / "other")
    assert (done.status, done.err) == (0, "") and list(asked["drafts"]) == [folder.name, "other"]
    assert weights_read(asked["drafts"]["other"]) > 0 and asked["size"] is SIZES["small"]
    refused(run(*command, "--also-draft", "self"), "self", "measured anyway")
    refused(run(*command, "--also-draft", folder, "--also-draft", folder), "two drafts are named")
    refused(run(*command, "--size", "huge"), "small, medium, full")


# Time and large targets


def test_what_takes_long_is_begun_early_in_a_call(pair: Pair, tmp_path: Path) -> None:
    def study_with(left: float, seconds: float | None) -> Study:
        deadline = Deadline(seconds)
        deadline._end = None if seconds is None else deadline._end - seconds + left  # type: ignore[operator]
        return Study(pair, TASKS, tmp_path, SIZE, None, 0, {}, deadline)

    assert study_with(50, 100).has_time() and study_with(0, None).has_time(1000)
    assert study_with(30, 100).has_time(29) and not study_with(30, 100).has_time(31)
    assert study_with(99, 100).has_time(1000) and not study_with(0.5, 100).has_time(0.1)


def test_a_study_that_is_out_of_time_measures_nothing(pair: Pair, tmp_path: Path) -> None:
    assert not bench_paper(pair, TASKS, tmp_path / "out", size=SIZE, seconds=0.5)
    assert not lines(tmp_path / "out") and not (tmp_path / "out" / "search").exists()


def test_an_inflated_target_is_searched_and_drafted_for(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(inflation.SHAPES, "llama-2-7b", Shape(64, 96, 3, 8, head_dim=8))
    monkeypatch.setattr(items, "ITEMS", ITEMS[:1])
    assert bench_paper(pair, {"gsm8k": [PROBLEM]}, tmp_path / "out", size=SIZE, inflate="llama-2-7b")
    monkeypatch.setattr(inflation, "SHAPES", Once(inflation.SHAPES))
    assert bench_paper(pair, {"gsm8k": [PROBLEM]}, tmp_path / "out", size=SIZE, inflate="llama-2-7b"), "opened once"
    configuration = json.loads((tmp_path / "out" / "search" / "search.json").read_text())["configuration"]
    assert configuration["inflated"] == "7B-cost, inflated"
    assert configuration["target_weights"] == read_records(tmp_path / "out" / "main")[0]["target_weights"]
    assert "the target before it was inflated" in found(tmp_path / "out", "draft-sizes").answer
    labels = {one.name: "7B-cost, inflated" in one.answer for one in PaperReport.of(tmp_path / "out").findings}
    assert labels["question-3"] and labels["draft-sizes"] and not labels["check-2"] and not labels["check-2-accuracy"]


def test_answers_that_part_are_counted_by_where() -> None:
    same, tie, other = ({"same": not parted, "tie": tie} for parted, tie in ((0, False), (1, True), (1, False)))
    assert findings.sameness([same, same]) == "the same"
    assert findings.sameness([same, tie]) == "the same but at ties of rounding"
    assert findings.sameness([same, other, same]) == "the same, and NOT in 1 of 3 answers"
    assert findings.sameness([tie, other, same]) == "the same but at ties of rounding, and NOT in 1 of 3 answers"
