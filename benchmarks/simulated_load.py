"""Would drafting help many requests on a GPU that is not here? python benchmarks/simulated_load.py

The scheduler as it is, host work included, over passes that compute nothing but take as long as those of an H200 with a
target of 7B-cost: their prices are known (docs/results), and what the draft gets right is drawn. For decisions, which
can be looked at without the device; for figures there is `draftgraph bench load`. Nothing overlaps here: a pass that
works by itself on a GPU keeps this host busy.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from itertools import cycle, islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftgraph import GraphConfig
from draftgraph.batching import Limits, Scheduler
from draftgraph.bench.load import LEAST, ROUNDS, Ours
from draftgraph.cost.latency import Curve, Latencies, MeasuredCost
from draftgraph.engine.paged import PagedEngine
from draftgraph.pair import Pair

NODES = [1, 8, 16, 32, 64, 128, 256, 512]
TARGET_MS = [4.9, 5.0, 5.1, 5.3, 5.6, 6.3, 8.0, 12.0]  # of a pass
DRAFT_MS = [0.35, 0.36, 0.37, 0.40, 0.45, 0.55, 0.8, 1.3]
VOCABULARY = 512


def tiny(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=4096, **sizes)).eval()


def pretend(engine: PagedEngine, prices: list[float], right: float | None) -> None:
    """Passes that take so many milliseconds and say what follows from token and position: the draft (`right`) is that
    often of the target's opinion."""

    def compute(
        tokens: Tensor, positions: Tensor, slots: Any, data: Any, kept: Tensor | None, adapters: Any, given: Any = None
    ) -> tuple[Tensor, Tensor | None]:
        until = time.perf_counter() + float(np.interp(tokens.shape[1], NODES, prices)) / 1e3
        mixed = (tokens[0].long() * 2654435761 + positions[0].long() * 40503) % 1000003
        rows, logits = torch.arange(len(mixed)), torch.zeros(len(mixed), engine.columns)
        logits[rows, mixed % VOCABULARY] = 5.0
        if right is not None:
            wrong = (mixed * 31 + 17) % 100 >= int(100 * right)
            logits[rows, (mixed * 7 + 3) % VOCABULARY] += torch.where(wrong, 6.0, 3.5)
        while time.perf_counter() < until:
            pass
        return (logits if kept is None else logits[: len(kept)]), None

    engine.compute = compute  # type: ignore[method-assign]


def simulated(right: float, texts: int) -> Scheduler:
    os.environ["DRAFTGRAPH_ENGINE"] = "static"
    curves = [Curve.of([0], NODES, [[price / 1e3 for price in prices]]) for prices in (TARGET_MS, DRAFT_MS)]
    config = GraphConfig(cost=MeasuredCost(Latencies(*curves, 64, 1.0)))
    scheduler = Scheduler(Pair(tiny(0), tiny(1), None), Limits(texts=texts), config)
    target, draft = scheduler.batch.engines.all
    assert isinstance(target, PagedEngine) and isinstance(draft, PagedEngine)
    pretend(target, TARGET_MS, None)
    pretend(draft, DRAFT_MS, right)
    return scheduler


def answered(scheduler: Scheduler, prompts: list[list[int]], texts: int, mode: str, new_tokens: int) -> dict[str, Any]:
    """A closed load of so many clients."""
    asked = list(islice(cycle(prompts), max(ROUNDS * texts, LEAST)))
    greedy = {"temperature": 0.0}
    return Ours(mode, scheduler, new_tokens, greedy).answer({"prompts": asked, "clients": texts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", default="1,4,16,64")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--right", type=float, default=0.65, help="how often the draft's best token is the target's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    draw, levels = random.Random(0), [int(number) for number in given.texts.split(",")]
    lengths = [draw.choice([50, 100, 200, 400]) for _ in range(56)]
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]
    scheduler = simulated(given.right, max(levels))
    for texts in levels:
        speeds: dict[str, list[float]] = {"off": [], "auto": []}
        answers = []
        for _ in range(1 + given.repeats):  # the first time for what happens only once
            for mode, known in speeds.items():
                found = answered(scheduler, prompts, texts, mode, given.new_tokens)
                known.append(sum(map(len, found["tokens"])) / found["seconds"])
                answers.append(found["tokens"])
        ratios = [auto / off for off, auto in zip(speeds["off"][1:], speeds["auto"][1:], strict=True)]
        same = all(one == answers[0] for one in answers)
        middle = {mode: round(median(known[1:])) for mode, known in speeds.items()}
        line = {"texts": texts, "ratio": round(median(ratios), 3), "tokens per second": middle, "same": same}
        print(json.dumps(line | {"drafts": scheduler.pair.decoder.experience.habit(texts).drafts}), flush=True)


if __name__ == "__main__":
    main()
