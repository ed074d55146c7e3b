"""A search report as tables, for the terminal and for Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from draftgraph.bench.report import Table
from draftgraph.bench.speed_tables import interval_of, number, ratio_of
from draftgraph.tuning.search_report import SearchReport, Tried

HIDDEN = ("target", "draft", "target_weights", "draft_weights", "prompts_digest")
EXPLANATION = (
    "Speed is against plain decoding of the same prompts, in turns with it: the whole answer without its prefill, the "
    "median of a prompt's rounds, the median prompt of a task, the geometric mean of tasks. A step, its draft and its "
    "check together, costs as much as so many passes of the target over one token: tokens per pass divided by that "
    "cost is the speed. "
)
FROM_TRIALS = (
    "There was no time to measure the best ones again beside each other: these are the figures of their trials. "
)
IMPORTANCE = (
    "Weight: how much a value decides whether a setting is among the fastest quarter (PED-ANOVA), all together 100%; "
    "trials that were given up early do not count."
)


def tables(report: SearchReport) -> Iterator[Table]:
    yield speed_table(report)
    yield tasks_table(report)
    yield settings_table(report)
    if report.importance:
        yield importance_table(report)


def to_markdown(report: SearchReport, plot: str | None = None) -> str:
    """With a link to the `plot` where there is one."""
    lead = [f"# {title_of(report)}", "", settings_of(report), "", explanation_of(report), ""]
    lead += [f"![Tokens per pass against the cost of a step]({plot})", ""] if plot else []
    return "\n".join([*lead, *(table.to_markdown() for table in tables(report))])


def title_of(report: SearchReport) -> str:
    known = report.configuration
    return f"Settings of graph for {known['target']}, draft: {known['draft'] or 'none'}"


def settings_of(report: SearchReport) -> str:
    shown = {name: value for name, value in report.configuration.items() if name not in HIDDEN and value is not None}
    settings = "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in shown.items())
    pruned = sum(one.pruned for one in report.trials)
    return f"{settings}; {len(report.trials)} trials, {pruned} given up early; {report.rounds} rounds of comparison"


def explanation_of(report: SearchReport) -> str:
    return EXPLANATION + ("" if report.rounds else FROM_TRIALS) + (IMPORTANCE if report.importance else "")


def name_in(report: SearchReport, one: Tried) -> str:
    marks = [mark for mark, holds in (("best", one is report.best), ("paper", one.paper)) if holds]
    return f"{one.name} ({', '.join(marks)})" if marks else one.name


def speed_table(report: SearchReport) -> Table:
    header = ["setting", "times as fast", "95% interval", "tokens per pass", "cost of a step", "nodes per pass"]
    header += ["draft passes", "same tokens"]
    lines = []
    for one in report.compared:
        found = one.outcome
        same = f"{found.same} of {found.answers}" + (f" ({found.ties} ties)" if found.ties else "")
        figures = (found.tokens_per_pass, found.step_cost, found.nodes_per_pass, found.draft_passes)
        cells = [ratio_of(found.speed), interval_of(found.speed), *map(number, figures), same]
        lines.append([name_in(report, one), *cells])
    return Table("Beside plain decoding", header, lines)


def tasks_table(report: SearchReport) -> Table:
    tasks = list(report.compared[0].outcome.tasks)
    lines = [[name_in(report, one), *(f"{one.outcome.tasks[task]:.2f}x" for task in tasks)] for one in report.compared]
    return Table("Times as fast as plain decoding, by task", ["setting", *tasks], lines)


def settings_table(report: SearchReport) -> Table:
    fixed = [one for one in report.compared if one is not report.auto]
    names = [name for name in fixed[0].setting if name != "mode"]
    lines = [[name_in(report, one), *(f"{one.setting[name]}" for name in names)] for one in fixed]
    return Table("Their values", ["setting", *names], lines)


def importance_table(report: SearchReport) -> Table:
    best = report.best.setting
    lines = [[name, f"{weight:.0%}", f"{best[name]}"] for name, weight in report.importance.items()]
    return Table("Which values matter", ["value", "weight", "best"], lines)
