"""A search as a picture: what a step gives against what it costs, a point for every trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftgraph.bench.plot import COLOURS, need_matplotlib
from draftgraph.errors import UsageError
from draftgraph.tuning.search_report import SearchReport, Tried
from draftgraph.tuning.search_tables import title_of

SPEEDS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)  # that lines show


def save_plot(report: SearchReport, folder: Path) -> bool:
    """False: there is no matplotlib."""
    try:
        need_matplotlib()
    except UsageError:
        return False
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.4), layout="constrained")
    axes = figure.subplots()
    draw(figure, axes, report)
    figure.suptitle(title_of(report), fontsize="medium")
    for kind in ("svg", "png"):
        figure.savefig(folder / f"search.{kind}", dpi=150)
    return True


def draw(figure: Any, axes: Any, report: SearchReport) -> None:
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
            label = f"{name}: {one.outcome.speed.ratio:.2f}x"
            axes.scatter(*places([one]), label=label, zorder=3, **style)
    draw_speeds(axes, [*report.trials, *report.compared])
    axes.set(xlabel="cost of a step, in passes of the target over one token", ylabel="tokens per pass")
    axes.legend(frameon=False, loc="best", fontsize="small")


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
