"""Measurements as one self-contained page, with charts as inline SVG: a benchmark run, a study, or several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from textwrap import shorten
from typing import Any, NamedTuple

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from draftgraph.bench import load_report, reporting, speed_report
from draftgraph.bench.load_report import LoadReport
from draftgraph.bench.paper.findings import TEXTS, VERDICTS, Finding, PaperReport
from draftgraph.bench.paper.items import GRID, PAPER_POINT
from draftgraph.bench.reporting import REASON, Table, shown_settings
from draftgraph.bench.runs import PLAIN, Record
from draftgraph.bench.speed_report import ALL, SpeedReport
from draftgraph.bench.tasks import scores_table
from draftgraph.cost.latency import Latencies
from draftgraph.errors import UsageError
from draftgraph.inspect import GraphReport
from draftgraph.inspect.report import REASONS, pictured
from draftgraph.inspect.theme import DARK, LIGHT

WIDTH = 360.0
NAMES, VALUES = 112.0, 52.0  # room for the names of bars, and for their values
LINE = 24.0
MOST_BESIDE, MOST_ABOVE = 14, 56  # characters of a name
PLOT_HEIGHT = 170.0
COLOURS = (0, 2, 4, 5, 3, 6, 1, 7)  # of series: classes of the style sheet, the first ones unlike each other
TICKS = 4
MOST_LINES = 20  # of a table that is not folded
LABEL = re.compile(r"^(.*) \((\w+-cost, inflated)\)$")
OURS, FIXED, OTHERS = 0, 1, 7  # colours: auto, fixed modes, other libraries
SHOWN_DEPTHS = 12
FIGURE = re.compile(r"[-+]?\d+(\.\d+)?")
CURVES = ("times as fast", "draft tokens per token", "accepted")  # by theta_prob and theta_sib
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    colour: int = 0


class Rail(NamedTuple):
    """Where bars begin, and how far they are apart: names stand beside them, or above where they are long."""

    left: float
    line: float
    beside: bool

    @classmethod
    def of(cls, names: Iterable[str]) -> Rail:
        beside = max(map(len, names), default=0) <= MOST_BESIDE
        return cls(NAMES, LINE, True) if beside else cls(4.0, 1.75 * LINE, False)

    def middle(self, place: int) -> float:
        return (place + 1) * self.line - LINE / 2


def bars(title: str, rows: Sequence[Bar], reference: float | None = None) -> Markup:
    """One under the other, with intervals where there are some, and a line at a `reference`."""
    rail = Rail.of(row.name for row in rows)
    scale = (WIDTH - rail.left - VALUES) / max([row.high or row.value for row in rows] + [reference or 0.0, 1e-9])
    return chart("bars", title, rows, rail, scale, reference)


def stacks(title: str, rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """Shares of one, side by side in every row; the keys of the rows are the legend."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    return chart("stacks", title, rows, Rail.of(rows), names)


def lines(title: str, series: Mapping[str, Points], across: str, logarithmic: bool = False) -> Markup:
    """Points of every series joined, from zero up; `across` says what goes from left to right."""
    xs = sorted({x for points in series.values() for x, _ in points})
    highest = nice(max((y for points in series.values() for _, y in points), default=1.0))
    first, last = (math.log(xs[0]), math.log(xs[-1])) if logarithmic else (xs[0], xs[-1])
    left, right = 40.0, WIDTH - 12

    def at(x: float, y: float) -> tuple[float, float]:
        share = ((math.log(x) if logarithmic else x) - first) / ((last - first) or 1.0)
        return left + (right - left) * share, 8 + PLOT_HEIGHT * (1 - y / highest)

    levels = [(at(xs[0], value)[1], value) for value in (highest * tick / TICKS for tick in range(TICKS + 1))]
    ticks = [(at(x, 0)[0], x) for x in (xs if len(xs) <= 8 else xs[:: math.ceil(len(xs) / 8)])]
    joined = {name: [(*at(x, y), x, y) for x, y in sorted(points)] for name, points in series.items()}
    return chart("lines", title, left, right, PLOT_HEIGHT, levels, ticks, across, joined)


def chart(kind: str, *arguments: Any) -> Markup:
    drawn: Markup = getattr(template("charts.html").module, kind)(*arguments)
    return drawn


def nice(value: float) -> float:
    """The next larger number that divides well into four.

    >>> nice(3.1), nice(0.9), nice(17)
    (4.0, 1.0, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(max(value, 1e-9)))
    return float(next(step * power for step in (1, 2, 4, 6, 8, 10) if step * power >= value * 0.999))


@dataclass(frozen=True)
class Section:
    """A heading, a short text, and the charts and tables behind it."""

    title: str
    text: str = ""
    charts: Sequence[Markup] = ()
    tables: Sequence[Table] = ()
    badge: tuple[str, str] | None = None  # a verdict: its kind (good, look, wrong) and its words
    wide: Sequence[Markup] = ()  # pictures that may need the whole width


@dataclass(frozen=True)
class Part:
    """The part of a page that shows one folder of measurements."""

    title: str
    facts: dict[str, str]  # the machine, the versions, the settings
    headline: str
    sections: Sequence[Section]
    verdicts: Sequence[tuple[str, str, str]] = field(default=())  # kind, signature, line
    footnote: str = ""
    name: str = ""  # of the folder: what tells it from others of the same models

    def named(self, name: str) -> Part:
        return replace(self, name=name)


def page(parts: Sequence[Part]) -> str:
    """One file that needs no other file and no network."""
    styles = {"light_style": Markup(LIGHT.style_sheet()), "dark_style": Markup(DARK.style_sheet())}
    title = "; ".join(part.title for part in parts)
    return template("page.html").render(parts=parts, title=title, light=LIGHT, dark=DARK, **styles)


@cache
def template(name: str) -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals |= {"cell": cell, "reason": REASON, "most_lines": MOST_LINES, "width": WIDTH}
    environment.filters |= {
        "short": lambda number: f"{round(number, 1):g}",
        "shorten": lambda words: shorten(words, MOST_ABOVE, placeholder="…"),
        "series": lambda place: COLOURS[place % len(COLOURS)],
    }
    return environment.from_string(files(__package__).joinpath(name).read_text(encoding="utf-8"))


def cell(content: str) -> Markup:
    """A figure of an inflated target keeps its label, below it and small."""
    if found := LABEL.match(content):
        return Markup("{}<small>{}</small>").format(*found.groups())
    return Markup.escape(content)


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
    if table is None:
        return Section(one.question, one.answer, badge=badge)
    columns = [column for column in TEXTS.get(one.name, {}).get("drawn", ()) if column in table.header]
    drawn = grid_charts(table) if one.name == "check-3" else (column_chart(table, column) for column in columns)
    return Section(one.question, one.answer, [chart for chart in drawn if chart is not None], [table], badge)


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


def speed_part(report: SpeedReport) -> Part:
    facts = shown_settings(report.configuration, speed_report.HIDDEN)
    return Part(
        speed_report.title_of(report),
        facts | {"measurements": f"{report.measured} of {report.planned}"},
        headline(report),
        list(sections(report)),
        [(one.verdict, one.signature, one.line) for one in speed_report.diagnoses(report)],
        speed_report.explanation_of(report),
    )


def load_part(report: LoadReport) -> Part:
    facts = shown_settings(report.configuration, load_report.HIDDEN)
    facts |= {"measurements": f"{report.measured} of {report.planned}"}
    return Part(report.title, facts, report.headline, list(load_sections(report)), footnote=report.explanation)


def load_sections(report: LoadReport) -> Iterator[Section]:
    for arrivals, table in zip(report.arrivals, report.tables(), strict=False):
        charts = []
        for what, figure in load_report.CHARTS.items():
            series: dict[str, list[tuple[float, float]]] = {}
            for (clients, arriving, mode), found in report.cells.items():
                if arriving == arrivals:
                    series.setdefault(mode, []).append((float(clients), figure(found)))
            charts.append(lines(what, series, "clients", logarithmic=True))
        yield Section(table.title, charts=charts, tables=[replace(table, title="")])
    if report.failed:
        yield Section("Not measured", tables=[replace(report.tables()[-1], title="")])


def headline(report: SpeedReport) -> str:
    if not report.drafting:
        return "Plain decoding alone was measured."
    best = max(report.drafting, key=lambda mode: mode.overall.speed.ratio)
    speed = best.overall.speed
    said = f"{best.mode} is {speed}" + (f" ({speed.interval})" if speed.interval else "")
    said = speed_report.labelled(f"{said} as fast as plain decoding", report)
    return " ".join([f"{said}, over {best.overall.prompts} prompts.", *(f"{one}." for one in report.beside)])


def sections(report: SpeedReport) -> Iterator[Section]:
    charts = [speed_chart(report, task) for task in sorted(report.groups, key=lambda task: task != ALL)]
    tables = [speed_report.speed_table(report), speed_report.beside_table(report), speed_report.times_table(report)]
    tables = [table for table in tables if table.lines]
    yield explained("Times as fast as plain decoding", charts, tables)
    yield exactness(report)
    if any(mode.sources.shares for mode in report.modes):
        yield acceptance(report)
    if any(mode.missed for mode in report.modes):
        yield missed(report)
    if report.latencies is not None:
        yield cost_curves(report.latencies)
    if report.examples:
        yield examples(report.examples)
    if report.scores:
        yield explained("Task scores", tables=[scores_table(report.scores)])
    yield Section("What it costs", tables=[speed_report.costs_table(report)])
    if report.failed:
        yield explained("Not measured", tables=[replace(speed_report.failed_table(report), title="")])


def explained(title: str, charts: Sequence[Markup] = (), tables: Sequence[Table] = (), **more: Any) -> Section:
    return Section(title, reporting.TEXTS["page"][title], charts, tables, **more)


def speed_chart(report: SpeedReport, task: str) -> Markup:
    rows = []
    for mode in report.modes:
        if mode.mode != PLAIN and task in mode.by_task:
            speed, colour = mode.by_task[task].speed, OTHERS if mode.library else OURS if mode.mode == "auto" else FIXED
            rows.append(Bar(mode.mode, speed.ratio, str(speed), speed.low, speed.high, colour))
    return bars(speed_report.labelled("all tasks" if task == ALL else task, report), rows, reference=1.0)


def exactness(report: SpeedReport) -> Section:
    lines_of = []
    for mode in report.modes:
        if mode.same is not None:
            other = mode.answers - mode.same - mode.ties
            lines_of.append([mode.mode, str(mode.answers), str(mode.same), str(mode.ties), str(other)])
    header = ["mode", "answers", "the tokens of plain decoding", "part at a tie", "part elsewhere"]
    tables = [Table("Answers compared with plain decoding's", header, lines_of)]
    if any(mode.rescored for mode in report.modes):
        tables.append(speed_report.rescored_table(report))
    same = explained("Is the output the same?", tables=tables)
    if report.configuration.get("dtype") in speed_report.EXACT:
        return same
    return replace(same, text=f"{same.text} {reporting.TEXTS['page']['half_precision']}")


def acceptance(report: SpeedReport) -> Section:
    told = [(mode.mode, mode.acceptance.by_depth) for mode in report.modes if mode.acceptance is not None]
    series = {
        mode: [(float(depth), share) for depth, share in enumerate(shares[:SHOWN_DEPTHS], start=1)]
        for mode, shares in told
    }
    shares = {mode.mode: mode.sources.shares for mode in report.modes if mode.sources.shares}
    charts, tables = [stacks("Accepted tokens by who proposed them", shares)], [speed_report.sources_table(report)]
    if series:
        charts.insert(0, lines("Passes that accept a token at a depth", series, "depth in the graph"))
        tables.insert(0, speed_report.acceptance_table(report))
    return explained("Acceptance", charts, tables)


def missed(report: SpeedReport) -> Section:
    shares = {mode.mode: mode.missed for mode in report.modes if mode.missed}
    names = [reason for reason in REASONS if any(reason in of_mode for of_mode in shares.values())]
    ordered = {mode: {name: found.get(name, 0.0) for name in names} for mode, found in shares.items()}
    said = {name: REASONS[name].replace("{k} ", "").replace(" (k)", "") for name in names}
    reasons = Table("What the names mean", ["name", REASON], [[name, words] for name, words in said.items()])
    tables = [speed_report.missed_table(report), reasons]
    return explained("Why tokens were missed", [stacks("Share of missed tokens", ordered)], tables)


def cost_curves(found: Record) -> Section:
    latencies = Latencies.from_dict(found)
    charts = []
    for name, curve in (("target", latencies.target), ("draft", latencies.draft)):
        if curve:
            series = {
                f"behind {context} tokens": [
                    (float(nodes), 1000 * one) for nodes, one in zip(curve.nodes, row, strict=True)
                ]
                for context, row in zip(curve.contexts, curve.seconds, strict=True)
            }
            charts.append(lines(f"A pass of the {name}, ms", series, "nodes", logarithmic=True))
    return explained("Cost curves", charts)


def examples(found: dict[str, str]) -> Section:
    """The steps of a warm-up that accepted the most."""
    pictures = []
    for mode, document in found.items():
        with suppress(UsageError):  # of another version
            pictures.append(pictured(GraphReport.from_json(document), mode))
    return explained("Example graphs", wide=pictures)
