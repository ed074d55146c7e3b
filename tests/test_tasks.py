"""Where tasks come from: own prompts, datasets of the hub, suites; what is wrong with one is said in one line."""

from __future__ import annotations

import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_tools import Runner

from draftgraph import UsageError
from draftgraph.bench.structures import DEFAULT, PEERS, SUITES, mode_named, suite_named
from draftgraph.bench.tasks import HUB, OWN_FOLDER, TaskPrompt, read_tasks, scorer_of
from draftgraph.extras import install_command

OWN_TASKS = ["code", "from_en", "instruct", "math", "questions", "story", "summary", "to_en"]
SCORED = {"from_en", "math", "summary", "to_en"}
VARIED = {"story", "poem", "instruction/list", "instruction/story", "instruction/text"}  # hardly repeat themselves


def own_rows() -> list[dict[str, str]]:
    return [json.loads(line) for file in OWN_FOLDER.iterdir() for line in file.read_text("utf-8").splitlines()]


# Own prompts


def test_own_prompts_are_of_eight_tasks_with_eight_each() -> None:
    tasks = read_tasks(["own"])
    assert list(tasks) == OWN_TASKS and all(len(prompts) == 8 for prompts in tasks.values())
    rows = own_rows()
    assert all(set(row) - {"reference"} == {"id", "task", "prompt"} for row in rows)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 64


def test_own_prompts_can_be_scored_where_their_task_can_be() -> None:
    for task, prompts in read_tasks(["own"]).items():
        for prompt in prompts:
            scorer = scorer_of({"task": task, "task_kind": prompt.kind, "reference": prompt.reference})
            assert (scorer is not None) == (task in SCORED), task


def test_a_third_of_own_prompts_ask_for_text_that_repeats_little() -> None:
    tasks = [row["task"] for row in own_rows()]
    varied = [task in VARIED or (task.startswith("questions/") and task != "questions/reasoning") for task in tasks]
    assert 3 * sum(varied) >= len(tasks)


def test_own_passages_are_as_long_as_an_article() -> None:
    lengths = [len(prompt.split()) for prompt in read_tasks(["own"], ["summary"])["summary"]]
    assert min(lengths) >= 120 and max(lengths) <= 260


# Files


def test_a_row_may_have_a_reference_and_the_sort_of_its_task(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "a", "reference": "b", "task": "translation"},
        {"prompt": "c", "reference": ""},
        {"prompt": "d", "reference": 3, "task": None},
    ]
    file = tmp_path / "mine.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    prompts = read_tasks([file])["mine"]
    assert prompts == ["a", "c", "d"], "they are strings"
    assert [(prompt.reference, prompt.kind) for prompt in prompts] == [("b", "translation"), (None, None), (None, None)]


def test_the_first_turn_of_a_conversation_is_a_prompt(tmp_path: Path) -> None:
    rows = [{"question_id": 1, "category": "math", "turns": ["Why?", "And then?"]}, {"prompt": "a", "turns": ["b"]}]
    file = tmp_path / "question.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    assert read_tasks([file])["question"] == ["Why?", "a"]
    for turns in ([], "Why?", [3], [""]):
        file.write_text(json.dumps({"turns": turns}))
        with pytest.raises(UsageError, match="line 1: no prompt"):
            read_tasks([file])


def test_a_task_that_is_there_twice_or_not_at_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "math.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(UsageError, match=r"two tasks are named math: .* leave one out"):
        read_tasks(["own", tmp_path])
    with pytest.raises(UsageError, match=f"no task poems: choose of {', '.join(OWN_TASKS)}"):
        read_tasks(["own"], ["poems"])
    with pytest.raises(UsageError, match=r"no file or folder .*: give JSON lines with prompts, .*own or hub:NAME"):
        read_tasks([tmp_path / "nowhere"])


# The hub

ROWS: dict[str, dict[str, Any]] = {
    "openai/gsm8k": {"question": "1 + 1?", "answer": "It is 2.\n#### 2"},
    "EdinburghNLP/xsum": {"document": "It rained.", "summary": "Rain.", "id": "1"},
    "tatsu-lab/alpaca": {"instruction": "Sort these.", "input": "b, a", "output": "a, b", "text": ""},
    "wmt/wmt14": {"translation": {"de": "Guten Tag", "en": "Good day"}},
    "openai/openai_humaneval": {"prompt": "def one():\n", "canonical_solution": "    return 1\n"},
    "euclaise/writingprompts": {"prompt": "[ WP ] A cat [ sic ] talks .", "story": "Miaow ."},
    "HuggingFaceH4/mt_bench_prompts": {"prompt": ["Why?", "And then?"], "category": "reasoning", "reference": []},
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Stands in for the `datasets` package: two rows of every dataset that is known, and then a lost connection."""
    asked: list[tuple[Any, ...]] = []

    def load_dataset(path: str, config: str | None, *, split: str, streaming: bool) -> Iterator[dict[str, Any]]:
        asked.append((path, config, split, streaming))
        yield ROWS[path]
        yield ROWS[path]
        raise ConnectionError("the connection\nis lost")

    package: Any = types.ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    for name in ("HF_HUB_OFFLINE", "DRAFTGRAPH_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    return asked


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gsm8k", TaskPrompt("1 + 1?", "It is 2.\n#### 2", "math")),
        ("xsum", TaskPrompt("It rained.\n\nSummarize the above article in one sentence.", "Rain.", "summarization")),
        ("alpaca", TaskPrompt("Sort these.\n\nb, a", "a, b", "instruction")),
        ("wmt14_deen", TaskPrompt("Translate German to English: Guten Tag", "Good day", "translation")),
        ("wmt14_ende", TaskPrompt("Translate English to German: Good day", "Guten Tag", "translation")),
        ("humaneval", TaskPrompt("```python\ndef one():\n```", "    return 1\n", "code")),
        ("writing_prompts", TaskPrompt("story based on this idea: A cat [ sic ] talks .", "Miaow .", "story")),
        ("mt_bench", TaskPrompt("Why?", None, "mt_bench/reasoning")),
    ],
)
def test_rows_of_the_hub_become_prompts_and_references(
    hub: list[tuple[Any, ...]], name: str, expected: TaskPrompt
) -> None:
    ((task, prompts),) = read_tasks([f"hub:{name}"], prompts=2).items()
    assert task == name and len(prompts) == 2, "no more is fetched than is asked for"
    assert prompts[0].endswith(expected) and (prompts[0].reference, prompts[0].kind) == (
        expected.reference,
        expected.kind,
    )
    assert hub == [(HUB[name].path, HUB[name].config, HUB[name].split, True)]


def test_a_dataset_that_cannot_be_read_says_why_in_one_line(
    hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"cannot read openai/gsm8k for hub:gsm8k: the connection$"):
        read_tasks(["hub:gsm8k"], prompts=3)
    with pytest.raises(UsageError, match=f"there is no hub:nothing: choose of hub:gsm8k, .*hub:{list(HUB)[-1]}"):
        read_tasks(["hub:nothing"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match=re.escape(f"needs the datasets package: {install_command('bench')}")):
        read_tasks(["hub:xsum"])
    monkeypatch.setenv("DRAFTGRAPH_OFFLINE", "1")
    with pytest.raises(UsageError, match="hub:xsum must be fetched"):
        read_tasks(["hub:xsum"])


# Suites


def test_a_full_suite_takes_every_own_prompt_and_a_quick_one_takes_minutes() -> None:
    quick, full = SUITES["quick"], SUITES["full"]
    assert full.prompts == max(len(prompts) for prompts in read_tasks(["own"], prompts=1000).values())
    answers = len(OWN_TASKS) * quick.prompts * quick.repeats * (len(quick.modes) + 1)
    assert 0.04 * answers * quick.new_tokens < 300, "at 40 ms per token, were no mode faster than plain decoding"
    for suite in (quick, full):
        ours = [word for word in suite.modes if word not in PEERS]
        assert {"off", "graph", "auto"} < set(ours) and all(map(mode_named, ours)) and len(suite.modes) > len(ours)


def test_what_is_given_by_hand_wins_over_a_suite() -> None:
    assert suite_named(None) == DEFAULT
    changed = suite_named("quick").changed(prompts=1, repeats=None, modes=["auto"])
    assert (changed.prompts, changed.repeats, changed.modes) == (1, SUITES["quick"].repeats, ["auto"])
    with pytest.raises(UsageError, match="there is no suite slow: choose of quick, full"):
        suite_named("slow")


@pytest.mark.model
def test_a_suite_measures_the_default_model_and_scores_it_alike_in_every_mode(
    default_model_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ("--tasks", "to_en", "--prompts", 1, "--new-tokens", 12, "--modes", "chain-4")
    done = Runner(capsys, monkeypatch)("bench", "run", "--suite", "quick", "--out", tmp_path, "--json", *few)
    assert done.status == 0, done
    scores = json.loads(done.out)["scores"]
    assert [score["metric"] for score in scores] == ["BLEU", "chrF"]
    assert all(score["by_mode"]["chain-4"] == score["by_mode"]["off"] for score in scores)
