"""A speed report as tables, for the terminal and for Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import get_args

from draftgraph.bench.diagnosis import diagnoses
from draftgraph.bench.gaps import MOST
from draftgraph.bench.intervals import Speed
from draftgraph.bench.report import LOOPS, REASON, Table
from draftgraph.bench.scores import EXPLANATION as SCORES
from draftgraph.bench.scores import scores_table
from draftgraph.bench.speed_report import ALL, Figures, ModeFigures, Sources, SpeedReport
from draftgraph.stats import SOURCES
from draftgraph.trace import Reason

HIDDEN = ("target", "draft", "target_weights", "draft_weights", "modes", "inflated")
EXPLANATION = (
    "Milliseconds per token are those of the whole answer without its prefill: the median of a prompt's repeats, then "
    "the mean of a task's prompts; ± is how far the mean may be off by its repeats alone, at 95%. Speed is the ratio of"
    " those medians to plain decoding's, the geometric mean over prompts, with a 95% bootstrap interval over prompts; "
    f"{ALL} counts every task the same. First token: prefill and the first step. Not drafted: accepted tokens that the "
    "draft had not proposed at that place (merged, copied or recycled)."
)
PEERS = (
    "Rows named hf and vllm are methods of other libraries, through their public interfaces; what they do not tell is "
    "left empty."
)
TIES = (
    "Ties: answers that part from plain decoding's where both tokens are within two rounding steps of the target's "
    "best score."
)
FLOAT32 = (
    "Scored again in float32: first answers with the same weights, unrounded. Not the best: tokens that another one "
    f"beats there; gap: by how much. Share and largest gap must be within {MOST} times off's; by chance or tie: they "
    "are not, but equally good texts differ as much, or the gap is at most two rounding steps."
)
SHOWN_DEPTHS = 8
CONVERTED = re.compile(r"-[0-9a-f]{16}$")  # a digest in the name of a converted model
MEASURED = (
    ("memory beside weights, GB", "extra_bytes", 1e9),
    ("process at most, GB", "resident_bytes", 1e9),
    ("joules per token", "joules_per_token", 1),
)  # where the device tells
VERDICTS = {(None, None): "", (True, True): "yes", (False, True): "by chance or tie", (False, False): "NO"}


def tables(report: SpeedReport) -> Iterator[Table]:
    yield speed_table(report)
    yield times_table(report)
    if any(mode.sources.shares for mode in report.modes):
        yield sources_table(report)
    if report.scores:
        yield scores_table(report.scores)
    if any(mode.acceptance for mode in report.modes):
        yield acceptance_table(report)
    if any(mode.missed for mode in report.modes):
        yield missed_table(report)
    if any(mode.rescored for mode in report.modes):
        yield rescored_table(report)
    yield costs_table(report)
    found = [[one.signature, one.line] for one in diagnoses(report)]
    yield Table("Signs of failure", ["sign", REASON], found)
    if report.failed:
        yield Table("Not measured", ["mode", REASON], [[mode, reason] for mode, reason in report.failed.items()])


def to_markdown(report: SpeedReport, plot: str | None = None) -> str:
    """With a link to the `plot` where there is one."""
    lead = [f"# {title_of(report)}", "", settings_of(report), "", explanation_of(report), ""]
    lead += [f"![Speed by mode and task]({plot})", ""] if plot else []
    return "\n".join([*lead, *(table.to_markdown() for table in tables(report))])


def title_of(report: SpeedReport) -> str:
    known = report.configuration
    target = CONVERTED.sub("", known["target"])
    return f"Speed of {target}{f' ({report.label})' if report.label else ''}, draft: {known['draft'] or 'none'}"


def settings_of(report: SpeedReport) -> str:
    shown = {name: value for name, value in report.configuration.items() if name not in HIDDEN and value is not None}
    settings = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in shown.items())
    return f"{settings}; {report.measured} of {report.planned} measurements"


def explanation_of(report: SpeedReport) -> str:
    looping = any(mode.sources.answers > mode.sources_without_loops.answers for mode in report.modes)
    others = report.failed or any(mode.library for mode in report.modes)
    said = [EXPLANATION, *([PEERS] if others else []), *([TIES] if any(mode.ties for mode in report.modes) else [])]
    said += [FLOAT32] if any(mode.rescored for mode in report.modes) else []
    said += [SCORES] if report.scores else []
    return " ".join([*said, *([LOOPS] if looping else [])])


def speed_table(report: SpeedReport) -> Table:
    tasks = tasks_of(report)
    header = ["mode", *tasks, *([ALL] if len(tasks) > 1 else []), "95% interval", "tokens per pass", "same tokens"]
    lines = []
    for mode in report.modes:
        known = {figures.task: figures for figures in shown_figures(mode)}
        cells = [labelled(ratio_of(known[task].speed) if task in known else "", report) for task in header[1:-3]]
        same = "" if mode.same is None else f"{mode.same} of {mode.answers}"
        same += f" ({mode.ties} ties)" if mode.ties else ""
        lines.append([mode.mode, *cells, interval_of(mode.overall.speed), number(mode.overall.tokens_per_pass), same])
    known_modes = {mode.mode for mode in report.modes}
    lines += [[mode, *[""] * (len(header) - 2), "failed"] for mode in report.failed if mode not in known_modes]
    return Table("Times as fast as plain decoding", header, lines)


def times_table(report: SpeedReport) -> Table:
    tasks = tasks_of(report)
    places = [*tasks, *([ALL] if len(tasks) > 1 else [])]
    repeated = any(mode.overall.noise is not None for mode in report.modes)
    lines = []
    for mode in report.modes:
        known = {figures.task: figures for figures in shown_figures(mode)}
        times = (number(known[task].ms_per_token) if task in known else "" for task in places)
        lines.append([mode.mode, *(labelled(time, report) for time in times)])
        if repeated:
            lines[-1].append("" if mode.overall.noise is None else f"{mode.overall.noise:.1%}")
    return Table("Milliseconds per token", ["mode", *places, *(["±"] if repeated else [])], lines)


def sources_table(report: SpeedReport) -> Table:
    header = ["mode", "answers", *SOURCES, "not drafted"]
    lines: list[list[str]] = []
    for mode in report.modes:
        if mode.sources.shares:
            lines.append([mode.mode, f"all {mode.sources.answers}", *shares_of(mode.sources)])
            if (steady := mode.sources_without_loops).answers < mode.sources.answers:
                lines.append([mode.mode, f"{steady.answers} that do not loop", *shares_of(steady)])
    return Table("Accepted tokens by source", header, lines)


def rescored_table(report: SpeedReport) -> Table:
    header = ["mode", "answers", "tokens", "not the best", "largest gap", "mean gap", f"within {MOST} times off"]
    lines = []
    for mode in report.modes:
        if (found := mode.rescored) is not None:
            gaps = [f"{found.not_best:.2%}", f"{found.largest_gap:.3f}", f"{found.mean_gap:.5f}"]
            lines.append(
                [mode.mode, str(found.answers), str(found.tokens), *gaps, VERDICTS[found.within, found.as_good]]
            )
    return Table("Scored again in float32", header, lines)


def acceptance_table(report: SpeedReport) -> Table:
    """Share of passes that accept at a depth, and share of a source's proposals that are accepted."""
    told = [(mode.mode, mode.acceptance) for mode in report.modes if mode.acceptance is not None]
    deepest = min(max(len(found.by_depth) for _, found in told), SHOWN_DEPTHS)
    header = ["mode", "proposed per accepted", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    header += [f"of {source}" for source in SOURCES]
    lines = []
    for mode, found in told:
        depths = [*found.by_depth[:deepest], *[0.0] * (deepest - len(found.by_depth))]
        shares = [*depths, *(found.by_source.get(source) for source in SOURCES)]
        lines.append([mode, number(found.proposed_per_accepted), *map(percent, shares)])
    return Table("Accepted proposals", header, lines)


def missed_table(report: SpeedReport) -> Table:
    names = [reason for reason in get_args(Reason) if any(reason in mode.missed for mode in report.modes)]
    told = [mode for mode in report.modes if mode.missed]
    lines = [[mode.mode, *(percent(mode.missed.get(name, 0.0)) for name in names)] for mode in told]
    return Table("Missed tokens by reason", ["mode", *names], lines)


def costs_table(report: SpeedReport) -> Table:
    header = ["mode", "first token, ms", "nodes per pass", "draft passes per pass", "warm-up, s"]
    lines = []
    for mode in report.modes:
        cells = [mode.mode, labelled(number(mode.overall.first_token_ms), report)]
        cells += [number(mode.overall.nodes_per_pass), number(mode.overall.draft_passes), number(mode.warm_up_seconds)]
        lines.append(cells)
    for title, figure, unit in MEASURED:
        values = [getattr(mode, figure) for mode in report.modes]
        if any(value is not None for value in values):
            header.append(title)
            for cells, value in zip(lines, values, strict=True):
                cells.append("" if value is None else f"{value / unit:.2f}")
    return Table("What it costs", header, lines)


def tasks_of(report: SpeedReport) -> list[str]:
    return list(dict.fromkeys(figures.task for mode in report.modes for figures in mode.tasks))


def shown_figures(mode: ModeFigures) -> list[Figures]:
    return [*mode.tasks, mode.overall]


def labelled(cell: str, report: SpeedReport) -> str:
    """A figure of an inflated target says so itself, wherever it is copied to."""
    return f"{cell} ({report.label})" if cell and report.label else cell


def ratio_of(speed: Speed) -> str:
    return f"{speed.ratio:.2f}x"


def interval_of(speed: Speed) -> str:
    return "" if speed.low is None or speed.high is None else f"{speed.low:.2f}–{speed.high:.2f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def shares_of(sources: Sources) -> list[str]:
    shares = [*(sources.shares.get(source) for source in SOURCES), sources.undrafted]
    return [percent(share) for share in shares]


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
