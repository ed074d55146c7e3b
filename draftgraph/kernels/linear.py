"""Products with weights in half precision on a GPU, each row of which has the same bits whatever other rows there are.

Rows of the weight are those of a tile, tokens its columns: a tensor core walks along the inputs of every one of them in
the same steps, however wide the tile is. The inputs go in so many parts, by the shapes of the weights alone, and the
sums of the parts are added in order. Which program computes which part, and how much it loads ahead, never changes
bits. Weights that are multiplied with the same rows go in one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from draftgraph.kernels.fused import activated
from draftgraph.kernels.triton_or_stub import ROUNDING, tl, triton

DTYPES = (torch.bfloat16, torch.float16)
TOGETHER = 3  # weights of one launch
PROGRAMS = 160  # that weights are shared among, if they are large enough: one for every processor of a large chip
LEAST_PART = 256  # inputs
STEP = 128  # inputs that a tile walks at a time, at most; a part has whole steps
MOST_PARTS = 8
NARROW = 64  # rows, at most, that tiles are as wide as; more are in tiles of WIDE
WIDE = 128
SHARED_BYTES = 200 << 10  # of a multiprocessor, for what the kernel loads ahead
FEWEST_STAGES, MOST_STAGES = 3, 6


class Tiling(NamedTuple):
    outputs: int  # rows of a weight
    rows: int
    step: int
    warps: int

    @property
    def step_bytes(self) -> int:
        return (self.outputs + self.rows) * self.step * 2


IN_SINGLE = Tiling(64, 16, 32, 4)  # of weights in float32, which no tensor core multiplies


def parts_of(outputs: int, inputs: int) -> int:
    """Into how many parts the inputs of weights with so many outputs go.

    >>> parts_of(4096, 4096), parts_of(3 * 4096, 4096), parts_of(4096, 11008), parts_of(32000, 4096)
    (2, 1, 2, 1)
    >>> parts_of(576, 1536)
    4
    """
    tiles, parts = -(-outputs // 64), 1
    while parts < MOST_PARTS and 2 * tiles * parts <= PROGRAMS and inputs // (2 * parts) >= LEAST_PART:
        parts *= 2
    return parts


def tiling_of(rows: int, parts: int) -> Tiling:
    """How weights are shared among programs. Tiles of 64 and of 128 outputs are one and two groups of warps, each of
    which multiplies 64 outputs at a time."""
    if rows > NARROW:
        return Tiling(128, WIDE, STEP // 2, 8)
    wide = max(16, triton.next_power_of_2(rows))
    return Tiling(64, wide, STEP // 2 if wide == NARROW and parts == 1 else STEP, 4)


def stages_of(tiling: Tiling, programs: int, processors: int) -> int:
    """How many steps are loaded ahead: as many as the programs that share a processor have room for."""
    beside = -(-programs // processors)
    room = SHARED_BYTES // tiling.step_bytes
    return max(1, min(room, MOST_STAGES, max(FEWEST_STAGES, room // beside)))


@triton.jit  # type: ignore[untyped-decorator]
def walk(  # type: ignore[no-untyped-def]
    weight, given, output, row, is_output, is_row, first, last, inputs, weight_row, given_row,
    tile: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, whole: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """Products of a tile of outputs and rows over the inputs from `first` to `last`. `weight_row`: from one output to
    the next in a weight whose inputs lie side by side, and from one input to the next in one that lies `turned`."""
    inner = tl.arange(0, step)
    if turned:
        weights = weight + output[:, None] + inner.to(tl.int64)[None, :] * weight_row
    else:
        weights = weight + output.to(tl.int64)[:, None] * weight_row + inner[None, :]
    numbers = given + row.to(tl.int64)[:, None] * given_row + inner[None, :]
    found = tl.zeros([tile, wide], tl.float32)
    for start in range(first, last, step):
        here = weights + start
        if turned:
            here = weights + tl.cast(start, tl.int64) * weight_row
        if whole:
            w = tl.load(here, mask=is_output[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(numbers + start, mask=is_row[:, None], other=0.0)
        else:
            inside = (start + inner < inputs)[None, :]
            w = tl.load(here, mask=is_output[:, None] & inside, other=0.0)
            x = tl.load(numbers + start, mask=is_row[:, None] & inside, other=0.0)
        found = tl.dot(w, tl.trans(x), found, input_precision="ieee")
    return found


@triton.jit  # type: ignore[untyped-decorator]
def _walk_parts(  # type: ignore[no-untyped-def]
    weight, given, output, row, is_output, is_row, first, inputs, part_inputs, weight_row, given_row,
    tile: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, parts: tl.constexpr, apart: tl.constexpr,
    whole: tl.constexpr, turned: tl.constexpr,
):  # fmt: skip
    """The same over one part of the inputs, or over all of them in their order."""
    total = walk(
        weight, given, output, row, is_output, is_row, first * part_inputs,
        tl.minimum((first + 1) * part_inputs, inputs), inputs, weight_row, given_row, tile, wide, step, whole, turned,
    )  # fmt: skip
    for part in range(1, 1 if apart else parts):
        total += walk(
            weight, given, output, row, is_output, is_row, part * part_inputs,
            tl.minimum((part + 1) * part_inputs, inputs), inputs, weight_row, given_row,
            tile, wide, step, whole, turned,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _products(  # type: ignore[no-untyped-def]
    given, weight0, weight1, weight2, bias0, bias1, bias2, out0, out1, out2, sums, met,
    rows, outputs0, outputs1, outputs2, inputs, part_inputs, given_row, weight_row,
    tile: tl.constexpr, wide: tl.constexpr, step: tl.constexpr, parts: tl.constexpr, apart: tl.constexpr,
    whole: tl.constexpr, turned: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """A tile of outputs and rows: all parts of the inputs, or one of them (`apart`). Then whoever is the last to finish
    a part of a tile adds all of them up. `activation`: of a gated MLP, whose gate and what it lets through are the
    first two weights; a tile is one of both, and only their product is written."""
    row_tiles = tl.cdiv(rows, wide)  # side by side, so that they read a weight together
    number, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    first = 0
    if apart:
        first = number % parts
        number //= parts
    tiles0, tiles1 = tl.cdiv(outputs0, tile), tl.cdiv(outputs1, tile)
    is_gated: tl.constexpr = activation is not None
    weight, out, outputs, before, tile_number = weight0, out0, outputs0, 0, number
    if number >= tiles0 + tiles1:
        weight, out, outputs, before = weight2, out2, outputs2, outputs0 + outputs1
        tile_number -= tiles0 + tiles1
    elif number >= tiles0:
        weight, out, outputs, before = weight1, out1, outputs1, outputs0
        tile_number -= tiles0
    output = tile_number * tile + tl.arange(0, tile)
    row = row_tile * wide + tl.arange(0, wide)
    is_output, is_row = output < outputs, row < rows
    total = _walk_parts(
        weight, given, output, row, is_output, is_row, first, inputs, part_inputs, weight_row, given_row,
        tile, wide, step, parts, apart, whole, turned,
    )  # fmt: skip
    passing = total
    if is_gated:
        passing = _walk_parts(
            weight1, given, output, row, is_output, is_row, first, inputs, part_inputs, weight_row, given_row,
            tile, wide, step, parts, apart, whole, turned,
        )  # fmt: skip
    there = is_output[:, None] & is_row[None, :]
    is_last = True
    if apart:
        part_size = rows.to(tl.int64) * (outputs0 + outputs1 + outputs2)
        place = sums + row.to(tl.int64)[None, :] * (outputs0 + outputs1 + outputs2) + (before + output)[:, None]
        tl.store(place + first * part_size, total, mask=there)
        if is_gated:
            tl.store(place + first * part_size + outputs0, passing, mask=there)
        tl.debug_barrier()  # all of this program's sums are there before it is counted
        counter = met + number * row_tiles + row_tile
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == parts - 1
        if is_last:
            tl.store(counter, 0)  # for the next launch
            total = tl.zeros([tile, wide], tl.float32)
            for other in tl.static_range(parts):
                total += tl.load(place + other * part_size, mask=there, other=0.0, cache_modifier=".cg")
            if is_gated:
                passing = tl.zeros([tile, wide], tl.float32)
                for other in tl.static_range(parts):
                    more = place + other * part_size + outputs0
                    passing += tl.load(more, mask=there, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias0 is not None:
            bias = bias0
            if number >= tiles0 + tiles1:
                bias = bias2
            elif number >= tiles0:
                bias = bias1
            total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if is_gated:
                passing += tl.load(bias1 + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if is_gated:  # rounded where modules would
            dtype: tl.constexpr = out.dtype.element_ty
            total = activated(total.to(dtype).to(tl.float32), activation).to(dtype).to(tl.float32)
            total *= passing.to(dtype).to(tl.float32)
        written = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(written, total.to(out.dtype.element_ty), mask=there)


@cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def counters(device: torch.device) -> Tensor:
    """For the programs of one launch at a time: how many have met at each tile."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def is_turned(weight: Tensor) -> bool:
    """Whether its outputs lie side by side, and not its inputs, in the last two dimensions."""
    return weight.stride(-1) != 1 and weight.stride(-2) == 1


def products(
    given: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    met: Tensor | None = None,
    tiling: Tiling | None = None,
    activation: str | None = None,
) -> list[Tensor]:
    """As `torch.nn.functional.linear` with each of up to TOGETHER weights. All have a bias, or none. `met`: `counters`
    that no launch uses at the same time. `activation`: the weights are those of a gated MLP's gate and of what it lets
    through, and what comes out is `fused.gated` of both. # [rows, in], [out, in] each -> [rows, out] each"""
    rows, inputs = given.shape
    given = given if given.stride(1) == 1 else given.contiguous()
    turned = all(map(is_turned, weights))
    side = 1 if turned else 0  # the dimension that does not lie side by side
    weights = [weight if weight.stride(1 - side) == 1 else weight.contiguous() for weight in weights]
    if len({weight.stride(side) for weight in weights}) > 1:
        weights, turned, side = [weight.contiguous() for weight in weights], False, 0
    sizes = [len(weight) for weight in weights]
    parts = parts_of(sum(sizes), inputs)
    tiling = tiling or tiling_of(rows, parts)
    part_inputs = triton.cdiv(triton.cdiv(inputs, parts), STEP) * STEP
    own = sizes if activation is None else sizes[:1]
    outs = [torch.empty((rows, size), dtype=given.dtype, device=given.device) for size in own]
    tiles = sum(triton.cdiv(size, tiling.outputs) for size in own), triton.cdiv(rows, tiling.rows)
    apart = parts > 1 and tiles[0] * tiles[1] <= PROGRAMS
    programs = tiles[0] * tiles[1] * (parts if apart else 1)
    sums = torch.empty((parts, rows, sum(sizes)) if apart else (0,), dtype=torch.float32, device=given.device)
    met = counters(given.device) if met is None and apart else met
    told = [[*some, *[some[0]] * (TOGETHER - len(some))] for some in (weights, biases, outs)]
    sizes += [0] * (TOGETHER - len(sizes))
    options: dict[str, Any] = {"num_warps": tiling.warps, **ROUNDING}
    _products[(programs,)](
        given, *told[0], *told[1], *told[2], sums, met, rows, *sizes,
        inputs, part_inputs, given.stride(0), weights[0].stride(side),
        tile=tiling.outputs, wide=tiling.rows, step=tiling.step, parts=parts, apart=apart, whole=inputs % STEP == 0,
        turned=turned, activation=activation,
        num_stages=stages_of(tiling, programs, processors_of(given.device)), **options,
    )  # fmt: skip
    return outs
