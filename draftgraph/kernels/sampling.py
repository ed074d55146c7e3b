"""Sampled tokens of many nodes at once, on their device: the rule of `KeyedChooser` with the usual processors.

Every row is processed as `generate` does it, then the best of its scores plus the noise of its position is chosen.
All but the number of top-k is data, so that the choice can be recorded once and replayed for any request; rows of
several requests may each have their own, and that number too, up to MOST_KEPT.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled import compiled
from draftgraph.kernels.noise import columns_of, gumbel, row_key, row_key_compiled
from draftgraph.kernels.triton_or_stub import ROUNDING, available, tl, triton
from draftgraph.kernels.vectors import LANES, everywhere, exp, load, store, store_gumbel
from draftgraph.noise import gumbel_rows, signed

MOST_KEPT = 64  # tokens that top-k may keep where it is data
UNIT = 2.0**40  # the highest probability of a row, as an integer
WHOLE = tl.constexpr(UNIT)
PART = 2048  # columns that one program searches


def sample(
    logits: Tensor,  # [rows, vocabulary]
    key: Tensor,  # [1] or [rows] int64, of the noise: `KeyedNoise.stream_key`, signed
    positions: Tensor,  # [rows] int64, of the tokens that are chosen
    temperature: Tensor,  # [1] or [rows] float64, as the two below
    top_p: Tensor,  # 1 keeps all
    min_p: Tensor,  # 0 keeps all
    top_k: int | Tensor = 0,  # or [rows] int64
) -> Tensor:
    """The chosen token of every row, whatever the other rows are. # [rows] int64"""
    if logits.is_cuda and available:
        return sample_triton(logits, key, positions, lowest_kept(logits, top_k), temperature, top_p, min_p)
    return sample_reference(logits, key, positions, temperature, top_p, min_p, top_k)


def lowest_kept(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """The lowest logit of each row that top-k keeps. # [rows] float32"""
    if isinstance(top_k, Tensor):
        best = torch.topk(logits, min(MOST_KEPT, logits.shape[1])).values
        last = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)[:, None])[:, 0].float()
        return last.where((top_k > 0) & (top_k < logits.shape[1]), -torch.inf)
    if not 0 < top_k < logits.shape[1]:
        return torch.full((len(logits),), -torch.inf, device=logits.device)
    return torch.topk(logits, top_k, sorted=False).values.amin(dim=-1).float()


def sample_reference(
    logits: Tensor,
    key: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: int | Tensor = 0,
) -> Tensor:
    scale = temperature.float()[:, None]
    scores = logits.float() / scale
    kept = scores >= lowest_kept(logits, top_k)[:, None] / scale
    scores = scores.masked_fill(~kept, -torch.inf)  # also what is no number
    highest = scores.amax(dim=-1, keepdim=True)
    chances = torch.where(scores == highest, 0.0, scores - highest).exp()  # relative to the highest
    removed = (removed_by_top_p(scores, chances, top_p) | (chances < min_p.float()[:, None])) & (highest < torch.inf)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_rows(key, positions, tokens)
    return (scores.masked_fill(removed, -torch.inf).double() + noise).argmax(dim=-1)


def sample_one(
    logits: Tensor, key: int, position: int, temperature: float, top_p: float, min_p: float, top_k: int
) -> int:
    """The same for one row on a CPU, as compiled code. # [vocabulary] float32"""
    every, row = columns_of(len(logits)).numpy(), logits.contiguous().numpy()
    return int(_sample_one(row, every, signed(key), position, temperature, top_p, min_p, top_k))


@compiled
def _sample_one(
    logits: Any, every: Any, key: int, position: int, temperature: float, top_p: float, min_p: float, top_k: int
) -> int:
    """`every`: the columns, in whole vectors."""
    columns, scale, infinite = len(logits), np.float32(temperature), np.float32(np.inf)
    lowest = _lowest_kept(logits, top_k) / scale if 0 < top_k < columns else -infinite
    scores, noise, count, highest = np.empty(len(every), dtype=np.float32), np.empty(len(every)), 0, -infinite
    tokens = np.empty(len(every) if 0 < top_k < columns else 0, dtype=np.int64)  # those that top-k keeps
    for column in range(columns):
        score = logits[column] / scale
        score = score if score >= lowest else -infinite
        highest = max(highest, score)
        if len(tokens) == 0:
            scores[column], count = score, columns
        elif score > -infinite:
            scores[count], tokens[count] = score, column
            count += 1
    kept = tokens if len(tokens) else every
    tokens[count : -(-count // LANES) * LANES] = 0
    scores[count : -(-count // LANES) * LANES] = -infinite
    own = row_key_compiled(key, position)
    for place in range(0, count, LANES):
        store_gumbel(own, kept.ctypes.data + 8 * place, noise.ctypes.data + 8 * place)
    removes = highest < infinite and (top_p < 1.0 or min_p > 0.0)
    chances = np.empty(len(every) if removes else 0, dtype=np.float32)  # relative to the highest
    for place in range(0, count if removes else 0, LANES):
        store(chances.ctypes.data + 4 * place, exp(load(scores.ctypes.data + 4 * place) - everywhere(highest)))
    floor = -1  # this place and all that top-p removes before it are out
    while True:
        best = -1
        for place in range(count):
            if floor >= 0 and not (scores[place] > scores[floor] or (scores[place] == scores[floor] and place > floor)):
                continue
            if removes and chances[place] < np.float32(min_p):
                continue
            if best < 0 or np.float64(scores[place]) + noise[place] > np.float64(scores[best]) + noise[best]:
                best = place
        if best < 0 or not removes or top_p >= 1.0 or not _is_removed(scores, chances, count, best, top_p):
            return int(kept[max(best, 0)]) if count else 0
        floor = best


@compiled
def _is_removed(scores: Any, chances: Any, count: int, candidate: int, top_p: float) -> bool:
    """By top-p: see `removed_by_top_p`."""
    below, whole, is_last = np.int64(0), np.int64(0), True
    for place in range(count):
        mass = np.int64(chances[place] * np.float32(UNIT))
        whole += mass
        before = scores[place] < scores[candidate] or (scores[place] == scores[candidate] and place <= candidate)
        below += mass if before else np.int64(0)
        is_last = is_last and before
    return not is_last and bool(np.float32(below / whole) <= np.float32(1 - top_p))


@compiled
def _lowest_kept(logits: Any, top_k: int) -> Any:
    """The lowest of the best logits, so many of them; what is no number comes last."""
    best, count = np.full(top_k, -np.inf, dtype=np.float32), 0
    for column in range(len(logits)):
        value = logits[column]
        if value > best[top_k - 1]:
            at = min(count, top_k - 1)
            while at > 0 and best[at - 1] < value:
                best[at] = best[at - 1]
                at -= 1
            best[at] = value
            count = min(count + 1, top_k)
    return best[top_k - 1]


def removed_by_top_p(scores: Tensor, chances: Tensor, top_p: Tensor) -> Tensor:
    """The lowest scores, as many as together have at most the rest of the probability; of equals the first tokens.

    Sums of integers are the same in any order; transformers rounds them to float32, and so the bound.
    """
    order = scores.argsort(dim=-1, stable=True)
    below = (chances * UNIT).long().gather(1, order).cumsum(dim=-1)
    share = (below.double() / below[:, -1:].double()).float()
    removed = (share <= (1 - top_p).float()[:, None]) & (top_p < 1)[:, None]
    removed[:, -1] = False
    return torch.empty_like(removed).scatter_(1, order, removed)


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


def sample_triton(
    logits: Tensor, key: Tensor, positions: Tensor, lowest: Tensor, temperature: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """Takes the lowest logit of each row that top-k keeps. # [rows] float32

    Parts of a row are searched by programs of their own, then the best is checked. Top-p and min-p are asked of the
    best token alone, and only if they remove it of the next: so nothing is sorted. Probabilities are added up as
    integers: the same sum in any order, so a row never depends on its neighbours.
    """
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
