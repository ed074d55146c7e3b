"""Linear layers in half precision on a GPU whose rows are batch invariant: a row has the same bits in every pass.

The weight is the left operand of the product and the tokens are its columns, so a tensor core walks along the inputs in
the same steps however many tokens there are. Inputs are split by the shapes of the weights alone, and the partial sums
are added in order. Which program computes a split, and how many steps it loads ahead, never changes bits. Weights that
are multiplied with the same rows (queries, keys and values; gate and up) share one launch.
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
MOST_WEIGHTS = 3  # of one launch
PROGRAMS = 160  # to split inputs for: about one for every processor of a large GPU
LEAST_SPLIT = 256  # inputs
MOST_SPLITS = 8
STEP = 128  # inputs of a step, at most; a split has whole steps
NARROW = 64  # rows of a tile, at most, up to which there is one tile of rows; beyond, tiles of WIDE
WIDE = 128
SHARED_BYTES = 200 << 10  # of a multiprocessor, for what is loaded ahead
FEWEST_STAGES, MOST_STAGES = 3, 6


class Tiling(NamedTuple):
    """What a program computes, and with how many warps."""

    outputs: int
    rows: int
    step: int
    warps: int

    @property
    def step_bytes(self) -> int:
        return (self.outputs + self.rows) * self.step * 2


FLOAT32_TILING = Tiling(64, 16, 32, 4)  # no tensor core multiplies float32


def splits_of(outputs: int, inputs: int) -> int:
    """Into how many parts the inputs of weights with so many outputs are split.

    >>> splits_of(4096, 4096), splits_of(3 * 4096, 4096), splits_of(4096, 11008), splits_of(32000, 4096)
    (2, 1, 2, 1)
    >>> splits_of(576, 1536)
    4
    """
    tiles, splits = -(-outputs // 64), 1
    while splits < MOST_SPLITS and 2 * tiles * splits <= PROGRAMS and inputs // (2 * splits) >= LEAST_SPLIT:
        splits *= 2
    return splits


def tiling_of(rows: int, splits: int) -> Tiling:
    """Tiles of 64 and of 128 outputs are one and two groups of warps, each of which multiplies 64 outputs at a time."""
    if rows > NARROW:
        return Tiling(128, WIDE, STEP // 2, 8)
    block_rows = max(16, triton.next_power_of_2(rows))
    return Tiling(64, block_rows, STEP // 2 if block_rows == NARROW and splits == 1 else STEP, 4)


def stages_of(tiling: Tiling, programs: int, processors: int) -> int:
    """How many steps are loaded ahead: as many as the programs that share a processor have room for."""
    sharing = -(-programs // processors)
    room = SHARED_BYTES // tiling.step_bytes
    return max(1, min(room, MOST_STAGES, max(FEWEST_STAGES, room // sharing)))


@triton.jit  # type: ignore[untyped-decorator]
def accumulate(  # type: ignore[no-untyped-def]
    weight, rows, output, row, is_output, is_row, start, end, inputs, weight_stride, row_stride,
    block_outputs: tl.constexpr, block_rows: tl.constexpr, step: tl.constexpr,
    even: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """The products of a tile over the inputs from `start` to `end`. `weight_stride`: from one output to the next, or
    from one input to the next if the weight is `transposed`. # [block_outputs, block_rows]"""
    inner = tl.arange(0, step)
    if transposed:
        w_pointers = weight + output[:, None] + inner.to(tl.int64)[None, :] * weight_stride
    else:
        w_pointers = weight + output.to(tl.int64)[:, None] * weight_stride + inner[None, :]
    x_pointers = rows + row.to(tl.int64)[:, None] * row_stride + inner[None, :]
    total = tl.zeros([block_outputs, block_rows], tl.float32)
    for at in range(start, end, step):
        w_here = w_pointers + at
        if transposed:
            w_here = w_pointers + tl.cast(at, tl.int64) * weight_stride
        if even:
            w = tl.load(w_here, mask=is_output[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(x_pointers + at, mask=is_row[:, None], other=0.0)
        else:
            inside = (at + inner < inputs)[None, :]
            w = tl.load(w_here, mask=is_output[:, None] & inside, other=0.0)
            x = tl.load(x_pointers + at, mask=is_row[:, None] & inside, other=0.0)
        total = tl.dot(w, tl.trans(x), total, input_precision="ieee")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate_splits(  # type: ignore[no-untyped-def]
    weight, rows, output, row, is_output, is_row, split, inputs, split_inputs, weight_stride, row_stride,
    block_outputs: tl.constexpr, block_rows: tl.constexpr, step: tl.constexpr, splits: tl.constexpr,
    split_k: tl.constexpr, even: tl.constexpr, transposed: tl.constexpr,
):  # fmt: skip
    """The products of a tile over one split, or over all of them in order."""
    total = accumulate(
        weight, rows, output, row, is_output, is_row, split * split_inputs,
        tl.minimum((split + 1) * split_inputs, inputs), inputs, weight_stride, row_stride,
        block_outputs, block_rows, step, even, transposed,
    )  # fmt: skip
    for other in range(1, 1 if split_k else splits):
        total += accumulate(
            weight, rows, output, row, is_output, is_row, other * split_inputs,
            tl.minimum((other + 1) * split_inputs, inputs), inputs, weight_stride, row_stride,
            block_outputs, block_rows, step, even, transposed,
        )  # fmt: skip
    return total


@triton.jit(do_not_specialize=["row_count"])  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    rows, weight0, weight1, weight2, bias0, bias1, bias2, out0, out1, out2, partials, counters,
    row_count, outputs0, outputs1, outputs2, inputs, split_inputs, row_stride, weight_stride,
    block_outputs: tl.constexpr, block_rows: tl.constexpr, step: tl.constexpr, splits: tl.constexpr,
    split_k: tl.constexpr, even: tl.constexpr, transposed: tl.constexpr, activation: tl.constexpr,
):  # fmt: skip
    """A tile of outputs and rows over all splits of the inputs, or over one of them (`split_k`): then the program that
    finishes a tile last adds the partial sums up. `activation`: the first two weights are the gate and up of a gated
    MLP, a tile computes both, and their gated product is written."""
    row_tiles = tl.cdiv(row_count, block_rows)  # side by side, so that they read a weight together
    tile, row_tile = tl.program_id(0) // row_tiles, tl.program_id(0) % row_tiles
    split = 0
    if split_k:
        split = tile % splits
        tile //= splits
    tiles0, tiles1 = tl.cdiv(outputs0, block_outputs), tl.cdiv(outputs1, block_outputs)
    gated: tl.constexpr = activation is not None
    weight, out, outputs, before, own_tile = weight0, out0, outputs0, 0, tile
    if tile >= tiles0 + tiles1:
        weight, out, outputs, before = weight2, out2, outputs2, outputs0 + outputs1
        own_tile -= tiles0 + tiles1
    elif tile >= tiles0:
        weight, out, outputs, before = weight1, out1, outputs1, outputs0
        own_tile -= tiles0
    output = own_tile * block_outputs + tl.arange(0, block_outputs)
    row = row_tile * block_rows + tl.arange(0, block_rows)
    is_output, is_row = output < outputs, row < row_count
    total = _accumulate_splits(
        weight, rows, output, row, is_output, is_row, split, inputs, split_inputs, weight_stride, row_stride,
        block_outputs, block_rows, step, splits, split_k, even, transposed,
    )  # fmt: skip
    up = total
    if gated:
        up = _accumulate_splits(
            weight1, rows, output, row, is_output, is_row, split, inputs, split_inputs, weight_stride, row_stride,
            block_outputs, block_rows, step, splits, split_k, even, transposed,
        )  # fmt: skip
    valid = is_output[:, None] & is_row[None, :]
    is_last = True
    if split_k:
        all_outputs = outputs0 + outputs1 + outputs2
        split_size = row_count.to(tl.int64) * all_outputs
        place = partials + row.to(tl.int64)[None, :] * all_outputs + (before + output)[:, None]
        tl.store(place + split * split_size, total, mask=valid)
        if gated:
            tl.store(place + split * split_size + outputs0, up, mask=valid)
        tl.debug_barrier()  # the partial sums are written before they are counted
        counter = counters + tile * row_tiles + row_tile
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - 1
        if is_last:
            tl.store(counter, 0)  # for the next launch
            total = tl.zeros([block_outputs, block_rows], tl.float32)
            for other in tl.static_range(splits):
                total += tl.load(place + other * split_size, mask=valid, other=0.0, cache_modifier=".cg")
            if gated:
                up = tl.zeros([block_outputs, block_rows], tl.float32)
                for other in tl.static_range(splits):
                    up_place = place + other * split_size + outputs0
                    up += tl.load(up_place, mask=valid, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias0 is not None:
            bias = bias0
            if tile >= tiles0 + tiles1:
                bias = bias2
            elif tile >= tiles0:
                bias = bias1
            total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
            if gated:
                up += tl.load(bias1 + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
        if gated:  # rounded where modules round
            dtype: tl.constexpr = out.dtype.element_ty
            total = activated(total.to(dtype).to(tl.float32), activation).to(dtype).to(tl.float32)
            total *= up.to(dtype).to(tl.float32)
        out_place = out + row.to(tl.int64)[None, :] * outputs + output[:, None]
        tl.store(out_place, total.to(out.dtype.element_ty), mask=valid)


@cache
def processors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def new_counters(device: torch.device) -> Tensor:
    """For one launch at a time: how many programs have finished each tile."""
    return torch.zeros(PROGRAMS, dtype=torch.int32, device=device)


def is_transposed(weight: Tensor) -> bool:
    """Whether outputs, and not inputs, are contiguous in the last two dimensions."""
    return weight.stride(-1) != 1 and weight.stride(-2) == 1


def linears(
    rows: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    counters: Tensor | None = None,
    tiling: Tiling | None = None,
    activation: str | None = None,
) -> list[Tensor]:
    """As `torch.nn.functional.linear` with each of up to MOST_WEIGHTS weights. # [rows, in] -> [rows, out] each

    Args:
        rows: What all weights are multiplied with.
        weights: Each is [out, in].
        biases: One for every weight, or all None.
        counters: `new_counters` that no launch uses at the same time.
        tiling: Left out: what suits the number of rows.
        activation: The weights are a gated MLP's gate and up, and the result is one tensor, `fused.gated` of both.
    """
    row_count, inputs = rows.shape
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    transposed = all(map(is_transposed, weights))
    strided = 1 if transposed else 0  # the dimension that is not contiguous
    weights = [weight if weight.stride(1 - strided) == 1 else weight.contiguous() for weight in weights]
    if len({weight.stride(strided) for weight in weights}) > 1:
        weights, transposed, strided = [weight.contiguous() for weight in weights], False, 0
    sizes = [len(weight) for weight in weights]
    splits = splits_of(sum(sizes), inputs)
    tiling = tiling or tiling_of(row_count, splits)
    split_inputs = triton.cdiv(triton.cdiv(inputs, splits), STEP) * STEP
    out_sizes = sizes if activation is None else sizes[:1]
    outs = [torch.empty((row_count, size), dtype=rows.dtype, device=rows.device) for size in out_sizes]
    tiles = sum(triton.cdiv(size, tiling.outputs) for size in out_sizes) * triton.cdiv(row_count, tiling.rows)
    split_k = splits > 1 and tiles <= PROGRAMS
    programs = tiles * (splits if split_k else 1)
    partial_shape = (splits, row_count, sum(sizes)) if split_k else (0,)
    partials = torch.empty(partial_shape, dtype=torch.float32, device=rows.device)
    counters = new_counters(rows.device) if counters is None and split_k else counters
    pointers = [[*some, *[some[0]] * (MOST_WEIGHTS - len(some))] for some in (weights, biases, outs)]
    sizes += [0] * (MOST_WEIGHTS - len(sizes))
    options: dict[str, Any] = {"num_warps": tiling.warps, **ROUNDING}
    _linear[(programs,)](
        rows, *pointers[0], *pointers[1], *pointers[2], partials, counters, row_count, *sizes,
        inputs, split_inputs, rows.stride(0), weights[0].stride(strided),
        block_outputs=tiling.outputs, block_rows=tiling.rows, step=tiling.step, splits=splits, split_k=split_k,
        even=inputs % STEP == 0, transposed=transposed, activation=activation,
        num_stages=stages_of(tiling, programs, processors_of(rows.device)), **options,
    )  # fmt: skip
    return outs
