"""What does a pass cost behind long texts, or many? Compares it with what reading them must cost.

    python benchmarks/long_texts.py --inflate llama-2-7b --texts 512,4096,8128 --json
    python benchmarks/long_texts.py --inflate llama-2-7b --texts 16,128,400 --together 64 --nodes 1

The limit of a pass is its time behind the shortest text, and what the further keys and values take to read at the
bandwidth of the memory; the limit of its attention is what all keys and values take. The goal is at most 1.25 times
that. Attention is what its kernels took in a profile.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

import draftgraph
from draftgraph.bench import inflate
from draftgraph.cost.measure import branches
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import PagedContext, PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.protocol import Segment
from draftgraph.graph import TokenTree

BANDWIDTH = 4.3e12  # bytes per second that an H200 reads
GOAL = 1.25
BURST = 20  # passes back to back
ROUNDS = 9
ATTENTION = "_attend"  # in the names of its kernels


@dataclass(frozen=True)
class Pass:
    text: int  # tokens
    nodes: int
    ms: float
    limit_ms: float
    share: float  # of the limit
    attention_ms: float
    attention_share: float  # of its limit


def key_value_bytes(model: Any) -> int:
    """Of one token."""
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * size * model.dtype.itemsize)


def pass_ms(contexts: list[PagedContext], tree: TokenTree) -> float:
    """On the device, one of many back to back."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        check(contexts, tree)
        begin.record()
        for _ in range(BURST):
            check(contexts, tree)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / BURST)
    return median(times)


def attention_ms(contexts: list[PagedContext], tree: TokenTree) -> float:
    """What its kernels take in a pass."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(ROUNDS):
            check(contexts, tree)
        torch.cuda.synchronize()
    spent = sum(event.device_time_total for event in profiled.key_averages() if ATTENTION in event.key)
    return float(spent) / 1000 / ROUNDS


def check(contexts: list[PagedContext], tree: TokenTree) -> None:
    contexts[0].engine.run([Segment.of_tree(context, tree) for context in contexts])
    for context in contexts:
        context.forget(0)


def judged(times: dict[int, tuple[float, float]], nodes: int, token_bytes: int, together: int = 1) -> list[Pass]:
    """The times of passes and of their attention by length of the texts, against their limits."""
    first = min(times)
    found = []
    for text, (ms, attention) in times.items():
        reading = 1000 * together * token_bytes / BANDWIDTH
        limit = times[first][0] + reading * (text - first)
        found.append(Pass(text, nodes, ms, limit, ms / limit, attention, attention / (reading * text)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--inflate")
    parser.add_argument("--texts", default="512,4096,8128")
    parser.add_argument("--nodes", type=int, default=64, help="behind each text")
    parser.add_argument("--together", type=int, default=1, help="texts of that length in a pass")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    model = draftgraph.load(asked.target, device="cuda").target
    if asked.inflate:
        model = inflate(model, asked.inflate)
    lengths = sorted(map(int, asked.texts.split(",")))
    times = {}
    with Loan(model):
        engine, tree = PagedEngine(model), branches(np.full(asked.nodes, 1))
        engine.reserve(asked.together * (lengths[-1] + asked.nodes + PAGE))
        contexts = [engine.open() for _ in range(asked.together)]
        for context in contexts:
            context.reserve(lengths[-1] + asked.nodes)
        for length in lengths:
            for context in contexts:
                context.prefill([1] * (length - len(context.text)))
            times[length] = pass_ms(contexts, tree), attention_ms(contexts, tree)
    passes = judged(times, asked.nodes, key_value_bytes(model), asked.together)
    if asked.json:
        print(json.dumps([asdict(one) for one in passes]))
        return
    for one in passes:
        print(
            f"text {one.text:6d}: {one.ms:.3f} ms, {one.share:.2f} of the limit {one.limit_ms:.3f} (goal {GOAL}); "
            f"attention {one.attention_ms:.3f} ms, {one.attention_share:.2f} of its limit"
        )


if __name__ == "__main__":
    main()
