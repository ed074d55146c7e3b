"""Do two runs on the same machine say the same?

    python benchmarks/compare_runs.py first second

Both are --out folders of the same `bench run`; prompts and repeats that only one of them has do not count. A cell is a
mode on a task: the median time per token of its prompts. How many cells differ by at most 5%, the usual difference, the
same of their ratios to plain decoding, and how far a cell may be off by its own repeats.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

from draftgraph.bench.runs import Place, Record, of_kind, read_records
from draftgraph.bench.speed_report import Figures, SpeedReport

CLOSE = 0.05
Cell = tuple[str, str]  # mode and task


def common(one: list[Record], other: list[Record]) -> list[list[Record]]:
    """What was measured in both."""
    places = {key(run) for run in of_kind(one, "run")} & {key(run) for run in of_kind(other, "run")}
    return [
        [record for record in records if record["kind"] != "run" or key(record) in places] for records in (one, other)
    ]


def key(run: Record) -> tuple[Place, str]:
    return Place.of(run), run["prompt_digest"]


def cells(records: list[Record]) -> dict[Cell, Figures]:
    report = SpeedReport.of(records)
    return {(mode.mode, figures.task): figures for mode in report.modes for figures in mode.tasks}


def compared(one: dict[Cell, Figures], other: dict[Cell, Figures]) -> dict[str, float]:
    both = one.keys() & other.keys()
    differences = [abs(other[cell].ms_per_token / one[cell].ms_per_token - 1) for cell in both]
    ratios = [abs(other[cell].speed.ratio / one[cell].speed.ratio - 1) for cell in both]
    noise = [figures.noise for found in (one, other) for figures in found.values() if figures.noise is not None]
    return {
        "cells": len(both),
        "close": sum(difference <= CLOSE for difference in differences) / len(both),
        "median_difference": median(differences),
        "largest_difference": max(differences),
        "close_ratios": sum(difference <= CLOSE for difference in ratios) / len(both),
        "median_ratio_difference": median(ratios),
        "median_half_width": median(noise) if noise else float("nan"),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    asked = parser.parse_args()
    both = common(read_records(asked.first), read_records(asked.second))
    print(json.dumps(compared(*map(cells, both))))
