"""Attention of the nodes of N sequences over their paged keys and values, each node seeing its text and its ancestors.

All that changes from pass to pass is data on the device and none of it a shape, so a captured CUDA graph takes the next
pass by copying into the tensors of `PagedPass`. The Triton kernel splits each text over programs, and a second kernel
combines; which tile of queries belongs to which sequence is found by the programs themselves. The reference is what the
kernel means, and what runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, e, log2
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftgraph.errors import UnsupportedModelError
from draftgraph.graph import WORD as BITS
from draftgraph.kernels.rows import is_plain, row_attention
from draftgraph.kernels.triton_or_stub import available, tl, triton

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
    exact: bool = False  # whether a node's bits may depend on its own path alone: see `exact_attention`
    views: dict[int | None, list[View]] = field(default_factory=dict, compare=False)  # of the reference, by window

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
MOST_SPLITS = 64
ENOUGH = 1.15  # more splits than these must promise a time shorter by this ratio
RESERVE = 1024  # bytes of shared memory for page numbers on their way

# What one compiled kernel serves all values of: a text that outgrows its table must not wait for a compiler.
NUMBERS = ("nodes", "words", "texts", "most_pages", "splits")
DATA = ("starts", "lengths", "pages", "ancestors", "positions", "scratch_positions", "bests", "totals")


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


@triton.jit
def _slots(table, place, there):  # type: ignore[no-untyped-def]
    """The slots of these places of a text; `there` is None where all of them are written."""
    if there is not None:
        page = tl.load(table + place // PAGE, mask=there, other=0)
    else:
        page = tl.load(table + place // PAGE)
    return page.to(tl.int64) * PAGE + place % PAGE


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    best, total, mixed, sinks, out, log2e, node, head, real, written, column, heads: tl.constexpr, size: tl.constexpr
):  # fmt: skip
    """What queries have attended to, after the weight that goes to no slot."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * log2e
        higher = tl.maximum(best, sink)
        shrink = tl.exp2(best - higher)
        total, mixed = total * shrink + tl.exp2(sink - higher), mixed * shrink[:, None]
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    place = (node * (tl.num_programs(1) * heads) + head)[:, None] * size + column[None, :]
    tl.store(out + place, mixed.to(out.dtype.element_ty), mask=written)


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
        _write(best, total, mixed, sinks, out, log2e, node, head, real, written, column, heads, size)
    else:
        place = (group * splits + split) * nodes * heads + first_node * heads + which
        tl.store(bests + place, best, mask=real)
        tl.store(totals + place, total, mask=real)
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
    return available and known and fits and torch.cuda.get_device_capability(query.device) >= (8, 0)


def split_count(programs: int, capacity: int, places: int) -> int:
    """Into how many parts the context goes where `places` programs run at a time: the fewest that keep them busy."""
    counts = range(1, max(1, min(MOST_SPLITS, capacity // BITS)) + 1)
    times = [ceil(programs * count / places) / count for count in counts]
    return next(count for count, time in zip(counts, times, strict=True) if time <= ENOUGH * min(times))


class Inputs(NamedTuple):
    """What kernels are told of the states, and what they are compiled for."""

    states: tuple[Tensor, ...]  # query, key and value, each row of them in one piece
    strides: list[int]
    exponent: float  # of 2, by the score
    cap: float | None
    sizes: dict[str, Any]
    padded_texts: int
    rows: int  # queries of one text and group, mostly
    shared_memory: int  # bytes

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, data: PagedPass, scale: float, softcap: float | None
    ) -> Inputs:
        _, all_heads, nodes, size = query.shape
        heads, texts = all_heads // key.shape[1], len(data.pages)
        columns = max(16, triton.next_power_of_2(size))  # the fewest that tensor cores take
        states = tuple(part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
        device: Any = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
        usual = min(data.most_nodes, 2 * triton.cdiv(nodes, texts))  # nodes of a text; one with more has several tiles
        return cls(
            states,
            strides=[stride for part in states for stride in part.stride()[1:-1]],
            exponent=scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap,
            cap=None if softcap is None else softcap * LOG2E,
            sizes={"heads": heads, "size": size, "columns": columns},
            padded_texts=max(128, triton.next_power_of_2(texts + 1)),
            rows=usual * heads,
            shared_memory=getattr(device, "shared_memory_per_block_optin", 48 * 1024) - RESERVE,  # ROCm does not tell
        )

    def tiling(self, queries: int) -> Tiling:
        return Tiling.of(queries, self.sizes["columns"], self.states[0].element_size(), self.shared_memory)


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
    """See `paged_attention`. `splits`: in how many parts each text is read; None: enough to fill the device."""
    _, all_heads, nodes, size = query.shape
    groups, (texts, most_pages) = key.shape[1], data.pages.shape
    inputs = Inputs.of(query, key, value, data, scale, softcap)
    heads, tiling = inputs.sizes["heads"], inputs.tiling(inputs.rows)
    if splits is None:
        busy = groups * max(min(texts, nodes), nodes * heads // tiling.queries)
        processors = torch.cuda.get_device_properties(query.device).multi_processor_count
        splits = split_count(busy, most_pages * PAGE_SIZE, tiling.at_once * processors)
    out = query.new_empty(1, nodes, all_heads, size)
    parts = query.new_empty((1, groups, splits, nodes * heads, size) if splits > 1 else (0,), dtype=torch.float32)
    bests, totals = query.new_empty((2, *parts.shape[:-1]), dtype=torch.float32)
    shape = inputs.sizes | {"enable_fp_fusion": True}
    tiles = nodes * heads // tiling.queries + texts + 1
    told = [part.contiguous() for part in data.tensors]
    _attend[(tiles * splits, groups)](
        *inputs.states, *told, sinks, out, bests, totals, parts, inputs.exponent, inputs.cap, window, LOG2E,
        nodes, data.ancestors.shape[-1], texts, most_pages, splits, *inputs.strides, **shape,
        queries=tiling.queries, slots=tiling.slots, padded_texts=inputs.padded_texts,
        single=splits == 1, precision="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tiling.warps, num_stages=2 * tiling.stages - 1,  # page numbers come first, then what lies there
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        partial = (bests, totals, parts, sinks, out, LOG2E, splits)
        _combine[(all_heads, nodes, 1)](*partial, **shape, padded_splits=padded, num_warps=4)
    return out
