"""A speed report as a picture: speed by mode and task, and where accepted tokens came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from draftgraph.bench.plot import COLOURS, need_matplotlib
from draftgraph.bench.runs import PLAIN
from draftgraph.bench.speed_report import Figures, ModeFigures, SpeedReport
from draftgraph.bench.speed_tables import tasks_of, title_of
from draftgraph.errors import UsageError
from draftgraph.stats import SOURCES

MOST_MODES = 16
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "frameon": False}


def save_plot(report: SpeedReport, file: Path) -> Path | None:
    """None: there is no matplotlib, or there are more modes than a picture can show; the page has a chart of those."""
    if len(report.modes) > MOST_MODES:
        return None
    try:
        need_matplotlib()
    except UsageError:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_speed(left, report)
    draw_sources(right, [mode for mode in report.modes if mode.sources.shares])
    figure.suptitle(title_of(report))
    figure.savefig(file, dpi=150)
    return file


def draw_speed(axes: Any, report: SpeedReport) -> None:
    """With 95% intervals where a task has several prompts."""
    tasks = tasks_of(report)
    modes = [mode for mode in report.modes if mode.mode != PLAIN]
    groups = [*tasks, "all"] if len(tasks) > 1 else tasks
    width = 0.8 / max(len(modes), 1)
    for index, mode in enumerate(modes):
        known = {figures.task: figures for figures in (*mode.tasks, mode.overall)}
        here = [(place, known[task]) for place, task in enumerate(groups) if task in known]
        places = [place + (index + 0.5) * width - 0.4 for place, _ in here]
        heights = [figures.speed.ratio for _, figures in here]
        bars = {"yerr": errors([figures for _, figures in here]), "capsize": 2, "color": COLOURS[index % len(COLOURS)]}
        axes.bar(places, heights, width, label=mode.mode, **bars)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_title(
        "Times as fast as plain decoding" + (f" ({report.label})" if report.label else ""), fontsize="medium"
    )
    if modes:
        axes.legend(**BESIDE)


def errors(figures: list[Figures]) -> list[list[float]]:
    speeds = [one.speed for one in figures]
    below = [math.nan if one.low is None else one.ratio - one.low for one in speeds]
    above = [math.nan if one.high is None else one.high - one.ratio for one in speeds]
    return [below, above]


def draw_sources(axes: Any, modes: list[ModeFigures]) -> None:
    bottoms = [0.0] * len(modes)
    for index, source in enumerate(SOURCES):
        shares = [mode.sources.shares[source] for mode in modes]
        axes.bar([mode.mode for mode in modes], shares, bottom=bottoms, label=source, color=COLOURS[index])
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    axes.set_title("Accepted tokens by source, looping answers included", fontsize="medium")
    axes.set(ylim=(0, 1.01), ylabel="share")
    if modes:
        axes.tick_params(axis="x", rotation=30)
        axes.legend(**BESIDE)
