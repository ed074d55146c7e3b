"""What a finding is, and the tables that several of them have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftgraph.bench.paper.counts import Measured
from draftgraph.bench.report import Table

COUNTS = [
    "setting",
    "times as fast",
    "tokens per pass",
    "nodes per pass",
    "draft tokens per token",
    "accepted",
    "merged",
]


@dataclass(frozen=True)
class Finding:
    """An item of the paper, what was found, and the table behind it."""

    name: str
    question: str
    answer: str
    table: Table | None = None
    agrees: bool | None = None  # with the paper; None: it says nothing of this
    figures: dict[str, float] = field(default_factory=dict)
    timed: bool = True  # False: looked into with the pair as it is, inflated or not


def counts_row(words: str, known: Measured, mode: str) -> list[str]:
    one = known.modes[mode]
    figures = [one.per_pass, one.nodes / one.passes, one.drafted_per_token]
    shares = [f"{one.acceptance:.1%}", f"{one.merged:.1%}"]
    return [words, known.shown(mode), *(f"{figure:.2f}" for figure in figures), *shares]


def speed_table(known: Measured, modes: Sequence[str]) -> Table:
    rows = [[mode, *(known.shown(mode, task) for task in known.tasks), known.shown(mode)] for mode in modes]
    return Table("Times as fast as plain decoding", ["mode", *known.tasks, "all"], rows)
