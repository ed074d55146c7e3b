"""The figures of `bench run`: speed against plain decoding by task, and where accepted tokens came from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from draftgraph.bench.gaps import Rescored
from draftgraph.bench.intervals import Speed, geometric_mean
from draftgraph.bench.runs import PLAIN, Place, Record, of_kind
from draftgraph.bench.scores import TaskScore, scores_of
from draftgraph.models.cache import replacing
from draftgraph.stats import SOURCES

ALL = "all"


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
    first_token_ms: float  # prefill and the first step
    speed: Speed  # against plain decoding of the same prompts
    tokens_per_pass: float
    nodes_per_pass: float
    draft_passes: float  # per pass of the target


@dataclass(frozen=True)
class Sources:
    """Shares of accepted tokens, in all answers or in those that do not loop."""

    answers: int
    shares: dict[str, float]  # by source; empty: nothing was accepted
    undrafted: float | None  # merged, copied or recycled: the draft had not proposed them at that node

    @classmethod
    def of(cls, runs: Sequence[Record]) -> Sources:
        counts = {source: sum(run["accepted_by_source"].get(source, 0) for run in runs) for source in SOURCES}
        if not (accepted := sum(counts.values())):
            return cls(len(runs), {}, None)
        shares = {source: count / accepted for source, count in counts.items()}
        return cls(len(runs), shares, 1.0 - shares["draft"])


@dataclass(frozen=True)
class ModeFigures:
    mode: str
    prices: str | None  # that it decided by
    tasks: list[Figures]
    overall: Figures
    sources: Sources
    sources_without_loops: Sources
    answers: int
    same: int  # answers with the tokens of plain decoding
    ties: int  # others that part where two tokens were as good as tied
    warm_up_seconds: float | None
    extra_bytes: int | None  # beside the weights, at most; None: not on a GPU
    rescored: Rescored | None  # in float32, where the target is in half precision


@dataclass(frozen=True)
class PeerFigures:
    """A method of `transformers` on one prompt of a task, once; speed against plain decoding of that prompt here."""

    method: str
    task: str
    ms_per_token: float | None
    first_token_ms: float | None
    speed: float | None
    same: bool | None  # None: sampled
    error: str | None


@dataclass(frozen=True)
class SpeedReport:
    """What `bench_run` measured."""

    configuration: Record
    measured: int
    planned: int
    modes: list[ModeFigures]
    peers: list[PeerFigures]
    unscored: int  # answers in half precision that wait to be scored in float32
    scores: list[TaskScore]  # of tasks with references

    @classmethod
    def of(cls, records: Sequence[Record]) -> SpeedReport:
        configuration = {name: value for name, value in records[0].items() if name != "kind"}
        runs, sessions = of_kind(records, "run"), of_kind(records, "session")
        plain = times_of(runs, PLAIN)
        names = [mode for mode in configuration["modes"] if any(run["mode"] == mode for run in runs)]
        modes = [mode_figures(mode, [run for run in runs if run["mode"] == mode], plain, records) for mode in names]
        peers = [peer_figures(peer, plain) for peer in of_kind(records, "peer")]
        planned = sessions[-1]["planned"] if sessions else len(runs)
        return cls(configuration, len(runs), planned, modes, peers, answers_to_rescore(records), scores_of(runs))

    @property
    def label(self) -> str | None:
        label: str | None = self.configuration.get("inflated")
        return label

    def mode(self, name: str) -> ModeFigures:
        return next(figures for figures in self.modes if figures.mode == name)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def save(self, folder: Path) -> None:
        """Writes report.json, report.md and, where there is matplotlib, report.png."""
        from draftgraph.bench.speed_plot import save_plot
        from draftgraph.bench.speed_tables import to_markdown

        plot = save_plot(self, folder / "report.png") if self.modes else None
        for name, content in (
            ("report.json", json.dumps(self.to_dict(), indent=2) + "\n"),
            ("report.md", to_markdown(self, None if plot is None else plot.name)),
        ):
            with replacing(folder / name) as partial:
                partial.write_text(content, encoding="utf-8")


Prompt = tuple[str, int]  # of a task, by number


def answers_to_rescore(records: Sequence[Record]) -> int:
    """Of the prompts of the last call, if it is one that scores answers in float32."""
    sessions = of_kind(records, "session")
    if not sessions or not sessions[-1].get("rescores"):
        return 0
    asked = sessions[-1]["prompts"]
    answers = [run for run in of_kind(records, "run") if "tokens" in run and run["prompt"] < asked.get(run["task"], 0)]
    return len({Place.of(run) for run in answers} - {Place.of(done) for done in of_kind(records, "rescored")})


def times_of(runs: Sequence[Record], mode: str, figure: str = "ms_per_token") -> dict[Prompt, float]:
    """The median of every prompt's repeats."""
    repeats: dict[Prompt, list[float]] = {}
    for run in runs:
        if run["mode"] == mode:
            repeats.setdefault((run["task"], run["prompt"]), []).append(run[figure])
    return {prompt: median(values) for prompt, values in repeats.items()}


def mode_figures(
    mode: str, runs: Sequence[Record], plain: dict[Prompt, float], records: Sequence[Record]
) -> ModeFigures:
    ratios: dict[str, list[float]] = {}
    for prompt, time in times_of(runs, mode).items():
        ratios.setdefault(prompt[0], []).append(plain[prompt] / time)
    tasks = [task_figures(mode, task, [run for run in runs if run["task"] == task], ratios[task]) for task in ratios]
    warm_ups = [record for record in of_kind(records, "warm-up") if record["mode"] == mode]
    held = [record["extra_bytes"] for record in (*warm_ups, *runs) if "extra_bytes" in record]
    return ModeFigures(
        mode,
        warm_ups[-1]["prices"] if warm_ups else None,
        tasks,
        mean_of(tasks, geometric_mean(ratios)),
        Sources.of(runs),
        Sources.of([run for run in runs if not run["loops"]]),
        len(runs),
        sum(run["same"] for run in runs),
        sum(run["tie"] for run in runs),
        max((record["seconds"] for record in warm_ups), default=None),  # later starts find prices on disk
        max(held, default=None),
        Rescored.of(mode, of_kind(records, "rescored"), PLAIN),
    )


def task_figures(mode: str, task: str, runs: Sequence[Record], ratios: Sequence[float]) -> Figures:
    passes = sum(run["steps"] for run in runs)
    return Figures(
        task,
        len(ratios),
        fmean(times_of(runs, mode).values()),
        1000 * fmean(times_of(runs, mode, "first_token_seconds").values()),
        geometric_mean({task: ratios}),
        sum(run["new_tokens"] for run in runs) / passes,
        sum(run["nodes"] for run in runs) / passes,
        sum(run["draft_passes"] for run in runs) / passes,
    )


def mean_of(tasks: Sequence[Figures], speed: Speed) -> Figures:
    """Every task counts the same."""
    names = ("ms_per_token", "first_token_ms", "tokens_per_pass", "nodes_per_pass", "draft_passes")
    means: dict[str, Any] = {name: fmean(getattr(task, name) for task in tasks) for name in names}
    return Figures(task=ALL, prompts=sum(task.prompts for task in tasks), speed=speed, **means)


def peer_figures(peer: Record, plain: dict[Prompt, float]) -> PeerFigures:
    time, first, here = peer.get("ms_per_token"), peer.get("first_token_seconds"), plain.get((peer["task"], 0))
    return PeerFigures(
        peer["method"],
        peer["task"],
        time,
        None if first is None else 1000 * first,
        here / time if here and time else None,
        peer.get("same"),
        peer.get("error"),
    )
