"""The Triton kernels behind `sample`: parts of a row are searched by programs of their own, then the best is checked.

Top-p and min-p are asked of the best token alone, and only if they remove it of the next: so nothing is sorted.
Probabilities are added up as integers: the same sum in any order, so a row never depends on its neighbours.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftgraph.engine.noise_kernel import gumbel, row_key
from draftgraph.engine.sampling import UNIT
from draftgraph.kernels.triton_or_stub import ROUNDING

PART = 2048  # columns that one program searches
WHOLE = tl.constexpr(UNIT)


@triton.jit
def _score(logit, temperature, lowest):  # type: ignore[no-untyped-def]
    """What temperature and top-k leave of logits in float32."""
    score = tl.div_rn(logit, temperature)
    return tl.where(score >= lowest, score, -float("inf"))


@triton.jit
def _above(score, token, other, other_token):  # type: ignore[no-untyped-def]
    """Whether top-p removes the other one first."""
    return (score > other) | ((score == other) & (token > other_token))


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_part(  # type: ignore[no-untyped-def]
    logits, columns, first, temperature, lowest, key, floor, floor_token, part: tl.constexpr
):
    """The best token of a part of a row among those above the floor, with its value; and the part's highest score."""
    token = first + tl.arange(0, part)
    logit = tl.load(logits + token, mask=token < columns, other=-float("inf")).to(tl.float32)
    score = _score(logit, temperature, lowest)
    value = score.to(tl.float64) + gumbel(key, token.to(tl.int64))
    value = tl.where(_above(score, token, floor, floor_token), value, -float("inf"))
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, token, columns), axis=0), tl.max(score, axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    logits, key, positions, temperature, lowest, values, places, highs, row_stride, columns, parts, own,
    part: tl.constexpr,
):  # fmt: skip
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    scale = tl.load(temperature + row * own).to(tl.float32)
    limit = tl.div_rn(tl.load(lowest + row), scale)
    noise = row_key(tl.load(key + row * own), tl.load(positions + row))
    value, place, high = _best_of_part(
        logits + row * row_stride, columns, piece * part, scale, limit, noise, -float("inf"), columns, part
    )
    tl.store(values + row * parts + piece, value)
    tl.store(places + row * parts + piece, place)
    tl.store(highs + row * parts + piece, high)


@triton.jit  # type: ignore[untyped-decorator]
def _share(  # type: ignore[no-untyped-def]
    logits, columns, temperature, lowest, highest, score, token, part: tl.constexpr
):
    """The probability of a token and all below it; 2 for the highest of all, which always stays."""
    below, total = tl.zeros([part], tl.int64), tl.zeros([part], tl.int64)
    for first in range(0, columns, part):
        other = first + tl.arange(0, part)
        logit = tl.load(logits + other, mask=other < columns, other=-float("inf")).to(tl.float32)
        other_score = _score(logit, temperature, lowest)
        away = tl.where(other_score == highest, 0.0, other_score - highest)
        weight = (tl.exp(away) * WHOLE).to(tl.int64)
        total += weight
        below += tl.where(_above(other_score, other, score, token), 0, weight)
    all_below, all_there = tl.sum(below, axis=0), tl.sum(total, axis=0)
    share = (all_below.to(tl.float64) / all_there.to(tl.float64)).to(tl.float32)
    return tl.where(all_below == all_there, 2.0, share)


@triton.jit  # type: ignore[untyped-decorator]
def _choose(  # type: ignore[no-untyped-def]
    logits, key, positions, temperature, lowest, top_p, min_p, values, places, highs, chosen,
    row_stride, columns, parts, own, part: tl.constexpr, pieces: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    scale = tl.load(temperature + row * own).to(tl.float32)
    limit = tl.div_rn(tl.load(lowest + row), scale)
    noise = row_key(tl.load(key + row * own), tl.load(positions + row))
    removed_share = (1.0 - tl.load(top_p + row * own)).to(tl.float32)
    removed_chance = tl.load(min_p + row * own).to(tl.float32)
    piece = tl.arange(0, pieces)
    at = row * parts + piece
    value = tl.load(values + at, mask=piece < parts, other=-float("inf"))
    place = tl.load(places + at, mask=piece < parts, other=0)
    highest = tl.max(tl.load(highs + at, mask=piece < parts, other=-float("inf")), axis=0)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, place, columns), axis=0)
    searching = tl.abs(best) < float("inf")
    floor, floor_token, rounds = -float("inf"), -1, 0  # top-p and min-p remove what is not above the floor
    while searching:
        score = _score(tl.load(logits + token).to(tl.float32), scale, limit)
        removed = _above(score, token, floor, floor_token) == 0
        if removed == 0:
            removed = tl.exp(tl.where(score == highest, 0.0, score - highest)) < removed_chance
            if (removed == 0) & (removed_share > 0):
                share = _share(logits, columns, scale, limit, highest, score, token, part)
                removed = share <= removed_share
            if removed:
                floor, floor_token = score, token
        if removed:
            here = token // part
            new_value, new_place, _ = _best_of_part(
                logits, columns, here * part, scale, limit, noise, floor, floor_token, part
            )
            value = tl.where(piece == here, new_value, value)
            place = tl.where(piece == here, new_place, place)
            best = tl.max(value, axis=0)
            token = tl.min(tl.where(value == best, place, columns), axis=0)
        rounds += 1
        searching = removed & (best > -float("inf")) & (rounds < columns)
    tl.store(chosen + row, token)


def sample(
    logits: Tensor, key: Tensor, positions: Tensor, lowest: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """As `draftgraph.engine.sampling.sample`, with the lowest logit of each row that top-k keeps. # [rows] float32"""
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(columns, PART)
    values, places, highs = (
        torch.empty((rows, parts), dtype=dtype, device=logits.device)
        for dtype in (torch.float64, torch.int32, torch.float32)
    )
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = (logits, key, positions.contiguous(), temperature, lowest)
    sizes = (logits.stride(0), columns, parts, int(len(key) > 1))  # the last: whether each row has its own numbers
    _search[(rows, parts)](*given, values, places, highs, *sizes, part=PART, num_warps=8, **ROUNDING)
    _choose[(rows,)](
        *given, top_p, min_p, values, places, highs, chosen, *sizes,
        part=PART, pieces=triton.next_power_of_2(parts), num_warps=8, **ROUNDING,
    )  # fmt: skip
    return chosen
