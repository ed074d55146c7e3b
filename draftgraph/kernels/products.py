"""Products of rows with weights in 4, 8, 16 or 32 bits on a CPU, each row by itself.

Weights of 4 and 8 bits lie in groups of 32 inputs: numbers without sign, a scale and an offset in float16 for each
group, as GGUF files hold them. The rows that they are multiplied with are rounded to 8 bits, by groups of 32 as well:
sums within a group are then exact, and those of groups are added in their order. Weights in bfloat16 and float32 are
read where PyTorch keeps them. In every format a row's sums are formed in one order, whatever other rows there are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.kernels.vectors import (
    BYTES,
    DENSE,
    FLOAT,
    FLOATS,
    HALF,
    HALVES,
    INT,
    INTS,
    LANES,
    LONG,
    PAIRS,
    Code,
    absolute,
    address,
    everywhere,
    host_features,
    larger,
    largest,
    load,
    load_number,
    load_short,
    operation,
    store_number,
    store_rounded,
    whole,
)

GROUP = 32  # inputs that share a scale and an offset
MOST_ROWS, MOST_DENSE = 8, 4  # rows that go through a weight together: as many as there are registers for
OUTPUTS_BESIDE = 4  # of a dense weight, computed together
VECTORS_BESIDE = 4  # the same of one that lies turned, 16 outputs each
AHEAD = 4096  # bytes of a weight that are fetched before they are needed
ROW_BLOCK = 128  # rows that go through all weights together: as many as caches hold
DTYPES = {torch.float32: 32, torch.bfloat16: 16, torch.float16: HALF}  # of dense weights, and their kinds
KIND, ADDRESS, OUTPUTS, INPUTS, BIAS, BIAS_KIND = range(6)  # a weight, as compiled functions are told of it
Bytes = NDArray[np.uint8]


def block_bytes(bits: int) -> int:
    """Of a group of 16 outputs: their numbers, scales and offsets."""
    return LANES * GROUP * bits // 8 + 4 * LANES


def code_bytes(inputs: int) -> int:
    """Of a row that was rounded to 8 bits: the numbers, then for each group its scale and its sum."""
    return -(-(inputs + 8 * (inputs // GROUP)) // 64) * 64


def packed(codes: Any, scales: Any, offsets: Any, bits: int) -> Bytes:
    """A weight in the order in which a product reads it: 16 outputs, group by group, four inputs of each at a time.

    # [outputs, inputs], [outputs, groups] twice -> [tiles, groups, bytes]
    """
    outputs, inputs = codes.shape
    tiles, groups = -(-outputs // LANES), inputs // GROUP
    full = tiles * LANES
    if full != outputs:
        codes, scales, offsets = (np.pad(part, ((0, full - outputs), (0, 0))) for part in (codes, scales, offsets))
    by_four = codes.reshape(tiles, LANES, groups, GROUP // 4, 4).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        by_four = by_four[:, :, 0::2] | by_four[:, :, 1::2] << 4
    found = np.empty((tiles, groups, block_bytes(bits)), dtype=np.uint8)
    end = LANES * GROUP * bits // 8
    found[:, :, :end] = by_four.reshape(tiles, groups, end)
    for start, part in ((end, scales), (end + 2 * LANES, offsets)):
        turned = np.ascontiguousarray(part.astype(np.float16).reshape(tiles, LANES, groups).transpose(0, 2, 1))
        found[:, :, start : start + 2 * LANES] = turned.view(np.uint8).reshape(tiles, groups, 2 * LANES)
    return found


def unpacked(blocks: Bytes, outputs: int, bits: int) -> tuple[NDArray[np.uint8], Any, Any]:
    """What `packed` was given."""
    tiles, groups, _ = blocks.shape
    end = LANES * GROUP * bits // 8
    by_four = blocks[:, :, :end].reshape(tiles, groups, -1, LANES, 4)
    if bits == 4:
        by_four = np.stack([by_four & 15, by_four >> 4], axis=3).reshape(tiles, groups, -1, LANES, 4)
    codes = by_four.transpose(0, 3, 1, 2, 4).reshape(tiles * LANES, groups * GROUP)
    scales, offsets = (
        np.ascontiguousarray(blocks[:, :, start : start + 2 * LANES])
        .view(np.float16)
        .transpose(0, 2, 1)
        .reshape(tiles * LANES, groups)
        for start in (end, end + 2 * LANES)
    )
    return codes[:outputs], scales[:outputs], offsets[:outputs]


def packed_tile(bits: int) -> Any:
    """16 outputs of up to MOST_ROWS rows, as an operation of compiled functions."""

    @operation(types.void, address, whole, address, whole, address, whole, whole)
    def multiply(
        code: Code, tile: Any, groups: Any, codes: Any, codes_row: Any, out: Any, out_row: Any, rows: Any
    ) -> None:
        code.cases(
            rows,
            range(1, MOST_ROWS + 1),
            lambda count: write(code, tile, groups, codes, codes_row, out, out_row, count),
        )

    def write(
        code: Code, tile: Any, groups: Any, codes: Any, codes_row: Any, out: Any, out_row: Any, rows: int
    ) -> None:
        b = code.builder
        sums, offset_sums = ([cgutils.alloca_once_value(b, code.all(0.0)) for _ in range(rows)] for _ in range(2))
        places = [b.add(codes, b.mul(codes_row, ir.Constant(LONG, row))) for row in range(rows)]
        inputs, size = b.mul(groups, ir.Constant(LONG, GROUP)), LANES * GROUP * bits // 8
        with cgutils.for_range(b, groups) as loop:
            block = b.add(tile, b.mul(loop.index, ir.Constant(LONG, block_bytes(bits))))
            for line in range(0, block_bytes(bits), 64):
                code.prefetch(code.plus(block, AHEAD + line))
            weights = []
            for start in range(0, size, 64):
                held = code.load(code.plus(block, start), BYTES, 64)
                weights += (
                    [held] if bits == 8 else [b.and_(held, code.all(15, BYTES)), b.lshr(held, code.all(4, BYTES))]
                )
            scale, offset = (
                b.fpext(code.load(code.plus(block, start), HALVES, 32), FLOATS) for start in (size, size + 2 * LANES)
            )
            for row, place in enumerate(places):
                group, found = b.add(place, b.mul(loop.index, ir.Constant(LONG, GROUP))), code.all(0, INTS)
                for step, weight in enumerate(weights):
                    given = code.all(code.load(code.plus(group, 4 * step), INT, 4), INTS)
                    found = code.dot_bytes(found, weight, b.bitcast(given, BYTES))
                numbers = b.add(b.add(place, inputs), b.mul(loop.index, ir.Constant(LONG, 8)))
                row_scale, row_sum = (code.all(code.load(code.plus(numbers, at), FLOAT, 4)) for at in (0, 4))
                scaled = b.fmul(b.sitofp(found, FLOATS), row_scale)
                b.store(code.fma(scaled, scale, b.load(sums[row])), sums[row])
                b.store(code.fma(offset, row_sum, b.load(offset_sums[row])), offset_sums[row])
        for row in range(rows):
            place = b.add(out, b.mul(out_row, ir.Constant(LONG, row)))
            code.store(place, b.fadd(b.load(sums[row]), b.load(offset_sums[row])), 4)

    return multiply


def dense_tile(bits: int, outputs: int, pairs: bool = False) -> Any:
    """So many outputs of up to MOST_DENSE rows, with weights in float32, bfloat16 or float16. `pairs`: the rows are in
    bfloat16 too, and whole vectors of 32 numbers."""
    kind, given_kind, given_bytes, lanes = DENSE[bits], FLOATS, 4, LANES
    if pairs:
        kind, given_kind, given_bytes, lanes = PAIRS, PAIRS, 2, 2 * LANES

    @operation(types.void, address, whole, address, whole, address, whole, whole)
    def multiply(
        code: Code, weight: Any, inputs: Any, given: Any, given_row: Any, out: Any, out_row: Any, rows: Any
    ) -> None:
        code.cases(
            rows,
            range(1, MOST_DENSE + 1),
            lambda count: write(code, weight, inputs, given, given_row, out, out_row, count),
        )

    def write(
        code: Code, weight: Any, inputs: Any, given: Any, given_row: Any, out: Any, out_row: Any, rows: int
    ) -> None:
        b = code.builder
        sums = [[cgutils.alloca_once_value(b, code.all(0.0)) for _ in range(rows)] for _ in range(outputs)]
        weight_row = b.mul(inputs, ir.Constant(LONG, bits // 8))
        weights = [b.add(weight, b.mul(weight_row, ir.Constant(LONG, output))) for output in range(outputs)]
        places = [b.add(given, b.mul(given_row, ir.Constant(LONG, row))) for row in range(rows)]

        def add(step: Any, mask: Any = None) -> None:
            def at(place: Any, size: int, kind: Any) -> Any:
                here = b.add(place, b.mul(step, ir.Constant(LONG, lanes * size)))
                return code.load(here, kind, size) if mask is None else code.load_where(here, kind, mask)

            xs = [at(place, given_bytes, given_kind) for place in places]
            ws = [at(place, bits // 8, kind) for place in weights]
            for w, by_row in zip(ws if pairs else map(code.floats, ws), sums, strict=True):
                for x, found in zip(xs, by_row, strict=True):
                    b.store(code.dot_pairs(b.load(found), w, x) if pairs else code.fma(w, x, b.load(found)), found)

        steps = b.udiv(inputs, ir.Constant(LONG, lanes))
        with cgutils.for_range(b, steps) as loop:
            add(loop.index)
        if not pairs:
            rest = b.sub(inputs, b.mul(steps, ir.Constant(LONG, LANES)))
            with b.if_then(b.icmp_signed(">", rest, ir.Constant(LONG, 0))):
                add(steps, code.lanes_below(rest))
        for output, by_row in enumerate(sums):
            for row, found in enumerate(by_row):
                place = code.plus(b.add(out, b.mul(out_row, ir.Constant(LONG, row))), 4 * output)
                code.store(place, code.reduced(b.load(found), b.fadd), 4)

    return multiply


def turned_tile(bits: int, vectors: int) -> Any:
    """The first `count` of so many times 16 outputs of up to MOST_DENSE rows, with the weights of an input in a row."""
    kind = DENSE[bits]

    @operation(types.void, address, whole, whole, whole, address, whole, address, whole, whole)
    def multiply(
        code: Code, weight: Any, weight_row: Any, count: Any, inputs: Any, given: Any, given_row: Any, out: Any,
        out_row: Any, rows: Any,
    ) -> None:  # fmt: skip
        def write(rows: int) -> None:
            b = code.builder
            sums = [[cgutils.alloca_once_value(b, code.all(0.0)) for _ in range(vectors)] for _ in range(rows)]
            mask = code.lanes_below(b.sub(count, ir.Constant(LONG, LANES * (vectors - 1))))
            with cgutils.for_range(b, inputs) as loop:
                line, at = b.add(weight, b.mul(loop.index, weight_row)), b.mul(loop.index, ir.Constant(LONG, 4))
                places = [code.plus(line, LANES * (bits // 8) * vector) for vector in range(vectors)]
                held = [code.load(place, kind, bits // 8) for place in places[:-1]]
                held = [code.floats(one) for one in (*held, code.load_where(places[-1], kind, mask))]
                for row, by_vector in enumerate(sums):
                    place = b.add(b.add(given, b.mul(given_row, ir.Constant(LONG, row))), at)
                    number = code.all(code.load(place, FLOAT, 4))
                    for one, found in zip(held, by_vector, strict=True):
                        b.store(code.fma(number, one, b.load(found)), found)
            for row, by_vector in enumerate(sums):
                place = b.add(out, b.mul(out_row, ir.Constant(LONG, row)))
                for vector, found in enumerate(by_vector):
                    code.store_where(
                        code.plus(place, 4 * LANES * vector), b.load(found), mask if vector == vectors - 1 else None
                    )

        code.cases(rows, range(1, MOST_DENSE + 1), write)

    return multiply


tile_4, tile_8 = packed_tile(4), packed_tile(8)
tile_16, tile_half, tile_32, single_16, single_half, single_32 = (
    dense_tile(bits, outputs) for outputs in (OUTPUTS_BESIDE, 1) for bits in (16, HALF, 32)
)
pairs_16, single_pairs_16 = (dense_tile(16, outputs, pairs=True) for outputs in (OUTPUTS_BESIDE, 1))
turned_16, turned_half, turned_32, narrow_16, narrow_half, narrow_32 = (
    turned_tile(bits, vectors) for vectors in (VECTORS_BESIDE, 1) for bits in (16, HALF, 32)
)


@compiled
def product(
    weight: NDArray[np.int64], first: int, last: int, given: int, given_row: int, out: int, out_row: int, rows: int
) -> None:
    """The outputs `first` to `last` of all rows; of packed weights whole tiles. `given`: rows in float32, or of packed
    weights as `round_row` left them. `out` is where output 0 of the first row goes."""
    for start in range(0, rows, ROW_BLOCK):
        x, y, count = given + start * given_row, out + start * out_row, min(rows - start, ROW_BLOCK)
        if weight[KIND] <= 8:
            packed_product(weight, first, last, x, given_row, y, out_row, count)
        else:
            dense_product(weight, first, last, x, given_row, y, out_row, count)


@compiled
def packed_product(
    weight: NDArray[np.int64], first: int, last: int, given: int, given_row: int, out: int, out_row: int, rows: int
) -> None:
    groups = weight[INPUTS] // GROUP
    size = groups * (LANES * GROUP * weight[KIND] // 8 + 4 * LANES)
    for tile in range(first // LANES, (last + LANES - 1) // LANES):
        block = weight[ADDRESS] + tile * size
        for row in range(0, rows, MOST_ROWS):
            x, y, count = given + row * given_row, out + row * out_row + tile * LANES * 4, min(rows - row, MOST_ROWS)
            if weight[KIND] == 4:
                tile_4(block, groups, x, given_row, y, out_row, count)
            else:
                tile_8(block, groups, x, given_row, y, out_row, count)


@compiled
def dense_product(
    weight: NDArray[np.int64], first: int, last: int, given: int, given_row: int, out: int, out_row: int, rows: int
) -> None:
    inputs, kind = weight[INPUTS], weight[KIND]
    output = first
    while output < last:
        place, several = weight[ADDRESS] + output * inputs * (kind // 8), last - output >= OUTPUTS_BESIDE
        for row in range(0, rows, MOST_DENSE):
            x, y, count = given + row * given_row, out + row * out_row + output * 4, min(rows - row, MOST_DENSE)
            if several and kind == 32:
                tile_32(place, inputs, x, given_row, y, out_row, count)
            elif several and kind == 16:
                tile_16(place, inputs, x, given_row, y, out_row, count)
            elif several:
                tile_half(place, inputs, x, given_row, y, out_row, count)
            elif kind == 32:
                single_32(place, inputs, x, given_row, y, out_row, count)
            elif kind == 16:
                single_16(place, inputs, x, given_row, y, out_row, count)
            else:
                single_half(place, inputs, x, given_row, y, out_row, count)
        output += OUTPUTS_BESIDE if several else 1


@compiled
def paired_product(
    weight: NDArray[np.int64], first: int, last: int, given: int, given_row: int, out: int, out_row: int, rows: int
) -> None:
    """The same with a weight in bfloat16 and rows in bfloat16: see `multiplies_pairs`."""
    inputs, output = weight[INPUTS], first
    while output < last:
        place, several = weight[ADDRESS] + output * inputs * 2, last - output >= OUTPUTS_BESIDE
        for row in range(0, rows, MOST_DENSE):
            x, y, count = given + row * given_row, out + row * out_row + output * 4, min(rows - row, MOST_DENSE)
            if several:
                pairs_16(place, inputs, x, given_row, y, out_row, count)
            else:
                single_pairs_16(place, inputs, x, given_row, y, out_row, count)
        output += OUTPUTS_BESIDE if several else 1


def multiplies_pairs(inputs: int) -> bool:
    """Whether this processor multiplies numbers in bfloat16, two at a time, and so many inputs are whole vectors."""
    return "avx512bf16" in host_features() and inputs % (2 * LANES) == 0


@compiled
def turned_product(
    weight: NDArray[np.int64], first: int, last: int, given: int, given_row: int, out: int, out_row: int, rows: int
) -> None:
    """The outputs `first`, of a whole tile, to `last` of all rows, with a weight of [inputs, outputs]."""
    inputs, kind, width = weight[INPUTS], weight[KIND], weight[KIND] // 8
    weight_row, output = weight[OUTPUTS] * width, first
    while output < last:
        several = last - output > LANES * (VECTORS_BESIDE - 1)
        count = min(last - output, LANES * VECTORS_BESIDE if several else LANES)
        place = weight[ADDRESS] + output * width
        for row in range(0, rows, MOST_DENSE):
            x, y, some = given + row * given_row, out + row * out_row + output * 4, min(rows - row, MOST_DENSE)
            if several and kind == 32:
                turned_32(place, weight_row, count, inputs, x, given_row, y, out_row, some)
            elif several and kind == 16:
                turned_16(place, weight_row, count, inputs, x, given_row, y, out_row, some)
            elif several:
                turned_half(place, weight_row, count, inputs, x, given_row, y, out_row, some)
            elif kind == 32:
                narrow_32(place, weight_row, count, inputs, x, given_row, y, out_row, some)
            elif kind == 16:
                narrow_16(place, weight_row, count, inputs, x, given_row, y, out_row, some)
            else:
                narrow_half(place, weight_row, count, inputs, x, given_row, y, out_row, some)
        output += count


@compiled
def round_row(given: int, inputs: int, codes: int) -> None:
    """A row in float32 in 8 bits, by groups: the largest number of a group is 127."""
    numbers = codes + inputs
    for start in range(0, inputs, GROUP):
        one, other = load(given + 4 * start), load(given + 4 * start + 4 * LANES)
        most = largest(larger(absolute(one), absolute(other)))
        factor = everywhere(np.float32(127.0) / most if most > 0 else np.float32(0.0))
        found = store_rounded(codes + start, one * factor) + store_rounded(codes + start + LANES, other * factor)
        scale = most / np.float32(127.0)
        store_number(numbers + start // GROUP * 8, scale)
        store_number(numbers + start // GROUP * 8 + 4, scale * np.float32(found))


@compiled
def read_row(weight: NDArray[np.int64], row: int, out: int) -> None:
    """An output's weights in float32: what an embedding looks up."""
    inputs, kind = weight[INPUTS], weight[KIND]
    if kind > 8:
        place = weight[ADDRESS] + row * inputs * (kind // 8)
        for column in range(inputs):
            found = load_number(place + 4 * column) if kind == 32 else load_short(place + 2 * column)
            store_number(out + 4 * column, found)
        return
    size = LANES * GROUP * kind // 8
    groups, lane = inputs // GROUP, row % LANES
    tile = weight[ADDRESS] + row // LANES * groups * (size + 4 * LANES)
    for group in range(groups):
        block = tile + group * (size + 4 * LANES)
        scale, offset = load_half(block + size + 2 * lane), load_half(block + size + 2 * LANES + 2 * lane)
        for column in range(GROUP):
            step = column // 4
            if kind == 4:
                held = load_byte(block + step // 2 * 64 + lane * 4 + column % 4)
                held = held >> 4 if step % 2 else held & 15
            else:
                held = load_byte(block + step * 64 + lane * 4 + column % 4)
            store_number(out + 4 * (group * GROUP + column), scale * np.float32(held) + offset)


@operation(types.float32, address)
def load_half(code: Code, place: Any) -> Any:
    return code.builder.fpext(code.load(place, ir.HalfType(), 2), FLOAT)


@operation(types.int64, address)
def load_byte(code: Code, place: Any) -> Any:
    return code.builder.zext(code.load(place, ir.IntType(8)), LONG)
