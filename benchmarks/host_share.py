"""How much of a step does the GPU wait for the host?

    python benchmarks/host_share.py --data prompts/ --inflate llama-2-7b
    python benchmarks/host_share.py --data prompts/ --inflate llama-2-7b --texts 1,4,16,64 --trace trace.json

Answers are timed on the clock of the wall, from when all texts have begun until the first of them ends, and every
recorded computation that they replayed is then timed back to back on the device: what is left of the wall's time is
waiting for the host. With --trace the same is read from a profile: what one call of the host set off (a recorded pass
is one call) is one span of work, and what no span covers is waiting. A profiler slows the host down, so its share is an
upper bound. Figures are those of the median step; means are beside them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import cycle, islice, pairwise, product
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import draftgraph
from draftgraph.batching import Job, Scheduler
from draftgraph.bench.load import in_turns, scheduler_for, settings_of
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import read_tasks
from draftgraph.engine.capture import Captured
from draftgraph.pair import Pair

ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
REPLAYS = 30

Span = tuple[float, float]


def spans_of(events: Iterable[dict[str, Any]]) -> list[Span]:
    """Start and end of what each call of the host set off, in microseconds."""
    calls: dict[Any, Span] = {}
    for event in events:
        if event.get("cat") in ON_DEVICE:
            begin, end = event["ts"], event["ts"] + event["dur"]
            known = calls.setdefault(event["args"]["correlation"], (begin, end))
            calls[event["args"]["correlation"]] = min(known[0], begin), max(known[1], end)
    return sorted(calls.values())


def waits_of(spans: list[Span]) -> list[tuple[float, float]]:
    """Of each step, from one pass of the target (the longest spans) to the next: its length, and the gaps in it."""
    longest = max(end - begin for begin, end in spans)
    steps: list[tuple[float, float]] = []
    started, waited, busy_until = None, 0.0, spans[0][0]
    for begin, end in spans:
        waited += max(0.0, begin - busy_until)
        if end - begin > longest / 2:
            if started is not None:
                steps.append((begin - started, waited))
            started, waited = begin, 0.0
        busy_until = max(busy_until, end)
    return steps


def alone(pair: Pair, prompt: str, mode: str, new_tokens: int) -> Iterator[int]:
    """The tokens of every step but the first."""
    decoding = pair.start(prompt, config=mode_named(mode), max_new_tokens=new_tokens)
    decoding.step()
    torch.cuda.synchronize()
    return map(len, decoding)


def together(scheduler: Scheduler, prompts: list[list[int]], mode: str, new_tokens: int, texts: int) -> Iterator[int]:
    """The same of many texts, from when all have begun until the first ends."""
    given: dict[str, Any] = {"max_tokens": new_tokens, "ignore_eos": True, "config": settings_of(mode)}
    waiting = {str(number) for number in range(texts)}
    for number, prompt in enumerate(islice(cycle(prompts), texts)):
        scheduler.submit(Job(str(number), tuple(prompt), cache_salt=str(time.monotonic()), **given))
    while waiting:
        waiting -= {told.id for told in scheduler.step() if told.tokens}
    torch.cuda.synchronize()
    return counted(scheduler)


def counted(scheduler: Scheduler) -> Iterator[int]:
    ended = False
    while not ended:
        told = scheduler.step()
        ended = any(one.finish_reason is not None for one in told)
        yield sum(len(one.tokens) for one in told)


def finish(scheduler: Scheduler | None) -> None:
    """What is left of the answers. Nobody reads them: what was timed was repeated in the middle of them."""
    while scheduler is not None and scheduler.busy:
        scheduler.step()


def traced(steps: Iterator[int], trace: Path) -> dict[str, float]:
    """Steps under the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in steps:
            pass
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    found = waits_of(spans_of(json.loads(trace.read_text())["traceEvents"]))
    return {
        "profiled_step_ms": median(whole for whole, _ in found) / 1000,
        "profiled_waiting_share": median(waited / whole for whole, waited in found),
    }


def timed(steps: Iterator[int]) -> dict[str, float]:
    """Steps, and what their replays take back to back."""
    replays: list[Counter[Captured]] = []
    tokens: list[int] = []
    call = Captured.__call__

    def counting(self: Captured) -> Any:
        replays[-1][self] += 1
        return call(self)

    Captured.__call__ = counting  # type: ignore[method-assign]
    try:
        clock = [time.perf_counter()]
        replays.append(Counter())
        for count in steps:
            clock.append(time.perf_counter())
            replays.append(Counter())
            tokens.append(count)
        torch.cuda.synchronize()
    finally:
        Captured.__call__ = call  # type: ignore[method-assign]
    seconds = {computation: back_to_back(computation) for computation in set().union(*replays)}
    walls = [end - start for start, end in pairwise(clock)]
    busy = [sum(count * seconds[one] for one, count in step.items()) for step in replays]
    waits = [wall - device for wall, device in zip(walls, busy, strict=False)]
    return {
        "steps": len(walls),
        "tokens_per_step": sum(tokens) / len(walls),
        "step_ms": 1000 * median(walls),
        "mean_step_ms": 1000 * mean(walls),
        "device_ms": 1000 * median(busy[: len(walls)]),
        "waiting_ms": 1000 * median(waits),
        "waiting_share": median(wait / wall for wait, wall in zip(waits, walls, strict=True)),
        "mean_waiting_share": sum(waits) / sum(walls),
    }


def back_to_back(computation: Captured) -> float:
    """Seconds of one replay among many."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    computation()
    begin.record()
    for _ in range(REPLAYS):
        computation()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / REPLAYS / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a file of prompts for each task")
    parser.add_argument("--tasks", default="gsm8k,alpaca,mt_bench", help="one prompt of each is answered")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--inflate")
    parser.add_argument("--modes", default="off,auto")
    parser.add_argument("--texts", default="1", help="answered together")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--trace", type=Path, help="also profile, and keep the last profile here for chrome://tracing")
    asked = parser.parse_args()
    pair = draftgraph.load(asked.target, asked.draft, device="cuda")
    pair = inflated_pair(pair, asked.inflate)
    tasks = read_tasks([asked.data], asked.tasks.split(","), prompts=1)
    modes, levels = asked.modes.split(","), [int(number) for number in asked.texts.split(",")]
    prompts, scheduler = in_turns(pair, tasks), None
    if max(levels) > 1:
        longest = max(map(len, prompts)) + asked.new_tokens
        scheduler = scheduler_for(pair, [mode_named(mode) for mode in modes], max(levels), longest)

    def measure(run: Callable[[], Iterator[int]], **what: Any) -> None:
        for _ in run():  # records what it needs
            pass
        finish(scheduler)
        found = timed(run())  # computations are timed as the first to end left them: all texts are there
        finish(scheduler)
        if asked.trace:
            found |= traced(run(), asked.trace)
            finish(scheduler)
        print(json.dumps(what | found), flush=True)

    for mode, texts in product(modes, levels):
        if texts > 1 and scheduler is not None:
            measure(partial(together, scheduler, prompts, mode, asked.new_tokens, texts), mode=mode, texts=texts)
            continue
        for task, (prompt,) in tasks.items():
            measure(partial(alone, pair, prompt, mode, asked.new_tokens), mode=mode, texts=1, task=task)


if __name__ == "__main__":
    main()
