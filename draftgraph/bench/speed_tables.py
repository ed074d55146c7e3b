"""A speed report for readers: tables for the terminal and Markdown, signs of failure, and a picture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from draftgraph.bench.reporting import (
    BESIDE,
    COLOURS,
    LOOPS,
    REASON,
    Table,
    described,
    document,
    has_matplotlib,
    new_figure,
    number,
    percent,
    same_of,
)
from draftgraph.bench.runs import PLAIN
from draftgraph.bench.sameness import MOST
from draftgraph.bench.scores import EXPLANATION as SCORES
from draftgraph.bench.scores import scores_table
from draftgraph.bench.speed_report import ALL, ModeFigures, Sources, Speed, SpeedReport
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
MOST_MODES = 16  # of a picture
VERDICTS = {(None, None): "", (True, True): "yes", (False, True): "by chance or tie", (False, False): "NO"}
LOW = 0.5  # of passes that accept nothing: more is a draft that seldom helps
PRUNED = 0.5  # of missed tokens that pruning has taken: more is too much of it
Verdict = Literal["good", "look", "wrong"]
REMEDIES = {
    "k": "the draft did not have the token among its best: a better draft helps (draftgraph distill)",
    "theta_prob": "pruning by probability ended the path: lower theta_prob",
    "theta_sib": "pruning of siblings took the token: lower theta_sib",
    "budget": "the budget of nodes or levels ended before the token: raise max_nodes or max_depth",
    "not drafted": "nothing had been proposed there: a draft model helps",
}
SIZED = "the token was not worth its place at the measured prices: a cheaper pass or a better draft helps"


@dataclass(frozen=True)
class Diagnosis:
    signature: str
    verdict: Verdict
    line: str


def diagnoses(report: SpeedReport) -> list[Diagnosis]:
    """What may be wrong where drafting disappoints: a line for each of its failure signatures."""
    return [low_acceptance(report.drafting), high_computation(report.drafting), generation_errors(report)]


def low_acceptance(modes: Sequence[ModeFigures]) -> Diagnosis:
    name = "Low acceptance"
    first = {mode.mode: (mode.acceptance.by_depth or [0.0])[0] for mode in modes if mode.acceptance is not None}
    if not first and any(mode.sources.shares for mode in modes):
        return Diagnosis(name, "good", "Proposals were accepted; how many were made is not told in these measurements.")
    if not first:
        return Diagnosis(name, "good" if not modes else "look", "No drafted token was accepted, or none was drafted.")
    worst = min((mode for mode in modes if mode.mode in first), key=lambda mode: first[mode.mode])
    found = f"{worst.mode} accepts something in {first[worst.mode]:.0%} of its passes"
    found += f", the least of {', '.join(first)}" if len(first) > 1 else ""
    if worst.missed:
        reason, share = max(worst.missed.items(), key=lambda pair: pair[1])
        chooses_budget = reason == "budget" and worst.mode == "auto"
        found += f"; in {share:.0%} of its misses {SIZED if chooses_budget else REMEDIES[reason]}"
    pruned = sum(worst.missed.get(reason, 0.0) for reason in ("theta_prob", "theta_sib"))
    return Diagnosis(name, "look" if first[worst.mode] < LOW or pruned > PRUNED else "good", f"{found}.")


def high_computation(modes: Sequence[ModeFigures]) -> Diagnosis:
    name, found = "High computation", ""
    slow = [mode for mode in modes if (mode.overall.speed.high or mode.overall.speed.ratio) < 1.0]
    if told := [(mode, mode.acceptance.proposed_per_accepted) for mode in modes if mode.acceptance is not None]:
        dearest, proposed = max(told, key=lambda pair: pair[1])
        merged = dearest.sources.shares.get("merged", 0.0)
        found = f"{dearest.mode} has {proposed:.1f} nodes checked for every one accepted, and {merged:.1%} of "
        found += "its accepted tokens from merged nodes. "
    if not slow:
        return Diagnosis(name, "good", f"{found}No mode is slower than plain decoding.")
    slower = ", ".join(f"{mode.mode} {mode.overall.speed}" for mode in slow)
    advice = "Prune more, merge more, or let auto decide."
    return Diagnosis(name, "look", f"{found}Slower than plain decoding: {slower}. {advice}")


def generation_errors(report: SpeedReport) -> Diagnosis:
    name = "Generation errors"
    ours = [mode for mode in report.modes if mode.library is None and mode.same is not None]
    answers, same, ties = (sum(getattr(mode, what) or 0 for mode in ours) for what in ("answers", "same", "ties"))
    if same == answers:
        return Diagnosis(name, "good", f"None: all {answers} answers have the tokens of plain decoding.")
    parted = f"{answers - same} of {answers} answers part from plain decoding's, {ties} of them at a tie"
    verdicts = [mode.rescored.as_good for mode in ours if mode.rescored is not None and mode.mode != PLAIN]
    if verdicts and all(verdicts):
        rule = "scored in float32 they are as good as plain decoding's, which is what half precision can promise"
        return Diagnosis(name, "good", f"None: {parted}; {rule}.")
    if same + ties == answers and not verdicts:
        return Diagnosis(name, "good", f"None known: {parted}, where rounding decides.")
    wrong: Verdict = "wrong" if verdicts or report.configuration.get("dtype") == "float32" else "look"
    advice = "the masks of tree attention may be wrong; check them with draftgraph doctor"
    return Diagnosis(name, wrong, f"{parted}: {advice}.")


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
    lead = (title_of(report), settings_of(report), explanation_of(report))
    return document(lead, tables(report), plot, "Speed by mode and task")


def title_of(report: SpeedReport) -> str:
    known = report.configuration
    target = CONVERTED.sub("", known["target"])
    return f"Speed of {target}{f' ({report.label})' if report.label else ''}, draft: {known['draft'] or 'none'}"


def settings_of(report: SpeedReport) -> str:
    return f"{described(report.configuration, HIDDEN)}; {report.measured} of {report.planned} measurements"


def explanation_of(report: SpeedReport) -> str:
    looping = any(mode.sources.answers > mode.sources_without_loops.answers for mode in report.modes)
    others = report.failed or any(mode.library for mode in report.modes)
    said = [EXPLANATION, *([PEERS] if others else []), *([TIES] if any(mode.ties for mode in report.modes) else [])]
    said += [FLOAT32] if any(mode.rescored for mode in report.modes) else []
    said += [SCORES] if report.scores else []
    return " ".join([*said, *([LOOPS] if looping else [])])


def speed_table(report: SpeedReport) -> Table:
    header = ["mode", *report.groups, "95% interval", "tokens per pass", "same tokens"]
    lines = []
    for mode in report.modes:
        known, same = mode.by_task, same_of(mode.same, mode.answers, mode.ties)
        cells = [labelled(str(known[task].speed) if task in known else "", report) for task in report.groups]
        lines.append([mode.mode, *cells, mode.overall.speed.interval, number(mode.overall.tokens_per_pass), same])
    known_modes = {mode.mode for mode in report.modes}
    lines += [[mode, *[""] * (len(header) - 2), "failed"] for mode in report.failed if mode not in known_modes]
    return Table("Times as fast as plain decoding", header, lines)


def times_table(report: SpeedReport) -> Table:
    repeated = any(mode.overall.noise is not None for mode in report.modes)
    lines = []
    for mode in report.modes:
        known = mode.by_task
        times = (number(known[task].ms_per_token) if task in known else "" for task in report.groups)
        noise = [percent(mode.overall.noise)] if repeated else []
        lines.append([mode.mode, *(labelled(time, report) for time in times), *noise])
    return Table("Milliseconds per token", ["mode", *report.groups, *(["±"] if repeated else [])], lines)


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
            verdict = VERDICTS[found.within, found.as_good]
            lines.append([mode.mode, str(found.answers), str(found.tokens), *gaps, verdict])
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
        figures = (mode.overall.nodes_per_pass, mode.overall.draft_passes, mode.warm_up_seconds)
        first = labelled(number(mode.overall.first_token_ms), report)
        lines.append([mode.mode, first, *map(number, figures)])
    for title, figure, unit in MEASURED:
        values = [getattr(mode, figure) for mode in report.modes]
        if any(value is not None for value in values):
            header.append(title)
            for cells, value in zip(lines, values, strict=True):
                cells.append("" if value is None else f"{value / unit:.2f}")
    return Table("What it costs", header, lines)


def labelled(cell: str, report: SpeedReport) -> str:
    """A figure of an inflated target says so itself, wherever it is copied to."""
    return f"{cell} ({report.label})" if cell and report.label else cell


def shares_of(sources: Sources) -> list[str]:
    shares = [*(sources.shares.get(source) for source in SOURCES), sources.undrafted]
    return [percent(share) for share in shares]


def save_plot(report: SpeedReport, file: Path) -> Path | None:
    """None: there is no matplotlib, or there are more modes than a picture can show; the page has a chart of those."""
    if len(report.modes) > MOST_MODES or not has_matplotlib():
        return None
    figure = new_figure(title_of(report), 12, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_speed(left, report)
    draw_sources(right, [mode for mode in report.modes if mode.sources.shares])
    figure.savefig(file, dpi=150)
    return file


def draw_speed(axes: Any, report: SpeedReport) -> None:
    """With 95% intervals where a task has several prompts."""
    modes, groups = [mode for mode in report.modes if mode.mode != PLAIN], report.groups
    width = 0.8 / max(len(modes), 1)
    for index, mode in enumerate(modes):
        known = mode.by_task
        here = {place: known[task].speed for place, task in enumerate(groups) if task in known}
        places = [place + (index + 0.5) * width - 0.4 for place in here]
        heights = [speed.ratio for speed in here.values()]
        bars = {"yerr": errors([*here.values()]), "capsize": 2, "color": COLOURS[index % len(COLOURS)]}
        axes.bar(places, heights, width, label=mode.mode, **bars)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_title(labelled("Times as fast as plain decoding", report), fontsize="medium")
    if modes:
        axes.legend(**BESIDE)


def errors(speeds: list[Speed]) -> list[list[float]]:
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
