"""The Triton kernels behind `graph_attention`: the context is split over programs, and a second kernel combines.

What changes from pass to pass (lengths, ancestors, positions) is read by the programs themselves, so a launch inside
a captured CUDA graph stays right. Launch once before capturing: the first launch compiles.
"""

from __future__ import annotations

from math import ceil, e, log2
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = log2(e)  # exponents are of 2: that is what the hardware computes
WORD = tl.constexpr(64)  # scratch slots that one word of ancestors tells of
LOWEST = tl.constexpr(-1e30)  # under any score, yet finite: -inf less LOWEST is -inf, and never not a number
LARGEST_SIZE = 256
MOST_SPLITS = 64
ENOUGH = 1.15  # more splits than these must promise a time shorter by this ratio

# What one compiled kernel serves all values of: a text that outgrows its cache must not wait for a compiler.
NUMBERS = ("nodes", "words", "capacity", "splits")
DATA = ("lengths", "ancestors", "positions", "scratch_positions", "bests", "totals")


@triton.jit  # type: ignore[untyped-decorator]
def _read(place, there, column, size: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slots of keys or values; `there` is None where all of them are written."""
    if there is not None:
        states = tl.load(place, mask=there[:, None] & (column < size)[None, :], other=0.0)
    elif size < columns:
        states = tl.load(place, mask=(column < size)[None, :], other=0.0)
    else:
        states = tl.load(place)
    return states


@triton.jit  # type: ignore[untyped-decorator]
def _fold(q, k, v, seen, best, total, mixed, scale, cap, precision: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax on the way: the largest exponent, the sum of weights and the weighted values, now with these slots."""
    score = tl.dot(q, tl.trans(k), input_precision=precision)
    if cap is not None:
        score = cap - 2.0 * cap / (tl.exp2(score * scale) + 1.0)  # a tanh
        scale = 1.0
    if seen is not None:
        score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(best, tl.max(score, axis=1) * scale)
    weight = tl.exp2(score * scale - higher[:, None])
    shrink = tl.exp2(best - higher)
    total = total * shrink + tl.sum(weight, axis=1)
    mixed = tl.dot(weight.to(v.dtype), v, mixed * shrink[:, None], input_precision=precision)
    return higher, total, mixed


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=DATA)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, lengths, ancestors, positions, scratch_positions, sinks, out, bests, totals, parts,
    scale, cap, window, log2e, nodes, words, capacity, splits,
    query_row, query_head, query_node, key_row, key_head, key_slot, value_row, value_head, value_slot,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, queries: tl.constexpr, slots: tl.constexpr,
    single: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One tile of queries (nodes times the heads of a group) over one part of its row's context."""
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    group, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column, slot = tl.arange(0, columns), tl.arange(0, slots)
    which = tile * queries + tl.arange(0, queries)
    real = which < nodes * heads
    node, head = which // heads, group * heads + which % heads
    place = row * query_row + head[:, None] * query_head + node[:, None] * query_node + column[None, :]
    written = real[:, None] & (column < size)[None, :]
    q = tl.load(query + place, mask=written, other=0.0)
    keys = key + row * key_row + group * key_head
    values = value + row * value_row + group * value_head
    key_tile = slot[:, None] * key_slot + column[None, :]
    value_tile = slot[:, None] * value_slot + column[None, :]
    length = tl.load(lengths + row).to(tl.int32)
    best = tl.full([queries], LOWEST, tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, columns], tl.float32)

    first = 0  # the first slot of text that any query here sees
    if window is not None:
        nearest = tl.load(positions + row * nodes + node, mask=real, other=2**30).to(tl.int32) - window + 1
        first = tl.minimum(tl.maximum(tl.min(nearest, axis=0), 0), length)
    text_blocks = tl.cdiv(length - first, slots)
    blocks = text_blocks + words * WORD // slots
    begin, end = split * blocks // splits, (split + 1) * blocks // splits

    start = first + tl.minimum(begin, text_blocks) * slots
    stop = tl.minimum(first + tl.minimum(end, text_blocks) * slots, length)
    whole = start + (stop - start) // slots * slots
    for at in range(start, whole, slots):
        k = _read(keys + tl.cast(at, tl.int64) * key_slot + key_tile, None, column, size, columns)
        v = _read(values + tl.cast(at, tl.int64) * value_slot + value_tile, None, column, size, columns)
        if window is not None:
            near = (at + slot)[None, :] >= nearest[:, None]
            best, total, mixed = _fold(q, k, v, near, best, total, mixed, scale, cap, precision)
        else:
            best, total, mixed = _fold(q, k, v, None, best, total, mixed, scale, cap, precision)
    if whole < stop:
        there = whole + slot < stop
        k = _read(keys + whole.to(tl.int64) * key_slot + key_tile, there, column, size, columns)
        v = _read(values + whole.to(tl.int64) * value_slot + value_tile, there, column, size, columns)
        seen = there[None, :]
        if window is not None:
            seen = seen & ((whole + slot)[None, :] >= nearest[:, None])
        best, total, mixed = _fold(q, k, v, seen, best, total, mixed, scale, cap, precision)

    lineage = ancestors + (row * nodes + node) * words
    for block in tl.range(tl.maximum(begin - text_blocks, 0), end - text_blocks, num_stages=1):
        here = (length + block * slots).to(tl.int64)
        k = _read(keys + here * key_slot + key_tile, here + slot < capacity, column, size, columns)
        v = _read(values + here * value_slot + value_tile, here + slot < capacity, column, size, columns)
        bits = tl.load(lineage + block * slots // WORD, mask=real, other=0)
        bit = ((block * slots + slot) % WORD).to(tl.int64)
        # What no query here sees was perhaps never written. Reading it all the same waits for nothing.
        v = tl.where(((tl.reduce_or(bits, axis=0) >> bit) & 1 != 0)[:, None], v, 0.0)
        seen = (bits[:, None] >> bit[None, :]) & 1 != 0
        if window is not None:
            position = tl.load(scratch_positions + row * words * WORD + block * slots + slot).to(tl.int32)
            seen = seen & (position[None, :] >= nearest[:, None])
        best, total, mixed = _fold(q, k, v, seen, best, total, mixed, scale, cap, precision)

    groups = tl.num_programs(1)
    if single:  # no other split
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * log2e
            higher = tl.maximum(best, sink)
            shrink = tl.exp2(best - higher)
            total, mixed = total * shrink + tl.exp2(sink - higher), mixed * shrink[:, None]
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        place = ((row * nodes + node) * groups * heads + head)[:, None] * size + column[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=written)
    else:
        place = ((row * groups + group) * splits + split) * nodes * heads + which
        tl.store(bests + place, best, mask=real)
        tl.store(totals + place, total, mask=real)
        if begin < end:
            tl.store(parts + place[:, None] * size + column[None, :], mixed, mask=written)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["bests", "totals"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    bests, totals, parts, sinks, out, log2e, splits,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, padded_splits: tl.constexpr,
):  # fmt: skip
    """One query of one head: the parts of its context, each by its share of the weights."""
    head, node, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    groups, nodes = tl.num_programs(0) // heads, tl.num_programs(1)
    column, split = tl.arange(0, columns), tl.arange(0, padded_splits)
    there, inside = split < splits, column < size
    place = ((row * groups + head // heads) * splits + split) * nodes * heads + node * heads + head % heads
    best = tl.load(bests + place, mask=there, other=LOWEST)
    total = tl.load(totals + place, mask=there, other=0.0)
    mixed = tl.load(parts + place[:, None] * size + column, mask=there[:, None] & inside[None, :], other=0.0)
    mixed = tl.where((total != 0.0)[:, None], mixed, 0.0)  # a part without weights was perhaps never written
    highest = tl.max(best, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * log2e
        highest = tl.maximum(highest, sink)
    share = tl.exp2(best - highest)
    weights = tl.sum(total * share, axis=0)
    if sinks is not None:
        weights += tl.exp2(sink - highest)
    mixed = tl.sum(mixed * share[:, None], axis=0) / tl.where(weights == 0.0, 1.0, weights)
    place = ((row * nodes + node) * tl.num_programs(0) + head) * size + column
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=inside)


class Tiling(NamedTuple):
    """How much a program holds at a time, by what its registers take: compiled for a Hopper chip, hardly any spill."""

    queries: int
    slots: int
    at_once: int  # programs that a processor has registers and shared memory for
    warps: int
    stages: int

    @classmethod
    def of(cls, queries: int, columns: int, itemsize: int, shared_memory: int) -> Tiling:
        if itemsize > 2:  # exact products know no tensor cores, and take many registers
            return cls(16, max(16, min(32, 2048 // columns)), 1, 8, 1)
        held = 16 if queries <= 16 else 64 if queries <= 64 else 128
        slots = min(64, 8192 // columns)
        light = held == 16 or (held == 64 and columns <= 128)
        at_once = 2 if light and shared_memory >= 160 * 1024 else 1
        room = shared_memory // at_once - 1024 - held * columns * itemsize  # for keys and values on their way
        stages = max(1, min(4, room // (2 * slots * columns * itemsize)))
        return cls(held, slots, at_once, 8 if held == 128 else 4, stages)


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel knows these dtypes and sizes on this device."""
    known = query.dtype in (torch.bfloat16, torch.float16, torch.float32) and query.dtype == key.dtype == value.dtype
    fits = key.shape == value.shape and query.shape[-1] <= LARGEST_SIZE
    return known and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def split_count(programs: int, capacity: int, places: int) -> int:
    """Into how many parts the context goes where `places` programs run at a time: the fewest that keep them busy."""
    counts = range(1, max(1, min(MOST_SPLITS, capacity // WORD.value)) + 1)
    times = [ceil(programs * count / places) / count for count in counts]
    return next(count for count, time in zip(counts, times, strict=True) if time <= ENOUGH * min(times))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    positions: Tensor,
    scratch_positions: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `graph_attention`. `splits`: in how many parts the context is read; None: enough to fill the device."""
    rows, all_heads, nodes, size = query.shape
    groups, capacity = key.shape[1:3]
    heads = all_heads // groups
    columns = max(16, triton.next_power_of_2(size))  # the fewest that tensor cores take
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    device: Any = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    shared_memory = getattr(device, "shared_memory_per_block_optin", 48 * 1024)  # ROCm does not tell
    tiling = Tiling.of(nodes * heads, columns, query.element_size(), shared_memory)
    tiles = triton.cdiv(nodes * heads, tiling.queries)
    if splits is None:
        splits = split_count(rows * groups * tiles, capacity, tiling.at_once * device.multi_processor_count)
    out = query.new_empty(rows, nodes, all_heads, size)
    parts = query.new_empty((rows, groups, splits, nodes * heads, size) if splits > 1 else (0,), dtype=torch.float32)
    bests, totals = query.new_empty((2, *parts.shape[:-1]), dtype=torch.float32)
    strides = [stride for states in (query, key, value) for stride in states.stride()[:-1]]
    exponent = scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap
    cap = None if softcap is None else softcap * LOG2E
    shape: dict[str, Any] = {"heads": heads, "size": size, "columns": columns, "enable_fp_fusion": True}
    _attend[(tiles * splits, groups, rows)](
        query, key, value, lengths, ancestors.contiguous(), positions.contiguous(), scratch_positions.contiguous(),
        sinks, out, bests, totals, parts, exponent, cap, window, LOG2E, nodes, ancestors.shape[-1], capacity, splits,
        *strides, **shape, queries=tiling.queries, slots=tiling.slots, single=splits == 1,
        precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        partial = (bests, totals, parts, sinks, out, LOG2E, splits)
        _combine[(all_heads, nodes, rows)](*partial, **shape, padded_splits=padded, num_warps=4)
    return out
