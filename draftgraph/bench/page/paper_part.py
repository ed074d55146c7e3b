"""The paper's study as a part of the page: every item with its question, its answer, a chart and a table."""

from __future__ import annotations

import re
from collections.abc import Sequence

from markupsafe import Markup

from draftgraph.bench.page.charts import Bar, bars, lines
from draftgraph.bench.page.page import Part, Section
from draftgraph.bench.paper.finding import Finding
from draftgraph.bench.paper.items import GRID, PAPER_POINT
from draftgraph.bench.paper.report import VERDICTS, PaperReport
from draftgraph.bench.report import Table
from draftgraph.bench.speed_report import ALL

FIGURE = re.compile(r"[-+]?\d+(\.\d+)?")
# The columns of an item's table that are drawn, one chart each: a bar for every row.
DRAWN: dict[str, Sequence[str]] = {
    "main": [ALL],
    "experiment-1": ["times as fast", "tokens per pass", "draft tokens per token"],
    "experiment-2": ["times as fast", "merged", "draft tokens per token"],
    "experiment-3": ["times as fast", "tokens per pass", "draft tokens per token"],
    "experiment-2-borrowed": ["median KL, own from borrowed"],
    "check-1": [ALL],
    "check-2": ["surprise, more", "tokens per pass"],
    "check-2-accuracy": ["accuracy", "answers unchanged"],
    "foreign": [ALL],
    "question-1": ["bigrams shared", "edits per token"],
    "question-2": ["best chain", "graph", "auto"],
    "question-3": ["times as fast"],
    "draft-sizes": ["times as fast"],
}
CURVES = ("times as fast", "draft tokens per token", "accepted")  # by theta_prob and theta_sib


def paper_part(report: PaperReport) -> Part:
    agreeing = [one for one in report.findings if one.agrees is not None]
    said = f"{sum(bool(one.agrees) for one in agreeing)} of {len(agreeing)} items come out as the paper has them."
    sections = [section_of(one) for one in report.findings]
    facts = dict(entry.split(": ", 1) for entry in report.settings.split("; ") if ": " in entry)
    return Part(report.title, facts, said, sections)


def section_of(one: Finding) -> Section:
    words = VERDICTS[one.agrees]
    badge = ("good" if one.agrees else "look", words) if words else None
    table = one.table
    charts = [] if table is None else grid_charts(table) if one.name == "check-3" else charts_of(one.name, table)
    return Section(one.question, one.answer, charts, [] if table is None else [table], badge)


def charts_of(name: str, table: Table) -> list[Markup]:
    return [
        chart for column in DRAWN.get(name, ()) if column in table.header and (chart := column_chart(table, column))
    ]


def column_chart(table: Table, column: str) -> Markup | None:
    """None: no row has a figure there."""
    place, mode = table.header.index(column), table.header.index("mode") if "mode" in table.header[1:] else None
    rows = [
        (line[0] if mode is None else f"{line[0]}, {line[mode]}", line[place], value)
        for line in table.lines
        if (value := value_of(line[place])) is not None
    ]
    reference = 1.0 if any(shown.endswith("x") for _, shown, _ in rows) else None
    if not rows or min(value for *_, value in rows) < 0:
        return None
    title = "times as fast, all tasks" if column == ALL else column
    return bars(title, [Bar(name, value, shown.split(" (")[0]) for name, shown, value in rows], reference)


def grid_charts(table: Table) -> list[Markup]:
    """At the paper's tau: a line for every theta_sib, from one theta_prob to the next."""
    tau = PAPER_POINT[list(GRID).index("tau")]
    charts = []
    for column in CURVES:
        place, series = table.header.index(column), dict[str, list[tuple[float, float]]]()
        for line in table.lines:
            at = dict(entry.split("=") for entry in line[0].split(", "))
            if float(at["tau"]) == tau and (value := value_of(line[place])) is not None:
                series.setdefault(f"theta_sib {at['theta_sib']}", []).append((float(at["theta_prob"]), value))
        charts.append(lines(f"{column}, tau={tau}", series, "theta_prob"))
    return charts


def value_of(cell: str) -> float | None:
    """The first number of a cell.

    >>> value_of("12.5%"), value_of("1.73x (7B-cost, inflated)"), value_of("")
    (12.5, 1.73, None)
    """
    found = FIGURE.search(cell)
    return float(found.group()) if found else None
