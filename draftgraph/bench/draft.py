"""How good a draft is for a target: agreement place by place, and tokens per pass with each structure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from draftgraph.bench import reporting
from draftgraph.bench.answers import TargetAnswers
from draftgraph.bench.replay import Replay, Replayed
from draftgraph.bench.reporting import Table
from draftgraph.bench.speed import name_of, refuse_unreadable
from draftgraph.bench.structures import STRUCTURES
from draftgraph.config import GraphConfig
from draftgraph.kernels.packed import number_format
from draftgraph.notices import progress_bar
from draftgraph.pair import Pair
from draftgraph.stats import Stats
from draftgraph.text import encode

Selection = Literal["all", "without loops"]  # a looping answer flatters a draft
# Structures of a kind are joined by a line: how it is marked and called.
SERIES = {
    "chain": ("s", "chain"),
    "paper-tree": ("^", "the paper's tree"),
    "paper-graph": ("D", "the paper's graph"),
    "tree": ("v", "best-first tree"),
    "graph": ("o", "best-first graph"),
}


@dataclass(frozen=True)
class StructureFigures:
    """Means over the target's passes."""

    tokens_per_pass: float  # the bonus token included
    verified_nodes: float  # the root included
    draft_levels: float
    accepted_by_depth: list[float]  # share of passes that accept a draft at depth 1, 2, ...

    @classmethod
    def of(cls, stats: Sequence[Stats]) -> StructureFigures:
        total = sum(stats, Stats())
        levels = total.draft_passes / total.steps
        by_depth = [total.accepted_by_depth[depth] / total.steps for depth in sorted(total.accepted_by_depth)]
        return cls(total.mean_accepted_length, total.verified_tokens / total.steps, levels, by_depth)

    @classmethod
    def mean(cls, tasks: Sequence[StructureFigures]) -> StructureFigures:
        names = ("tokens_per_pass", "verified_nodes", "draft_levels")
        means = {name: fmean(getattr(one, name) for one in tasks) for name in names}
        depths = zip_longest(*(one.accepted_by_depth for one in tasks), fillvalue=0.0)
        return cls(**means, accepted_by_depth=[fmean(shares) for shares in depths])


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
    def of(cls, task: str, selection: Selection, replayed: Sequence[Replayed]) -> Row:
        answers = [one.answer for one in replayed]
        places = sum(len(answer.tokens) for answer in answers)
        return cls(
            task,
            answers[0].temperature,
            selection,
            len(answers),
            sum(answer.loops for answer in answers),
            sum(one.agreed for one in replayed) / places,
            sum(one.agreed_among_several for one in replayed) / places,
            {name: StructureFigures.of([one.stats[name] for one in replayed]) for name in replayed[0].stats},
        )

    @classmethod
    def mean(cls, rows: Sequence[Row]) -> Row:
        counts = {name: sum(getattr(row, name) for row in rows) for name in ("answers", "looping")}
        shares: dict[str, Any] = {
            name: fmean(getattr(row, name) for row in rows) for name in ("agreement", "agreement_of_4")
        }
        means = {name: StructureFigures.mean([row.structures[name] for row in rows]) for name in rows[0].structures}
        return replace(rows[0], task=reporting.MEAN, structures=means, **counts, **shares)

    @property
    def cells(self) -> list[str]:
        lengths = (f"{figures.tokens_per_pass:.2f}" for figures in self.structures.values())
        return [self.task, f"{self.agreement:.3f}", f"{self.agreement_of_4:.3f}", *lengths]


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
    def title(self) -> str:
        return f"{self.draft} as a draft for {self.target}"

    @property
    def temperatures(self) -> list[float]:
        return list(dict.fromkeys(row.temperature for row in self.rows))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def explanation(self) -> str:
        """What the columns and titles of the tables mean."""
        several = len({row.task for row in self.rows} - {reporting.MEAN}) > 1
        own = [reporting.TEXTS["draft"][name] for name in (("columns", "means") if several else ("columns",))]
        return " ".join([*own, reporting.TEXTS["loops"]])

    def tables(self) -> Iterator[Table]:
        """Agreement and tokens per pass by task; a second time without looping answers, where there are some."""
        for temperature in self.temperatures:
            everything = self.selected(temperature, "all")
            steady = self.selected(temperature, "without loops") if everything[-1].looping else []
            for rows in filter(None, (everything, steady)):
                mean, which = rows[-1], "all {} answers ({} looping)"
                if mean.selection == "without loops":
                    which = "the {} answers that do not loop"
                title = f"{heat(temperature).capitalize()}, {which.format(mean.answers, mean.looping or 'none')}"
                header = ["task", "agrees", "best 4", *(name.replace("-", " ") for name in mean.structures)]
                yield Table(title, header, [row.cells for row in shown(rows)])

    def structures_table(self) -> Table:
        means = [self.selected(temperature, "all")[-1] for temperature in self.temperatures]
        header, lines = ["structure"], {name: [name] for name in means[0].structures}
        for row in means:
            header += [f"{column}, {heat(row.temperature)}" for column in ("nodes", "levels", "tokens")]
            for name, one in row.structures.items():
                lines[name] += [f"{one.verified_nodes:.1f}", f"{one.draft_levels:.1f}", f"{one.tokens_per_pass:.2f}"]
        return Table("Per pass of the target: verified nodes, draft levels, tokens", header, list(lines.values()))

    def to_markdown(self, plot: str | None = None) -> str:
        """With a link to the `plot` where there is one."""
        lead = (self.title, reporting.described(self.settings), self.explanation)
        tables = (*self.tables(), self.structures_table())
        return reporting.document(lead, tables, plot, "Agreement by task, and tokens per pass")

    def save(self, folder: Path) -> None:
        """Writes results.json, results.md, plot.svg and plot.png."""
        reporting.write_files(folder, {"results.json": self.to_dict(), "results.md": self.to_markdown("plot.svg")})
        reporting.save_figure(drawn(self), folder, "plot")


def bench_draft(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    *,
    structures: Mapping[str, GraphConfig] = STRUCTURES,
    temperatures: Sequence[float] = (0.0, 0.7),
    max_new_tokens: int = 128,
    seed: int = 0,
) -> DraftReport:
    """Lets the target answer the prompts of every task, and replays the answers with the draft.

    >>> report = bench_draft(pair, {"sky": ["Why is the sky blue?"]})    # doctest: +SKIP
    >>> report.rows[-1].agreement, report.to_dict()                      # doctest: +SKIP
    """
    refuse_unreadable(pair, tasks, max_new_tokens)
    answers = TargetAnswers(pair.decoder, max_new_tokens, seed)
    replay = Replay(pair.decoder, dict(structures), max_new_tokens, answers.stop_ids)
    rows: list[Row] = []
    for temperature in temperatures:
        measured: dict[str, list[Replayed]] = {}
        for task, prompts in tasks.items():
            with progress_bar(f"{task}, {heat(temperature)}: the target answers") as report:
                given = answers.to([encode(pair.tokenizer, prompt) for prompt in prompts], temperature, report)
            with progress_bar(f"{task}, {heat(temperature)}: the draft follows") as report:
                measured[task] = replay.along(given, report)
        rows += rows_of(measured, "all")
        steady = {task: [one for one in found if not one.answer.loops] for task, found in measured.items()}
        rows += rows_of(steady, "without loops")
    settings = {
        "tasks": ", ".join(tasks),
        "prompts": sum(len(prompts) for prompts in tasks.values()),
        "max_new_tokens": max_new_tokens,
        "seed": seed,
        "dtype": number_format(pair.target),
        "device": str(pair.decoder.engines.target.device),
    }
    return DraftReport(name_of(pair.target), name_of(pair.draft), settings, dict(structures), rows)


def rows_of(measured: dict[str, list[Replayed]], selection: Selection) -> list[Row]:
    """A row for every task that has answers, and one for their mean."""
    rows = [Row.of(task, selection, replayed) for task, replayed in measured.items() if replayed]
    return [*rows, Row.mean(rows)] if rows else []


def heat(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def shown(rows: list[Row]) -> list[Row]:
    """Tasks and their mean; a single task is shown without a mean."""
    return rows[:1] if len(rows) == 2 else rows


def drawn(report: DraftReport) -> Any:
    """Agreement by task, and tokens per pass against verified nodes: of all answers, looping ones included."""
    figure = reporting.new_figure(report.title, 12, 4.8)
    left, right = figure.subplots(1, 2)
    width, which = 0.8 / len(report.temperatures), "Mean of the tasks"
    for index, temperature in enumerate(report.temperatures):
        rows, colour = shown(report.selected(temperature, "all")), reporting.colour(index)
        which = rows[0].task if len(rows) == 1 else which
        places = [place + (index + 0.5) * width - 0.4 for place in range(len(rows))]
        left.bar(places, [row.agreement for row in rows], width, color=colour, label=heat(temperature))
        left.bar(places, [row.agreement_of_4 for row in rows], width, fill=False, edgecolor=colour)
        left.set_xticks(range(len(rows)), [row.task for row in rows], rotation=30, ha="right")
        series: dict[str, list[tuple[float, float]]] = {}
        for name, figures in rows[-1].structures.items():
            kind = re.sub(r"-\d+$", "", name)
            series.setdefault(kind, []).append((figures.verified_nodes, figures.tokens_per_pass))
        for number, (kind, points) in enumerate(series.items()):
            marker, label = SERIES.get(kind, (".", kind))
            style = {
                "marker": marker,
                "linestyle": reporting.LINES[index % len(reporting.LINES)],
                "color": reporting.colour(number),
            }
            right.plot(*zip(*sorted(points), strict=True), label=None if index else label, **style)
    left.set_title("The target's token is the draft's best (outline: among its 4 best)", fontsize="medium")
    left.set(ylim=(0, 1.01), ylabel="share of places")
    left.legend(loc="lower left", framealpha=1.0)
    lines = zip(reporting.LINES, report.temperatures, strict=False)
    right.set_title(f"{which} ({', '.join(f'{line}: {heat(one)}' for line, one in lines)})", fontsize="medium")
    right.set(xlabel="verified nodes per pass, the root included", ylabel="tokens per pass")
    reporting.by_powers_of_two(right)
    right.legend(**reporting.BESIDE)
    return figure
