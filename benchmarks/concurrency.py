"""How many tokens per second do many requests get together, and does drafting help them?

    python benchmarks/concurrency.py --data prompts/ --inflate llama-2-7b --device cuda --out load.jsonl

For every number of concurrent requests, plain decoding and mode auto in turns, through the scheduler of the server:
so many clients, each of which asks again as soon as it is answered, four times. All tokens, over all the time from the
first request to the last answer, prompts included. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import draftgraph
from draftgraph.batching import Job, Limits, Scheduler
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.tasks import read_tasks
from draftgraph.engine.capture import Captured
from draftgraph.text import encode

MODES = ("off", "auto")
ROUNDS, LEAST = 4, 16  # requests of each client; of all of them


def run(scheduler: Scheduler, prompts: list[tuple[int, ...]], texts: int, mode: str, new_tokens: int) -> dict[str, Any]:
    """Tokens and seconds from the first request until the last is answered."""
    coming = iter(zip(range(max(ROUNDS * texts, LEAST)), cycle(prompts), strict=False))
    answers: dict[str, list[int]] = {}
    passes, recorded, start = 0, Captured.made, time.perf_counter()
    for _ in range(texts):
        submit(scheduler, *next(coming), mode, new_tokens)
    while scheduler.busy:
        for one in scheduler.step():
            if one.error:
                raise SystemExit(one.error["message"])
            answers.setdefault(one.id, []).extend(one.tokens)
            if one.finish_reason and (following := next(coming, None)):
                submit(scheduler, *following, mode, new_tokens)
        passes += 1
    seconds = time.perf_counter() - start
    counts = {"tokens": sum(map(len, answers.values())), "seconds": seconds, "passes": passes}
    return counts | {"recorded": Captured.made - recorded, "answers": [answers[id] for id in sorted(answers)]}


def submit(scheduler: Scheduler, number: int, prompt: tuple[int, ...], mode: str, new_tokens: int) -> str:
    job = Job(f"{number:06}", prompt, max_tokens=new_tokens, ignore_eos=True, config={"mode": mode})
    scheduler.submit(job)
    return job.id


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for texts in sorted({line["texts"] for line in lines}):
        speeds = {
            mode: [line["tokens"] / line["seconds"] for line in lines if (line["texts"], line["mode"]) == (texts, mode)]
            for mode in MODES
        }
        if all(speeds.values()):
            ratios = [auto / off for off, auto in zip(speeds["off"], speeds["auto"], strict=False)]
            middle = {mode: round(median(values), 1) for mode, values in speeds.items()}
            found.append({"texts": texts, "ratio": round(median(ratios), 3), "tokens per second": middle})
    return found


def same_answers(lines: list[dict[str, Any]]) -> str:
    """In float32 and float64 all; in half precision passes of other shapes round differently."""
    plain = {(line["texts"], line["repeat"]): line["answers"] for line in lines if line["mode"] == "off"}
    drafted = [line for line in lines if line["mode"] == "auto" and (line["texts"], line["repeat"]) in plain]
    pairs = [
        pair for line in drafted for pair in zip(line["answers"], plain[line["texts"], line["repeat"]], strict=True)
    ]
    return f"{sum(one == other for one, other in pairs)} of {len(pairs)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a file of prompts for each task")
    parser.add_argument("--tasks", default="gsm8k,xsum,alpaca,wmt14_deen,humaneval,mt_bench,writing_prompts")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inflate")
    parser.add_argument("--texts", default="1,4,16,64")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after this")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    given = parser.parse_args()
    begun = time.perf_counter()
    known = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    places = {(line["repeat"], line["texts"], line["mode"]) for line in known}
    pair = draftgraph.load(device=given.device)
    pair = inflated_pair(pair, given.inflate)
    tasks = read_tasks([given.data], given.tasks.split(","), given.prompts)
    by_task = [[tuple(encode(pair.tokenizer, prompt)) for prompt in of_task] for of_task in tasks.values()]
    prompts = [prompt for turn in zip(*by_task, strict=True) for prompt in turn]
    levels = [int(number) for number in given.texts.split(",")]
    scheduler = Scheduler(pair, Limits(texts=max(levels)))
    scheduler.batch.prepare(scheduler.config)
    warm: set[tuple[int, str]] = set()
    for repeat in range(given.repeats):
        for texts in levels:
            for mode in MODES:
                if (repeat, texts, mode) in places or time.perf_counter() - begun > given.seconds:
                    continue
                if (texts, mode) not in warm:  # whatever happens only once
                    run(scheduler, prompts, texts, mode, given.new_tokens)
                    warm.add((texts, mode))
                line = {"repeat": repeat, "texts": texts, "mode": mode}
                line |= run(scheduler, prompts, texts, mode, given.new_tokens)
                known.append(line)
                with given.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    print(json.dumps({"load": summary(known), "answers with the same tokens": same_answers(known)}, indent=2))


if __name__ == "__main__":
    main()
