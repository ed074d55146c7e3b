"""Whether two runs of lm-evaluation-harness gave the same answers: python benchmarks/same_answers.py FOLDER FOLDER

The folders are those of --output_path, written with --log_samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Answers = dict[tuple[str, int], Any]


def answers_in(folder: Path) -> Answers:
    """By task and question; of a task that was run again, the last run."""
    answers: Answers = {}
    for file in sorted(folder.rglob("samples_*.jsonl"), key=lambda file: file.stat().st_mtime):
        task = file.stem.removeprefix("samples_").rsplit("_", 1)[0]
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            answers[task, row["doc_id"]] = row["resps"]
    return answers


def main(one: str, other: str) -> int:
    first, second = answers_in(Path(one)), answers_in(Path(other))
    if not first or first.keys() != second.keys():
        print(f"not the same questions: {len(first)} in {one}, {len(second)} in {other}", file=sys.stderr)
        return 2
    different = [key for key in first if first[key] != second[key]]
    for task, question in different:
        print(f"{task}, question {question}: the answers differ")
    print(f"{len(first) - len(different)} of {len(first)} answers are the same")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
