"""The Triton kernel behind `sampler.row_attention`: a program takes the heads of a group in one row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 16  # the fewest that tensor cores take
SLOTS = 64  # read at a time


@triton.jit  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, places, out, scale, capacity, groups, heads: tl.constexpr, size: tl.constexpr,
    queries: tl.constexpr, slots: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    head, column, slot = tl.arange(0, queries), tl.arange(0, size), tl.arange(0, slots)
    place = (row * groups + group) * heads * size + head[:, None] * size + column[None, :]
    q = tl.load(query + place, mask=head[:, None] < heads, other=0.0)
    text = (row * groups + group) * capacity * size
    length = tl.load(places + row) + 1
    best = tl.full([queries], -float("inf"), tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, size], tl.float32)
    for start in range(0, length, slots):
        there = start + slot < length
        where = text + (start + slot)[:, None] * size + column[None, :]
        k = tl.load(key + where, mask=there[:, None], other=0.0)
        v = tl.load(value + where, mask=there[:, None], other=0.0)
        score = tl.dot(q, tl.trans(k)) * scale
        score = tl.where(there[None, :], score, -float("inf"))
        higher = tl.maximum(best, tl.max(score, axis=1))
        weight = tl.exp(score - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weight, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v)
        best = higher
    tl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=head[:, None] < heads)


def attend(grouped: Tensor, key: Tensor, value: Tensor, places: Tensor, scale: Any) -> Tensor:
    """Queries [rows, groups, heads of a group, size] over slots 0 to `places` of keys [rows, groups, slots, size]."""
    rows, groups, heads, size = grouped.shape
    grouped, key, value = grouped.contiguous(), key.contiguous(), value.contiguous()
    out = torch.empty_like(grouped)
    queries = max(QUERIES, triton.next_power_of_2(heads))
    arguments = (grouped, key, value, places, out, float(scale), key.shape[2], groups)
    _attend[(rows, groups)](*arguments, heads=heads, size=size, queries=queries, slots=SLOTS, num_warps=4)
    return out
