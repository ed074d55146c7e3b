"""Task scores: by the sort of a task, right on known answers, and flat where all modes answer alike."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_tools import pair_in
from cli_tools import Runner, refused

from draftgraph.bench import bench_run
from draftgraph.bench.runs import Record, read_records
from draftgraph.bench.tasks import Scorer, TaskPrompt, accuracy, last_number, rouge, scorer_of, scores_of, translation
from draftgraph.extras import install_command

pytestmark = pytest.mark.usefixtures("own_cache")


def answer(mode: str, prompt: int, text: str, reference: str | None, **changes: Any) -> Record:
    row = {"task": "deen", "task_kind": "translation", "mode": mode, "prompt": prompt, "repeat": 0}
    return row | {"text": text, "reference": reference} | changes


# Which score


@pytest.mark.parametrize(
    ("task", "kind", "reference", "expected"),
    [
        ("anything", None, "2 * 4 = 8\n#### 8", accuracy),
        ("anything", "math", "#### -1,200.50 ", accuracy),
        ("math", "math", "eight", None),
        ("xsum", None, "Rain.", rouge),
        ("mixed", "summarization", "Rain.", rouge),
        ("wmt14_deen", None, "Good day", translation),
        ("mixed", "translation/de", "Good day", translation),
        ("xsum", "news", "Rain.", rouge),
        ("xsum", None, None, None),
        ("translation", None, "", None),
        ("alpaca", "instruction", "Some text", None),
    ],
)
def test_a_score_is_chosen_by_the_sort_of_task_and_reference(
    task: str, kind: str | None, reference: str | None, expected: Scorer | None
) -> None:
    assert scorer_of({"task": task, "task_kind": kind, "reference": reference}) is expected


# What it is


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 4.", 4.0),
        ("$1,840.00!", 1840.0),
        ("the answer is -5", -5.0),
        ("12-5", 5.0),
        ("x = 0.50", 0.5),
        ("#### 7", 7.0),
        ("none", None),
    ],
)
def test_the_last_number_of_a_text_is_its_answer(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_accuracy_is_the_share_of_right_numbers() -> None:
    assert accuracy(["so it is 8", "9 I think", "?"], ["#### 8", "#### 8", "#### 8"]) == {
        "accuracy": pytest.approx(100 / 3)
    }


def test_rouge_counts_words_pairs_and_common_order() -> None:
    found = rouge(["the cat sat"], ["the cat slept"])
    assert found == {"ROUGE-1": pytest.approx(200 / 3), "ROUGE-2": pytest.approx(50), "ROUGE-L": pytest.approx(200 / 3)}
    assert set(rouge(["a b c", "d e f"], ["a b c", "x y z"]).values()) == {50.0}


def test_translations_are_scored_over_the_whole_task() -> None:
    good = "The train to the coast was an hour late."
    assert translation([f"{good}\n"], [good]) == {"BLEU": pytest.approx(100), "chrF": pytest.approx(100)}
    both = translation([good, "nothing of it"], [good, "We saw the sunset from there."])
    assert 0 < both["BLEU"] < 100 and 0 < both["chrF"] < 100


# By mode


def test_scores_are_flat_where_answers_are_the_same() -> None:
    texts = ["The train was an hour late.", "We saw the sunset."]
    rows = [answer(mode, number, text, text) for mode in ("off", "auto") for number, text in enumerate(texts)]
    rows += [answer("off", 2, "Only plain decoding came this far", "We"), answer("off", 3, "no reference", None)]
    rows += [{"mode": "off", "task": "deen", "prompt": 0, "repeat": 1}]
    bleu, chrf = scores_of(rows)
    assert (bleu.task, bleu.metric, chrf.metric, bleu.answers) == ("deen", "BLEU", "chrF", 2)
    assert bleu.by_mode["off"] == bleu.by_mode["auto"] == pytest.approx(100)
    worse = scores_of([*rows, answer("auto", 1, "nothing", texts[1])])[0]
    assert worse.by_mode["auto"] < worse.by_mode["off"]


def test_a_task_of_several_sorts_has_several_scores() -> None:
    rows = [answer("off", 0, "Good day", "Good day"), answer("off", 1, "It is 4", "#### 4")]
    rows += [answer("off", 2, "Rain", "Rain", task_kind="summarization"), answer("off", 3, "?", "!", task_kind="chat")]
    assert [score.metric for score in scores_of(rows)] == ["BLEU", "chrF", "accuracy", "ROUGE-1", "ROUGE-2", "ROUGE-L"]


def test_without_its_package_a_score_is_left_out_with_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    rows = [answer("off", 0, "a", "b"), answer("off", 0, "a", "b", task="ende"), answer("off", 1, "4", "#### 4")]
    assert [score.metric for score in scores_of(rows)] == ["accuracy"]
    assert capsys.readouterr().err == f"draftgraph: some task scores need sacrebleu: {install_command('bench')}\n"


# In a run and its report


def test_first_answers_are_kept_as_text_with_their_references(folder: Path, tmp_path: Path) -> None:
    pair = pair_in(folder)
    prompts = [TaskPrompt("the cat sat", "#### 4", "math"), "a cat"]
    report = bench_run(pair, {"cats": prompts}, tmp_path, modes=["chain-2"], max_new_tokens=6, repeats=2)
    runs = [record for record in read_records(tmp_path) if record["kind"] == "run"]
    for run in runs:
        assert ("text" in run) == ("reference" in run) == ("task_kind" in run) == (run["repeat"] == 0)
        if run["repeat"] == 0:
            assert run["text"] == pair.tokenizer.decode(run["tokens"], skip_special_tokens=True)
            assert (run["reference"], run["task_kind"]) == [("#### 4", "math"), (None, None)][run["prompt"]]
    (score,) = report.scores
    assert (score.task, score.metric, score.answers) == ("cats", "accuracy", 1)
    assert list(score.by_mode) == ["off", "chain-2"] and len(set(score.by_mode.values())) == 1


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Runner:
    return Runner(capsys, monkeypatch)


def small(folder: Path, out: Path, *more: object) -> tuple[object, ...]:
    return "bench", "run", "--target", folder, "--out", out, "--new-tokens", 4, "--modes", "chain-2", *more


def test_own_prompts_are_measured_and_scored_if_no_others_are_named(run: Runner, folder: Path, tmp_path: Path) -> None:
    common = ("--suite", "quick", "--tasks", "math,to_en,story")
    done = run(*small(folder, tmp_path, *common))
    assert done.status == 0 and done.err == "", done
    for word in ("Task scores", "accuracy", "BLEU", "chrF", "12 of 12 measurements", "Task scores, of 100"):
        assert word in done.out
    assert "## Task scores" in (tmp_path / "report.md").read_text()
    names = [(score["task"], score["metric"]) for score in json.loads((tmp_path / "report.json").read_text())["scores"]]
    assert names == [("math", "accuracy"), ("to_en", "BLEU"), ("to_en", "chrF")]
    done = run(*small(folder, tmp_path, *common, "--repeats", 2))
    assert "24 of 24 measurements" in done.out, "what is given by hand wins over the suite"


def test_a_run_without_references_has_no_scores(run: Runner, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "xsum.jsonl").write_text('{"prompt": "the cat sat"}')
    done = run(*small(folder, tmp_path / "out", "--data", tmp_path / "xsum.jsonl", "--repeats", 1))
    assert done.status == 0 and "Task scores" not in done.out and "2 of 2 measurements" in done.out


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["--suite", "slow"], ["no suite slow", "quick, full"]),
        (["--tasks", "poems"], ["no task poems", "story"]),
        (["--data", "hub:nothing"], ["no hub:nothing", "hub:gsm8k"]),
        (["--suite", "quick", "--repeats", 0], ["repeats must be"]),
        (["--suite", "quick", "--prompts", 0], ["prompts must be"]),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_known(
    run: Runner, folder: Path, tmp_path: Path, wrong: list[object], words: list[str]
) -> None:
    refused(run(*small(folder, tmp_path / "out", *wrong)), *words)
    assert not (tmp_path / "out").exists()
