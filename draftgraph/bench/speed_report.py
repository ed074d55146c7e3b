"""What `bench run` measured: speed against plain decoding by task, where accepted tokens came from, signs of failure;
as data, as tables for the terminal and Markdown, and as a picture."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from draftgraph.bench import reporting
from draftgraph.bench.reporting import Table, number, percent, write_files
from draftgraph.bench.runs import PLAIN, Place, Record, can_be_rescored, last_session, of_kind
from draftgraph.bench.sameness import MOST, Rescored
from draftgraph.bench.tasks import TaskScore, scores_of, scores_table
from draftgraph.stats import SOURCES

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

ALL = "all"
EXACT = ("float32", "int8", "int4")  # number formats in which all answers must be those of plain decoding
RESAMPLES = 10_000
FEWER_RESAMPLES = 1_000  # where every prompt of every cell has its own
PERCENTILES = (2.5, 97.5)
HIDDEN = ("target", "draft", "target_weights", "draft_weights", "modes", "inflated")
TEXTS: dict[str, Any] = reporting.TEXTS["speed"]
PEERS, TIES, FLOAT32 = TEXTS["peers"], TEXTS["ties"], TEXTS["float32"].format(most=MOST)
SHOWN_DEPTHS = 8
CONVERTED = re.compile(r"-[0-9a-f]{16}$")  # a digest in the name of a converted model
MEASURED = (
    ("memory beside weights, GB", "extra_bytes", 1e9),
    ("process at most, GB", "resident_bytes", 1e9),
    ("joules per token", "joules_per_token", 1),
    ("tokens per s", "tokens_per_second", 1),
    ("prompt tokens per s", "prompt_tokens_per_second", 1),
    ("load, s", "load_seconds", 1),
)  # where the device or the library tells
MOST_MODES = 16  # of a picture
VERDICTS = {(None, None): "", (True, True): "yes", (False, True): "by chance or tie", (False, False): "NO"}
LOW = 0.5  # of passes that accept nothing: more is a draft that seldom helps
PRUNED = 0.5  # of missed tokens that pruning has taken: more is too much of it
Verdict = Literal["good", "look", "wrong"]


@dataclass(frozen=True)
class Speed:
    """A ratio against plain decoding; the 95% interval is None where a task has a single prompt."""

    ratio: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x"

    @property
    def interval(self) -> str:
        return "" if self.low is None or self.high is None else f"{self.low:.2f}–{self.high:.2f}"


def geometric_mean(ratios: Mapping[str, Sequence[float]], centre: Callable[..., Any] = np.mean) -> Speed:
    """Of the ratios of tasks' prompts, every task counting the same; the interval by a bootstrap over the prompts.
    The `centre` of a task may also be `np.median`: then a machine that stalls once does not spoil it.

    >>> geometric_mean({"one": [2.0], "other": [8.0]})
    Speed(ratio=4.0, low=None, high=None)
    """
    logs = [np.log(np.asarray(of_task, dtype=float)) for of_task in ratios.values()]
    mean = float(np.mean([centre(of_task) for of_task in logs]))
    if min(map(len, logs)) < 2:
        return Speed(float(np.exp(mean)))
    draw = np.random.default_rng(0)
    resampled = [centre(one[draw.integers(0, len(one), (RESAMPLES, len(one)))], axis=1) for one in logs]
    low, high = np.exp(np.percentile(np.mean(resampled, axis=0), PERCENTILES))
    return Speed(float(np.exp(mean)), float(low), float(high))


def noise_of(repeats: Sequence[Sequence[float]]) -> float | None:
    """How far the mean over prompts of their repeats' medians may be off, by the repeats alone: half of the 95%
    interval of a bootstrap over them, as a share of the mean. None: nothing was repeated.

    >>> noise_of([[2.0, 2.0, 2.0], [8.0, 8.0]]), noise_of([[2.0], [8.0]])
    (0.0, None)
    """
    if max(map(len, repeats), default=0) < 2:
        return None
    draw, known = np.random.default_rng(0), [np.asarray(one, dtype=float) for one in repeats]
    medians = [np.median(one[draw.integers(0, len(one), (FEWER_RESAMPLES, len(one)))], axis=1) for one in known]
    low, high = np.percentile(np.mean(medians, axis=0), PERCENTILES)
    return float(high - low) / 2 / float(np.mean([np.median(one) for one in known]))


def label_of(shape: str | None) -> str | None:
    """The label of every figure of an inflated target.

    >>> label_of("llama-2-7b")
    '7B-cost, inflated'
    """
    return None if shape is None else f"{shape.rpartition('-')[2].upper()}-cost, inflated"


@dataclass(frozen=True)
class Figures:
    """A mode on a task, or the mean of all tasks. A prompt's times are medians of its repeats."""

    task: str
    prompts: int
    ms_per_token: float  # prefill apart
    noise: float | None  # half of its 95% interval, as a share, by the repeats alone; None: nothing was repeated
    first_token_ms: float  # prefill and the first step
    speed: Speed  # against plain decoding of the same prompts
    tokens_per_pass: float | None  # None here and below: another library, which does not tell
    nodes_per_pass: float | None
    draft_passes: float | None  # per pass of the target


@dataclass(frozen=True)
class Sources:
    """Shares of accepted tokens, in all answers or in those that do not loop."""

    answers: int
    shares: dict[str, float]  # by source; empty: nothing was accepted
    undrafted: float | None  # merged, copied or recycled: the draft had not proposed them at that node

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Sources:
        counts = total_by_source(runs, "accepted_by_source")
        if not (accepted := sum(counts.values())):
            return cls(len(runs), {}, None)
        shares = {source: count / accepted for source, count in counts.items()}
        return cls(len(runs), shares, 1.0 - shares["draft"])


@dataclass(frozen=True)
class Acceptance:
    """What became of the tokens that were proposed."""

    by_depth: list[float]  # share of the target's passes that accept a proposal at depth 1, 2, ...
    by_source: dict[str, float]  # share of proposals that are accepted, of sources that proposed any
    proposed_per_accepted: float

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Acceptance | None:
        """None where nothing was accepted, or where the runs do not say."""
        told = [run for run in runs if "checked_by_source" in run]
        proposed, accepted = (total_by_source(told, f"{what}_by_source") for what in ("checked", "accepted"))
        if not sum(accepted.values()):
            return None
        passes = sum(run["steps"] for run in told)
        depths = zip_longest(*(run["accepted_by_depth"] for run in told), fillvalue=0)
        by_source = {source: accepted[source] / count for source, count in proposed.items() if count}
        return cls(
            [sum(counts) / passes for counts in depths], by_source, sum(proposed.values()) / sum(accepted.values())
        )


@dataclass(frozen=True)
class ModeFigures:
    mode: str
    prices: str | None  # that it decided by
    tasks: list[Figures]
    overall: Figures
    sources: Sources
    sources_without_loops: Sources
    acceptance: Acceptance | None
    missed: dict[str, float]  # why the target's token was not in the graph, as shares; empty: nothing is told
    answers: int
    same: int | None  # answers with the tokens of plain decoding; None: no claim, another library sampled or rounded
    equal: int | None  # the same of a library that rounds in other ways, for information; None: of any other
    ties: int  # others that part where two tokens were as good as tied
    warm_up_seconds: float | None
    load_seconds: float | None  # None: not told
    prompt_tokens_per_second: float | None  # to the first token
    extra_bytes: int | None  # beside the weights, at most; None: not on a GPU
    resident_bytes: int | None  # of the process, at most, so far; None: on a GPU, or not told
    joules_per_token: float | None  # of the whole device, prefill included; None: it does not count
    rescored: Rescored | None  # in float32, where the target is in half precision
    library: str | None  # that it is a method of, with its version; None: this one

    @property
    def tokens_per_second(self) -> float:
        return 1000 / self.overall.ms_per_token

    @property
    def by_task(self) -> dict[str, Figures]:
        """The figures of every task and their mean."""
        return {figures.task: figures for figures in (*self.tasks, self.overall)}


@dataclass(frozen=True)
class Beside:
    """The fastest method of another library: how many times as fast a mode of this one is, on the same prompts."""

    library: str
    method: str
    mode: str
    speed: Speed

    def __str__(self) -> str:
        return f"{self.mode} is {self.speed} as fast as {self.method}, the fastest of {self.library}"

    @classmethod
    def of_all(cls, modes: Sequence[ModeFigures], runs: Sequence[Record]) -> list[Beside]:
        """For every other library, `auto`, or the fastest mode where that was not measured."""
        ranked = sorted(modes, key=lambda mode: mode.overall.speed.ratio)
        fastest = {mode.library: mode.mode for mode in ranked}
        ours = "auto" if any(mode.mode == "auto" for mode in modes) else fastest.pop(None, PLAIN)
        found = []
        for library, method in fastest.items():
            times = times_of(runs, method)
            common = [run for run in runs if (run["task"], run["prompt"]) in times]
            if library is not None and (ratios := ratios_of(common, ours, times)):
                found.append(cls(library, method, ours, geometric_mean(ratios)))
        return found


@dataclass(frozen=True)
class SpeedReport:
    """What `bench_run` measured."""

    configuration: Record
    measured: int
    planned: int
    modes: list[ModeFigures]
    failed: dict[str, str]  # methods of other libraries that the last call gave up, and why
    unscored: int  # answers in half precision that wait to be scored in float32
    scores: list[TaskScore]  # of tasks with references
    beside: list[Beside]
    latencies: Record | None = None  # of passes, as they were measured last; see `Latencies`
    examples: dict[str, str] = field(default_factory=dict)  # a step of each mode, as a document of `inspect`

    @classmethod
    def of(cls, records: Sequence[Record]) -> SpeedReport:
        configuration = {name: value for name, value in records[0].items() if name != "kind"}
        runs, sessions = of_kind(records, "run"), of_kind(records, "session")
        plain = times_of(runs, PLAIN)
        names = [mode for mode in configuration["modes"] if any(run["mode"] == mode for run in runs)]
        modes = [mode_figures(mode, [run for run in runs if run["mode"] == mode], plain, records) for mode in names]
        given_up = of_kind(records[last_session(records) :], "failed")
        planned = sessions[-1]["planned"] - sum(one["left_out"] for one in given_up) if sessions else len(runs)
        failed = {one["mode"]: one["reason"] for one in given_up}
        warm_ups = of_kind(records, "warm-up")
        latencies = [one["latencies"] for one in warm_ups if "latencies" in one]
        return cls(
            configuration,
            len(runs),
            planned,
            modes,
            failed,
            answers_to_rescore(records),
            scores_of(runs) or [TaskScore(**one) for found in of_kind(records, "scores") for one in found["scores"]],
            Beside.of_all(modes, runs),
            latencies[-1] if latencies else None,
            {one["mode"]: one["example"] for one in warm_ups if "example" in one},
        )

    @property
    def label(self) -> Any:
        """Shown beside every figure of an inflated target; None: not inflated."""
        return self.configuration.get("inflated")

    @property
    def groups(self) -> list[str]:
        """The tasks, and all of them together where there are several."""
        tasks = list(dict.fromkeys(figures.task for mode in self.modes for figures in mode.tasks))
        return [*tasks, ALL] if len(tasks) > 1 else tasks

    @property
    def drafting(self) -> list[ModeFigures]:
        """Modes of this library that draft."""
        return [mode for mode in self.modes if mode.library is None and mode.mode != PLAIN]

    def mode(self, name: str) -> ModeFigures:
        return next(figures for figures in self.modes if figures.mode == name)

    def to_dict(self) -> dict[str, Any]:
        """Without the examples, which are pictures."""
        return {name: value for name, value in asdict(self).items() if name != "examples"}

    def to_markdown(self, plot: str | None = None) -> str:
        """With a link to the `plot` where there is one."""
        lead = (title_of(self), settings_of(self), explanation_of(self))
        return reporting.document(lead, tables(self), plot, "Speed by mode and task")

    def to_part(self) -> Part:
        from draftgraph.bench.page import speed_part

        return speed_part(self)

    def save(self, folder: Path) -> None:
        """Writes report.json, report.md, report.html and, where there is matplotlib, report.png."""
        from draftgraph.bench.page import page

        plot = save_plot(self, folder / "report.png") if self.modes else None
        text = self.to_markdown(None if plot is None else plot.name)
        write_files(folder, {"report.json": self.to_dict(), "report.md": text, "report.html": page([self.to_part()])})


Prompt = tuple[str, int]  # of a task, by number


def answers_to_rescore(records: Sequence[Record]) -> int:
    """Of the prompts of the last call, if it is one that scores answers in float32."""
    sessions = of_kind(records, "session")
    if not sessions or not sessions[-1].get("rescores"):
        return 0
    asked = sessions[-1]["prompts"]
    runs = [run for run in of_kind(records, "run") if run["prompt"] < asked.get(run["task"], 0)]
    answers = [run for run in runs if can_be_rescored(run)]
    return len({Place.of(run) for run in answers} - {Place.of(done) for done in of_kind(records, "rescored")})


def times_of(runs: Sequence[Record], mode: str, figure: str = "ms_per_token") -> dict[Prompt, float]:
    """The median of every prompt's repeats."""
    return {prompt: median(values) for prompt, values in repeats_of(runs, mode, figure).items()}


def repeats_of(runs: Sequence[Record], mode: str, figure: str = "ms_per_token") -> dict[Prompt, list[float]]:
    repeats: dict[Prompt, list[float]] = {}
    for run in runs:
        if run["mode"] == mode:
            repeats.setdefault((run["task"], run["prompt"]), []).append(run[figure])
    return repeats


def ratios_of(runs: Sequence[Record], mode: str, plain: dict[Prompt, float]) -> dict[str, list[float]]:
    """How many times as fast as plain decoding, prompt by prompt of every task."""
    ratios: dict[str, list[float]] = {}
    for prompt, time in times_of(runs, mode).items():
        ratios.setdefault(prompt[0], []).append(plain[prompt] / time)
    return ratios


def mode_figures(
    mode: str, runs: Sequence[Record], plain: dict[Prompt, float], records: Sequence[Record]
) -> ModeFigures:
    ratios = ratios_of(runs, mode, plain)
    tasks = [task_figures(mode, task, [run for run in runs if run["task"] == task], ratios[task]) for task in ratios]
    warm_ups = [record for record in of_kind(records, "warm-up") if record["mode"] == mode]
    known = (*warm_ups, *runs)
    missed = Counter[str]()
    for run in runs:
        missed.update(run.get("missed", {}))
    claims = [run["same"] for run in runs if run["same"] is not None]
    return ModeFigures(
        mode,
        warm_ups[-1]["prices"] if warm_ups else None,
        tasks,
        mean_of(tasks, geometric_mean(ratios), noise_of(list(repeats_of(runs, mode).values()))),
        Sources.of(runs),
        Sources.of([run for run in runs if not run["loops"]]),
        Acceptance.of(runs),
        {reason: count / missed.total() for reason, count in missed.most_common()},
        len(runs),
        sum(claims) if claims else None,
        sum(run["equal"] for run in runs) if all("equal" in run for run in runs) else None,
        sum(run["tie"] for run in runs),
        max((record["seconds"] for record in warm_ups), default=None),  # later starts find prices on disk
        largest(warm_ups, "load_seconds"),
        per(runs, "prompt_tokens", "first_token_seconds"),
        largest(known, "extra_bytes"),
        largest(known, "resident_bytes"),
        per(runs, "joules", "new_tokens"),
        Rescored.of(mode, of_kind(records, "rescored"), PLAIN),
        warm_ups[-1].get("library") if warm_ups else None,
    )


def task_figures(mode: str, task: str, runs: Sequence[Record], ratios: Sequence[float]) -> Figures:
    return Figures(
        task,
        len(ratios),
        fmean(times_of(runs, mode).values()),
        noise_of(list(repeats_of(runs, mode).values())),
        1000 * fmean(times_of(runs, mode, "first_token_seconds").values()),
        geometric_mean({task: ratios}),
        per(runs, "new_tokens", "steps"),
        per(runs, "nodes", "steps"),
        per(runs, "draft_passes", "steps"),
    )


def mean_of(tasks: Sequence[Figures], speed: Speed, noise: float | None) -> Figures:
    """Every task counts the same."""
    names = ("ms_per_token", "first_token_ms", "tokens_per_pass", "nodes_per_pass", "draft_passes")
    told = {name: [value for task in tasks if (value := getattr(task, name)) is not None] for name in names}
    means: dict[str, Any] = {name: fmean(values) if values else None for name, values in told.items()}
    return Figures(task=ALL, prompts=sum(task.prompts for task in tasks), speed=speed, noise=noise, **means)


def per(runs: Sequence[Record], figure: str, unit: str) -> float | None:
    """A sum over a sum, of the runs that have both."""
    told = [run for run in runs if figure in run and unit in run]
    return sum(run[figure] for run in told) / sum(run[unit] for run in told) if told else None


def largest(records: Sequence[Record], figure: str) -> Any:
    return max((record[figure] for record in records if figure in record), default=None)


def total_by_source(runs: Sequence[Record], figure: str) -> dict[str, int]:
    return {source: sum(run.get(figure, {}).get(source, 0) for run in runs) for source in SOURCES}


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
        remedy = TEXTS["remedies"]["sized" if reason == "budget" and worst.mode == "auto" else reason]
        found += f"; in {share:.0%} of its misses {remedy}"
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
    wrong: Verdict = "wrong" if verdicts or report.configuration.get("dtype") in EXACT else "look"
    advice = "the masks of tree attention may be wrong; check them with draftgraph doctor"
    return Diagnosis(name, wrong, f"{parted}: {advice}.")


def tables(report: SpeedReport) -> list[Table]:
    """All tables that have rows."""
    signs = [[one.signature, one.line] for one in diagnoses(report)]
    scores, failures = scores_table(report.scores), Table("Signs of failure", ["sign", reporting.REASON], signs)
    proposals = [sources_table(report), scores, acceptance_table(report), missed_table(report), rescored_table(report)]
    costs = [costs_table(report), failures, failed_table(report)]
    speeds = [speed_table(report), beside_table(report), times_table(report)]
    return [table for table in (*speeds, *proposals, *costs) if table.lines]


def title_of(report: SpeedReport) -> str:
    known = report.configuration
    target = CONVERTED.sub("", known["target"])
    return f"Speed of {target}{f' ({report.label})' if report.label else ''}, draft: {known['draft'] or 'none'}"


def settings_of(report: SpeedReport) -> str:
    return f"{reporting.described(report.configuration, HIDDEN)}; {report.measured} of {report.planned} measurements"


def explanation_of(report: SpeedReport) -> str:
    looping = any(mode.sources.answers > mode.sources_without_loops.answers for mode in report.modes)
    others = report.failed or any(mode.library for mode in report.modes)
    said = {
        TEXTS["columns"]: True,
        PEERS: others,
        TIES: any(mode.ties for mode in report.modes),
        FLOAT32: any(mode.rescored for mode in report.modes),
        reporting.TEXTS["scores"]: report.scores,
        reporting.TEXTS["loops"]: looping,
    }
    return " ".join(text for text, holds in said.items() if holds)


def speed_table(report: SpeedReport) -> Table:
    header = ["mode", *report.groups, "95% interval", "tokens per pass", "same tokens"]
    lines = []
    for mode in report.modes:
        known, same = mode.by_task, reporting.same_of(mode.same, mode.answers, mode.ties)
        same = same if mode.equal is None else f"({mode.equal} of {mode.answers})"
        cells = [labelled(str(known[task].speed) if task in known else "", report) for task in report.groups]
        lines.append([mode.mode, *cells, mode.overall.speed.interval, number(mode.overall.tokens_per_pass), same])
    known_modes = {mode.mode for mode in report.modes}
    lines += [[mode, *[""] * (len(header) - 2), "failed"] for mode in report.failed if mode not in known_modes]
    return Table("Times as fast as plain decoding", header, lines)


def beside_table(report: SpeedReport) -> Table:
    lines = []
    for one in report.beside:
        lines.append([one.library, one.method, one.mode, labelled(str(one.speed), report), one.speed.interval])
    return Table("Beside other libraries", ["library", "its fastest", "mode", "times as fast", "95% interval"], lines)


def times_table(report: SpeedReport) -> Table:
    repeated = any(mode.overall.noise is not None for mode in report.modes)
    lines = []
    for mode in report.modes:
        known = mode.by_task
        times = (number(known[task].ms_per_token) if task in known else "" for task in report.groups)
        noise = [percent(mode.overall.noise)] if repeated else []
        lines.append([mode.mode, *(labelled(time, report) for time in times), *noise])
    return Table("Milliseconds per token", ["mode", *report.groups, *(["±"] if repeated else [])], lines)


def failed_table(report: SpeedReport) -> Table:
    lines = [[mode, reason] for mode, reason in report.failed.items()]
    return Table("Not measured", ["mode", reporting.REASON], lines)


def sources_table(report: SpeedReport) -> Table:
    header = ["mode", "answers", *SOURCES, "not drafted"]
    lines = []
    for mode in (mode for mode in report.modes if mode.sources.shares):
        every, steady = mode.sources, mode.sources_without_loops
        rows = {f"all {every.answers}": every}
        if steady.answers < every.answers:
            rows[f"{steady.answers} that do not loop"] = steady
        for words, found in rows.items():
            shares = [*(found.shares.get(source) for source in SOURCES), found.undrafted]
            lines.append([mode.mode, words, *map(percent, shares)])
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
    deepest = min(max((len(found.by_depth) for _, found in told), default=0), SHOWN_DEPTHS)
    header = ["mode", "proposed per accepted", *(f"depth {depth}" for depth in range(1, deepest + 1))]
    header += [f"of {source}" for source in SOURCES]
    lines = []
    for mode, found in told:
        depths = [*found.by_depth[:deepest], *[0.0] * (deepest - len(found.by_depth))]
        shares = [*depths, *(found.by_source.get(source) for source in SOURCES)]
        lines.append([mode, number(found.proposed_per_accepted), *map(percent, shares)])
    return Table("Accepted proposals", header, lines)


def missed_table(report: SpeedReport) -> Table:
    from draftgraph.stats import Reason

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


def save_plot(report: SpeedReport, file: Path) -> Path | None:
    """None: there is no matplotlib, or there are more modes than a picture can show; the page has a chart of those."""
    if len(report.modes) > MOST_MODES or not reporting.has_matplotlib():
        return None
    figure = reporting.new_figure(title_of(report), 12, 4.8)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_speed(left, report)
    modes = [mode for mode in report.modes if mode.sources.shares]
    bottoms = [0.0] * len(modes)
    for index, source in enumerate(SOURCES):
        shares = [mode.sources.shares[source] for mode in modes]
        right.bar([mode.mode for mode in modes], shares, bottom=bottoms, label=source, color=reporting.colour(index))
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares, strict=True)]
    right.set_title("Accepted tokens by source, looping answers included", fontsize="medium")
    right.set(ylim=(0, 1.01), ylabel="share")
    if modes:
        right.tick_params(axis="x", rotation=30)
        right.legend(**reporting.BESIDE)
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
        below = [math.nan if one.low is None else one.ratio - one.low for one in here.values()]
        above = [math.nan if one.high is None else one.high - one.ratio for one in here.values()]
        bars = {"yerr": [below, above], "capsize": 2, "color": reporting.colour(index)}
        axes.bar(places, [one.ratio for one in here.values()], width, label=mode.mode, **bars)
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_title(labelled("Times as fast as plain decoding", report), fontsize="medium")
    if modes:
        axes.legend(**reporting.BESIDE)
