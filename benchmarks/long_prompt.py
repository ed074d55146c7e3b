"""How long does a long prompt that arrives hold up the answers of others?

    python benchmarks/long_prompt.py --data prompts/ --inflate llama-2-7b --tokens 4000 --streams 1,16,63

So many streams run through the scheduler of the server; once all have begun, a prompt of so many tokens comes. Told are
the gaps between the deliveries of the streams before it came and while it was read, and how long its first token took.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import numpy as np

import draftgraph
from draftgraph.batching import Job, Scheduler
from draftgraph.bench.load import in_turns, percentiles, scheduler_for, settings_of
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import read_tasks

LONG = "long"
USUAL = 24  # steps of the streams alone that are looked at


def gaps_until(scheduler: Scheduler, last: dict[str, float], steps: float, awaited: str | None = None) -> list[float]:
    """Milliseconds between deliveries of each stream, for so many steps, or until somebody has its first token."""
    gaps: list[float] = []
    done = False
    while not done and steps > 0:
        steps -= 1
        told = scheduler.step()
        now = time.perf_counter()
        for one in told:
            if one.error is not None:
                raise SystemExit(one.error["message"])
            if one.tokens and one.id in last:
                gaps.append(1000 * (now - last[one.id]))
            if one.tokens:
                last[one.id] = now
                done = done or one.id == awaited
    return gaps


def measured(scheduler: Scheduler, prompts: list[list[int]], mode: str, streams: int, tokens: int) -> dict[str, Any]:
    longest = min(4 * tokens, (scheduler.window or 4 * tokens) - max(tokens, *map(len, prompts)))
    given: dict[str, Any] = {"max_tokens": longest, "ignore_eos": True, "config": settings_of(mode)}
    salt = f"{mode} {streams} {time.monotonic()}"
    for number, prompt in enumerate(islice(cycle(prompts), streams)):
        scheduler.submit(Job(str(number), tuple(prompt), cache_salt=salt, **given))
    last: dict[str, float] = {}
    while len(last) < streams:
        gaps_until(scheduler, last, 1)
    before = gaps_until(scheduler, last, USUAL)
    text = tuple(islice(cycle(chain.from_iterable(prompts)), tokens))
    start = time.perf_counter()
    scheduler.submit(Job(LONG, text, cache_salt=salt, **given))
    during = gaps_until(scheduler, last, np.inf, LONG)
    seconds = time.perf_counter() - start
    for id in [LONG, *map(str, range(streams))]:
        scheduler.cancel(id)
    figures = {"gap_ms": percentiles(before), "gap_while_read_ms": percentiles(during)}
    return figures | {"longest_ms": max(during, default=0.0), "first_token_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a file of prompts for each task")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--inflate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--modes", default="off,auto")
    parser.add_argument("--streams", default="1,16,63")
    parser.add_argument("--tokens", type=int, default=4000, help="of the prompt that arrives")
    parser.add_argument("--repeats", type=int, default=3, help="the first is for what happens only once")
    asked = parser.parse_args()
    pair = inflated_pair(draftgraph.load(asked.target, asked.draft, device=asked.device), asked.inflate)
    prompts = in_turns(pair, read_tasks([asked.data], [], prompts=4))
    modes, levels = asked.modes.split(","), [int(number) for number in asked.streams.split(",")]
    longest = max(map(len, prompts)) + asked.tokens // 2
    scheduler = scheduler_for(pair, [mode_named(mode) for mode in modes], max(levels) + 1, longest)
    for mode in modes:
        for streams in levels:
            for repeat in range(asked.repeats):
                found = measured(scheduler, prompts, mode, streams, asked.tokens)
                if repeat or asked.repeats == 1:
                    print(json.dumps({"mode": mode, "streams": streams, "tokens": asked.tokens} | found), flush=True)


if __name__ == "__main__":
    main()
