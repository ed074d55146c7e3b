"""How fast many clients are answered: tokens per second, how long the first takes, and the gaps between them.

The scheduler of the server and the engine of vLLM, both without HTTP, in turns, under the same load: a closed one, of
so many clients who ask again once they are answered, or an open one, of requests that arrive at random, so many of
which at most are answered together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, Protocol

import numpy as np

from draftgraph.batching import Job, Limits, Scheduler
from draftgraph.batching.requests import CONFIG_FIELDS
from draftgraph.bench.load_report import PERCENTILES, LoadReport
from draftgraph.bench.methods import ROOM, Exports, MethodFailed, Vllm, failing
from draftgraph.bench.runs import PLAIN, Deadline, Record, Runs, digest, of_kind
from draftgraph.bench.speed import inflated_pair, longest_of, name_of, refuse_unreadable, surroundings
from draftgraph.bench.speed_report import label_of
from draftgraph.bench.stopwatch import Stopwatch
from draftgraph.bench.structures import VLLM_METHODS, mode_named
from draftgraph.bench.worker import drive
from draftgraph.config import GraphConfig
from draftgraph.engine.capture import Captured
from draftgraph.errors import DraftGraphError, UsageError
from draftgraph.files import claimed, held_alone
from draftgraph.notices import progress_bar
from draftgraph.pair import Pair
from draftgraph.text import encode

MODES = ("off", "auto")
CLIENTS = (1, 4, 16, 64)
CLOSED = "closed"
ROUNDS, LEAST = 4, 16  # requests of each client; of all of them


@dataclass(frozen=True)
class Promise:
    """What an answer must keep to count as good."""

    first_ms: float = 1000.0  # until its first token
    token_ms: float = 100.0  # from there on, by token


class Place(NamedTuple):
    """Which measurement."""

    clients: int
    arrivals: str
    mode: str
    repeat: int

    @classmethod
    def of(cls, record: Record) -> Place:
        return cls(*(record[name] for name in cls._fields))


class Engine(Protocol):
    """What is put under load."""

    name: str

    def warm_up(self, load: Record) -> None: ...

    def answer(self, load: Record) -> Record:
        """What `drive` records, and more."""

    def close(self) -> None: ...


class Ours:
    """A mode of this library, in a scheduler that other modes use too. No prompt is answered from the pages of one that
    was read before, as vLLM is told not to."""

    def __init__(self, name: str, scheduler: Scheduler, new_tokens: int, sampling: Mapping[str, Any]) -> None:
        self.name, self._scheduler = name, scheduler
        self._given = dict(sampling) | {"max_tokens": new_tokens, "ignore_eos": True, "config": settings_of(name)}
        self._asked = 0

    def warm_up(self, load: Record) -> None:
        self.answer(load)

    def answer(self, load: Record) -> Record:
        steps, recorded = self._scheduler.figures()["steps"], Captured.made
        found = drive(load, self._add, self._step)
        more = {"steps": self._scheduler.figures()["steps"] - steps, "recorded": Captured.made - recorded}
        return found | more

    def _add(self, number: int, prompt: list[int]) -> None:
        self._asked += 1
        salt = f"{self.name} {self._asked}"
        self._scheduler.submit(Job(str(number), tuple(prompt), cache_salt=salt, **self._given))

    def _step(self) -> Iterable[tuple[int, list[int], bool]]:
        for told in self._scheduler.step():
            if told.error is not None:
                raise DraftGraphError(f"{self.name}: {told.error['message']}")
            yield int(told.id), told.tokens, told.finish_reason is not None

    def close(self) -> None: ...


class Theirs:
    """A method of vLLM, whose engine takes all requests in one process."""

    def __init__(self, method: Vllm, longest: str) -> None:
        self.name, self._method, self._longest = method.name, method, longest
        self._started = False

    def warm_up(self, load: Record) -> None:
        if not self._started:
            with failing():
                self._method.prepare(self._longest)
            self._started = True
        self.answer(load)

    def answer(self, load: Record) -> Record:
        return self._method.answer_all(load, self._longest)

    def close(self) -> None:
        self._method.close()


def settings_of(word: str) -> dict[str, Any]:
    """What a job says to be answered in this mode."""
    config = mode_named(word)
    settings = {name: getattr(config, name) for name in CONFIG_FIELDS}
    if GraphConfig(**settings) != config:
        raise UsageError(f"jobs of a server cannot ask for mode {word}: leave its sizes out, or name its settings")
    return settings


def bench_load(
    pair: Pair,
    tasks: Mapping[str, Sequence[str]],
    out: str | Path,
    *,
    modes: Sequence[str] = MODES,
    clients: Sequence[int] = CLIENTS,
    arrivals: Sequence[str] = (CLOSED,),
    inflate: str | None = None,
    max_new_tokens: int = 128,
    repeats: int = 3,
    temperature: float | None = None,
    top_p: float | None = None,
    seed: int = 0,
    promise: Promise | None = None,
    vllm: str | None = None,
    seconds: float | None = None,
    names: Mapping[str, str | None] | None = None,
) -> LoadReport:
    """Measures every mode, `off` always among them, under the load of so many clients, and keeps each measurement in
    `out`/runs.jsonl. Every answer has as many tokens as were asked for.

    Arrivals are `closed`, a share of what the mode answered in a closed load, as in `70%`, or requests per second, as
    in `2.5`. Called again with the same arguments it goes on where it was; `seconds` stops it in time. Methods of vLLM
    among the modes need the python of an environment that has it, `vllm`.

    Examples:
        >>> report = bench_load(pair, {"sky": ["Why is the sky blue?"]}, "load", clients=[1, 4])  # doctest: +SKIP
        >>> report.cells[4, "closed", "auto"].tokens_per_second  # doctest: +SKIP
    """
    deadline, folder, promise = Deadline(seconds), Path(out).expanduser(), promise or Promise()
    wanted = list(dict.fromkeys([PLAIN, *modes]))
    loads = list(dict.fromkeys([CLOSED, *map(arrivals_named, arrivals)]))
    theirs = [word for word in wanted if word in VLLM_METHODS]
    configs = {word: mode_named(word) for word in wanted if word not in theirs}
    if not clients or min(clients) < 1 or repeats < 1:
        raise UsageError("clients and repeats must be at least 1")
    refuse_unreadable(pair, tasks, max_new_tokens)
    sampling = {"temperature": temperature or 0.0, "top_p": 1.0 if top_p is None else top_p, "seed": seed}
    with claimed(folder, "--out"), held_alone(folder, "bench load"), ExitStack() as stack:
        lender, pair = pair.target, inflated_pair(pair, inflate)
        prompts, longest = in_turns(pair, tasks), longest_of(pair, tasks)
        scheduler = scheduler_for(
            pair, configs.values(), max(clients), len(encode(pair.tokenizer, longest)) + max_new_tokens
        )
        arguments = {"temperature": temperature or None, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
        watch = Stopwatch(pair, {}, arguments)
        exports = stack.enter_context(closing(Exports(pair, lender, folder)))
        engines: list[Engine] = [Ours(word, scheduler, max_new_tokens, sampling) for word in configs]
        for word in theirs:
            method = Vllm(word, watch, exports, vllm, sequences=max(clients), sharing=len(theirs))
            engines.append(stack.enter_context(closing(Theirs(method, longest))))
        shown = {"target": name_of(pair.target), "draft": pair.draft and name_of(pair.draft)} | dict(names or {})
        configuration = {"measures": "load"} | shown | {"inflated": label_of(inflate), "modes": wanted} | arguments
        configuration |= vars(promise) | {"prompts": digest(prompts)} | surroundings(pair)
        with Runs(folder, configuration) as runs:
            places = [
                Place(number, arriving, engine.name, repeat)
                for repeat in range(repeats)
                for number in sorted(set(clients))
                for arriving in loads
                for engine in engines
            ]
            now = {"at": datetime.now(UTC).isoformat(timespec="seconds"), "planned": len(places)}
            runs.append("session", now | {"tasks": {task: len(of_task) for task, of_task in tasks.items()}})
            measure_all({engine.name: engine for engine in engines}, runs, places, prompts, promise, seed, deadline)
            report = LoadReport.of(runs.records)
        if report.cells:
            report.save(folder)
    return report


def arrivals_named(word: str) -> str:
    """How requests arrive.

    >>> arrivals_named("70%"), arrivals_named("2.50")
    ('70%', '2.5')
    """
    try:
        number = math.inf if word == CLOSED else float(word.removesuffix("%"))
    except ValueError:
        number = math.nan
    if not number > 0 or (math.isinf(number) and word != CLOSED):
        raise UsageError(
            f"arrivals must be {CLOSED}, a share as in 70%, or requests per second as in 2.5, not {word!r}"
        )
    return word if word == CLOSED else f"{number:g}{'%' * word.endswith('%')}"


def scheduler_for(pair: Pair, configs: Iterable[GraphConfig], texts: int, longest: int) -> Scheduler:
    """With room for so many texts of this length, and all recorded and measured that its steps need."""
    configs = list(configs)
    slots = texts * (longest + max(ROOM, *(config.nodes for config in configs)))
    scheduler = Scheduler(pair, Limits(texts=texts, slots=slots))
    for config in configs:
        scheduler.batch.prepare(config)
    return scheduler


def in_turns(pair: Pair, tasks: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """The first prompt of every task, then the second of each."""
    longest = max(map(len, tasks.values()))
    turns = [of_task[place] for place in range(longest) for of_task in tasks.values() if place < len(of_task)]
    return [encode(pair.tokenizer, prompt) for prompt in turns]


def measure_all(
    engines: Mapping[str, Engine],
    runs: Runs,
    places: Sequence[Place],
    prompts: list[list[int]],
    promise: Promise,
    seed: int,
    deadline: Deadline,
) -> None:
    """In turns, each warmed up for every number of clients. vLLM, where it fails, is not tried again in this call."""
    measured = {Place.of(record) for record in of_kind(runs.records, "load")}
    missing = [place for place in places if place not in measured]
    warm: set[tuple[str, int]] = set()
    failed: set[str] = set()
    with progress_bar(f"{len(missing)} of {len(places)} measurements") as report:
        for done, place in enumerate(missing):
            if deadline.is_near:
                return
            engine = engines[place.mode]
            load = load_of(place, runs, prompts, seed)
            if place.mode in failed or load is None:
                continue
            try:
                if (place.mode, place.clients) not in warm:  # whatever happens only once
                    engine.warm_up({"prompts": load["prompts"][: place.clients], "clients": place.clients})
                    warm.add((place.mode, place.clients))
                with deadline.watch():
                    found = engine.answer(load)
            except MethodFailed as error:
                failed.add(place.mode)
                runs.append("failed", {"mode": place.mode, "reason": str(error)})
                engine.close()
                continue
            runs.append("load", place._asdict() | figures_of(found, promise, len(prompts)))
            report((done + 1) / len(missing))


def load_of(place: Place, runs: Runs, prompts: list[list[int]], seed: int) -> Record | None:
    """What is asked, and when; the same for all modes of a repeat but for the rate of a share. None: there is no closed
    load to take a share of."""
    count = max(ROUNDS * place.clients, LEAST)
    load: Record = {"prompts": [prompts[number % len(prompts)] for number in range(count)], "clients": place.clients}
    if place.arrivals == CLOSED:
        return load
    rate = float(place.arrivals.removesuffix("%"))
    if place.arrivals.endswith("%"):
        same = [
            record
            for record in of_kind(runs.records, "load")
            if Place.of(record)[:3] == (place.clients, CLOSED, place.mode)
        ]
        if not same:
            return None
        rate *= median(record["requests"] / record["seconds"] for record in same) / 100
    gaps = np.random.default_rng([seed, place.clients, place.repeat]).exponential(1 / rate, count)
    return load | {"arrivals": np.cumsum(gaps).tolist()}


def figures_of(found: Record, promise: Promise, prompts: int) -> Record:
    """Of one measurement. Gaps lie between deliveries, as a reader sees them; a delivery may hold several tokens."""
    first: list[float] = []
    between: list[float] = []
    by_token: list[float] = []
    good = 0
    for due, came in zip(found["due"], found["came"], strict=True):
        times, counts = zip(*came, strict=True)
        behind = sum(counts[1:])
        first.append(1000 * (times[0] - due))
        between.extend(1000 * np.diff(times))
        by_token.append(1000 * (times[-1] - times[0]) / behind if behind else 0.0)
        good += sum(counts) * (first[-1] <= promise.first_ms and by_token[-1] <= promise.token_ms)
    answers = [digest(tokens) for tokens in found["tokens"]]
    rest: Record = {name: found[name] for name in ("steps", "recorded") if name in found}
    return rest | {
        "requests": len(answers),
        "tokens": sum(map(len, found["tokens"])),
        "seconds": found["seconds"],
        "good_tokens": good,
        "first_ms": percentiles(first),
        "between_ms": percentiles(between),
        "token_ms": percentiles(by_token),
        "answers": [[number % prompts, answer] for number, answer in enumerate(answers)],
    }


def percentiles(values: Sequence[float]) -> list[float]:
    return [float(one) for one in np.percentile(values, PERCENTILES)] if len(values) else [0.0] * len(PERCENTILES)
