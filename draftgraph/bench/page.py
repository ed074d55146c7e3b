"""Measurements as one self-contained page, with charts as inline SVG: a benchmark run, a study, or several of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from html import escape
from importlib.resources import files
from textwrap import shorten

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from draftgraph.bench import speed_report
from draftgraph.bench.paper.findings import VERDICTS, Finding, PaperReport
from draftgraph.bench.paper.items import GRID, PAPER_POINT
from draftgraph.bench.reporting import REASON, Table, shown_settings
from draftgraph.bench.runs import PLAIN, Record
from draftgraph.bench.speed_report import ALL, SpeedReport
from draftgraph.bench.tasks import scores_table
from draftgraph.errors import UsageError
from draftgraph.inspect import GraphReport
from draftgraph.inspect.html import pictured
from draftgraph.inspect.markup import element, text
from draftgraph.inspect.report import REASONS
from draftgraph.inspect.theme import DARK, LIGHT
from draftgraph.tuning.latency import Latencies

WIDTH = 360.0
NAMES, VALUES = 112.0, 52.0  # room for the names of bars, and for their values
LINE = 24.0
MOST_BESIDE, MOST_ABOVE = 14, 56  # characters of a name
PLOT_HEIGHT = 170.0
LEFT, BOTTOM = 40.0, 38.0
COLOURS = (0, 2, 4, 5, 3, 6, 1, 7)  # of series: classes of the style sheet, the first ones unlike each other
TICKS = 4
MOST_LINES = 20  # of a table that is not folded
LABEL = re.compile(r"^(.*) \((\w+-cost, inflated)\)$")
OURS, FIXED, OTHERS = 0, 1, 7  # colours: auto, fixed modes, other libraries
SHOWN_DEPTHS = 12
FIGURE = re.compile(r"[-+]?\d+(\.\d+)?")
# The columns of an item's table that are drawn, one chart each: a bar for every row.
DRAWN_COLUMNS: dict[str, Sequence[str]] = {
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
Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Bar:
    name: str
    value: float
    shown: str
    low: float | None = None
    high: float | None = None
    colour: int = 0


@dataclass(frozen=True)
class Rail:
    """Where bars begin and what stands beside them: their names, or above them where those are long."""

    left: float
    line: float  # from bar to bar

    @classmethod
    def of(cls, names: Sequence[str]) -> Rail:
        longest = max(map(len, names), default=0)
        return cls(NAMES, LINE) if longest <= MOST_BESIDE else cls(4.0, 1.75 * LINE)

    def middle(self, place: int) -> float:
        return (place + 1) * self.line - LINE / 2

    def name(self, place: int, name: str) -> str:
        if self.left == NAMES:
            return text(NAMES - 8, self.middle(place), name, "name")
        return text(self.left, self.middle(place) - 0.75 * LINE, shorten(name, MOST_ABOVE, placeholder="…"), "above")


def bars(title: str, rows: Sequence[Bar], reference: float | None = None) -> Markup:
    """One under the other, with intervals where there are some, and a line at a `reference`."""
    rail = Rail.of([row.name for row in rows])
    scale = (WIDTH - rail.left - VALUES) / max([row.high or row.value for row in rows] + [reference or 0.0, 1e-9])
    parts = []
    for place, row in enumerate(rows):
        middle = rail.middle(place)
        parts.append(rail.name(place, row.name))
        width = max(scale * row.value, 0.5)
        parts.append(rectangle(rail.left, middle, width, row.colour, f"{row.name}: {row.shown}"))
        end = scale * (row.high or row.value)
        if row.low is not None and row.high is not None:
            low, high = rail.left + scale * row.low, rail.left + scale * row.high
            parts.append(segment(low, middle, high, middle, "interval"))
        parts.append(text(rail.left + end + 6, middle, row.shown, "value"))
    if reference is not None:
        x = rail.left + scale * reference
        parts.append(segment(x, 0, x, rail.line * len(rows), "reference"))
    return figure(title, "".join(parts), rail.line * len(rows))


def stacks(title: str, rows: Mapping[str, Mapping[str, float]]) -> Markup:
    """Shares of one, side by side in every row; the keys of the first row are the legend."""
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    rail = Rail.of(list(rows))
    scale = WIDTH - rail.left - 4
    parts = []
    for place, (row_name, row) in enumerate(rows.items()):
        middle, x = rail.middle(place), rail.left
        parts.append(rail.name(place, row_name))
        for colour, name in enumerate(names):
            width = scale * row.get(name, 0.0)
            if width > 0:
                parts.append(rectangle(x, middle, width, of_series(colour), f"{row_name}, {name}: {row[name]:.1%}"))
            x += width
    return figure(title, "".join(parts), rail.line * len(rows), names)


def lines(title: str, series: Mapping[str, Points], across: str, logarithmic: bool = False) -> Markup:
    """Points of every series joined, from zero up; `across` says what goes from left to right."""
    xs = sorted({x for points in series.values() for x, _ in points})
    highest = nice(max((y for points in series.values() for _, y in points), default=1.0))
    left, right = (math.log(xs[0]), math.log(xs[-1])) if logarithmic else (xs[0], xs[-1])
    room = WIDTH - LEFT - 12

    def at(x: float, y: float) -> tuple[float, float]:
        share = ((math.log(x) if logarithmic else x) - left) / ((right - left) or 1.0)
        return LEFT + room * share, 8 + PLOT_HEIGHT * (1 - y / highest)

    parts = []
    for tick in range(TICKS + 1):
        value = highest * tick / TICKS
        _, y = at(xs[0], value)
        parts += [segment(LEFT, y, WIDTH - 12, y, "grid"), text(LEFT - 6, y, f"{value:g}", "name")]
    shown = xs if len(xs) <= 8 else xs[:: math.ceil(len(xs) / 8)]
    parts += [text(at(x, 0)[0], PLOT_HEIGHT + 20, f"{x:g}", "tick") for x in shown]
    parts.append(text(LEFT + room / 2, PLOT_HEIGHT + BOTTOM, across, "tick"))
    for colour, (name, points) in enumerate(series.items()):
        places = [at(x, y) for x, y in sorted(points)]
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(element("polyline", points=joined, class_=f"line c{of_series(colour)}"))
        for (x, y), (value_x, value_y) in zip(places, sorted(points), strict=True):
            said = element("title", escape(f"{name}: {value_y:.3g} at {value_x:g}"))
            parts.append(element("circle", said, cx=x, cy=y, r=3.0, class_=f"dot c{of_series(colour)}"))
    return figure(title, "".join(parts), PLOT_HEIGHT + BOTTOM + 10, list(series))


def figure(title: str, body: str, height: float, names: Sequence[str] = ()) -> Markup:
    picture = element(
        "svg", body, viewBox=f"0 0 {WIDTH:g} {height:g}", class_="chart", role="img", aria_label=title, width="100%"
    )
    keys = "".join(f'<span class="key c{of_series(place)}">{escape(name)}</span>' for place, name in enumerate(names))
    legend = f'<p class="keys">{keys}</p>' if names else ""
    return Markup(f"<figure><figcaption>{escape(title)}</figcaption>{picture}{legend}</figure>")


def of_series(place: int) -> int:
    return COLOURS[place % len(COLOURS)]


def rectangle(x: float, middle: float, width: float, colour: int, said: str) -> str:
    where = {"x": float(x), "y": middle - 8.0, "width": float(width), "height": 16.0, "rx": 2.0}
    return element("rect", element("title", escape(said)), **where, class_=f"bar c{colour}")


def segment(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)


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
    return template().render(
        parts=parts,
        title="; ".join(part.title for part in parts),
        light=LIGHT,
        dark=DARK,
        light_style=Markup(LIGHT.style_sheet()),
        dark_style=Markup(DARK.style_sheet()),
        cell=cell,
        reason=REASON,
        most_lines=MOST_LINES,
    )


@cache
def template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))


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
    columns = [column for column in DRAWN_COLUMNS.get(one.name, ()) if column in table.header]
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


def headline(report: SpeedReport) -> str:
    if not report.drafting:
        return "Plain decoding alone was measured."
    best = max(report.drafting, key=lambda mode: mode.overall.speed.ratio)
    speed = best.overall.speed
    said = f"{best.mode} is {speed}" + (f" ({speed.interval})" if speed.interval else "")
    return f"{speed_report.labelled(f'{said} as fast as plain decoding', report)}, over {best.overall.prompts} prompts."


def sections(report: SpeedReport) -> Iterator[Section]:
    yield Section(
        "Times as fast as plain decoding",
        "Whiskers are 95% intervals; the line is plain decoding.",
        [speed_chart(report, task) for task in sorted(report.groups, key=lambda task: task != ALL)],
        [speed_report.speed_table(report), speed_report.times_table(report)],
    )
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
        yield Section("Task scores", "The same answers have the same scores.", tables=[scores_table(report.scores)])
    yield Section("What it costs", tables=[speed_report.costs_table(report)])
    if report.failed:
        text = "Methods that could not answer, and what they said."
        yield Section("Not measured", text, tables=[replace(speed_report.failed_table(report), title="")])


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
    text = "Every answer is compared with plain decoding's of the same run, token for token."
    if report.configuration.get("dtype") != "float32":
        text += " In half precision a pass over many tokens rounds otherwise than one over a single token: texts may "
        text += "part where two tokens are as good as tied, and are judged by scoring them again in float32."
    return Section("Is the output the same?", text, tables=tables)


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
    return Section("Acceptance", "How deep proposals are accepted, and where accepted ones came from.", charts, tables)


def missed(report: SpeedReport) -> Section:
    shares = {mode.mode: mode.missed for mode in report.modes if mode.missed}
    names = [reason for reason in REASONS if any(reason in of_mode for of_mode in shares.values())]
    ordered = {mode: {name: found.get(name, 0.0) for name in names} for mode, found in shares.items()}
    said = {name: REASONS[name].replace("{k} ", "").replace(" (k)", "") for name in names}
    reasons = Table("What the names mean", ["name", REASON], [[name, words] for name, words in said.items()])
    text = "Every pass ends at a token that was not in the graph, or at the graph's end: why it was not there."
    tables = [speed_report.missed_table(report), reasons]
    return Section("Why tokens were missed", text, [stacks("Share of missed tokens", ordered)], tables)


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
    text = "What a pass takes by the number of nodes, as measured on this machine: auto sizes its graphs by it."
    return Section("Cost curves", text, charts)


def examples(found: dict[str, str]) -> Section:
    """The steps of a warm-up that accepted the most."""
    pictures = []
    for mode, document in found.items():
        with suppress(UsageError):  # of another version
            pictures.append(pictured(GraphReport.from_json(document), mode))
    text = "For each mode a step of its warm-up. Left the end of the text; what the target accepted is drawn thick."
    return Section("Example graphs", text, wide=pictures)
