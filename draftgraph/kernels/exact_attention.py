"""Paged attention in half precision whose bits depend on a node's own path alone: see `attention.paged_attention`.

All sums over keys go by their place in the path, in blocks and chunks whose borders are fixed places, in one order: in
a tree as in plain decoding, behind a text that was read in any pieces, beside any other sequences. So a node's numbers
are the same whatever else is in its pass, and choosing how many programs share the work never changes them.

A first kernel reads the blocks that whole tiles of queries share, a chunk at a time. A second one goes on, for each
node, through the rest of its path, whose slots need not lie in a row, and adds the chunks up in their order. Skipping a
block that a query does not see changes nothing: its weights are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftgraph.kernels.attention import (
    DATA,
    LOG2E,
    LOWEST,
    WORD,
    Inputs,
    PagedPass,
    _fold,
    _read,
    _slots,
    _write,
    supports,
)
from draftgraph.kernels.attention import PAGE_SIZE as PAGE
from draftgraph.kernels.triton_or_stub import ROUNDING, tl, triton

CHUNK, LATER_CHUNK, EARLY = 256, 1024, 8  # places of each of the first chunks, of those behind them, how many are first
SHORT, LONG, FIRST = tl.constexpr(CHUNK), tl.constexpr(LATER_CHUNK), tl.constexpr(EARLY)
NARROW, WIDE = 64, 128  # queries of a tile: as many rows as one or two groups of warps multiply at a time
NUMBERS = ("nodes", "words", "texts", "most_pages", "chunks")


def supports_exactly(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether these dtypes and sizes have an order of their own on this device."""
    return query.element_size() == 2 and supports(query, key, value)


def chunks_of(places: int) -> int:
    """How many chunks hold so many places.

    >>> chunks_of(1), chunks_of(256), chunks_of(257), chunks_of(2048), chunks_of(2049), chunks_of(8192)
    (1, 1, 2, 8, 9, 14)
    """
    return min(-(-places // CHUNK), EARLY) + max(0, -(-(places - EARLY * CHUNK) // LATER_CHUNK))


@triton.jit
def _chunk_start(chunk):  # type: ignore[no-untyped-def]
    return tl.maximum(chunk - FIRST, 0) * (LONG - SHORT) + chunk * SHORT


@triton.jit
def _chunk_of(place):  # type: ignore[no-untyped-def]
    return tl.minimum(place // SHORT, FIRST) + tl.maximum(place - FIRST * SHORT, 0) // LONG


@triton.jit
def _is_row(lineage, length, end, words, real):  # type: ignore[no-untyped-def]
    """Whether the scratch slots of these paths are the first ones, without a gap, so that they lie as a text would."""
    count = (end - length).to(tl.int64)
    same = real
    for word in range(words):
        inside = tl.minimum(tl.maximum(count - word * WORD, 0), WORD)
        ones = tl.where(inside == WORD, -1, (1 << tl.minimum(inside, WORD - 1)) - 1).to(tl.int64)
        same = same & (tl.load(lineage + word, mask=real, other=0) == ones)
    return same


@triton.jit  # type: ignore[untyped-decorator]
def _path(lineage, positions, node, length, words, is_text, slots: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of nodes: their position, the end of their path, whether it lies in a row, and where the blocks end that the
    first kernel reads."""
    position = tl.load(positions + node, mask=is_text, other=-1).to(tl.int32)
    end = tl.where(is_text, position + 1, 0)
    is_row = _is_row(lineage, length, end, words, is_text)
    base = tl.where(is_row, end, tl.minimum(length, end)) // slots * slots
    return position, end, is_row, base


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=DATA)  # type: ignore[untyped-decorator]
def _shared(  # type: ignore[no-untyped-def]
    query, key, value, starts, lengths, pages, ancestors, positions, bests, totals, parts,
    scale, cap, window, nodes, words, texts, most_pages, chunks,
    query_head, query_node, key_head, key_slot, value_head, value_slot,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, queries: tl.constexpr, slots: tl.constexpr,
    padded_texts: tl.constexpr,
):  # fmt: skip
    """One tile of queries (nodes of one text times the heads of a group) over one chunk, as far as it is in whole
    blocks that lie in a row. Tiles are numbered as in `attention._attend`."""
    tile, chunk = tl.program_id(0) // chunks, tl.program_id(0) % chunks
    group = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, padded_texts)
    begins = tl.load(starts + each, mask=each <= texts, other=0)
    text = tl.sum(((each <= texts) & (begins * heads // queries + each <= tile)).to(tl.int32), axis=0) - 1
    if text >= texts:  # nodes that only fill the pass up
        return
    first_node = tl.load(starts + text)
    count = tl.load(starts + text + 1) - first_node
    tile -= first_node * heads // queries + text
    if tile * queries >= count * heads:
        return

    column, slot = tl.arange(0, columns), tl.arange(0, slots)
    which = tile * queries + tl.arange(0, queries)
    real = which < count * heads
    node, head = first_node + which // heads, group * heads + which % heads
    length = tl.load(lengths + text).to(tl.int32)
    lineage = ancestors + node.to(tl.int64) * words
    position, _, _, base = _path(lineage, positions, node, length, words, real, slots)
    start = _chunk_start(chunk)
    stop = tl.minimum(_chunk_start(chunk + 1), tl.max(base, axis=0))
    if start >= stop:
        return

    written = real[:, None] & (column < size)[None, :]
    place = head[:, None] * query_head + node.to(tl.int64)[:, None] * query_node + column[None, :]
    q = tl.load(query + place, mask=written, other=0.0)
    keys, values = key + group * key_head + column[None, :], value + group * value_head + column[None, :]
    table = pages + text.to(tl.int64) * most_pages
    best = tl.full([queries], LOWEST, tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, columns], tl.float32)
    for at in range(start, stop, slots):
        here = _slots(table, at + slot, None)
        k = _read(keys + here[:, None] * key_slot, None, column, size, columns)
        v = _read(values + here[:, None] * value_slot, None, column, size, columns)
        seen = (at < base)[:, None] & (slot >= 0)[None, :]
        if window is not None:
            seen = seen & ((at + slot)[None, :] > (position - window)[:, None])
        best, total, mixed = _fold(q, k, v, seen, best, total, mixed, scale, cap, "ieee")
    place = (group * chunks + chunk) * nodes * heads + first_node * heads + which
    tl.store(bests + place, best, mask=real)
    tl.store(totals + place, total, mask=real)
    tl.store(parts + place[:, None] * size + column[None, :], mixed, mask=written)


@triton.jit
def _places(lineage, at, slot, length, words):  # type: ignore[no-untyped-def]
    """The places of a path in its sequence: that of the text, then of each ancestor the slot that it stands in."""
    lane = tl.arange(0, WORD)
    place, before, depth = at + slot, 0, at + slot - length
    for word in range(words):
        bit = ((tl.load(lineage + word) >> lane.to(tl.int64)) & 1).to(tl.int32)
        rank = tl.cumsum(bit, axis=0) - 1 + before
        found = (bit != 0)[None, :] & (rank[None, :] == depth[:, None])
        stands = tl.sum(tl.where(found, word * WORD + lane[None, :] - depth[:, None], 0), axis=1)
        place += stands  # a text's places have no depth, and stay
        before += tl.sum(bit, axis=0)
    return place


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=DATA)  # type: ignore[untyped-decorator]
def _finished(  # type: ignore[no-untyped-def]
    query, key, value, starts, lengths, pages, ancestors, positions, sinks, out, bests, totals, parts,
    scale, cap, window, log2e, nodes, words, texts, most_pages, chunks,
    query_head, query_node, key_head, key_slot, value_head, value_slot,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, queries: tl.constexpr, slots: tl.constexpr,
    padded_texts: tl.constexpr,
):  # fmt: skip
    """Heads of one group of one node: the chunks of its path in their order, those that are not whole read here."""
    node, group = tl.program_id(0), tl.program_id(1).to(tl.int64)
    each = tl.arange(0, padded_texts)
    begins = tl.load(starts + each, mask=each <= texts, other=2**30)
    text = tl.sum((begins <= node).to(tl.int32), axis=0) - 1
    is_text = text < texts
    length = tl.load(lengths + text, mask=is_text, other=0).to(tl.int32)
    lineage = ancestors + node.to(tl.int64) * words
    position, end, is_row, base = _path(lineage, positions, node, length, words, is_text, slots)
    gathered = tl.where(is_row, 0, words)

    column, slot = tl.arange(0, columns), tl.arange(0, slots)
    which = tl.program_id(2) * queries + tl.arange(0, queries)
    real = which < heads
    head = group * heads + which
    written = real[:, None] & (column < size)[None, :]
    q = tl.load(
        query + head[:, None] * query_head + node.to(tl.int64) * query_node + column[None, :], mask=written, other=0.0
    )
    keys, values = key + group * key_head + column[None, :], value + group * value_head + column[None, :]
    table = pages + text.to(tl.int64) * most_pages
    best = tl.full([queries], LOWEST, tl.float32)
    total = tl.zeros([queries], tl.float32)
    mixed = tl.zeros([queries, columns], tl.float32)
    for chunk in range(tl.where(end > 0, _chunk_of(end - 1) + 1, 0)):
        start = _chunk_start(chunk)
        place = (group * chunks + chunk) * nodes * heads + node * heads + which
        there = real & (start < base)
        chunk_best = tl.load(bests + place, mask=there, other=LOWEST)
        chunk_total = tl.load(totals + place, mask=there, other=0.0)
        chunk_mixed = tl.load(parts + place[:, None] * size + column[None, :], mask=there[:, None] & written, other=0.0)
        for at in range(tl.maximum(start, base), tl.minimum(_chunk_start(chunk + 1), end), slots):
            inside = at + slot < end
            here = _slots(table, _places(lineage, at, slot, length, gathered), inside)
            k = _read(keys + here[:, None] * key_slot, inside, column, size, columns)
            v = _read(values + here[:, None] * value_slot, inside, column, size, columns)
            if window is not None:
                inside = inside & (at + slot > position - window)
            seen = (which >= 0)[:, None] & inside[None, :]
            chunk_best, chunk_total, chunk_mixed = _fold(
                q, k, v, seen, chunk_best, chunk_total, chunk_mixed, scale, cap, "ieee"
            )
        higher = tl.maximum(best, chunk_best)
        shrink, share = tl.exp2(best - higher), tl.exp2(chunk_best - higher)
        total = total * shrink + chunk_total * share
        mixed = mixed * shrink[:, None] + chunk_mixed * share[:, None]
        best = higher
    _write(best, total, mixed, sinks, out, log2e, node, head, real, written, column, heads, size)


def attend_exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    data: PagedPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `attention.paged_attention`."""
    _, all_heads, nodes, size = query.shape
    groups, (texts, most_pages) = key.shape[1], data.pages.shape
    inputs = Inputs.of(query, key, value, data, scale, softcap)
    heads, own = inputs.sizes["heads"], inputs.tiling(NARROW)
    tiling = inputs.tiling(WIDE) if inputs.rows > NARROW else own
    chunks = chunks_of(most_pages * PAGE)
    out = query.new_empty(1, nodes, all_heads, size)
    parts = query.new_empty((groups, chunks, nodes * heads, size), dtype=torch.float32)
    bests, totals = query.new_empty((2, *parts.shape[:-1]), dtype=torch.float32)
    given = (*inputs.states, *(part.contiguous() for part in data.tensors[:-1]))
    numbers = (nodes, data.ancestors.shape[-1], texts, most_pages, chunks, *inputs.strides)
    shape = inputs.sizes | {"slots": tiling.slots, "padded_texts": inputs.padded_texts} | ROUNDING
    tiles = nodes * heads // tiling.queries + texts + 1
    _shared[(tiles * chunks, groups)](
        *given, bests, totals, parts, inputs.exponent, inputs.cap, window, *numbers, **shape,
        queries=tiling.queries, num_warps=tiling.warps, num_stages=2 * tiling.stages - 1,
    )  # fmt: skip
    _finished[(nodes, groups, triton.cdiv(heads, own.queries))](
        *given, sinks, out, bests, totals, parts, inputs.exponent, inputs.cap, window, LOG2E, *numbers, **shape,
        queries=own.queries, num_warps=own.warps, num_stages=1,
    )  # fmt: skip
    return out
