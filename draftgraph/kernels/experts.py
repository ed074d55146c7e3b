"""Experts of a mixture in half precision on a GPU, batch invariant: a token's result depends on that token alone.

A pair is a token and an expert that it chose, numbered token by token. Pairs of one expert are the columns of tiles
whose rows are outputs of its weight, as in `linear`, and their inputs are not split. Which pairs a tile has is found on
the device, so that passes can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftgraph.kernels.linear import STEP, accumulate, is_transposed, processors_of, stages_of, tiling_of
from draftgraph.kernels.triton_or_stub import ROUNDING, tl, triton

COUNTED = 1024  # pairs at a time
COLUMNS = 512  # of a token's result that one program combines


class Tiles(NamedTuple):
    """Which pairs each tile has."""

    table: Tensor  # int32 [tiles, 2 + block_pairs]: the expert, how many pairs, their numbers
    block_pairs: int
    pairs: int


@triton.jit(do_not_specialize=["pairs", "tiles", "experts"])  # type: ignore[untyped-decorator]
def _assign(  # type: ignore[no-untyped-def]
    chosen, table, pairs, tiles, experts, block_pairs: tl.constexpr, by_pairs: tl.constexpr, counted: tl.constexpr
):
    """The tiles of one expert. They start behind those of the experts before it, for which room is left: a tile for
    each of their pairs (`by_pairs`), or as many as their pairs fill and one more for each expert."""
    expert = tl.program_id(0)
    before, own = 0, 0
    for start in range(0, pairs, counted):
        pair = start + tl.arange(0, counted)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=experts)
        before += tl.sum((choice < expert).to(tl.int32))
        own += tl.sum((choice == expert).to(tl.int32))
    if by_pairs:
        first, end = before, before + own
    else:
        first, end = before // block_pairs + expert, (before + own) // block_pairs + expert + 1
    if expert == experts - 1:
        end = tiles
    for tile in range(first, end):
        count = tl.minimum(tl.maximum(own - (tile - first) * block_pairs, 0), block_pairs)
        tl.store(table + tile * (block_pairs + 2), expert)
        tl.store(table + tile * (block_pairs + 2) + 1, count)
    placed = 0
    for start in range(0, pairs, counted):
        pair = start + tl.arange(0, counted)
        is_own = tl.load(chosen + pair, mask=pair < pairs, other=experts) == expert
        place = placed + tl.cumsum(is_own.to(tl.int32)) - 1
        entry = (first + place // block_pairs) * (block_pairs + 2) + 2 + place % block_pairs
        tl.store(table + entry, pair, mask=is_own)
        placed += tl.sum(is_own.to(tl.int32))


def tiles_of(chosen: Tensor, experts: int) -> Tiles:
    """The tiles of all pairs; those whose expert is none of these are left out. # [tokens, choices]"""
    pairs = chosen.numel()
    block_pairs = tiling_of(2 * pairs // experts, 1).rows
    filled = pairs // block_pairs + experts
    tiles = min(pairs, filled)
    table = torch.empty((tiles, 2 + block_pairs), dtype=torch.int32, device=chosen.device)
    options = {"block_pairs": block_pairs, "by_pairs": pairs <= filled, "counted": COUNTED}
    _assign[(experts,)](chosen.contiguous(), table, pairs, tiles, experts, **options)
    return Tiles(table, block_pairs, pairs)


@triton.jit  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    rows, weight, bias, out, table, outputs, inputs, choices, row_stride, expert_stride, weight_stride,
    block_outputs: tl.constexpr, block_pairs: tl.constexpr, step: tl.constexpr,
    even: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """A tile of pairs and of outputs. `choices`: pairs that read the same row."""
    entry = table + tl.program_id(0).to(tl.int64) * (block_pairs + 2)
    expert, count = tl.load(entry).to(tl.int64), tl.load(entry + 1)
    column = tl.arange(0, block_pairs)
    output = tl.program_id(1) * block_outputs + tl.arange(0, block_outputs)
    is_output, is_pair = output < outputs, column < count
    pair = tl.load(entry + 2 + column, mask=is_pair, other=0)
    end = tl.where(count > 0, inputs, 0)
    total = accumulate(
        weight + expert * expert_stride, rows, output, pair // choices, is_output, is_pair, 0, end, inputs,
        weight_stride, row_stride, block_outputs, block_pairs, step, even, transposed,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + expert * outputs + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_place = out + pair.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(out_place, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_pair[None, :])


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, tiles: Tiles) -> Tensor:
    """Every pair's row, of which there is one for each token or each pair, with its expert's weight; what is written
    for pairs in no tile is undefined. # [rows, in], [experts, out, in], [experts, out] -> [pairs, out]"""
    count, inputs = rows.shape
    outputs = weight.shape[1]
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    bias = None if bias is None else bias.contiguous()
    transposed = is_transposed(weight)
    out = torch.empty((tiles.pairs, outputs), dtype=rows.dtype, device=rows.device)
    tiling = tiling_of(tiles.block_pairs, 1)
    programs = len(tiles.table), triton.cdiv(outputs, tiling.outputs)
    options: dict[str, Any] = {"num_warps": tiling.warps, **ROUNDING}
    _linear[programs](
        rows, weight, bias, out, tiles.table, outputs, inputs, tiles.pairs // count, rows.stride(0),
        weight.stride(0), weight.stride(2 if transposed else 1),
        block_outputs=tiling.outputs, block_pairs=tiles.block_pairs, step=tiling.step, even=inputs % STEP == 0,
        transposed=transposed, num_stages=stages_of(tiling, programs[0] * programs[1], processors_of(rows.device)),
        **options,
    )  # fmt: skip
    return out


def linear_reference(rows: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """The same in PyTorch, pair by pair."""
    experts = chosen.flatten()
    rows = rows.repeat_interleave(len(experts) // len(rows), dim=0)
    out = torch.einsum("pi,poi->po", rows, weight[experts])
    return out if bias is None else out + bias[experts]


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    results, chosen, weights, out, size, experts, choices: tl.constexpr, columns: tl.constexpr
):
    """Some columns of one token's result."""
    token, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < size
    total = tl.zeros([columns], tl.float32)
    for number in range(choices):
        pair = token * choices + number
        is_here = tl.load(chosen + pair) < experts
        place = results + pair.to(tl.int64) * size + column
        result = tl.load(place, mask=is_column & is_here, other=0.0).to(tl.float32)
        total += result * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + column, total.to(out.dtype.element_ty), mask=is_column)


def combine(results: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """The weighted sum of the results of a token's pairs, in the order of its choices, rounded once.
    # [pairs, size], [tokens, choices] twice -> [tokens, size]"""
    tokens, choices = chosen.shape
    size = results.shape[1]
    out = torch.empty((tokens, size), dtype=results.dtype, device=results.device)
    given = results.contiguous(), chosen.contiguous(), weights.contiguous()
    programs = tokens, triton.cdiv(size, COLUMNS)
    _combine[programs](*given, out, size, experts, choices=choices, columns=COLUMNS, **ROUNDING)
    return out


def combine_reference(results: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same in PyTorch."""
    weighted = results.float().view(*chosen.shape, -1) * weights.float()[..., None]
    return weighted.sum(dim=1).to(results.dtype)
