"""Products with the weights of experts in half precision on a GPU: what a token is given depends on that token alone.

A pair is a token and an expert that it chose, in the order of tokens and of their choices. Pairs of one expert are the
columns of tiles whose rows are outputs of its weight, as in `linear`; the inputs go in one part, from the first to the
last. How many tiles an expert needs is found on the device, so that passes can be captured.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftgraph.kernels.linear import STEP, is_turned, processors_of, stages_of, tiling_of, walk
from draftgraph.kernels.triton_or_stub import ROUNDING, tl, triton

AT_ONCE = 1024  # pairs that are counted at a time
COLUMNS = 512  # of a token's result that a program adds up


class Shares(NamedTuple):
    """Who multiplies what."""

    tiles: Tensor  # of each: its expert, how many pairs it has, and these # int32 [tiles, 2 + wide]
    wide: int
    pairs: int


@triton.jit(do_not_specialize=["pairs", "tiles", "experts"])  # type: ignore[untyped-decorator]
def _share(  # type: ignore[no-untyped-def]
    chosen, told, pairs, tiles, experts, wide: tl.constexpr, by_pairs: tl.constexpr, at_once: tl.constexpr
):
    """Tiles of one expert. They begin behind those of the experts before it, wherever these end: at the number of their
    pairs (`by_pairs`), or of the tiles that as many pairs fill and one for each of the experts."""
    expert = tl.program_id(0)
    before, own = 0, 0
    for start in range(0, pairs, at_once):
        pair = start + tl.arange(0, at_once)
        choice = tl.load(chosen + pair, mask=pair < pairs, other=experts)
        before += tl.sum((choice < expert).to(tl.int32))
        own += tl.sum((choice == expert).to(tl.int32))
    if by_pairs:
        first, last = before, before + own
    else:
        first, last = before // wide + expert, (before + own) // wide + expert + 1
    if expert == experts - 1:
        last = tiles
    for tile in range(first, last):
        tl.store(told + tile * (wide + 2), expert)
        tl.store(told + tile * (wide + 2) + 1, tl.minimum(tl.maximum(own - (tile - first) * wide, 0), wide))
    placed = 0
    for start in range(0, pairs, at_once):
        pair = start + tl.arange(0, at_once)
        mine = tl.load(chosen + pair, mask=pair < pairs, other=experts) == expert
        place = placed + tl.cumsum(mine.to(tl.int32)) - 1
        tl.store(told + (first + place // wide) * (wide + 2) + 2 + place % wide, pair, mask=mine)
        placed += tl.sum(mine.to(tl.int32))


def shares_of(chosen: Tensor, experts: int) -> Shares:
    """How pairs are shared among tiles. Choices that are none of these experts are nobody's. # [tokens, choices]"""
    pairs = chosen.numel()
    wide = tiling_of(2 * pairs // experts, 1).rows
    some = pairs // wide + experts
    tiles = min(pairs, some)
    told = torch.empty((tiles, 2 + wide), dtype=torch.int32, device=chosen.device)
    by_pairs = pairs <= some
    _share[(experts,)](chosen.contiguous(), told, pairs, tiles, experts, wide=wide, by_pairs=by_pairs, at_once=AT_ONCE)
    return Shares(told, wide, pairs)


@triton.jit  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    given, weight, bias, out, told, outputs, inputs, choices, given_row, weight_expert, weight_row,
    tile: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, whole: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """A tile of outputs and of pairs. `choices`: pairs that read the same row."""
    here = told + tl.program_id(0).to(tl.int64) * (wide + 2)
    expert, count = tl.load(here).to(tl.int64), tl.load(here + 1)
    column = tl.arange(0, wide)
    output = tl.program_id(1) * tile + tl.arange(0, tile)
    is_output, is_pair = output < outputs, column < count
    pair = tl.load(here + 2 + column, mask=is_pair, other=0)
    last = tl.where(count > 0, inputs, 0)
    total = walk(
        weight + expert * weight_expert, given, output, pair // choices, is_output, is_pair, 0, last, inputs,
        weight_row, given_row, tile, wide, step, whole, turned,
    )  # fmt: skip
    if bias is not None:
        total += tl.load(bias + expert * outputs + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    written = out + pair.to(tl.int64)[None, :] * outputs + output[:, None]
    tl.store(written, total.to(out.dtype.element_ty), mask=is_output[:, None] & is_pair[None, :])


def products(given: Tensor, weight: Tensor, bias: Tensor | None, shares: Shares) -> Tensor:
    """Every pair's row of `given`, which has one for each token or each pair, with its expert's weight; pairs that are
    nobody's are left as they are. # [rows, in], [experts, out, in], [experts, out] -> [pairs, out]"""
    rows, inputs = given.shape
    outputs = weight.shape[1]
    given = given if given.stride(1) == 1 else given.contiguous()
    bias = None if bias is None else bias.contiguous()
    turned = is_turned(weight)
    out = torch.empty((shares.pairs, outputs), dtype=given.dtype, device=given.device)
    tiling = tiling_of(shares.wide, 1)
    programs = len(shares.tiles), triton.cdiv(outputs, tiling.outputs)
    options: dict[str, Any] = {"num_warps": tiling.warps, **ROUNDING}
    _products[programs](
        given, weight, bias, out, shares.tiles, outputs, inputs, shares.pairs // rows, given.stride(0),
        weight.stride(0), weight.stride(2 if turned else 1),
        tile=tiling.outputs, wide=shares.wide, step=tiling.step, whole=inputs % STEP == 0, turned=turned,
        num_stages=stages_of(tiling, programs[0] * programs[1], processors_of(given.device)), **options,
    )  # fmt: skip
    return out


def products_reference(given: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor) -> Tensor:
    """The same in PyTorch, pair by pair."""
    own = chosen.flatten()
    rows = given.repeat_interleave(len(own) // len(given), dim=0)
    found = torch.einsum("pi,poi->po", rows, weight[own])
    return found if bias is None else found + bias[own]


@triton.jit  # type: ignore[untyped-decorator]
def _mix(  # type: ignore[no-untyped-def]
    found, chosen, weights, out, size, experts, choices: tl.constexpr, columns: tl.constexpr
):
    """A part of one token's result."""
    token, column = tl.program_id(0), tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column < size
    total = tl.zeros([columns], tl.float32)
    for number in range(choices):
        pair = token * choices + number
        there = tl.load(chosen + pair) < experts
        one = tl.load(found + pair.to(tl.int64) * size + column, mask=is_column & there, other=0.0).to(tl.float32)
        total += one * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token.to(tl.int64) * size + column, total.to(out.dtype.element_ty), mask=is_column)


def mixed(found: Tensor, chosen: Tensor, weights: Tensor, experts: int) -> Tensor:
    """What a token's experts say, in the order of its choices, by their weights: it is rounded once.
    # [pairs, size], [tokens, choices] twice -> [tokens, size]"""
    tokens, choices = chosen.shape
    size = found.shape[1]
    out = torch.empty((tokens, size), dtype=found.dtype, device=found.device)
    told = found.contiguous(), chosen.contiguous(), weights.contiguous()
    programs = tokens, triton.cdiv(size, COLUMNS)
    _mix[programs](*told, out, size, experts, choices=choices, columns=COLUMNS, **ROUNDING)
    return out


def mixed_reference(found: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The same in PyTorch."""
    parts = found.float().view(*chosen.shape, -1) * weights.float()[..., None]
    return parts.sum(dim=1).to(found.dtype)
