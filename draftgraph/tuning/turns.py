"""Settings against plain decoding, in turns on every prompt: a machine that slows down slows all of them alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from draftgraph.bench.intervals import Speed, geometric_mean
from draftgraph.bench.runs import PLAIN, Place, Record
from draftgraph.bench.speed_report import mode_figures, times_of
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.config import GraphConfig
from draftgraph.pair import Pair
from draftgraph.text import encode

# Of a run, what the figures need.
KEPT = (
    "ms_per_token",
    "first_token_seconds",
    "steps",
    "new_tokens",
    "nodes",
    "draft_passes",
    "accepted_by_source",
    "loops",
    "same",
    "tie",
)


@dataclass(frozen=True)
class Outcome:
    """How a setting did. A prompt's times are medians of its repeats, a task's speed is that of its median prompt."""

    speed: Speed  # against plain decoding of the same prompts, in turns
    tokens_per_pass: float
    nodes_per_pass: float
    draft_passes: float  # per pass of the target
    tasks: dict[str, float]  # how many times as fast, by task
    answers: int
    same: int  # with the tokens of plain decoding
    ties: int  # others, that part where two tokens were as good as tied

    @classmethod
    def of(cls, runs: Sequence[Record], mode: str) -> Outcome:
        own, plain = [run for run in runs if run["mode"] == mode], times_of(runs, PLAIN)
        found = mode_figures(mode, own, plain, ())
        ratios: dict[str, list[float]] = {}
        for prompt, taken in times_of(own, mode).items():
            ratios.setdefault(prompt[0], []).append(plain[prompt] / taken)
        tasks = {task: geometric_mean({task: of_task}, np.median).ratio for task, of_task in ratios.items()}
        names = ("tokens_per_pass", "nodes_per_pass", "draft_passes")
        figures = {name: getattr(found.overall, name) for name in names}
        counts = {"answers": found.answers, "same": sum(run["same"] for run in own), "ties": found.ties}
        return cls(speed=geometric_mean(ratios, np.median), tasks=tasks, **figures, **counts)

    @property
    def step_cost(self) -> float:
        """A step, draft and check together, in passes of the target over one token."""
        return self.tokens_per_pass / self.speed.ratio


class Turns:
    """Decodes the prompts of all tasks, in modes that callers name: `off` and `auto` are there."""

    def __init__(self, pair: Pair, tasks: Mapping[str, Sequence[str]], max_new_tokens: int) -> None:
        self.tasks = tasks
        self.prompts = sum(map(len, tasks.values()))
        self.modes = {PLAIN: GraphConfig(mode="off"), "auto": GraphConfig()}
        self._watch = Stopwatch(pair, self.modes, {"max_new_tokens": max_new_tokens, "seed": 0})
        self._plain: dict[str, list[int]] = {}

    def warm_up(self) -> None:
        """Whatever happens only once, in every mode that was named so far; `auto` keeps the prices of now."""
        tokenizer = self._watch.pair.tokenizer
        prompts = (prompt for of_task in self.tasks.values() for prompt in of_task)
        longest = max(prompts, key=lambda prompt: len(encode(tokenizer, prompt)))
        for mode in self.modes:
            self._watch.warm_up(mode, longest)

    def task(self, task: str, modes: Sequence[str], repeat: int = 0) -> Iterator[Record]:
        """Plain decoding and these modes, prompt by prompt."""
        for number, prompt in enumerate(self.tasks[task]):
            for mode in (PLAIN, *modes):
                run = self._watch.run(mode, prompt, self._plain.get(prompt))
                if mode == PLAIN:
                    self._plain.setdefault(prompt, run["tokens"])
                yield Place(task, number, mode, repeat)._asdict() | {name: run[name] for name in KEPT}
