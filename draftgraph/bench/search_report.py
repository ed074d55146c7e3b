"""What a search of settings found: every trial, the best ones beside `auto`, and which values mattered."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftgraph.bench.reporting import (
    COLOURS,
    Table,
    described,
    document,
    has_matplotlib,
    new_figure,
    number,
    same_of,
    save_figure,
    write_files,
)
from draftgraph.bench.runs import PLAIN, Record
from draftgraph.bench.speed_report import Speed, geometric_mean, mode_figures, ratios_of, times_of

HIDDEN = ("target", "draft", "target_weights", "draft_weights", "prompts_digest")
SPEEDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # that lines of the picture show
EXPLANATION = (
    "Speed is against plain decoding of the same prompts, in turns with it: the whole answer without its prefill, the "
    "median of a prompt's rounds, the median prompt of a task, the geometric mean of tasks. A step, its draft and its "
    "check together, costs as much as so many passes of the target over one token: tokens per pass divided by that "
    "cost is the speed. "
)
FROM_TRIALS = (
    "There was no time to measure the best ones again beside each other: these are the figures of their trials. "
)
IMPORTANCE = (
    "Weight: how much a value decides whether a setting is among the fastest quarter (PED-ANOVA), all together 100%; "
    "trials that were given up early do not count."
)
Setting = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """How a setting did. A prompt's times are medians of its repeats, a task's speed is that of its median prompt."""

    speed: Speed  # against plain decoding of the same prompts, in turns
    tokens_per_pass: float
    nodes_per_pass: float
    draft_passes: float  # per pass of the target
    tasks: dict[str, float]  # how many times as fast, by task
    answers: int
    same: int  # with the tokens of plain decoding
    ties: int  # others, that part where two tokens were as good as tied

    @classmethod
    def of(cls, runs: Sequence[Record], mode: str) -> Outcome:
        own, plain = [run for run in runs if run["mode"] == mode], times_of(runs, PLAIN)
        found, ratios = mode_figures(mode, own, plain, ()), ratios_of(own, mode, plain)
        tasks = {task: geometric_mean({task: of_task}, np.median).ratio for task, of_task in ratios.items()}
        names = ("tokens_per_pass", "nodes_per_pass", "draft_passes")
        figures = {name: getattr(found.overall, name) for name in names}
        counts = {"answers": found.answers, "same": sum(run["same"] for run in own), "ties": found.ties}
        return cls(speed=geometric_mean(ratios, np.median), tasks=tasks, **figures, **counts)

    @property
    def step_cost(self) -> float:
        """A step, draft and check together, in passes of the target over one token."""
        return self.tokens_per_pass / self.speed.ratio


@dataclass(frozen=True)
class Tried:
    """A setting, and how it did; `auto` has no trial and no setting."""

    name: str
    setting: Setting
    outcome: Outcome
    paper: bool = False
    pruned: bool = False  # given up after some tasks: its figures are of those

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"step_cost": self.outcome.step_cost}


@dataclass(frozen=True)
class SearchReport:
    """What `search` measured."""

    configuration: Record
    trials: list[Tried]
    compared: list[Tried]  # the paper's setting first, auto last; by trials alone as long as there is no round
    rounds: int
    importance: dict[str, float]  # of values, in all 1; empty: too few trials

    @property
    def best(self) -> Tried:
        """Of the fixed settings."""
        return max((one for one in self.compared if one.name != "auto"), key=lambda one: one.outcome.speed.ratio)

    @property
    def paper(self) -> Tried | None:
        return next((one for one in self.compared if one.paper), None)

    @property
    def auto(self) -> Tried | None:
        return next((one for one in self.compared if one.name == "auto"), None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "configuration": self.configuration,
            "best": self.best.to_dict(),
            "rounds": self.rounds,
            "compared": [one.to_dict() for one in self.compared],
            "importance": self.importance,
            "trials": [one.to_dict() for one in self.trials],
        }

    def save(self, folder: Path) -> None:
        """Writes search.json, search.md and, where there is matplotlib, search.svg and search.png."""
        drawn = has_matplotlib()
        if drawn:
            save_figure(picture(self), folder, "search")
        lead = (title_of(self), settings_of(self), explanation_of(self))
        plot, alt = "search.svg" if drawn else None, "Tokens per pass against the cost of a step"
        data = json.dumps(self.to_dict(), indent=2) + "\n"
        write_files(folder, {"search.json": data, "search.md": document(lead, tables(self), plot, alt)})


def title_of(report: SearchReport) -> str:
    known = report.configuration
    return f"Settings of graph for {known['target']}, draft: {known['draft'] or 'none'}"


def settings_of(report: SearchReport) -> str:
    pruned = sum(one.pruned for one in report.trials)
    counts = f"{len(report.trials)} trials, {pruned} given up early; {report.rounds} rounds of comparison"
    return f"{described(report.configuration, HIDDEN)}; {counts}"


def explanation_of(report: SearchReport) -> str:
    return EXPLANATION + ("" if report.rounds else FROM_TRIALS) + (IMPORTANCE if report.importance else "")


def tables(report: SearchReport) -> Iterator[Table]:
    def name(one: Tried) -> str:
        marks = [mark for mark, holds in (("best", one is report.best), ("paper", one.paper)) if holds]
        return f"{one.name} ({', '.join(marks)})" if marks else one.name

    header = ["setting", "times as fast", "95% interval", "tokens per pass", "cost of a step", "nodes per pass"]
    lines = []
    for one in report.compared:
        found = one.outcome
        figures = (found.tokens_per_pass, found.step_cost, found.nodes_per_pass, found.draft_passes)
        cells = [str(found.speed), found.speed.interval, *map(number, figures)]
        lines.append([name(one), *cells, same_of(found.same, found.answers, found.ties)])
    yield Table("Beside plain decoding", [*header, "draft passes", "same tokens"], lines)

    tasks = list(report.compared[0].outcome.tasks)
    lines = [[name(one), *(f"{one.outcome.tasks[task]:.2f}x" for task in tasks)] for one in report.compared]
    yield Table("Times as fast as plain decoding, by task", ["setting", *tasks], lines)

    fixed = [one for one in report.compared if one is not report.auto]
    values = [value for value in fixed[0].setting if value != "mode"]
    lines = [[name(one), *(f"{one.setting[value]}" for value in values)] for one in fixed]
    yield Table("Their values", ["setting", *values], lines)

    if report.importance:
        best = report.best.setting
        lines = [[value, f"{weight:.0%}", f"{best[value]}"] for value, weight in report.importance.items()]
        yield Table("Which values matter", ["value", "weight", "best"], lines)


def picture(report: SearchReport) -> Any:
    """What a step gives against what it costs, a point for every trial."""
    figure = new_figure(title_of(report), 8, 5.4, fontsize="medium")
    axes = figure.subplots()
    whole, pruned = ([one for one in report.trials if one.pruned is state] for state in (False, True))
    speeds = [one.outcome.speed.ratio for one in whole]
    points = axes.scatter(*places(whole), c=speeds, s=40, cmap="viridis", label="trial")
    figure.colorbar(points, ax=axes, label="times as fast as plain decoding")
    if pruned:
        axes.scatter(*places(pruned), c="lightgrey", s=20, marker="x", label="given up early: of its first tasks only")
    marked = {"the paper": (report.paper, "D"), "best": (report.best, "*"), "auto": (report.auto, "s")}
    for (name, (one, marker)), colour in zip(marked.items(), COLOURS[1:], strict=False):
        if one is not None:
            style = {"marker": marker, "s": 150, "facecolors": "none", "edgecolors": colour, "linewidths": 2}
            axes.scatter(*places([one]), label=f"{name}: {one.outcome.speed}", zorder=3, **style)
    draw_speeds(axes, [*report.trials, *report.compared])
    axes.set(xlabel="cost of a step, in passes of the target over one token", ylabel="tokens per pass")
    axes.legend(frameon=False, loc="best", fontsize="small")
    return figure


def places(several: list[Tried]) -> tuple[list[float], list[float]]:
    return [one.outcome.step_cost for one in several], [one.outcome.tokens_per_pass for one in several]


def draw_speeds(axes: Any, several: list[Tried]) -> None:
    """Lines of one speed: tokens per pass divided by cost."""
    costs, tokens = places(several)
    left, bottom, right, top = 0.9 * min(1.0, *costs), 0.9, 1.05 * max(costs), 1.1 * max(tokens)
    for speed in SPEEDS:
        end = min(right, top / speed)
        axes.plot([0, end], [0, speed * end], color="grey", linewidth=0.7, linestyle="dotted", zorder=0)
        if end > left and speed * end > bottom:
            axes.annotate(f"{speed:g}x", (end, speed * end), color="grey", fontsize="small", ha="right", va="top")
    axes.set(xlim=(left, right), ylim=(bottom, top))
