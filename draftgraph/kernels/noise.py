"""Logits plus the keyed noise of `draftgraph.noise`. The kernels make the same bits, with logarithms in float64."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph import noise
from draftgraph.compiled import compiled
from draftgraph.kernels.triton_or_stub import ROUNDING, available, tl, triton
from draftgraph.kernels.vectors import LANES, store_gumbel

BLOCK = 1024  # columns of one program

GOLDEN = tl.constexpr(noise.signed(noise.GOLDEN))
FIRST_SHIFT, SECOND_SHIFT, LAST_SHIFT = (tl.constexpr(shift) for shift in (noise.MIX[0][0], noise.MIX[1][0], 31))
FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(noise.signed(factor)) for _, factor in noise.MIX)
LARGEST = tl.constexpr(2**63 - 1)
SMALLEST = tl.constexpr(2.0**-52)

UNSIGNED_GOLDEN = np.uint64(noise.GOLDEN)
SHIFTS = tuple(np.uint64(shift) for shift in (noise.MIX[0][0], noise.MIX[1][0], 31))
FACTORS = tuple(np.uint64(factor) for _, factor in noise.MIX)


def perturbed(logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """What a draft ranks in sampled text: logits, plus a temperature times the noise of each row's position and of the
    tokens that the columns stand for. As many rows of each text.

    # [rows, columns], [texts] int64, [rows] int64, [columns] int64, [texts] float64 -> [rows, columns] float32
    """
    if logits.is_cuda:
        compute = perturbed_triton if available else perturbed_reference
    else:
        compute = perturbed_reference if torch.compiler.is_compiling() else perturbed_compiled
    return compute(logits, key, positions, tokens, temperature)


def perturbed_reference(logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    sharing = len(logits) // len(key)
    keys, temperatures = (given.repeat_interleave(sharing) for given in (key, temperature))
    return (logits.double() + temperatures[:, None] * noise.gumbel_rows(keys, positions, tokens)).float()


def perturbed_compiled(logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    found, rows = torch.empty((len(logits), len(tokens))), logits.float()
    numbers = (rows, key, positions, whole_vectors(tokens), temperature, found)
    _perturb_compiled(*(one.numpy() for one in numbers))
    return found


@lru_cache(8)
def columns_of(count: int) -> Tensor:
    """All of so many tokens, in whole vectors."""
    return whole_vectors(torch.arange(count))


def whole_vectors(tokens: Tensor) -> Tensor:
    """The same tokens and as many more as fill the last vector: `store_gumbel` reads them all."""
    missing = -len(tokens) % LANES
    return torch.cat([tokens, tokens.new_zeros(missing)]) if missing else tokens.contiguous()


@compiled
def mixed_compiled(bits: Any) -> Any:
    """Of unsigned numbers."""
    bits = (bits ^ (bits >> SHIFTS[0])) * FACTORS[0]
    bits = (bits ^ (bits >> SHIFTS[1])) * FACTORS[1]
    return bits ^ (bits >> SHIFTS[2])


@compiled
def row_key_compiled(key: int, position: int) -> Any:
    """Of the noise at a position."""
    return np.int64(mixed_compiled(np.uint64(key ^ position) + UNSIGNED_GOLDEN))


@compiled
def _perturb_compiled(logits: Any, key: Any, positions: Any, tokens: Any, temperature: Any, found: Any) -> None:
    sharing, columns = len(logits) // len(key), found.shape[1]
    noise = np.empty(len(tokens))
    for row in range(len(logits)):
        text = row // sharing
        if temperature[text] == 0:
            found[row] = logits[row, :columns]
            continue
        own = row_key_compiled(key[text], positions[row])
        for column in range(0, len(tokens), LANES):
            store_gumbel(own, tokens.ctypes.data + 8 * column, noise.ctypes.data + 8 * column)
        for column in range(columns):
            found[row, column] = np.float32(np.float64(logits[row, column]) + temperature[text] * noise[column])


@triton.jit  # type: ignore[untyped-decorator]
def _shift_right(bits, by: tl.constexpr):  # type: ignore[no-untyped-def]
    """A logical shift: that of a signed number is arithmetic."""
    return (bits >> by) & (LARGEST >> (by - 1))


@triton.jit
def _mixed(bits):  # type: ignore[no-untyped-def]
    bits = (bits ^ _shift_right(bits, FIRST_SHIFT)) * FIRST_FACTOR
    bits = (bits ^ _shift_right(bits, SECOND_SHIFT)) * SECOND_FACTOR
    return bits ^ _shift_right(bits, LAST_SHIFT)


@triton.jit
def row_key(key, position):  # type: ignore[no-untyped-def]
    """Of the noise at a position; both are int64."""
    return _mixed((key ^ position) + GOLDEN)


@triton.jit
def gumbel(key_of_row, token):  # type: ignore[no-untyped-def]
    """The noise of a block of tokens, int64, in float64."""
    bits = _mixed((token + 1) * GOLDEN + key_of_row)
    uniform = (_shift_right(bits, 12).to(tl.float64) + 0.5) * SMALLEST
    return -tl.log(-tl.log(uniform))


@triton.jit  # type: ignore[untyped-decorator]
def _perturb(  # type: ignore[no-untyped-def]
    logits, key, positions, tokens, temperature, perturbed, row_stride, columns, sharing, block: tl.constexpr
):
    """So many rows share a key and a temperature."""
    row = tl.program_id(0).to(tl.int64)
    text = row // sharing
    column = tl.program_id(1) * block + tl.arange(0, block)
    there = column < columns
    logit = tl.load(logits + row * row_stride + column, mask=there, other=0.0).to(tl.float64)
    token = tl.load(tokens + column, mask=there, other=0)
    added = tl.load(temperature + text) * gumbel(row_key(tl.load(key + text), tl.load(positions + row)), token)
    tl.store(perturbed + row * columns + column, (logit + added).to(tl.float32), mask=there)


def perturbed_triton(logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    rows, columns = len(logits), len(tokens)
    found = torch.empty((rows, columns), dtype=torch.float32, device=logits.device)
    _perturb[(rows, triton.cdiv(columns, BLOCK))](
        logits, key, positions.contiguous(), tokens, temperature, found, logits.stride(0), columns,
        rows // len(key), block=BLOCK, num_warps=4, **ROUNDING,
    )  # fmt: skip
    return found
