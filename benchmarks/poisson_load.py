"""Does the simulation of `capacity.py` foresee a real load?

    OMP_NUM_THREADS=1 python benchmarks/poisson_load.py --out docs/results/capacity

The scheduler of the server with the default pair, on this CPU. First its steps are timed with 1, 4 and 16 texts in
them, and prompts of some lengths; then requests come at random times, and what they get is compared with what the
simulation says of the same requests. Time is the processor time of this process, with leaps where there is nothing to
do: others may use the machine meanwhile.
"""

from __future__ import annotations

import time

time.perf_counter = time.monotonic = time.process_time  # before anybody asks for it: the scheduler decides by the clock

import argparse  # noqa: E402
import json  # noqa: E402
import random  # noqa: E402
from dataclasses import asdict, replace  # noqa: E402
from itertools import count  # noqa: E402
from pathlib import Path  # noqa: E402
from statistics import fmean, median  # noqa: E402
from typing import Any  # noqa: E402

import numpy as np  # noqa: E402
import torch  # noqa: E402
from capacity import Costs, Habits, Replica, Request, User, percentile, replayed  # noqa: E402

import draftgraph  # noqa: E402
from draftgraph.batching import Job, Limits, Scheduler  # noqa: E402
from draftgraph.bench.tasks import read_tasks  # noqa: E402
from draftgraph.text import encode  # noqa: E402

LEVELS, STEPS = (1, 4, 16), 48
LENGTHS = (16, 48, 96, 160)
MODES = ("off", "auto")


class Machine:
    """A scheduler, and prompts of any length that it has never seen."""

    def __init__(self, texts: int) -> None:
        pair = draftgraph.load()
        self.scheduler = Scheduler(pair, Limits(texts=texts))
        self.scheduler.batch.prepare(self.scheduler.config)
        prompts = [prompt for task in read_tasks(["own"], [], 8).values() for prompt in task]
        self._prompts = [tuple(encode(pair.tokenizer, prompt)) for prompt in prompts]
        self._numbers = count()

    def job(self, length: int, answer: int, mode: str) -> Job:
        """Another prompt every time, repeated up to its length; with a salt of its own nothing of it is known."""
        number = next(self._numbers)
        prompt = self._prompts[number % len(self._prompts)]
        tokens = (prompt * (1 + length // len(prompt)))[-length:]
        name = str(number)
        return Job(name, tokens, cache_salt=name, max_tokens=answer, ignore_eos=True, config={"mode": mode})

    def drain(self) -> None:
        while self.scheduler.busy:
            self.scheduler.step()

    def steps(self, texts: int, mode: str) -> tuple[float, float]:
        """Milliseconds of a step with so many texts, all of whose prompts are read, and tokens for each."""
        for _ in range(texts):
            self.scheduler.submit(self.job(48, 4 * STEPS, mode))
        while not all(one.began for one in self.scheduler.batch.running) or self.scheduler.batch.waiting:
            self.scheduler.step()
        taken, tokens = [], []
        while len(self.scheduler.batch.running) == texts and len(taken) < 2 * STEPS:
            start = time.perf_counter()
            told = self.scheduler.step()
            taken.append(time.perf_counter() - start)
            tokens.append(sum(len(one.tokens) for one in told) / texts)
        self.end()
        return 1e3 * fmean(taken[STEPS // 4 :]), fmean(tokens[STEPS // 4 :])

    def end(self) -> None:
        for one in [task.job.id for task in self.scheduler._tasks.values()]:
            self.scheduler.cancel(one)

    def first_token(self, length: int, mode: str) -> float:
        """Milliseconds that a prompt of this length waits for it alone."""
        start = time.perf_counter()
        self.scheduler.submit(self.job(length, 2, mode))
        while not any(one.tokens for one in self.scheduler.step()):
            pass
        found = 1e3 * (time.perf_counter() - start)
        self.drain()
        return found

    def reading(self, mode: str, step_ms: float) -> tuple[float, float]:
        """Milliseconds of a prompt and of each of its tokens: a pass reads it, a step gives the first token."""
        times = [(length, self.first_token(length, mode)) for length in LENGTHS for _ in range(5)]
        middle = [median(ms for known, ms in times if known == length) for length in LENGTHS]
        token, once = np.polyfit(LENGTHS, middle, 1)
        return max(0.0, float(once) - 2 * step_ms), float(token)

    def costs(self) -> Costs:
        for mode in MODES:  # what happens only once
            self.steps(LEVELS[-1], mode)
        plain = [self.steps(texts, "off")[0] for texts in LEVELS]
        drafted = [self.steps(texts, "auto") for texts in LEVELS]
        own, with_draft = (self.reading(mode, plain[0]) for mode in MODES)
        more = [max(0.0, one - other) for one, other in zip(with_draft, own, strict=True)]
        ms, tokens = zip(*drafted, strict=True)
        return Costs(LEVELS, tuple(plain), ms, tokens, *own, *more)

    def answered(self, requests: list[Request], mode: str) -> list[Request]:
        """Requests at known times, by the clock."""
        jobs = [self.job(one.prompt, one.answer, mode) for one in requests]
        by_name = {job.id: one for job, one in zip(jobs, requests, strict=True)}
        coming = list(zip(requests, jobs, strict=True))[::-1]
        start = time.perf_counter()
        while coming or self.scheduler.busy:
            now = time.perf_counter() - start
            if not self.scheduler.busy and coming[-1][0].asked > now:
                start -= coming[-1][0].asked - now
                continue
            while coming and coming[-1][0].asked <= now:
                self.scheduler.submit(coming.pop()[1])
            for told in self.scheduler.step():
                one, at = by_name[told.id], time.perf_counter() - start
                if told.tokens and not one.first:
                    one.first = at
                if told.finish_reason is not None:
                    one.ended = at
        return requests


def arrivals(rate: float, number: int, habits: Habits) -> list[Request]:
    """First turns of strangers, so many a second."""
    draw, now, found = random.Random(1), 0.0, []
    for name in range(number):
        now += draw.expovariate(rate)
        found.append(User(str(name), habits, draw).asks(now))
    return found


def told(requests: list[Request]) -> dict[str, float]:
    waits, steps = [one.wait for one in requests], [one.per_token for one in requests]
    return {
        "tokens per second": sum(one.answer for one in requests) / max(one.ended for one in requests),
        "first token, mean": fmean(waits),
        "first token, 90%": percentile(waits, 0.9),
        "per token, mean": fmean(steps),
        "per token, 90%": percentile(steps, 0.9),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for check.json")
    parser.add_argument("--rates", default="2,5", help="requests a second")
    parser.add_argument("--requests", type=int, default=200)
    given = parser.parse_args()
    torch.set_num_threads(1)
    machine, habits = Machine(LEVELS[-1]), Habits(message=60.0, answer=60.0, longest_answer=200)
    costs = machine.costs()
    found: dict[str, Any] = {"costs": asdict(costs), "requests": given.requests, "loads": []}
    print(json.dumps(found["costs"]), flush=True)
    for rate in map(float, given.rates.split(",")):
        for mode in MODES:
            asked = arrivals(rate, given.requests, habits)
            predicted = told(replayed(Replica(costs, mode == "auto", LEVELS[-1]), [replace(one) for one in asked]))
            measured = told(machine.answered(asked, mode))
            found["loads"].append({"rate": rate, "mode": mode, "predicted": predicted, "measured": measured})
            print(json.dumps(found["loads"][-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "check.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
