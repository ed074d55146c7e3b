"""The best few tokens of every row of logits, and their probabilities: what a level of a draft is for."""

from __future__ import annotations

from math import inf, log
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled import compiled
from draftgraph.kernels.triton_or_stub import available, tl, triton
from draftgraph.kernels.vectors import LANES, any_above, everywhere, exp, load, load_number, total

PART = 2048  # columns that one program searches


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns and log-probabilities of the k best of each row, best first. # [rows, k] int64, [rows, k] float32"""
    k = min(k, logits.shape[-1])
    if is_compilable(logits):
        return best_tokens_compiled(logits, k)
    return best_tokens_triton(logits, k) if logits.is_cuda and available else best_tokens_reference(logits, k)


def best_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same, with the logits themselves; of equals the first is the best."""
    k = min(k, logits.shape[-1])
    if logits.is_cuda and available and logits.dtype != torch.float64:
        return best_tokens_triton(logits, k, normalised=False)
    if is_compilable(logits):
        return best_tokens_compiled(logits, k, normalised=False)
    return first_of_equals(logits, *torch.topk(logits, k))


def first_of_equals(logits: Tensor, values: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Of the largest the one that comes first is put first: `topk` may have put another there, or left it out."""
    first = logits.argmax(dim=-1, keepdim=True)
    tokens = torch.where(tokens == first, tokens[:, :1], tokens)
    return torch.cat([first, tokens[:, 1:]], dim=1), values


def best_tokens_reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = torch.topk(torch.log_softmax(logits.float(), dim=-1), k)
    return best.indices, best.values


def is_compilable(logits: Tensor) -> bool:
    in_rows = logits.dtype == torch.float32 and logits.stride(1) == 1
    return logits.device.type == "cpu" and in_rows and not torch.compiler.is_compiling()


def best_tokens_compiled(logits: Tensor, k: int, normalised: bool = True) -> tuple[Tensor, Tensor]:
    tokens, chances = torch.empty((len(logits), k), dtype=torch.long), torch.empty((len(logits), k))
    found = tokens.numpy(), chances.numpy()
    _best_compiled(logits.data_ptr(), 4 * logits.stride(0), logits.shape[1], *found, normalised)
    return tokens, chances


@compiled
def _best_compiled(logits: int, row_bytes: int, columns: int, tokens: Any, chances: Any, normalised: bool) -> None:
    """Of equals the first, and what is no number before all others."""
    k, whole = tokens.shape[1], columns // LANES * LANES
    for row in range(len(tokens)):
        place = logits + row * row_bytes
        count, least = 0, np.float32(-inf)
        for start in range(0, columns, LANES):
            if count == k and start < whole and not any_above(place + 4 * start, least):
                continue
            for column in range(start, min(start + LANES, columns)):
                value = load_number(place + 4 * column)
                if count == k and value <= least:
                    continue
                at = min(count, k - 1)
                while at > 0 and not (value <= chances[row, at - 1] or chances[row, at - 1] != chances[row, at - 1]):
                    tokens[row, at], chances[row, at] = tokens[row, at - 1], chances[row, at - 1]
                    at -= 1
                tokens[row, at], chances[row, at] = column, value
                count = min(count + 1, k)
                least = chances[row, k - 1] if count == k else np.float32(-inf)
        if normalised:
            highest, sums = everywhere(chances[row, 0]), everywhere(np.float32(0.0))
            for column in range(0, whole, LANES):
                sums = sums + exp(load(place + 4 * column) - highest)
            mass = np.float64(total(sums))
            for column in range(whole, columns):
                mass += np.exp(np.float64(load_number(place + 4 * column) - chances[row, 0]))
            best = np.float64(chances[row, 0])
            for rank in range(k):
                chances[row, rank] = chances[row, rank] - best - log(mass)


@triton.jit  # type: ignore[untyped-decorator]
def _search(  # type: ignore[no-untyped-def]
    logits, row_stride, columns, values, places, sums, k, parts, part: tl.constexpr
):
    """The k largest of a part of a row, largest first, and the part's sum of exponentials over its largest."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = piece * part + tl.arange(0, part)
    score = tl.load(logits + row * row_stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    highest = tl.max(score, axis=0)
    shifted = tl.where(highest > -float("inf"), score - highest, -float("inf"))
    tl.store(sums + row * parts + piece, tl.sum(tl.exp(shifted), axis=0))
    for rank in range(k):
        value, place = tl.max(score, axis=0, return_indices=True)
        tl.store(values + (row * parts + piece) * k + rank, value)
        # Where a row is no numbers any place may be found, also one behind its end.
        tl.store(places + (row * parts + piece) * k + rank, tl.minimum(piece * part + place, columns - 1))
        score = tl.where(tl.arange(0, part) == place, -float("inf"), score)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    values, places, sums, tokens, scores, k, parts, found: tl.constexpr, pieces: tl.constexpr, normalised: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    index, piece = tl.arange(0, found), tl.arange(0, pieces)
    value = tl.load(values + row * parts * k + index, mask=index < parts * k, other=-float("inf"))
    total = 0.0
    if normalised:
        highest = tl.max(value, axis=0)
        first = tl.load(values + (row * parts + piece) * k, mask=piece < parts, other=-float("inf"))
        weight = tl.load(sums + row * parts + piece, mask=piece < parts, other=0.0)
        total = highest + tl.log(tl.sum(tl.exp(first - highest) * weight, axis=0))
    for rank in range(k):
        best, place = tl.max(value, axis=0, return_indices=True)
        tl.store(scores + row * k + rank, best - total)
        found_at = tl.minimum(place, parts * k - 1)
        tl.store(tokens + row * k + rank, tl.load(places + row * parts * k + found_at).to(tl.int64))
        value = tl.where(index == place, -float("inf"), value)


def best_tokens_triton(logits: Tensor, k: int, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """Parts of a row are searched by programs of their own, then put together."""
    rows, columns = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    parts = triton.cdiv(columns, PART)
    values, places, sums = (
        torch.empty(shape, dtype=dtype, device=logits.device)
        for shape, dtype in (
            ((rows, parts, k), torch.float32),
            ((rows, parts, k), torch.int32),
            ((rows, parts), torch.float32),
        )
    )
    tokens = torch.empty((rows, k), dtype=torch.int64, device=logits.device)
    scores = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    _search[(rows, parts)](logits, logits.stride(0), columns, values, places, sums, k, parts, part=PART, num_warps=4)
    found, pieces = triton.next_power_of_2(parts * k), triton.next_power_of_2(parts)
    _join[(rows,)](values, places, sums, tokens, scores, k, parts, found, pieces, normalised, num_warps=4)
    return tokens, scores
