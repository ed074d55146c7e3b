"""Puts measurements into docs/results: their figures whole, but nobody's text.

    python docs/publish.py speed h200-7b

The folder of a `bench run`, `bench load` or `bench paper` is copied to docs/results/h200-7b without answers and
references, scores computed before; then its report is written there as JSON and Markdown, and the page of all results
anew. `python docs/figures.py` updates the documents.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from draftgraph.bench.page import page
from draftgraph.bench.runs import FILE, Record, of_kind, records_in
from draftgraph.bench.tasks import scores_of
from draftgraph.cli.bench import read_report

RESULTS = Path(__file__).parent / "results"
TEXTS = ("tokens", "text", "reference", "task_kind")
KEPT = ("search.json", "sizes.json")  # of a study, beside its measurements
DIGITS = 6


def published(records: list[Record]) -> list[Record]:
    """Without texts, but with the scores that need them."""
    scores = [asdict(one) for one in scores_of(of_kind(records, "run"))]
    told = [{name: value for name, value in one.items() if name not in TEXTS or is_count(value)} for one in records]
    kept: list[Record] = [rounded(one) for one in told]
    return kept + ([{"kind": "scores", "scores": scores}] if scores else [])


def is_count(value: Any) -> bool:
    """Of tokens, say: a figure of a load has the name of a text."""
    return isinstance(value, int)


def rounded(value: Any) -> Any:
    """Numbers to the digits that were measured."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list) else value


def publish(source: Path, place: Path) -> None:
    for file in sorted(source.rglob(FILE)):
        copy = place / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        records = published(records_in(file))
        if file.parent != source:  # the page of a study shows no examples
            records = [{name: value for name, value in one.items() if name != "example"} for one in records]
        copy.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    for file in (one for name in KEPT for one in source.rglob(name)):
        copy = place / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        found = rounded(json.loads(file.read_text(encoding="utf-8")))
        copy.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    report, name = read_report(place), "report" if (place / FILE).exists() else "paper"
    (place / f"{name}.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n", encoding="utf-8")
    (place / f"{name}.md").write_text(report.to_markdown(), encoding="utf-8")


def page_of_all() -> str:
    names = ("report.json", "paper.json")
    places = sorted({file.parent for name in names for file in RESULTS.glob(f"*/{name}")})
    return page([read_report(place).to_part().named(place.name) for place in places])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("name")
    asked = parser.parse_args()
    publish(asked.source, RESULTS / asked.name)
    (RESULTS / "all.html").write_text(page_of_all(), encoding="utf-8")
