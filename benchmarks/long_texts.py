"""What does a pass over a tree cost behind a long text? Compares it with what reading the longer text must cost.

    python benchmarks/long_texts.py --inflate llama-2-7b --texts 512,4096,8128 --json

The limit of a pass is its time behind the shortest text, and what the further keys and values take to read at the
bandwidth of the memory. The goal is at most 1.25 times that.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

import draftgraph
from draftgraph.bench import inflate
from draftgraph.cost.measure import branches
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import PagedContext, PagedEngine
from draftgraph.engine.protocol import Segment
from draftgraph.graph import TokenTree

BANDWIDTH = 4.3e12  # bytes per second that an H200 reads
GOAL = 1.25
BURST = 20  # passes back to back
ROUNDS = 9


@dataclass(frozen=True)
class Pass:
    text: int  # tokens
    nodes: int
    ms: float
    limit_ms: float
    share: float  # of the limit


def key_value_bytes(model: Any) -> int:
    """Of one token."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize)


def pass_ms(context: PagedContext, nodes: int) -> float:
    """On the device, one of many back to back."""
    tree = branches(np.full(nodes, 1))
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        check(context, tree)
        begin.record()
        for _ in range(BURST):
            check(context, tree)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / BURST)
    return median(times)


def check(context: PagedContext, tree: TokenTree) -> None:
    context.engine.run([Segment.of_tree(context, tree)])
    context.forget(0)


def judged(times: dict[int, float], nodes: int, token_bytes: int) -> list[Pass]:
    """The times of passes by length of the text, against their limits."""
    first = min(times)
    found = []
    for text, ms in times.items():
        limit = times[first] + 1000 * (text - first) * token_bytes / BANDWIDTH
        found.append(Pass(text, nodes, ms, limit, ms / limit))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--inflate")
    parser.add_argument("--texts", default="512,4096,8128")
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    model = draftgraph.load(asked.target, device="cuda").target
    if asked.inflate:
        model = inflate(model, asked.inflate)
    lengths = sorted(map(int, asked.texts.split(",")))
    times = {}
    with Loan(model):
        context = PagedEngine(model).open()
        context.reserve(lengths[-1] + asked.nodes)
        for length in lengths:
            context.prefill([1] * (length - len(context.text)))
            times[length] = pass_ms(context, asked.nodes)
    passes = judged(times, asked.nodes, key_value_bytes(model))
    if asked.json:
        print(json.dumps([asdict(one) for one in passes]))
        return
    for one in passes:
        print(f"text {one.text:6d}: {one.ms:.3f} ms, {one.share:.2f} of the limit {one.limit_ms:.3f} (goal {GOAL})")


if __name__ == "__main__":
    main()
