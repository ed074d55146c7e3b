"""The product of a few rows with a large weight, in Triton: made to read the weight once, at the memory's speed."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_ROWS = 128
SHARED_BYTES = 200 << 10  # of a multiprocessor, for what is loaded ahead


class Tiling(NamedTuple):
    """How a weight is shared among programs."""

    outputs: int  # rows of the weight that a program reads
    inputs: int  # columns at a time
    splits: int  # of the columns, each to a program of its own
    warps: int
    stages: int


TILINGS = (
    Tiling(16, 256, 1, 4, 4),
    Tiling(16, 512, 1, 4, 3),
    Tiling(32, 256, 1, 4, 4),
    Tiling(32, 128, 4, 4, 4),
    Tiling(64, 128, 4, 4, 4),
    Tiling(64, 128, 1, 4, 4),
)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    given, weight, bias, out, parts, rows, outputs, inputs, given_row, weight_row,
    most_rows: tl.constexpr, tile: tl.constexpr, step: tl.constexpr, splits: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    column, split = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1)
    row, inner = tl.arange(0, most_rows), tl.arange(0, step)
    there = column < outputs
    total = tl.zeros([most_rows, tile], tl.float32)
    places = weight + column[:, None].to(tl.int64) * weight_row + inner[None, :]
    for start in range(split * step, inputs, splits * step):
        if whole:
            w = tl.load(places + start, mask=there[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(given + row[:, None] * given_row + start + inner[None, :], mask=row[:, None] < rows, other=0.0)
        else:
            inside = start + inner < inputs
            w = tl.load(places + start, mask=there[:, None] & inside[None, :], other=0.0)
            seen = (row[:, None] < rows) & inside[None, :]
            x = tl.load(given + row[:, None] * given_row + start + inner[None, :], mask=seen, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    seen = (row[:, None] < rows) & there[None, :]
    if splits > 1:
        tl.store(parts + (split * rows + row[:, None]) * outputs + column[None, :], total, mask=seen)
    else:
        if bias is not None:
            total += tl.load(bias + column, mask=there, other=0.0)[None, :].to(tl.float32)
        tl.store(out + row[:, None] * outputs + column[None, :], total.to(out.dtype.element_ty), mask=seen)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(parts, bias, out, count, outputs, splits: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(parts + split * count + place, mask=place < count, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % outputs, mask=place < count, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def skinny_linear(given: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """As `torch.nn.functional.linear` for at most `MOST_ROWS` rows. # [rows, in], [out, in] -> [rows, out]"""
    rows, inputs = given.shape
    outputs = len(weight)
    given = given if given.stride(1) == 1 else given.contiguous()
    out = torch.empty((rows, outputs), dtype=given.dtype, device=given.device)
    splits = tiling.splits
    parts = torch.empty((splits, rows, outputs), dtype=torch.float32, device=given.device) if splits > 1 else out
    grid = (triton.cdiv(outputs, tiling.outputs), splits)
    most_rows = max(16, triton.next_power_of_2(rows))
    ahead = SHARED_BYTES // ((most_rows + tiling.outputs) * tiling.inputs * weight.element_size())
    _product[grid](
        given, weight, bias, out, parts, rows, outputs, inputs, given.stride(0), weight.stride(0),
        most_rows=most_rows, tile=tiling.outputs, step=tiling.inputs, splits=splits,
        whole=inputs % (tiling.inputs * splits) == 0, num_warps=tiling.warps,
        num_stages=max(1, min(tiling.stages, ahead)),
    )  # fmt: skip
    if splits > 1:
        count = rows * outputs
        _sum[(triton.cdiv(count, 1024),)](parts, bias, out, count, outputs, splits=splits, block=1024)
    return out
