"""Is every answer that of plain decoding alone, token for token?

    python benchmarks/exactness.py --data prompts/ --inflate llama-2-7b --out exact.jsonl
    python benchmarks/exactness.py --data prompts/ --dtype float16 --styles sampled --clients "" --out exact.jsonl

Every prompt is answered in every mode, greedy and sampled. Then the same prompts are answered by the scheduler of the
server for so many clients at once, with and without kept prefixes. What is in --out is not done again, so a run that
was stopped goes on, and plain answers of an earlier process (its digest is told) are those that later ones are compared
with; `off` is one of the modes for that. Exit status 1: an answer differs; 3: --minutes were over before all was done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
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
SERVED = ("off", "auto")  # modes of the scheduler
PLAIN = "plain"  # the run of `off` that all others are compared with
Answers = list[list[int]]
Row = dict[str, Any]


class Rows:
    """What was found, as JSON lines; found once, it is not looked for again."""

    def __init__(self, file: Path | None, shared: Row, seconds: float) -> None:
        self._file, self._shared, self._end = file, shared, time.monotonic() + seconds
        lines = file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else []
        self._known = [json.loads(line) for line in lines]
        self._longest = 0.0
        self.differ = self.left = 0

    def of(self, find: Callable[[], tuple[Answers, Row]], expected: Answers | None, **key: Any) -> Answers | None:
        """The answers of a run; None: they are in the file, or there is no time for them."""
        key = self._shared | key
        known = next((row for row in self._known if key.items() <= row.items()), None)
        if known is None and time.monotonic() + 1.5 * self._longest > self._end:
            self.left += 1
            return None
        if known is None:
            start = time.monotonic()
            answers, figures = find()
            self._longest = max(self._longest, time.monotonic() - start)
            known = key | figures | (compared(answers, expected) if expected is not None else {"answers": answers})
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known) + "\n")
        self.differ += len(known.get("differ", []))
        shown = {name: value for name, value in known.items() if name != "answers"}
        print(json.dumps(shown), flush=True)
        return known.get("answers")


def compared(found: Answers, expected: Answers) -> Row:
    differ = [number for number, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    return {"same": len(found) - len(differ), "of": len(found), "differ": differ}


def alone(pair: Pair, prompts: list[str], mode: str, new_tokens: int, style: dict[str, Any]) -> tuple[Answers, Row]:
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
        "digest": hashlib.sha256(json.dumps(answers).encode()).hexdigest()[:16],
    }


def together(
    scheduler: Scheduler, prompts: list[list[int]], mode: str, new_tokens: int, clients: int, keeps: bool
) -> tuple[Answers, Row]:
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
    return answers, {"tokens_per_second": round(sum(map(len, answers)) / (time.monotonic() - start))}


def named(names: str) -> list[str]:
    return [name for name in names.split(",") if name]


def arguments() -> argparse.Namespace:
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
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="nothing is begun that would take longer")
    return parser.parse_args()


def check_together(
    rows: Rows, pair: Pair, prompts: list[str], new_tokens: int, clients: list[int], plain: Answers
) -> None:
    ids = [encode(pair.tokenizer, prompt) for prompt in prompts]
    slots = max(clients) * (max(map(len, ids)) + new_tokens + 128)
    scheduler = Scheduler(pair, Limits(texts=max(clients), slots=slots))
    for mode in SERVED:
        scheduler.batch.prepare(mode_named(mode))
    for number, mode, keeps in product(clients, SERVED, (False, True)):
        run = partial(together, scheduler, ids, mode, new_tokens, number, keeps)
        rows.of(run, plain, clients=number, mode=mode, kept_prefixes=keeps)


def main() -> int:
    asked = arguments()
    tasks = read_tasks([asked.data], named(asked.tasks), asked.prompts)
    prompts = [prompt for of_task in tasks.values() for prompt in of_task]
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:8]
    shared = {"target": asked.target, "inflate": asked.inflate, "dtype": asked.dtype, "device": asked.device}
    rows = Rows(asked.out, shared | {"prompts": digest, "new_tokens": asked.new_tokens}, 60 * asked.minutes)
    pair = draftgraph.load(asked.target, asked.draft, device=asked.device, dtype=asked.dtype)
    pair = inflated_pair(pair, asked.inflate)
    styles, clients = named(asked.styles), [int(number) for number in named(asked.clients)]
    for style, sampling in STYLES.items():
        serves = style == "greedy" and bool(clients)
        if style not in styles and not serves:
            continue
        run = partial(alone, pair, prompts, new_tokens=asked.new_tokens, style=sampling)
        plain = rows.of(partial(run, mode="off"), None, style=style, mode=PLAIN)
        if plain is None:
            continue
        for mode in named(asked.modes) if style in styles else ():
            rows.of(partial(run, mode=mode), plain, style=style, mode=mode)
        if serves:
            check_together(rows, pair, prompts, asked.new_tokens, clients, plain)
    print(json.dumps({"differ": rows.differ, "left": rows.left}))
    return 1 if rows.differ else 3 if rows.left else 0


if __name__ == "__main__":
    sys.exit(main())
