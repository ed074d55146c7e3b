"""Latencies as a picture: milliseconds by nodes, and what `auto` gains with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from draftgraph.bench.plot import COLOURS, LINES, need_matplotlib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from draftgraph.tuning.report import TuneReport


def plot(report: TuneReport) -> Figure:
    need_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    if report.choices:
        left, right = figure.subplots(1, 2)
        draw_choices(right, report)
    else:
        left = figure.subplots()
    draw_latencies(left, report)
    names = report.target if report.draft is None else f"{report.target} with {report.draft}"
    figure.suptitle(f"{names}: {report.settings['device']}, {report.settings['dtype']}")
    return figure


def draw_latencies(axes: Any, report: TuneReport) -> None:
    for (name, curve), colour in zip(report.curves.items(), COLOURS, strict=False):
        for context, row, line in zip(curve.contexts, curve.seconds, LINES, strict=False):
            style = {"marker": "o", "linestyle": line, "color": colour}
            axes.plot(curve.nodes, [1000 * seconds for seconds in row], label=f"{name}, text of {context}", **style)
    axes.set(xlabel="nodes of a pass", ylabel="milliseconds", title="How long a pass takes")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def draw_choices(axes: Any, report: TuneReport) -> None:
    places = range(len(report.choices))
    axes.bar(places, [one.ratio for one in report.choices], color=COLOURS[2])
    for place, one in enumerate(report.choices):
        axes.annotate(f"levels {one.levels}\nnodes {one.nodes}", (place, one.ratio), ha="center", va="bottom")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(places, [f"{one.hit:g}" for one in report.choices])
    axes.set(xlabel="how often the draft's best token is right", ylabel="times as fast as off")
    axes.set_title("What auto would do, and what it expects", fontsize="medium")
    axes.set_ylim(top=1.2 * max(one.ratio for one in report.choices))
