"""The figures of `bench run`: speed against plain decoding by task, and where accepted tokens came from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import numpy as np

from draftgraph.bench.reporting import write_files
from draftgraph.bench.runs import PLAIN, Place, Record, can_be_rescored, last_session, of_kind
from draftgraph.bench.sameness import Rescored
from draftgraph.bench.scores import TaskScore, scores_of
from draftgraph.stats import SOURCES

if TYPE_CHECKING:
    from draftgraph.bench.page import Part

ALL = "all"
RESAMPLES = 10_000
FEWER_RESAMPLES = 1_000  # where every prompt of every cell has its own
PERCENTILES = (2.5, 97.5)


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
    """What every figure of an inflated target must say.

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
        """None: nothing was accepted, or nothing is told."""
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
    same: int | None  # answers with the tokens of plain decoding; None: no claim, another library has sampled them
    ties: int  # others that part where two tokens were as good as tied
    warm_up_seconds: float | None
    extra_bytes: int | None  # beside the weights, at most; None: not on a GPU
    resident_bytes: int | None  # of the process, at most, so far; None: on a GPU, or not told
    joules_per_token: float | None  # of the whole device, prefill included; None: it does not count
    rescored: Rescored | None  # in float32, where the target is in half precision
    library: str | None  # that it is a method of, with its version; None: this one

    @property
    def by_task(self) -> dict[str, Figures]:
        """The mean of all among them."""
        return {figures.task: figures for figures in (*self.tasks, self.overall)}


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
            latencies[-1] if latencies else None,
            {one["mode"]: one["example"] for one in warm_ups if "example" in one},
        )

    @property
    def label(self) -> str | None:
        label: str | None = self.configuration.get("inflated")
        return label

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
        """But for the examples, which are pictures."""
        return {name: value for name, value in asdict(self).items() if name != "examples"}

    def to_markdown(self, plot: str | None = None) -> str:
        """With a link to the `plot` where there is one."""
        from draftgraph.bench.speed_tables import to_markdown

        return to_markdown(self, plot)

    def to_part(self) -> Part:
        """Of a page."""
        from draftgraph.bench.page import speed_part

        return speed_part(self)

    def save(self, folder: Path) -> None:
        """Writes report.json, report.md, report.html and, where there is matplotlib, report.png."""
        from draftgraph.bench.page import page
        from draftgraph.bench.speed_tables import save_plot

        plot = save_plot(self, folder / "report.png") if self.modes else None
        data = json.dumps(self.to_dict(), indent=2) + "\n"
        text = self.to_markdown(None if plot is None else plot.name)
        write_files(folder, {"report.json": data, "report.md": text, "report.html": page([self.to_part()])})


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
    claims = [run["same"] for run in runs if run["same"] is not None]
    return ModeFigures(
        mode,
        warm_ups[-1]["prices"] if warm_ups else None,
        tasks,
        mean_of(tasks, geometric_mean(ratios), noise_of(list(repeats_of(runs, mode).values()))),
        Sources.of(runs),
        Sources.of([run for run in runs if not run["loops"]]),
        Acceptance.of(runs),
        missed_shares(runs),
        len(runs),
        sum(claims) if claims else None,
        sum(run["tie"] for run in runs),
        max((record["seconds"] for record in warm_ups), default=None),  # later starts find prices on disk
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
    """A sum over a sum, of runs that tell both."""
    told = [run for run in runs if figure in run and unit in run]
    return sum(run[figure] for run in told) / sum(run[unit] for run in told) if told else None


def largest(records: Sequence[Record], figure: str) -> int | None:
    return max((record[figure] for record in records if figure in record), default=None)


def missed_shares(runs: Sequence[Record]) -> dict[str, float]:
    counts = Counter[str]()
    for run in runs:
        counts.update(run.get("missed", {}))
    return {reason: count / counts.total() for reason, count in counts.most_common()}


def total_by_source(runs: Sequence[Record], figure: str) -> dict[str, int]:
    return {source: sum(run.get(figure, {}).get(source, 0) for run in runs) for source in SOURCES}
