"""What an item of the study measured, mode by mode: sums over all answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from draftgraph.bench.runs import FILE, Record, of_kind, records_in
from draftgraph.bench.speed_report import SpeedReport
from draftgraph.stats import SOURCES


@dataclass(frozen=True)
class Sameness:
    """Answers against those of plain decoding."""

    answers: int
    at_ties: int  # that part from it there
    elsewhere: int

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Sameness:
        ties = sum(run["tie"] for run in runs)
        return cls(len(runs), ties, sum(not run["same"] for run in runs) - ties)

    def __add__(self, other: Sameness) -> Sameness:
        mine, others = astuple(self), astuple(other)
        return Sameness(*map(sum, zip(mine, others, strict=True)))

    def __str__(self) -> str:
        words = "the same" + (" but at ties of rounding" if self.at_ties else "")
        return words + (f", and NOT in {self.elsewhere} of {self.answers} answers" if self.elsewhere else "")


@dataclass(frozen=True)
class Counts:
    """Of one mode."""

    tokens: int  # of all answers
    passes: int  # of the target
    nodes: int  # that it checked
    drafted: int  # tokens that the draft was fed
    accepted: dict[str, int]  # by source

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Counts:
        return cls(
            sum(run["new_tokens"] for run in runs),
            sum(run["steps"] for run in runs),
            sum(run["nodes"] for run in runs),
            sum(run["draft_tokens"] for run in runs),
            {source: sum(run["accepted_by_source"].get(source, 0) for run in runs) for source in SOURCES},
        )

    @property
    def per_pass(self) -> float:
        """Tokens per pass of the target."""
        return self.tokens / self.passes

    @property
    def acceptance(self) -> float:
        """How much of what the target checked it accepted, roots apart."""
        return sum(self.accepted.values()) / max(1, self.nodes - self.passes)

    @property
    def drafted_per_token(self) -> float:
        return self.drafted / self.tokens

    @property
    def merged(self) -> float:
        """The share of accepted tokens that came from merged nodes."""
        return self.accepted["merged"] / max(1, sum(self.accepted.values()))


@dataclass(frozen=True)
class Measured:
    """An item: its report, and the sums of every mode."""

    report: SpeedReport
    modes: dict[str, Counts]
    sameness: Sameness

    def speed(self, mode: str, task: str | None = None) -> float:
        """Times as fast as plain decoding."""
        figures = self.report.mode(mode)
        if task is None:
            return figures.overall.speed.ratio
        return next(one.speed.ratio for one in figures.tasks if one.task == task)

    def shown(self, mode: str, task: str | None = None) -> str:
        return f"{self.speed(mode, task):.2f}x"

    def fastest(self, modes: Sequence[str], task: str | None = None) -> str:
        return max((mode for mode in modes if mode in self.modes), key=lambda mode: self.speed(mode, task))

    @property
    def tasks(self) -> list[str]:
        return [one.task for one in self.report.modes[0].tasks]


def measured(folder: Path) -> Measured | None:
    """None: not all of it is done."""
    if not (folder / FILE).exists():
        return None
    records = records_in(folder / FILE)
    runs, sessions = of_kind(records, "run"), of_kind(records, "session")
    if not sessions or len(runs) < sessions[-1]["planned"]:
        return None
    by_mode: dict[str, list[Record]] = {}
    for run in runs:
        by_mode.setdefault(run["mode"], []).append(run)
    modes = {mode: Counts.of(these) for mode, these in by_mode.items()}
    return Measured(SpeedReport.of(records), modes, Sameness.of(runs))
