"""What does a draft gain from looking at the noise that the target's choice will be made with?

    python benchmarks/shared_noise.py --data prompts/ --device cuda --inflate llama-2-7b

Sampled answers in mode auto, once with drafts ranked by logits and noise, and once by logits alone: in turns, the same
tokens. Tokens per pass, and the time per token without prefill.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import draftgraph
from draftgraph.bench.speed import inflated_pair
from draftgraph.bench.tasks import read_tasks
from draftgraph.choose import KeyedChooser
from draftgraph.pair import Pair


@contextmanager
def drafts_without_noise() -> Iterator[None]:
    perturb = KeyedChooser.perturb
    try:
        KeyedChooser.perturb = lambda self, temperature: None  # type: ignore[method-assign, assignment]
        yield
    finally:
        KeyedChooser.perturb = perturb  # type: ignore[method-assign]


@contextmanager
def drafts_with_noise() -> Iterator[None]:
    yield


WAYS = {"with the noise": drafts_with_noise, "without": drafts_without_noise}


def answer(pair: Pair, prompt: str, new_tokens: int, temperature: float, top_p: float) -> tuple[list[int], int, float]:
    """Tokens, passes of the target, and seconds."""
    decoding = pair.start(prompt, max_new_tokens=new_tokens, temperature=temperature, top_p=top_p, seed=1)
    start = time.perf_counter()
    for _ in decoding:
        pass
    return decoding.new_tokens, decoding.stats.steps, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with a file of prompts for each task")
    parser.add_argument("--tasks", default="gsm8k,xsum,alpaca,wmt14_deen,humaneval,mt_bench,writing_prompts")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--inflate")
    parser.add_argument("--temperatures", default="0.5,0.7,1.0")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--new-tokens", type=int, default=128)
    asked = parser.parse_args()
    pair = draftgraph.load(asked.target, asked.draft, device=asked.device)
    pair = inflated_pair(pair, asked.inflate)
    tasks = read_tasks([asked.data], asked.tasks.split(","), asked.prompts)
    prompts = [prompt for prompts in tasks.values() for prompt in prompts]
    for temperature in map(float, asked.temperatures.split(",")):
        counts = {way: [0, 0, 0.0] for way in WAYS}
        same = 0
        for number, prompt in enumerate([prompts[0], *prompts]):  # the first one twice: it also records
            answers = []
            for way, drafting in WAYS.items():
                with drafting():
                    tokens, passes, seconds = answer(pair, prompt, asked.new_tokens, temperature, asked.top_p)
                answers.append(tokens)
                if number:
                    counts[way] = [a + b for a, b in zip(counts[way], (len(tokens), passes, seconds), strict=True)]
            same += number > 0 and answers[0] == answers[1]
        for way, (tokens, passes, seconds) in counts.items():
            found = {"tokens_per_pass": tokens / passes, "ms_per_token": 1000 * seconds / tokens}
            print(json.dumps({"temperature": temperature, "drafts": way} | found | {"same": same}), flush=True)


if __name__ == "__main__":
    main()
