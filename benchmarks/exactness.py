"""Is every answer that of plain decoding alone, token for token?

    python benchmarks/exactness.py --data prompts/ --inflate llama-2-7b
    python benchmarks/exactness.py --data prompts/ --dtype float16 --styles sampled --clients ""

Every prompt is answered in every mode, greedy and sampled. Then the same prompts are answered by the scheduler of the
server for so many clients at once, with and without kept prefixes. Exit status 1: an answer differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import draftgraph
from draftgraph.batching import Job, Limits, Scheduler
from draftgraph.bench.load import settings_of
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.structures import mode_named
from draftgraph.bench.tasks import read_tasks
from draftgraph.pair import Pair
from draftgraph.text import encode

STYLES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.7, "top_p": 0.95, "seed": 1}}
Answers = list[list[int]]


def alone(pair: Pair, prompts: list[str], mode: str, new_tokens: int, style: dict[str, Any]) -> tuple[Answers, Any]:
    """One prompt after the other: the answers, and what was measured."""
    config, answers, seconds, passes = mode_named(mode), [], 0.0, 0.0
    pair.generate(prompts[0], max_new_tokens=8, config=config, **style)  # whatever happens only once
    for prompt in prompts:
        out = pair.generate(prompt, max_new_tokens=new_tokens, config=config, **style)
        answers.append(list(out.token_ids))
        seconds += sum(taken for name, taken in out.stats.seconds.items() if name != "prefill")
        passes += out.stats.new_tokens / out.stats.mean_accepted_length
    tokens = sum(map(len, answers))
    return answers, {
        "ms_per_token": round(1000 * seconds / tokens, 3),
        "tokens_per_pass": round(tokens / passes, 2),
        "exact": out.stats.exact,
    }


def together(
    scheduler: Scheduler, prompts: list[list[int]], mode: str, new_tokens: int, clients: int, keeps: bool
) -> tuple[Answers, float]:
    """So many at a time; `keeps`: prompts may be answered from pages that were read before."""
    answers: Answers = [[] for _ in prompts]
    waiting, running, start = list(range(len(prompts))), 0, time.monotonic()
    while waiting or running:
        while waiting and running < clients:
            number = waiting.pop(0)
            salt = "" if keeps else f"{mode} {clients} {number}"
            given = {"max_tokens": new_tokens, "config": settings_of(mode), "cache_salt": salt}
            scheduler.submit(Job(str(number), tuple(prompts[number]), **given))
            running += 1
        for told in scheduler.step():
            if told.error is not None:
                sys.exit(f"{mode}: {told.error['message']}")
            answers[int(told.id)] += told.tokens
            running -= told.finish_reason is not None
    return answers, time.monotonic() - start


def compared(found: Answers, expected: Answers) -> dict[str, Any]:
    differ = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return {"same": len(found) - len(differ), "of": len(found), "differ": differ}


def named(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a file of prompts for each task")
    parser.add_argument("--tasks", default="", help="files of the folder by name; left out: all")
    parser.add_argument("--prompts", type=int, default=8, help="of each task")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--inflate")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--modes", default="chain-4,chain-6,tree,graph,auto")
    parser.add_argument("--styles", default=",".join(STYLES))
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    pair = draftgraph.load(asked.target, asked.draft, device=asked.device, dtype=asked.dtype)
    pair = inflated_pair(pair, asked.inflate)
    tasks = read_tasks([asked.data], named(asked.tasks), asked.prompts)
    prompts = [prompt for of_task in tasks.values() for prompt in of_task]
    differ, plain = 0, None

    def tell(**row: Any) -> None:
        print(json.dumps(row), flush=True)

    for style in named(asked.styles):
        expected, figures = alone(pair, prompts, "off", asked.new_tokens, STYLES[style])
        digest = hashlib.sha256(json.dumps(expected).encode()).hexdigest()[:16]
        tell(style=style, mode="off", answers=len(expected), digest=digest, **figures)
        plain = expected if style == "greedy" else plain
        for mode in named(asked.modes):
            found, figures = alone(pair, prompts, mode, asked.new_tokens, STYLES[style])
            result = compared(found, expected)
            differ += len(result["differ"])
            tell(style=style, mode=mode, **result, **figures)
    if clients := [int(number) for number in named(asked.clients)]:
        ids = [encode(pair.tokenizer, prompt) for prompt in prompts]
        expected = plain or alone(pair, prompts, "off", asked.new_tokens, {})[0]
        slots = max(clients) * (max(map(len, ids)) + asked.new_tokens + 128)
        scheduler = Scheduler(pair, Limits(texts=max(clients), slots=slots))
        for mode in ("off", "auto"):
            scheduler.batch.prepare(mode_named(mode))
        for number in clients:
            for mode in ("off", "auto"):
                for keeps in (False, True):
                    found, seconds = together(scheduler, ids, mode, asked.new_tokens, number, keeps)
                    result = compared(found, expected)
                    differ += len(result["differ"])
                    speed = round(sum(map(len, found)) / seconds)
                    tell(clients=number, mode=mode, kept_prefixes=keeps, tokens_per_second=speed, **result)
    tell(differ=differ)
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
