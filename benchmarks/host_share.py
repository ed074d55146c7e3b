"""How much of a step does the GPU wait for the host?

    python benchmarks/host_share.py --data prompts/ --inflate llama-2-7b
    python benchmarks/host_share.py --data prompts/ --inflate llama-2-7b --trace trace.json

An answer is timed on the clock of the wall, and every recorded computation that it replayed is then timed back to back
on the device: what is left of the wall's time is waiting for the host. With --trace the same is read from a profile:
what one call of the host set off (a recorded pass is one call) is one span of work, and what no span covers is waiting.
A profiler slows the host down, so its share is an upper bound. Figures are those of the median step; means are beside
them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import draftgraph
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import read_tasks
from draftgraph.decoder import Decoding
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


def begun(pair: Pair, prompt: str, mode: str, new_tokens: int) -> Decoding:
    """After its first step."""
    decoding = pair.start(prompt, config=mode_named(mode), max_new_tokens=new_tokens)
    decoding.step()
    torch.cuda.synchronize()
    return decoding


def traced(decoding: Decoding, trace: Path) -> dict[str, float]:
    """The rest of an answer under the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in decoding:
            pass
        torch.cuda.synchronize()
    profiled.export_chrome_trace(str(trace))
    steps = waits_of(spans_of(json.loads(trace.read_text())["traceEvents"]))
    return {
        "profiled_step_ms": median(whole for whole, _ in steps) / 1000,
        "profiled_waiting_share": median(waited / whole for whole, waited in steps),
    }


def timed(decoding: Decoding) -> dict[str, float]:
    """The rest of an answer, and what its replays take back to back."""
    replays: list[Counter[Captured]] = []
    call = Captured.__call__

    def counting(self: Captured) -> Any:
        replays[-1][self] += 1
        return call(self)

    Captured.__call__ = counting  # type: ignore[method-assign]
    try:
        clock = [time.perf_counter()]
        replays.append(Counter())
        for _ in decoding:
            clock.append(time.perf_counter())
            replays.append(Counter())
        torch.cuda.synchronize()
    finally:
        Captured.__call__ = call  # type: ignore[method-assign]
    seconds = {computation: back_to_back(computation) for computation in set().union(*replays)}
    walls = [end - start for start, end in pairwise(clock)]
    busy = [sum(count * seconds[one] for one, count in step.items()) for step in replays]
    waits = [wall - device for wall, device in zip(walls, busy, strict=False)]
    return {
        "steps": len(walls),
        "tokens_per_step": (decoding.stats.new_tokens - 1) / len(walls),
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
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--trace", type=Path, help="also profile, and keep the last profile here for chrome://tracing")
    asked = parser.parse_args()
    pair = draftgraph.load(asked.target, asked.draft, device="cuda")
    pair = inflated_pair(pair, asked.inflate)
    tasks = read_tasks([asked.data], asked.tasks.split(","), prompts=1)
    for mode in asked.modes.split(","):
        for task, (prompt,) in tasks.items():
            pair.generate(prompt, config=mode_named(mode), max_new_tokens=asked.new_tokens)  # records what it needs
            found = timed(begun(pair, prompt, mode, asked.new_tokens))
            if asked.trace:
                found |= traced(begun(pair, prompt, mode, asked.new_tokens), asked.trace)
            print(json.dumps({"mode": mode, "task": task} | found), flush=True)


if __name__ == "__main__":
    main()
