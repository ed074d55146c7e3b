"""A report as a picture: agreement by task, and tokens per pass against verified nodes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from draftgraph.bench.report import DraftReport, heat, shown
from draftgraph.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")
LINES = ("solid", "dashed", "dotted")
# Structures of a kind are joined by a line: how it is marked and called.
SERIES = {
    "chain": ("s", "chain"),
    "paper-tree": ("^", "the paper's tree"),
    "paper-graph": ("D", "the paper's graph"),
    "tree": ("v", "best-first tree"),
    "graph": ("o", "best-first graph"),
}


def need_matplotlib() -> None:
    """Before any work: without it nothing could be drawn at the end."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'draftgraph[bench]'") from error


def plot(report: DraftReport) -> Figure:
    """Of all answers, looping ones included."""
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_agreement(left, report)
    draw_tokens_per_pass(right, report)
    figure.suptitle(f"{report.draft} as a draft for {report.target}")
    return figure


def draw_agreement(axes: Any, report: DraftReport) -> None:
    width = 0.8 / len(report.temperatures)
    for index, temperature in enumerate(report.temperatures):
        rows, colour = shown(report.selected(temperature, "all")), COLOURS[index % len(COLOURS)]
        places = [place + (index + 0.5) * width - 0.4 for place in range(len(rows))]
        axes.bar(places, [row.agreement for row in rows], width, color=colour, label=heat(temperature))
        axes.bar(places, [row.agreement_of_4 for row in rows], width, fill=False, edgecolor=colour)
        axes.set_xticks(range(len(rows)), [row.task for row in rows], rotation=30, ha="right")
    axes.set_title("The target's token is the draft's best (outline: among its 4 best)", fontsize="medium")
    axes.set(ylim=(0, 1.01), ylabel="share of places")
    axes.legend(loc="lower left", framealpha=1.0)


def draw_tokens_per_pass(axes: Any, report: DraftReport) -> None:
    which = "Mean of the tasks"
    for index, temperature in enumerate(report.temperatures):
        rows = shown(report.selected(temperature, "all"))
        which = rows[0].task if len(rows) == 1 else which
        series: dict[str, list[tuple[float, float]]] = {}
        for name, figures in rows[-1].structures.items():
            kind = re.sub(r"-\d+$", "", name)
            series.setdefault(kind, []).append((figures.verified_nodes, figures.tokens_per_pass))
        for number, (kind, points) in enumerate(series.items()):
            marker, label = SERIES.get(kind, (".", kind))
            style = {"marker": marker, "linestyle": LINES[index % len(LINES)], "color": COLOURS[number % len(COLOURS)]}
            axes.plot(*zip(*sorted(points), strict=True), label=None if index else label, **style)
    lines = zip(LINES, report.temperatures, strict=False)
    axes.set_title(f"{which} ({', '.join(f'{line}: {heat(one)}' for line, one in lines)})", fontsize="medium")
    axes.set(xlabel="verified nodes per pass, the root included", ylabel="tokens per pass")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
