"""The Triton kernel behind `packed_graph_attention`: `graph_kernel` for many texts of any number of nodes, by pages.

Which tile of queries belongs to which text is found by the programs themselves, so that a launch inside a captured
CUDA graph is right for any share of nodes. Launch once before capturing: the first launch compiles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgraph.engine import pages
from draftgraph.engine.graph_kernel import LOG2E, LOWEST, WORD, Tiling, _combine, _fold, _read, split_count, supports
from draftgraph.engine.packed_graph import PackedData

__all__ = ["attend", "supports"]

PAGE = tl.constexpr(pages.PAGE)
RESERVE = 1024  # bytes of shared memory for page numbers on their way

# What one compiled kernel serves all values of: a text that outgrows its table must not wait for a compiler.
NUMBERS = ("nodes", "words", "texts", "most_pages", "splits")
DATA = ("starts", "lengths", "pages", "ancestors", "positions", "scratch_positions", "bests", "totals")


@triton.jit
def _slots(table, place, there):  # type: ignore[no-untyped-def]
    """The slots of these places of a text; `there` is None where all of them are written."""
    if there is not None:
        page = tl.load(table + place // PAGE, mask=there, other=0)
    else:
        page = tl.load(table + place // PAGE)
    return page.to(tl.int64) * PAGE + place % PAGE


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=DATA)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, starts, lengths, pages, ancestors, positions, scratch_positions, sinks, out, bests, totals,
    parts, scale, cap, window, log2e, nodes, words, texts, most_pages, splits,
    query_head, query_node, key_head, key_slot, value_head, value_slot,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, queries: tl.constexpr, slots: tl.constexpr,
    padded_texts: tl.constexpr, single: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    """One tile of queries (nodes of one text times the heads of a group) over one part of that text.

    Text t has the tiles from starts[t] * heads // queries + t on: as many as it needs, or one too many. Behind the
    last text come the nodes that only fill the pass up.
    """
    tile, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    group = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, padded_texts)
    begins = tl.load(starts + each, mask=each <= texts, other=0)
    text = tl.sum(((each <= texts) & (begins * heads // queries + each <= tile)).to(tl.int32), axis=0) - 1
    is_text = text < texts
    first_node = tl.load(starts + text)
    count = tl.load(starts + text + 1, mask=is_text, other=0)
    count = tl.where(is_text, count, nodes) - first_node
    tile -= first_node * heads // queries + text
    if tile * queries >= count * heads:
        return

    column, slot = tl.arange(0, columns), tl.arange(0, slots)
    which = tile * queries + tl.arange(0, queries)
    real = which < count * heads
    node, head = first_node + which // heads, group * heads + which % heads
    written = real[:, None] & (column < size)[None, :]
    place = head[:, None] * query_head + node.to(tl.int64)[:, None] * query_node + column[None, :]
    q = tl.load(query + place, mask=written, other=0.0)
    keys, values = key + group * key_head + column[None, :], value + group * value_head + column[None, :]
    length = tl.load(lengths + text, mask=is_text, other=0).to(tl.int32)
    table = pages + text.to(tl.int64) * most_pages
    best = tl.full([queries], LOWEST, tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, columns], tl.float32)

    first = 0  # the first place of text that any query here sees, or the beginning of its page
    if window is not None:
        nearest = tl.load(positions + node, mask=real, other=2**30).to(tl.int32) - window + 1
        first = tl.minimum(tl.maximum(tl.min(nearest, axis=0), 0), length) // PAGE * PAGE
    blocks = tl.cdiv(length - first, slots)
    start = first + split * blocks // splits * slots
    stop = tl.minimum(first + (split + 1) * blocks // splits * slots, length)
    whole = start + (stop - start) // slots * slots
    for at in range(start, whole, slots):
        here = _slots(table, at + slot, None)
        k = _read(keys + here[:, None] * key_slot, None, column, size, columns)
        v = _read(values + here[:, None] * value_slot, None, column, size, columns)
        if window is not None:
            near = (at + slot)[None, :] >= nearest[:, None]
            best, total, mixed = _fold(q, k, v, near, best, total, mixed, scale, cap, precision)
        else:
            best, total, mixed = _fold(q, k, v, None, best, total, mixed, scale, cap, precision)
    if whole < stop:
        there = whole + slot < stop
        here = _slots(table, whole + slot, there)
        k = _read(keys + here[:, None] * key_slot, there, column, size, columns)
        v = _read(values + here[:, None] * value_slot, there, column, size, columns)
        seen = there[None, :]
        if window is not None:
            seen = seen & ((whole + slot)[None, :] >= nearest[:, None])
        best, total, mixed = _fold(q, k, v, seen, best, total, mixed, scale, cap, precision)

    # Scratch slots in turn: of most words a text needs the first few bits alone.
    scratch_blocks = tl.where(is_text, words * WORD // slots, 0)
    lineage = ancestors + node.to(tl.int64) * words
    for block in tl.range(split, scratch_blocks, splits, num_stages=1):
        bits = tl.load(lineage + block * slots // WORD, mask=real, other=0)
        bit = ((block * slots + slot) % WORD).to(tl.int64)
        there = (tl.reduce_or(bits, axis=0) >> bit) & 1 != 0  # somebody here sees it, so it was written
        if tl.max(there.to(tl.int32), axis=0) > 0:
            here = _slots(table, length + block * slots + slot, there)
            k = _read(keys + here[:, None] * key_slot, there, column, size, columns)
            v = _read(values + here[:, None] * value_slot, there, column, size, columns)
            seen = (bits[:, None] >> bit[None, :]) & 1 != 0
            if window is not None:
                position = tl.load(scratch_positions + (text * words * WORD + block * slots + slot)).to(tl.int32)
                seen = seen & (position[None, :] >= nearest[:, None])
            best, total, mixed = _fold(q, k, v, seen, best, total, mixed, scale, cap, precision)

    if single:  # no other split
        if sinks is not None:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * log2e
            higher = tl.maximum(best, sink)
            shrink = tl.exp2(best - higher)
            total, mixed = total * shrink + tl.exp2(sink - higher), mixed * shrink[:, None]
        mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
        place = (node * (tl.num_programs(1) * heads) + head)[:, None] * size + column[None, :]
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=written)
    else:
        place = (group * splits + split) * nodes * heads + first_node * heads + which
        tl.store(bests + place, best, mask=real)
        tl.store(totals + place, total, mask=real)
        tl.store(parts + place[:, None] * size + column[None, :], mixed, mask=written)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    data: PackedData,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `packed_graph_attention`. `splits`: in how many parts each text is read; None: enough to fill the device."""
    _, all_heads, nodes, size = query.shape
    groups, (texts, most_pages) = key.shape[1], data.pages.shape
    heads = all_heads // groups
    columns = max(16, triton.next_power_of_2(size))  # the fewest that tensor cores take
    query, key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (query, key, value))
    device: Any = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    shared_memory = getattr(device, "shared_memory_per_block_optin", 48 * 1024) - RESERVE  # ROCm does not tell
    usual = min(data.most_nodes, 2 * triton.cdiv(nodes, texts))  # nodes of a text; one with more has several tiles
    tiling = Tiling.of(usual * heads, columns, query.element_size(), shared_memory)
    if splits is None:
        busy = groups * max(min(texts, nodes), nodes * heads // tiling.queries)
        capacity = most_pages * pages.PAGE
        splits = split_count(busy, capacity, tiling.at_once * device.multi_processor_count)
    out = query.new_empty(1, nodes, all_heads, size)
    parts = query.new_empty((1, groups, splits, nodes * heads, size) if splits > 1 else (0,), dtype=torch.float32)
    bests, totals = query.new_empty((2, *parts.shape[:-1]), dtype=torch.float32)
    strides = [stride for states in (query, key, value) for stride in states.stride()[1:-1]]
    exponent = scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap
    cap = None if softcap is None else softcap * LOG2E
    shape: dict[str, Any] = {"heads": heads, "size": size, "columns": columns, "enable_fp_fusion": True}
    tiles = nodes * heads // tiling.queries + texts + 1
    told = [part.contiguous() for part in data.tensors]
    _attend[(tiles * splits, groups)](
        query, key, value, *told, sinks, out, bests, totals, parts, exponent, cap, window, LOG2E,
        nodes, data.ancestors.shape[-1], texts, most_pages, splits, *strides, **shape,
        queries=tiling.queries, slots=tiling.slots, padded_texts=max(128, triton.next_power_of_2(texts + 1)),
        single=splits == 1, precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps, num_stages=2 * tiling.stages - 1,  # page numbers come first, then what lies there
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        partial = (bests, totals, parts, sinks, out, LOG2E, splits)
        _combine[(all_heads, nodes, 1)](*partial, **shape, padded_splits=padded, num_warps=4)
    return out
