"""The figures of a draft: how often it agrees with the target, and tokens per pass with each structure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from draftgraph.config import GraphConfig

Selection = Literal["all", "without loops"]  # a looping answer flatters a draft
MEAN = "mean"
REASON = "reason"  # a column of whole sentences


@dataclass(frozen=True)
class StructureFigures:
    """Means over the target's passes."""

    tokens_per_pass: float  # the bonus token included
    verified_nodes: float  # the root included
    draft_levels: float
    accepted_by_depth: list[float]  # share of passes that accept a draft at depth 1, 2, ...


@dataclass(frozen=True)
class Row:
    """The figures of a task, or the mean of all tasks, at one temperature."""

    task: str
    temperature: float
    selection: Selection
    answers: int
    looping: int
    agreement: float  # share of places where the target's token is the draft's best
    agreement_of_4: float  # or among its four best
    structures: dict[str, StructureFigures]

    @classmethod
    def mean(cls, rows: Sequence[Row]) -> Row:
        """Every task counts the same."""

        def over_tasks(name: str) -> StructureFigures:
            of_tasks = [row.structures[name] for row in rows]
            return StructureFigures(
                fmean(one.tokens_per_pass for one in of_tasks),
                fmean(one.verified_nodes for one in of_tasks),
                fmean(one.draft_levels for one in of_tasks),
                [fmean(shares) for shares in zip_longest(*(one.accepted_by_depth for one in of_tasks), fillvalue=0.0)],
            )

        return cls(
            MEAN,
            rows[0].temperature,
            rows[0].selection,
            sum(row.answers for row in rows),
            sum(row.looping for row in rows),
            fmean(row.agreement for row in rows),
            fmean(row.agreement_of_4 for row in rows),
            {name: over_tasks(name) for name in rows[0].structures},
        )


@dataclass(frozen=True)
class Table:
    title: str
    header: list[str]
    lines: list[list[str]]

    def to_markdown(self) -> str:
        marks = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, marks, *self.lines)]
        return "\n".join([f"## {self.title}", "", *lines, ""])


@dataclass(frozen=True)
class DraftReport:
    """What `bench_draft` measured."""

    target: str
    draft: str
    settings: dict[str, Any]
    structures: dict[str, GraphConfig]
    rows: list[Row]  # by temperature and selection: tasks, then their mean

    def selected(self, temperature: float, selection: Selection) -> list[Row]:
        return [row for row in self.rows if (row.temperature, row.selection) == (temperature, selection)]

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(row.temperature for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def explanation(self) -> str:
        """What the columns and titles of the tables mean."""
        several = len({row.task for row in self.rows} - {MEAN}) > 1
        return f"{COLUMNS} {MEANS} {LOOPS}" if several else f"{COLUMNS} {LOOPS}"

    def tables(self) -> Iterator[Table]:
        """Agreement and tokens per pass by task; a second time without looping answers, where there are some."""
        for temperature in self.temperatures:
            everything = self.selected(temperature, "all")
            steady = self.selected(temperature, "without loops") if everything[-1].looping else []
            for rows in filter(None, (everything, steady)):
                yield Table(title_of(rows[-1]), header_of(rows[-1]), [cells_of(row) for row in shown(rows)])

    def structures_table(self) -> Table:
        """What each structure costs, and what it gives."""
        means = [self.selected(temperature, "all")[-1] for temperature in self.temperatures]
        header, lines = ["structure"], {name: [name] for name in means[0].structures}
        for row in means:
            header += [f"{column}, {heat(row.temperature)}" for column in ("nodes", "levels", "tokens")]
            for name, one in row.structures.items():
                lines[name] += [f"{one.verified_nodes:.1f}", f"{one.draft_levels:.1f}", f"{one.tokens_per_pass:.2f}"]
        return Table("Per pass of the target: verified nodes, draft levels, tokens", header, list(lines.values()))

    def to_markdown(self, plot: str | None = None) -> str:
        """With a link to the `plot` where there is one."""
        settings = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in self.settings.items())
        lead = f"# {self.draft} as a draft for {self.target}\n\n{settings}\n\n{self.explanation}\n"
        lead += f"\n![Agreement by task, and tokens per pass]({plot})\n" if plot else ""
        return "\n".join([lead, *(table.to_markdown() for table in (*self.tables(), self.structures_table()))])

    def save(self, folder: Path) -> None:
        """Writes results.json, results.md, plot.svg and plot.png."""
        from draftgraph.bench.plot import plot

        folder.mkdir(parents=True, exist_ok=True)
        (folder / "results.json").write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        (folder / "results.md").write_text(self.to_markdown("plot.svg"), encoding="utf-8")
        figure = plot(self)
        for kind in ("svg", "png"):
            figure.savefig(folder / f"plot.{kind}", dpi=150)


COLUMNS = (
    "Agrees: share of places in the target's answers where its token is the draft's best; best 4: among its four best. "
    "The other columns: tokens per pass of the target, the bonus token included, when the draft grows this "
    "structure."
)
MEANS = "The mean counts every task the same."
LOOPS = (
    "A looping answer ends in the same few words over and over (at most 24 tokens, three times or more), which is easy "
    "to foresee and flatters a draft."
)


def heat(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def title_of(mean: Row) -> str:
    name = heat(mean.temperature).capitalize()
    if mean.selection == "all":
        return f"{name}, all {mean.answers} answers ({mean.looping or 'none'} looping)"
    return f"{name}, the {mean.answers} answers that do not loop"


def shown(rows: list[Row]) -> list[Row]:
    """Tasks and their mean; of a single task, no mean."""
    return rows[:1] if len(rows) == 2 else rows


def header_of(row: Row) -> list[str]:
    return ["task", "agrees", "best 4", *(name.replace("-", " ") for name in row.structures)]


def cells_of(row: Row) -> list[str]:
    lengths = (figures.tokens_per_pass for figures in row.structures.values())
    return [row.task, f"{row.agreement:.3f}", f"{row.agreement_of_4:.3f}", *(f"{length:.2f}" for length in lengths)]
