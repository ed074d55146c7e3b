"""A benchmark run as a part of the page: how fast, how exact, why, and at what price."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from markupsafe import Markup

from draftgraph.bench.diagnosis import diagnoses
from draftgraph.bench.page.charts import Bar, bars, lines, stacks
from draftgraph.bench.page.page import Part, Section
from draftgraph.bench.report import REASON, Table
from draftgraph.bench.runs import PLAIN, Record
from draftgraph.bench.scores import scores_table
from draftgraph.bench.speed_report import ALL, ModeFigures, SpeedReport
from draftgraph.bench.speed_tables import (
    HIDDEN,
    acceptance_table,
    costs_table,
    explanation_of,
    interval_of,
    labelled,
    missed_table,
    ratio_of,
    rescored_table,
    sources_table,
    speed_table,
    tasks_of,
    times_table,
    title_of,
)
from draftgraph.errors import UsageError
from draftgraph.inspect import GraphReport
from draftgraph.inspect.report import REASONS, pictured
from draftgraph.tuning.latency import Curve, Latencies

OURS, FIXED, OTHERS = 0, 1, 7  # colours: auto, fixed modes, other libraries
SHOWN_DEPTHS = 12


def speed_part(report: SpeedReport) -> Part:
    known = {name: value for name, value in report.configuration.items() if name not in HIDDEN and value is not None}
    facts = {name.replace("_", " "): str(value) for name, value in known.items()}
    facts["measurements"] = f"{report.measured} of {report.planned}"
    return Part(
        title_of(report),
        facts,
        headline(report),
        list(sections(report)),
        [(one.verdict, one.signature, one.line) for one in diagnoses(report)],
        explanation_of(report),
    )


def headline(report: SpeedReport) -> str:
    drafting = [mode for mode in report.modes if mode.library is None and mode.mode != PLAIN]
    if not drafting:
        return "Plain decoding alone was measured."
    best = max(drafting, key=lambda mode: mode.overall.speed.ratio)
    speed = best.overall.speed
    said = f"{best.mode} is {ratio_of(speed)}" + (f" ({interval_of(speed)})" if speed.low is not None else "")
    label = f" ({report.label})" if report.label else ""
    return f"{said} as fast as plain decoding{label}, over {best.overall.prompts} prompts."


def sections(report: SpeedReport) -> Iterator[Section]:
    yield Section(
        "Times as fast as plain decoding",
        "Whiskers are 95% intervals; the line is plain decoding.",
        [speed_chart(report, task) for task in groups(report)],
        [speed_table(report), times_table(report)],
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
    yield Section("What it costs", tables=[costs_table(report)])
    if report.failed:
        table = Table("", ["mode", REASON], [[mode, why] for mode, why in report.failed.items()])
        yield Section("Not measured", "Methods that could not answer, and what they said.", tables=[table])


def groups(report: SpeedReport) -> list[str]:
    tasks = tasks_of(report)
    return [ALL, *tasks] if len(tasks) > 1 else tasks


def speed_chart(report: SpeedReport, task: str) -> Markup:
    rows = []
    for mode in report.modes:
        for figures in (*mode.tasks, mode.overall):
            if figures.task == task and mode.mode != PLAIN:
                speed = figures.speed
                rows.append(Bar(mode.mode, speed.ratio, ratio_of(speed), speed.low, speed.high, colour_of(mode)))
    return bars(labelled("all tasks" if task == ALL else task, report), rows, reference=1.0)


def colour_of(mode: ModeFigures) -> int:
    return OTHERS if mode.library else OURS if mode.mode == "auto" else FIXED


def exactness(report: SpeedReport) -> Section:
    lines_of = []
    for mode in report.modes:
        if mode.same is not None:
            other = mode.answers - mode.same - mode.ties
            lines_of.append([mode.mode, str(mode.answers), str(mode.same), str(mode.ties), str(other)])
    header = ["mode", "answers", "the tokens of plain decoding", "part at a tie", "part elsewhere"]
    tables = [Table("Answers compared with plain decoding's", header, lines_of)]
    if any(mode.rescored for mode in report.modes):
        tables.append(rescored_table(report))
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
    charts, tables = [stacks("Accepted tokens by who proposed them", shares)], [sources_table(report)]
    if series:
        charts.insert(0, lines("Passes that accept a token at a depth", series, "depth in the graph"))
        tables.insert(0, acceptance_table(report))
    return Section("Acceptance", "How deep proposals are accepted, and where accepted ones came from.", charts, tables)


def missed(report: SpeedReport) -> Section:
    shares = {mode.mode: mode.missed for mode in report.modes if mode.missed}
    names = [reason for reason in REASONS if any(reason in of_mode for of_mode in shares.values())]
    ordered = {mode: {name: found.get(name, 0.0) for name in names} for mode, found in shares.items()}
    said = {name: REASONS[name].replace("{k} ", "").replace(" (k)", "") for name in names}
    header = ["name", REASON]
    reasons = Table("What the names mean", header, [[name, words] for name, words in said.items()])
    text = "Every pass ends at a token that was not in the graph, or at the graph's end: why it was not there."
    return Section(
        "Why tokens were missed", text, [stacks("Share of missed tokens", ordered)], [missed_table(report), reasons]
    )


def cost_curves(found: Record) -> Section:
    latencies = Latencies.from_dict(found)
    charts = [
        curve_chart(name, curve) for name, curve in (("target", latencies.target), ("draft", latencies.draft)) if curve
    ]
    text = "What a pass takes by the number of nodes, as measured on this machine: auto sizes its graphs by it."
    return Section("Cost curves", text, charts)


def curve_chart(name: str, curve: Curve) -> Markup:
    series = {
        f"behind {context} tokens": [(float(nodes), 1000 * one) for nodes, one in zip(curve.nodes, row, strict=True)]
        for context, row in zip(curve.contexts, curve.seconds, strict=True)
    }
    return lines(f"A pass of the {name}, ms", series, "nodes", logarithmic=True)


def examples(found: dict[str, str]) -> Section:
    """The steps of a warm-up that accepted the most."""
    pictures = []
    for mode, document in found.items():
        with suppress(UsageError):  # of another version
            graph = GraphReport.from_json(document)
            pictures.append(pictured(graph, mode))
    text = "For each mode a step of its warm-up. Left the end of the text; what the target accepted is drawn thick."
    return Section("Example graphs", text, wide=pictures)
