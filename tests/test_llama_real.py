"""llama.cpp itself beside this library, on the default model's own file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_tools import Runner

from draftgraph import load
from draftgraph.bench import bench_run
from draftgraph.bench.runs import Record, read_records
from draftgraph.bench.structures import LLAMA_METHODS

PROMPT = "Repeat: one two three four five six seven eight nine ten."

pytestmark = pytest.mark.model


@pytest.fixture(autouse=True)
def has_llama() -> None:
    pytest.importorskip("xllamacpp")


def test_every_method_of_llama_answers_the_same_prompt(default_model_file: Path, tmp_path: Path) -> None:
    given: dict[str, Any] = {"modes": LLAMA_METHODS, "gguf": default_model_file, "max_new_tokens": 8, "repeats": 2}
    report = bench_run(load(draft="none"), {"count": [PROMPT]}, tmp_path, **given)
    assert not report.failed and [mode.mode for mode in report.modes] == ["off", *LLAMA_METHODS]
    runs: dict[str, list[Record]] = {}
    for run in (record for record in read_records(tmp_path) if record["kind"] == "run"):
        runs.setdefault(run["mode"], []).append(run)
    plain = runs["off"][0]
    for run in (run for mode in LLAMA_METHODS for run in runs[mode]):
        assert run["prompt_tokens"] == plain["prompt_tokens"] and run["new_tokens"] == 8
        assert run["ms_per_token"] > 0 and run["steps"] == runs[run["mode"]][0]["steps"], "it remembers no answer"
    assert {run["tokens_digest"] for mode in LLAMA_METHODS for run in runs[mode]} == {runs["llama"][0]["tokens_digest"]}
    assert runs["llama"][0]["tokens"][:2] == plain["tokens"][:2], "the same question"


def test_compare_tells_how_fast_llama_is(
    default_model_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Runner(capsys, monkeypatch)
    options = ("compare", PROMPT, "--mode", "chain", "--max-new-tokens", 8, "--repeat", 1)
    figures = json.loads(run(*options, "--json").out)["llama"]
    assert figures["library"].startswith("llama.cpp") and figures["tokens_per_second"] > 0
    assert figures["tokens"] == 8 and len(figures["seconds"]) == 1
    assert "times as fast as llama.cpp" in run(*options).out
    assert "llama" not in run(*options, "--no-llama").out
