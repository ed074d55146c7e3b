"""The figures that are shown: those of README and docs come from docs/results, and those from measurements there."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from bench_tools import pair_in
from conftest import REPOSITORY

from draftgraph.bench.paper.findings import TEXTS as QUESTIONS
from draftgraph.bench.paper.findings import PaperReport
from draftgraph.bench.runs import FILE, Record, records_in
from draftgraph.bench.speed import bench_run
from draftgraph.bench.speed_report import SpeedReport
from draftgraph.bench.tasks import TaskPrompt

RESULTS = REPOSITORY / "docs" / "results"
MEASURED = sorted(file.parent for file in RESULTS.glob(f"*/{FILE}"))
STUDIES = sorted(file.parent for file in RESULTS.glob("*/paper.json"))
ALL_ITEMS = set(QUESTIONS)
FIGURES = runpy.run_path(str(REPOSITORY / "docs" / "figures.py"))
PUBLISH = runpy.run_path(str(REPOSITORY / "docs" / "publish.py"))
TEXTS = {"tokens", "text", "reference"}


def documents() -> dict[Path, str]:
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/**/*.md")]
    texts = {page: page.read_text(encoding="utf-8") for page in pages}
    return {page: text for page, text in texts.items() if FIGURES["BLOCK"].search(text)}


def test_documents_have_the_figures_that_were_measured() -> None:
    texts = documents()
    assert {*texts} == {*FIGURES["DOCUMENTS"]}, "python docs/figures.py fills every document that has figures"
    names = [found[2] for text in texts.values() for found in FIGURES["BLOCK"].finditer(text)]
    assert sorted(names) == sorted(FIGURES["BLOCKS"]), "every block is there, once"
    assert {page: FIGURES["filled"](text) for page, text in texts.items()} == texts, "run python docs/figures.py"


@pytest.mark.parametrize("page, begins", [("README.md", "| **draftgraph"), ("docs/speed.md", "| **7B-cost")])
def test_a_figure_that_was_changed_by_hand_is_noticed(page: str, begins: str) -> None:
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith(begins))
    changed = text.replace(line, re.sub(r"(\d)(\D*)$", r"9\1\2", line))
    assert changed != text and FIGURES["filled"](changed) == text


def test_the_readme_can_be_read_in_five_minutes() -> None:
    lines = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150 and sum(line.startswith("|---") for line in lines) == 1, "one table, of speeds"


def test_there_are_results_of_every_size() -> None:
    assert {"cpu", "h200-135m", "h200-7b", "h200-7b-sampled", "h200-13b", "h200-70b"} <= {one.name for one in MEASURED}
    assert STUDIES


@pytest.mark.parametrize("folder", MEASURED, ids=lambda folder: folder.name)
def test_a_report_follows_from_the_measurements_beside_it(folder: Path) -> None:
    shown: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    found = json.loads(json.dumps(SpeedReport.of(records_in(folder / FILE)).to_dict()))
    assert found["measured"] == shown["measured"] and found["configuration"] == shown["configuration"]
    assert speeds(found) == pytest.approx(speeds(shown)) and len(speeds(found)) > 4
    label, size = shown["configuration"]["inflated"], re.search(r"-(\d+b)", folder.name)
    assert label == (f"{size[1].upper()}-cost, inflated" if size else None)


@pytest.mark.parametrize("folder", STUDIES, ids=lambda folder: folder.name)
def test_a_study_follows_from_its_measurements(folder: Path) -> None:
    shown = json.loads((folder / "paper.json").read_text(encoding="utf-8"))
    found = PaperReport.of(folder)
    assert found is not None and json.loads(json.dumps(found.to_dict())) == shown
    assert {one["name"] for one in shown["findings"]} == ALL_ITEMS, "every item has its answer"


def speeds(report: dict[str, Any]) -> dict[tuple[str, str], float]:
    return {
        (mode["mode"], one["task"]): one["speed"]["ratio"]
        for mode in report["modes"]
        for one in (*mode["tasks"], mode["overall"])
    }


@pytest.mark.parametrize("file", sorted(RESULTS.rglob(FILE)), ids=lambda file: str(file.parent.relative_to(RESULTS)))
def test_nobodys_text_is_published(file: Path) -> None:
    assert not any(TEXTS & record.keys() for record in records_in(file))


def test_publishing_drops_texts_and_keeps_figures(folder: Path, tmp_path: Path, own_cache: Path) -> None:
    prompts = [TaskPrompt("the cat sat", reference="#### 4"), TaskPrompt("a cat", reference="#### 5")]
    out = tmp_path / "speed"
    report = bench_run(pair_in(folder), {"math": prompts}, out, modes=["chain-4"], max_new_tokens=6, repeats=1)
    PUBLISH["publish"](out, tmp_path / "results")
    kept: list[Record] = records_in(tmp_path / "results" / FILE)
    assert not any(TEXTS & record.keys() for record in kept)
    again = SpeedReport.of(kept)
    assert again.scores == report.scores and report.scores, "scores are kept, though their texts are not"
    assert again.measured == report.measured == 4
    before, after = report.mode("chain-4"), again.mode("chain-4")
    assert after.sources == before.sources
    assert after.overall.speed.ratio == pytest.approx(before.overall.speed.ratio, rel=1e-4)
