"""Attention of the nodes of N sequences over their paged keys and values, each node seeing its text and its ancestors.

All that changes from pass to pass is data on the device and none of it a shape, so a captured CUDA graph takes the next
pass by copying into the tensors of `PagedPass`. The programs of the Triton kernel find out by themselves which tile of
queries belongs to which sequence. The reference is what the kernel means, and what runs on a CPU.

In the kernel a node's bits depend on its own path alone: in a tree as in plain decoding, behind a text that was read in
any pieces, beside any other sequences. All sums over keys go by their place in the path, in chunks whose borders are
fixed places. The last places of a path, whose slots need not lie in a row, are the tail: its keys are added one by one,
so that what a node does not see adds nothing, wherever it stands in between. How many programs share the chunks of a
text never changes bits: whoever finishes last adds them up in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import e, log2
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftgraph.errors import UnsupportedModelError
from draftgraph.graph import WORD as BITS
from draftgraph.kernels.linear import processors_of
from draftgraph.kernels.rows import is_plain, row_attention
from draftgraph.kernels.triton_or_stub import ROUNDING, available, tl, triton

PAGE_SIZE = 16  # tokens of a page


@dataclass(frozen=True)
class PagedPass:
    """What one pass over N sequences tells the attention.

    Place p of sequence s is slot pages[s, p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE of the pool; scratch slot j of it
    is place lengths[s] + j. What lies behind a sequence's last page in `pages` is never read. Nodes behind starts[-1]
    only fill the pass up: they see nothing, and get nothing.
    """

    starts: Tensor  # int32 [sequences + 1]: sequence s has the nodes starts[s] to starts[s + 1]; absent ones have none
    lengths: Tensor  # int32 [sequences]: slots of committed text
    pages: Tensor  # int32 [sequences, most pages]
    ancestors: Tensor  # int64 [nodes, words]: bit j % 64 of word j // 64 says that the node sees scratch slot j
    positions: Tensor  # int64 [1, nodes]
    scratch_positions: Tensor  # int [sequences, words * 64]
    most_nodes: int  # of any one sequence: a shape
    views: dict[int | None, list[View]] = field(default_factory=dict, compare=False)  # of the reference, by window
    counters: dict[int, Tensor] = field(default_factory=dict, compare=False)  # of the kernel, by how many they are

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.starts, self.lengths, self.pages, self.ancestors, self.positions, self.scratch_positions


def paged_attention(
    query: Tensor,  # [1, heads, nodes, size]
    key: Tensor,  # [1, groups, slots of the pool, size]
    value: Tensor,  # [1, groups, slots of the pool, value size]
    data: PagedPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a weight that goes to no slot
) -> Tensor:
    """The attended values. # [1, nodes, heads, value size]

    A window hides the keys that are `window` positions or more before the query.
    """
    if torch.compiler.is_compiling():
        told = (*data.tensors, data.most_nodes, scale, window, softcap, sinks)
        return _compiled_attention(query, key, value, *told)  # type: ignore[no-any-return]
    if not query.is_cuda:
        return attend_reference(query, key, value, data, scale, window, softcap, sinks)
    if not supports(query, key, value):
        sizes = f"{query.shape[-1]} and {value.shape[-1]}"
        raise UnsupportedModelError(f"no attention kernel for {query.dtype} and heads of {sizes} on this GPU")
    return attend_triton(query, key, value, data, scale, window, softcap, sinks)


@torch.library.custom_op("draftgraph::paged_attention", mutates_args=())  # one node in a graph of torch.compile
def _compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    pages: Tensor,
    ancestors: Tensor,
    positions: Tensor,
    scratch_positions: Tensor,
    most_nodes: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    data = PagedPass(starts, lengths, pages, ancestors, positions, scratch_positions, most_nodes)
    return paged_attention(query, key, value, data, scale, window, softcap, sinks)


@_compiled_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    rows, heads, nodes, _ = query.shape
    return query.new_empty(rows, nodes, heads, value.shape[-1])


class View(NamedTuple):
    """The nodes of one sequence in a pass, for the reference: read from the data once a pass, not once a layer."""

    nodes: slice
    slots: slice | Tensor  # of its text and scratch, as far as any node here sees
    seen: Tensor | None  # [nodes, slots]; None: all of it
    unseen: Tensor | None  # [slots] that no node sees, which may hold anything; None: there are none

    def of(self, states: Tensor) -> Tensor:
        """The sequence's keys or values: in place where its pages are neighbours, else gathered."""
        return states[:, :, self.slots] if isinstance(self.slots, slice) else states.index_select(2, self.slots)


def attend_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    data: PagedPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `paged_attention` means, sequence by sequence. Reads the data on the host, so it cannot be captured."""
    if window not in data.views:
        data.views[window] = views_of(data, window)
    parts = [attend_view(view, query, key, value, scale, softcap, sinks) for view in data.views[window]]
    if len(parts) == 1 and parts[0].shape[1] == query.shape[2]:
        return parts[0]
    attended = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    for view, part in zip(data.views[window], parts, strict=True):
        attended[:, view.nodes] = part
    return attended


def attend_view(
    view: View, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """The nodes of one sequence. # [1, nodes, heads, value size]"""
    mine, keys, values = query[:, :, view.nodes], view.of(key), view.of(value)
    if is_plain(mine, keys, values):
        return row_attention(mine, keys, values, view.seen, scale, softcap, sinks)
    if view.unseen is not None:  # 0 times what was never written is not always 0
        values = values.masked_fill(view.unseen[:, None], 0)
    if softcap is None and sinks is None:
        grouped = query.shape[1] != key.shape[1]
        found = scaled_dot_product_attention(mine, keys, values, view.seen, scale=scale, enable_gqa=grouped)
        return found.transpose(1, 2).contiguous()
    seen = torch.ones((), dtype=torch.bool, device=query.device) if view.seen is None else view.seen
    return masked_attention(mine, keys, values, seen, scale, softcap, sinks)


def views_of(data: PagedPass, window: int | None) -> list[View]:
    given = (tensor.cpu().numpy() for tensor in data.tensors)
    starts, lengths, pages, ancestors, positions, scratch_positions = given
    bits = np.unpackbits(np.ascontiguousarray(ancestors).view(np.uint8), axis=1, bitorder="little").astype(bool)
    views = []
    for sequence, (start, end) in enumerate(pairwise(starts.tolist())):
        if start == end:
            continue
        length, is_ancestor = int(lengths[sequence]), bits[start:end]
        scratch = int(np.flatnonzero(is_ancestor.any(axis=0)).max(initial=-1)) + 1
        if length + scratch == 0:
            continue
        seen = np.ones((end - start, length + scratch), dtype=bool)
        seen[:, length:] = is_ancestor[:, :scratch]
        if window is not None:
            places = np.concatenate([np.arange(length), scratch_positions[sequence, :scratch]])
            seen &= positions[0, start:end, None] - places < window
        held = pages[sequence, : -(-(length + scratch) // PAGE_SIZE)].astype(np.int64)
        if len(held) and (np.diff(held) == 1).all():
            slots: slice | Tensor = slice(int(held[0]) * PAGE_SIZE, int(held[0]) * PAGE_SIZE + length + scratch)
        else:
            place = np.arange(length + scratch)
            slots = torch.from_numpy(held[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE).to(data.pages.device)
        unseen, device = ~seen.any(axis=0), data.pages.device
        views.append(
            View(
                slice(start, end),
                slots,
                None if seen.all() else torch.from_numpy(seen).to(device),
                torch.from_numpy(unseen).to(device) if unseen.any() else None,
            )
        )
    return views


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,  # broadcasts to [rows, heads, queries, slots]: what is seen, or what is added
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with additions that `scaled_dot_product_attention` does not know. # [rows, queries, heads, size]"""
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows, heads, queries, size = query.shape
    groups, slots = key.shape[1:3]
    grouped = query.to(dtype).reshape(rows, groups, -1, size)  # the heads of a group share their keys
    score = (grouped @ key.to(dtype).mT * scale).view(rows, heads, queries, slots)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    best = score.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None]
        best = best.maximum(sink)
    weight = torch.exp(score - best)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - best)
    share = weight / total.where(total != 0, 1)  # who sees nothing gets nothing
    mixed = share.view(rows, groups, -1, slots) @ value.to(dtype)
    return mixed.view(rows, heads, queries, -1).transpose(1, 2).to(query.dtype).contiguous()


LOG2E = log2(e)  # exponents are of 2: that is what the hardware computes
WORD = tl.constexpr(BITS)  # scratch slots that one word of ancestors tells of
PAGE = tl.constexpr(PAGE_SIZE)
LOWEST = tl.constexpr(-1e30)  # under any score, yet finite: -inf less LOWEST is -inf, and never not a number
LARGEST_SIZE = 256
FEWEST = 16  # columns that tensor cores take
RESERVE = 1024  # bytes of shared memory for page numbers on their way
CHUNK, LATER_CHUNK, EARLY = 256, 1024, 8  # places of each of the first chunks, of those behind them, how many are first
SHORT, LONG, FIRST = tl.constexpr(CHUNK), tl.constexpr(LATER_CHUNK), tl.constexpr(EARLY)
DEEPEST = 32  # nodes of a path at most that need not lie in a row: so many places of every path are in its tail
DEEP = tl.constexpr(DEEPEST)
BUSY = 2  # programs for every processor, from which on each reads all chunks of its text

# What one compiled kernel serves all values of: a text that outgrows its table must not wait for a compiler.
NUMBERS = ("nodes", "words", "texts", "most_pages", "splits", "partials")
DATA = (
    "starts",
    "lengths",
    "pages",
    "ancestors",
    "positions",
    "scratch_positions",
    "partial_best",
    "partial_total",
    "counters",
)


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
def _is_contiguous(ancestor_row, length, end, words, valid):  # type: ignore[no-untyped-def]
    """Whether the scratch slots of these paths are the first ones, without a gap, so that they lie as a text would."""
    count = (end - length).to(tl.int64)
    same = valid
    for word in range(words):
        inside = tl.minimum(tl.maximum(count - word * WORD, 0), WORD)
        ones = tl.where(inside == WORD, -1, (1 << tl.minimum(inside, WORD - 1)) - 1).to(tl.int64)
        same = same & (tl.load(ancestor_row + word, mask=valid, other=0) == ones)
    return same


@triton.jit
def _slots(table, place, exists):  # type: ignore[no-untyped-def]
    """The slots of these places of a text; `exists` is None where all of them are written."""
    if exists is not None:
        page = tl.load(table + place // PAGE, mask=exists, other=0)
    else:
        page = tl.load(table + place // PAGE)
    return page.to(tl.int64) * PAGE + place % PAGE


@triton.jit  # type: ignore[untyped-decorator]
def _read(place, exists, column, size: tl.constexpr, columns: tl.constexpr):  # type: ignore[no-untyped-def]
    """Slots of keys or values; `exists` is None where all of them are written."""
    if exists is not None:
        states = tl.load(place, mask=exists[:, None] & (column < size)[None, :], other=0.0)
    elif size < columns:
        states = tl.load(place, mask=(column < size)[None, :], other=0.0)
    else:
        states = tl.load(place)
    return states


@triton.jit
def _exponents(k, q, seen, scale, cap):  # type: ignore[no-untyped-def]
    """Of the weights that queries give to keys. # [keys, size], [size, queries] -> [keys, queries]"""
    score = tl.dot(k, q, input_precision="ieee")
    if cap is not None:
        score = cap - 2.0 * cap / (tl.exp2(score * scale) + 1.0)  # a tanh
    else:
        score = score * scale
    return tl.where(seen, score, -float("inf"))


@triton.jit
def _merged(best, total, acc, other_best, other_total, other_acc):  # type: ignore[no-untyped-def]
    """The softmax over all chunks so far, and now over one more."""
    higher = tl.maximum(best, other_best)
    scale, other_scale = tl.exp2(best - higher), tl.exp2(other_best - higher)
    return higher, total * scale + other_total * other_scale, acc * scale[None, :] + other_acc * other_scale[None, :]


@triton.jit
def _tail_keys(  # type: ignore[no-untyped-def]
    at, tail_offset, in_text, first_tail_start, last_contiguous, most_scratch, tail_start, contiguous, length,
    ancestor_row, is_branching, window_start, table, scratch_places, window,
):  # fmt: skip
    """Keys of the tail from the `at`-th on: first those that lie as a text does, then scratch slots in their order,
    which is that of every path. Their slots, whether they are written, and who sees them.

    # [keys] twice, [keys, queries]
    """
    is_text, scratch = at < in_text, tl.maximum(at - in_text, 0)
    place = tl.where(is_text, first_tail_start + at, length + scratch) + tail_offset
    exists = place < tl.where(is_text, last_contiguous, length + most_scratch)
    bits = tl.load(ancestor_row + scratch // WORD, mask=is_branching & (at >= in_text), other=0)
    is_ancestor = (bits[None, :] >> ((scratch + tail_offset) % WORD).to(tl.int64)[:, None]) & 1 != 0
    in_tail = (place[:, None] >= tail_start[None, :]) & (place[:, None] < contiguous[None, :])
    seen = is_ancestor | (in_tail & is_text)
    if window is not None:
        pointers = scratch_places + scratch + tail_offset
        scratch_place = tl.load(pointers, mask=exists & (at >= in_text), other=0).to(tl.int32)
        seen = seen & (tl.where(is_text, place, scratch_place)[:, None] >= window_start[None, :])
    return _slots(table, place, exists), exists, seen


@triton.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=DATA)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    query, key, value, starts, lengths, pages, ancestors, positions, scratch_positions, sinks, out, partial_best,
    partial_total, partial_acc, counters, scale, cap, window, log2e, nodes, words, texts, most_pages, splits, partials,
    query_head, query_node, key_head, key_slot, value_head, value_slot,
    heads: tl.constexpr, size: tl.constexpr, columns: tl.constexpr, value_size: tl.constexpr,
    value_columns: tl.constexpr, block_queries: tl.constexpr, block_keys: tl.constexpr, tail_block: tl.constexpr,
    padded_texts: tl.constexpr, single: tl.constexpr,
):  # fmt: skip
    """One tile of queries (nodes of one text times the heads of a group) over all chunks of that text (`single`), or
    over one in `splits` of them; the tail is a chunk behind them.

    Text t has the tiles from starts[t] * heads // queries + t on: as many as it needs, or one too many. Behind the
    last text come the nodes that only fill the pass up.
    """
    tile_number, split = tl.program_id(0) // splits, tl.program_id(0) % splits
    group = tl.program_id(1).to(tl.int64)
    counter = counters + tile_number * tl.num_programs(1) + tl.program_id(1)
    each = tl.arange(0, padded_texts)
    begins = tl.load(starts + each, mask=each <= texts, other=0)
    text = tl.sum(((each <= texts) & (begins * heads // block_queries + each <= tile_number)).to(tl.int32), axis=0) - 1
    is_text = text < texts
    first_node = tl.load(starts + text)
    count = tl.load(starts + text + 1, mask=is_text, other=0)
    count = tl.where(is_text, count, nodes) - first_node
    tile = tile_number - first_node * heads // block_queries - text
    if tile * block_queries >= count * heads:
        return

    column, value_column, offset = tl.arange(0, columns), tl.arange(0, value_columns), tl.arange(0, block_keys)
    index = tile * block_queries + tl.arange(0, block_queries)
    valid = index < count * heads
    node, head = first_node + index // heads, group * heads + index % heads
    length = tl.load(lengths + text, mask=is_text, other=0).to(tl.int32)
    ancestor_row = ancestors + node.to(tl.int64) * words
    position = tl.load(positions + node, mask=valid & is_text, other=-1).to(tl.int32)
    end = position + 1
    is_contiguous = _is_contiguous(ancestor_row, length, end, words, valid & is_text)
    contiguous = tl.where(is_contiguous, end, tl.minimum(length, end))  # places that lie as a text does
    tail_start = tl.minimum(tl.maximum(end - DEEP, 0), contiguous) // block_keys * block_keys  # where the tail begins
    window_start, first = position, 0  # the first places that are seen, where there is a window
    if window is not None:
        window_start = position - window + 1
        first = tl.maximum(tl.min(tl.where(valid, window_start, 2**30), axis=0), 0) // block_keys * block_keys
    last_tail_start = tl.max(tail_start, axis=0)
    chunks = tl.where(last_tail_start > 0, _chunk_of(last_tail_start - 1) + 1, 0)
    if split > chunks:
        return

    q_pointers = column[:, None] + (head * query_head + node.to(tl.int64) * query_node)[None, :]
    q = tl.load(query + q_pointers, mask=(column < size)[:, None] & valid[None, :], other=0.0)
    valid_values = (value_column < value_size)[:, None] & valid[None, :]
    keys, values = key + group * key_head + column[None, :], value + group * value_head + value_column[None, :]
    table = pages + text.to(tl.int64) * most_pages
    query_place = first_node * heads + index
    best = tl.full([block_queries], LOWEST, tl.float32)
    total = tl.zeros([block_queries], tl.float32)
    acc = tl.zeros([value_columns, block_queries], tl.float32)

    for chunk in range(split, chunks, splits):
        chunk_best = tl.full([block_queries], LOWEST, tl.float32)
        chunk_total = tl.zeros([block_queries], tl.float32)
        chunk_acc = tl.zeros([value_columns, block_queries], tl.float32)
        chunk_end = tl.minimum(_chunk_start(chunk + 1), last_tail_start)
        for at in range(tl.maximum(_chunk_start(chunk), first), chunk_end, block_keys):
            slot = _slots(table, at + offset, None)
            k = _read(keys + slot[:, None] * key_slot, None, column, size, columns)
            v = _read(values + slot[:, None] * value_slot, None, value_column, value_size, value_columns)
            seen = (at < tail_start)[None, :] & (offset >= 0)[:, None]
            if window is not None:
                seen = seen & ((at + offset)[:, None] >= window_start[None, :])
            exponent = _exponents(k, q, seen, scale, cap)
            higher = tl.maximum(chunk_best, tl.max(exponent, axis=0))
            weight, shrink = tl.exp2(exponent - higher[None, :]), tl.exp2(chunk_best - higher)
            chunk_total = chunk_total * shrink + tl.sum(weight, axis=0)
            chunk_acc = tl.dot(tl.trans(v), weight.to(v.dtype), chunk_acc * shrink[None, :], input_precision="ieee")
            chunk_best = higher
        if single:
            best, total, acc = _merged(best, total, acc, chunk_best, chunk_total, chunk_acc)
        else:
            chunk_place = (group * partials + chunk) * nodes * heads + query_place
            tl.store(partial_best + chunk_place, chunk_best, mask=valid)
            tl.store(partial_total + chunk_place, chunk_total, mask=valid)
            acc_pointers = partial_acc + chunk_place[None, :] * value_size + value_column[:, None]
            tl.store(acc_pointers, chunk_acc, mask=valid_values)

    if split == chunks % splits:  # the tail: first its largest exponent, then its keys one by one
        is_branching = valid & is_text & (is_contiguous == 0)
        first_tail_start = tl.min(tl.where(valid, tail_start, 2**30), axis=0)
        last_contiguous = tl.max(contiguous, axis=0)
        in_text, most_scratch = tl.cdiv(tl.maximum(last_contiguous - first_tail_start, 0), block_keys) * block_keys, 0
        lane = tl.arange(0, WORD)
        for word in range(words):
            some = tl.reduce_or(tl.load(ancestor_row + word, mask=is_branching, other=0), axis=0)
            is_seen = (some >> lane.to(tl.int64)) & 1 != 0
            most_scratch = tl.maximum(most_scratch, tl.max(tl.where(is_seen, word * WORD + lane + 1, 0), axis=0))
        tail_length, scratch_places = in_text + most_scratch, scratch_positions + text * words * WORD
        tail_best = tl.full([block_queries], LOWEST, tl.float32)
        for at in range(0, tail_length, block_keys):
            slot, exists, seen = _tail_keys(
                at, offset, in_text, first_tail_start, last_contiguous, most_scratch, tail_start, contiguous, length,
                ancestor_row, is_branching, window_start, table, scratch_places, window,
            )  # fmt: skip
            k = _read(keys + slot[:, None] * key_slot, exists, column, size, columns)
            tail_best = tl.maximum(tail_best, tl.max(_exponents(k, q, seen, scale, cap), axis=0))
        tail_offset, one = tl.arange(0, tail_block), tl.full([16, tail_block], 1.0, tl.float32)
        tail_sums = tl.zeros([16, block_queries], tl.float32)  # the same in every row
        tail_acc = tl.zeros([value_columns, block_queries], tl.float32)
        for at in range(0, tail_length, tail_block):
            slot, exists, seen = _tail_keys(
                at, tail_offset, in_text, first_tail_start, last_contiguous, most_scratch, tail_start, contiguous,
                length, ancestor_row, is_branching, window_start, table, scratch_places, window,
            )  # fmt: skip
            k = _read(keys + slot[:, None] * key_slot, exists, column, size, columns)
            v = _read(values + slot[:, None] * value_slot, exists, value_column, value_size, value_columns)
            weight = tl.exp2(_exponents(k, q, seen, scale, cap) - tail_best[None, :])
            tail_sums = tl.dot(one, weight, tail_sums, input_precision="ieee")
            tail_acc = tl.dot(tl.trans(v).to(tl.float32), weight, tail_acc, input_precision="ieee")
        tail_total = tl.max(tail_sums, axis=0)
        if single:
            best, total, acc = _merged(best, total, acc, tail_best, tail_total, tail_acc)
        else:
            tail_place = (group * partials + chunks) * nodes * heads + query_place
            tl.store(partial_best + tail_place, tail_best, mask=valid)
            tl.store(partial_total + tail_place, tail_total, mask=valid)
            acc_pointers = partial_acc + tail_place[None, :] * value_size + value_column[:, None]
            tl.store(acc_pointers, tail_acc, mask=valid_values)

    is_last = True
    if not single:
        tl.debug_barrier()  # the partial results are written before they are counted
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == tl.minimum(splits - 1, chunks)
        if is_last:
            tl.store(counter, 0)  # for the next launch
            for number in range(chunks + 1):
                place = (group * partials + number) * nodes * heads + query_place
                other_best = tl.load(partial_best + place, mask=valid, other=LOWEST, cache_modifier=".cg")
                other_total = tl.load(partial_total + place, mask=valid, other=0.0, cache_modifier=".cg")
                acc_pointers = partial_acc + place[None, :] * value_size + value_column[:, None]
                other_acc = tl.load(acc_pointers, mask=valid_values, other=0.0, cache_modifier=".cg")
                best, total, acc = _merged(best, total, acc, other_best, other_total, other_acc)
    if is_last:
        if sinks is not None:
            sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * log2e
            higher = tl.maximum(best, sink)
            shrink = tl.exp2(best - higher)
            total, acc = total * shrink + tl.exp2(sink - higher), acc * shrink[None, :]
        acc = acc / tl.where(total == 0.0, 1.0, total)[None, :]
        out_place = (node * (tl.num_programs(1) * heads) + head)[None, :] * value_size + value_column[:, None]
        tl.store(out + out_place, acc.to(out.dtype.element_ty), mask=valid_values)


class Tiling(NamedTuple):
    """How much a program holds at a time. `block_keys` and `tail_block` are the same for any number of queries."""

    block_queries: int
    block_keys: int
    tail_block: int
    warps: int
    stages: int

    @classmethod
    def of(cls, block_queries: int, columns: int, itemsize: int, shared_memory: int) -> Tiling:
        if itemsize > 2:  # products in float32 know no tensor cores, and take many registers
            return cls(16, max(16, min(32, 2048 // columns)), 16, 8, 1)
        block_keys = min(64, 8192 // columns)
        half = shared_memory // 2  # two programs share a processor
        room = half - RESERVE - block_queries * (columns + block_keys) * itemsize
        stages = max(1, min(3, room // (2 * block_keys * columns * itemsize)))
        return cls(block_queries, block_keys, min(32, block_keys), 4, stages)


def queries_of(rows: int, texts: int, groups: int, columns: int, enough: int) -> int:
    """How many queries a tile has, of so many rows in all and texts: few, as long as that keeps no more programs busy
    than are enough.

    >>> [queries_of(rows, 1, 32, 128, 264) for rows in (1, 64, 256, 512)], queries_of(512, 64, 32, 128, 264)
    ([16, 16, 32, 64], 16)
    """
    block_queries, most = 16, 64 if columns <= 128 else 32
    while block_queries < most and block_queries * texts < rows and groups * (rows // block_queries) > enough:
        block_queries *= 2
    return block_queries


def supports(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernel knows these dtypes and sizes on this device."""
    known = query.dtype in (torch.bfloat16, torch.float16, torch.float32) and query.dtype == key.dtype == value.dtype
    fits = key.shape[:-1] == value.shape[:-1] and max(key.shape[-1], value.shape[-1]) <= LARGEST_SIZE
    return available and known and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def attend_triton(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    data: PagedPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """See `paged_attention`. `splits`: how many programs read a text; None: enough to fill the device."""
    _, all_heads, nodes, size = query.shape
    groups, (texts, most_pages) = key.shape[1], data.pages.shape
    heads, value_size = all_heads // groups, value.shape[-1]
    columns, value_columns = (max(FEWEST, triton.next_power_of_2(one)) for one in (size, value_size))
    device: Any = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    shared_memory = getattr(device, "shared_memory_per_block_optin", 48 * 1024)  # ROCm does not tell
    enough = BUSY * processors_of(query.device)
    most_columns = max(columns, value_columns)
    block_queries = queries_of(nodes * heads, texts, groups, most_columns, enough)
    tiling = Tiling.of(block_queries, most_columns, query.element_size(), shared_memory)
    if splits is None:
        busy = groups * max(min(texts, nodes), nodes * heads // tiling.block_queries)
        splits = 1 if busy >= enough else chunks_of(most_pages * PAGE_SIZE) + 1
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    out = query.new_empty(1, nodes, all_heads, value_size)
    partials = (groups, chunks_of(most_pages * PAGE_SIZE) + 1, nodes * heads) if splits > 1 else (0, 0, 0)
    partial_acc = query.new_empty((*partials, value_size), dtype=torch.float32)
    partial_best, partial_total = query.new_empty((2, *partials), dtype=torch.float32)
    tiles, words = nodes * heads // tiling.block_queries + texts + 1, data.ancestors.shape[-1]
    if groups * tiles not in data.counters:
        data.counters[groups * tiles] = torch.zeros(groups * tiles, dtype=torch.int32, device=query.device)
    _attend[(tiles * splits, groups)](
        query, key, value, *(part.contiguous() for part in data.tensors), sinks, out, partial_best, partial_total,
        partial_acc, data.counters[groups * tiles],
        scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap,
        None if softcap is None else softcap * LOG2E, window, LOG2E,
        nodes, words, texts, most_pages, splits, partials[1],
        *(stride for part in (query, key, value) for stride in part.stride()[1:-1]),
        heads=heads, size=size, columns=columns, value_size=value_size, value_columns=value_columns,
        block_queries=tiling.block_queries, block_keys=tiling.block_keys, tail_block=tiling.tail_block,
        padded_texts=max(128, triton.next_power_of_2(texts + 1)), single=splits == 1,
        num_warps=tiling.warps, num_stages=2 * tiling.stages - 1,  # page numbers come first, then what lies there
        **ROUNDING,
    )  # fmt: skip
    return out
