"""Products with a weight in half precision, each row of which has the same bits whatever other rows there are.

Rows of the weight are those of a tile, tokens its columns: a tensor core walks along the inputs of every one of them in
the same steps, however wide the tile is. The inputs go in so many parts, by the shape of the weight alone, and their
sums are added in order: in narrow passes each part is a program's, so that the weight is read at the memory's speed, in
wide ones a program walks through all of them. Which of these is quicker never changes bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftgraph.kernels.triton_or_stub import ROUNDING, tl, triton

DTYPES = (torch.bfloat16, torch.float16)
PROGRAMS = 256  # that a weight is shared among, if it is large enough: some for every processor of a large chip
LEAST_PART = 512  # inputs
STEP = 128  # inputs that a tile walks at a time, at most; a part has whole steps
MOST_PARTS = 8
NARROW = 64  # rows, at most, that tiles are as wide as; more are in tiles of WIDE
WIDE = 128
SHARED_BYTES = 200 << 10  # of a multiprocessor, for what the kernel loads ahead


class Tiling(NamedTuple):
    outputs: int  # rows of the weight
    rows: int
    step: int
    warps: int


def parts_of(outputs: int, inputs: int) -> int:
    """Into how many parts the inputs of a weight of this shape go.

    >>> parts_of(4096, 4096), parts_of(11008, 4096), parts_of(4096, 11008), parts_of(32000, 4096), parts_of(576, 576)
    (4, 2, 4, 1, 1)
    """
    tiles, parts = -(-outputs // 64), 1
    while parts < MOST_PARTS and tiles * parts < PROGRAMS and inputs // (2 * parts) >= LEAST_PART:
        parts *= 2
    return parts


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _exact_product(  # type: ignore[no-untyped-def]
    given, weight, bias, out, sums, rows, outputs, inputs, part_inputs, given_row, weight_row,
    tile: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, parts: tl.constexpr, apart: tl.constexpr,
    whole: tl.constexpr,
):  # fmt: skip
    """A tile of outputs and rows: all parts of the inputs, or one of them (`apart`)."""
    output = tl.program_id(0) * tile + tl.arange(0, tile)
    row = tl.program_id(1) * wide + tl.arange(0, wide)
    inner = tl.arange(0, step)
    is_output, is_row = output < outputs, row < rows
    weights = weight + output.to(tl.int64)[:, None] * weight_row + inner[None, :]
    numbers = given + row.to(tl.int64)[:, None] * given_row + inner[None, :]
    total = tl.zeros([tile, wide], tl.float32)
    first = tl.program_id(2) if apart else 0
    last = first + 1 if apart else parts
    for part in range(first, last):
        found = tl.zeros([tile, wide], tl.float32)
        for start in range(part * part_inputs, tl.minimum((part + 1) * part_inputs, inputs), step):
            if whole:
                w = tl.load(weights + start, mask=is_output[:, None], other=0.0, eviction_policy="evict_first")
                x = tl.load(numbers + start, mask=is_row[:, None], other=0.0)
            else:
                inside = (start + inner < inputs)[None, :]
                w = tl.load(weights + start, mask=is_output[:, None] & inside, other=0.0)
                x = tl.load(numbers + start, mask=is_row[:, None] & inside, other=0.0)
            found = tl.dot(w, tl.trans(x), found, input_precision="ieee")
        total += found
    there = is_output[:, None] & is_row[None, :]
    place = row.to(tl.int64)[None, :] * outputs + output[:, None]
    if apart:
        tl.store(sums + tl.program_id(2).to(tl.int64) * rows * outputs + place, total, mask=there)
    else:
        if bias is not None:
            total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        tl.store(out + place, total.to(out.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _add_parts(sums, bias, out, count, outputs, parts: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for part in tl.static_range(parts):
        total += tl.load(sums + part * count + place, mask=place < count, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % outputs, mask=place < count, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def tiling_of(rows: int, itemsize: int) -> tuple[Tiling, int]:
    """How a weight is shared among programs, and how many steps are loaded ahead. Tiles of 64 and of 128 outputs are
    one and two groups of warps, each of which multiplies 64 outputs at a time."""
    if rows <= NARROW:
        tiling = Tiling(64, max(16, triton.next_power_of_2(rows)), STEP, 4)
    else:
        tiling = Tiling(128, WIDE, STEP // 2, 8)
    held = (tiling.outputs + tiling.rows) * tiling.step * itemsize
    return tiling, max(1, min(4, SHARED_BYTES // held))


def exact_linear(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`. # [rows, in], [out, in] -> [rows, out]"""
    (rows, inputs), outputs = given.shape, len(weight)
    given = given if given.stride(1) == 1 else given.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty((rows, outputs), dtype=given.dtype, device=given.device)
    tiling, stages = tiling_of(rows, weight.element_size())
    parts = parts_of(outputs, inputs)
    part_inputs = triton.cdiv(triton.cdiv(inputs, parts), STEP) * STEP
    tiles = triton.cdiv(outputs, tiling.outputs), triton.cdiv(rows, tiling.rows)
    apart = parts > 1 and tiles[0] * tiles[1] < PROGRAMS
    sums = torch.empty((parts, rows, outputs) if apart else (0,), dtype=torch.float32, device=given.device)
    options: dict[str, Any] = {"num_warps": tiling.warps, "num_stages": stages, **ROUNDING}
    _exact_product[(*tiles, parts if apart else 1)](
        given, weight, bias, out, sums, rows, outputs, inputs, part_inputs, given.stride(0), weight.stride(0),
        tile=tiling.outputs, wide=tiling.rows, step=tiling.step, parts=parts, apart=apart,
        whole=inputs % STEP == 0, **options,
    )  # fmt: skip
    if apart:
        count = rows * outputs
        _add_parts[(triton.cdiv(count, 1024),)](sums, bias, out, count, outputs, parts=parts, block=1024, **ROUNDING)
    return out
