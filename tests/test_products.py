"""Products on a CPU: the right numbers, and of every row the same bits whatever rows are beside it."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftgraph.kernels import products, vectors
from draftgraph.kernels.packed import PackedTensor, aligned, compressed
from draftgraph.kernels.products import GROUP, code_bytes, packed, product, read_row, round_row, unpacked
from draftgraph.kernels.vectors import LANES

KINDS = (4, 8, 16, 32)
WIDTHS = (1, 2, 3, 8, 17, 33, 64, 130)


class Weight:
    """A random weight: its row of the table, and its numbers."""

    def __init__(self, kind: int, outputs: int, inputs: int, seed: int = 0) -> None:
        plain = torch.randn((outputs, inputs), generator=torch.Generator().manual_seed(seed))
        held: Any = plain
        if kind <= 8:
            found = compressed(plain, kind)
            held, plain = found.blocks, found.numbers()
        elif kind == 16:
            held = plain.bfloat16()
            plain = held.float()
        self.held, self.numbers = held, plain
        self.told = np.array([kind, held.data_ptr(), outputs, inputs, 0, 0], dtype=np.int64)

    def times(self, rows: torch.Tensor) -> torch.Tensor:
        kind, _, outputs, *_ = self.told.tolist()
        columns = -(-outputs // LANES) * LANES
        out = torch.zeros((len(rows), columns))
        given = rows.contiguous()
        if kind <= 8:
            given = rounded(rows)
        stride = given.stride(0) * given.element_size()
        product(self.told, 0, outputs, given.data_ptr(), stride, out.data_ptr(), columns * 4, len(rows))
        assert not out[:, -(-outputs // LANES) * LANES :].any()
        return out[:, :outputs]


def rounded(rows: torch.Tensor) -> torch.Tensor:
    codes = torch.zeros((len(rows), code_bytes(rows.shape[1])), dtype=torch.uint8)
    for row, code in zip(rows.contiguous(), codes, strict=True):
        round_row(row.data_ptr(), len(row), code.data_ptr())
    return codes


def rows_of(count: int, inputs: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((count, inputs), generator=torch.Generator().manual_seed(seed))


def differing(weight: Any, rows: torch.Tensor) -> list[int]:
    """Widths at which a row's bits are not those of the row alone."""
    alone = torch.cat([weight.times(row[None]) for row in rows])
    return [width for width in WIDTHS if not torch.equal(weight.times(rows[:width]), alone[:width])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(96, 64), (50, 160), (16, 1536)])
def test_a_product_is_that_of_the_weights_numbers(kind: int, shape: tuple[int, int]) -> None:
    weight, rows = Weight(kind, *shape), rows_of(7, shape[1])
    expected = rows.double() @ weight.numbers.double().T
    error = (weight.times(rows) - expected).norm() / expected.norm()
    assert error < (1e-2 if kind <= 8 else 1e-6)  # rows of packed weights are rounded to 8 bits


@pytest.mark.parametrize("kind", (16, 32))
@pytest.mark.parametrize("shape", [(5, 7), (3, 48), (9, 50)])
def test_dense_weights_may_have_any_shape(kind: int, shape: tuple[int, int]) -> None:
    weight, rows = Weight(kind, *shape), rows_of(5, shape[1])
    torch.testing.assert_close(weight.times(rows), rows @ weight.numbers.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_bits_do_not_depend_on_other_rows(kind: int) -> None:
    assert differing(Weight(kind, 80, 576), rows_of(max(WIDTHS), 576)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_sum_that_depends_on_the_number_of_rows_is_caught(kind: int) -> None:
    class Planted(Weight):
        def times(self, rows: torch.Tensor) -> torch.Tensor:
            if len(rows) < 8:
                return super().times(rows)
            half = rows.shape[1] // 2 // GROUP * GROUP  # inputs are split where there are many rows
            parts = [rows.clone(), rows.clone()]
            parts[0][:, half:] = parts[1][:, :half] = 0
            return super().times(parts[0]) + super().times(parts[1])

    assert differing(Planted(kind, 80, 576), rows_of(max(WIDTHS), 576))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_looked_up_has_the_weights_numbers(kind: int) -> None:
    weight = Weight(kind, 40, 96)
    for row in (0, 15, 16, 39):
        out = torch.zeros(96)
        read_row(weight.told, row, out.data_ptr())
        assert torch.equal(out, weight.numbers[row])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 4), st.sampled_from([4, 8]), st.integers(0, 2**32 - 1))
def test_unpacking_gives_what_was_packed(outputs: int, groups: int, bits: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    codes = random.integers(0, 1 << bits, (outputs, groups * GROUP)).astype(np.uint8)
    scales, offsets = (random.standard_normal((outputs, groups)).astype(np.float16) for _ in range(2))
    found = unpacked(packed(codes, scales, offsets, bits), outputs, bits)
    assert all(np.array_equal(one, other) for one, other in zip(found, (codes, scales, offsets), strict=True))


def test_a_rounded_row_is_within_half_a_step_of_each_group() -> None:
    row = rows_of(1, 96)[0]
    row[32:64] = 0  # a group of nothing has no step
    codes = rounded(row[None])[0].numpy()
    whole = codes[:96].view(np.int8).astype(np.float32).reshape(3, GROUP)
    numbers = codes[96 : 96 + 24].view(np.float32).reshape(3, 2)
    assert np.abs(whole * numbers[:, :1] - row.numpy().reshape(3, GROUP)).max() <= numbers[:, 0].max() / 2 + 1e-7
    np.testing.assert_allclose(numbers[:, 1], whole.sum(axis=1) * numbers[:, 0], rtol=1e-6)
    assert numbers[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bits", (4, 8))
def test_a_processor_without_byte_products_gives_the_same_bits(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, rows = Weight(bits, 16, 96), rows_of(1, 96)
    codes, out = rounded(rows), torch.zeros(16)
    monkeypatch.setattr(vectors, "host_features", lambda: frozenset())
    tile = products.packed_tile(bits)
    run = numba.njit(lambda block, codes, out: tile(block, 3, codes, 0, out, 0, 1))
    run(weight.held.data_ptr(), codes.data_ptr(), out.data_ptr())
    assert torch.equal(out, weight.times(rows)[0])


def test_a_packed_tensor_is_a_weight_like_any_other() -> None:
    weight = PackedTensor(aligned(compressed(rows_of(40, 64), 8).blocks.numpy()), 40)
    plain, rows, bias = weight.numbers(), rows_of(3, 64, 2), torch.ones(40)
    assert weight.shape == (40, 64) and weight.dtype == torch.float32
    torch.testing.assert_close(torch.nn.functional.linear(rows, weight, bias), rows @ plain.T + 1, rtol=2e-2, atol=0.2)
    assert torch.equal(torch.nn.functional.embedding(torch.tensor([[3, 39]]), weight), plain[None, [3, 39]])
    assert torch.equal(weight[torch.tensor([2, 5])], plain[[2, 5]])
    assert torch.equal(weight.only(torch.tensor([17, 2])).numbers(), plain[[17, 2]])
    assert torch.equal(weight * 2, plain * 2) and type(weight * 2) is torch.Tensor
    assert float(weight.mean()) == float(plain.mean())


def test_fewer_bits_lose_more() -> None:
    plain = rows_of(64, 128)
    errors = [float((compressed(plain, bits).numbers() - plain).norm() / plain.norm()) for bits in (8, 4)]
    assert errors[0] < 0.01 < errors[1] < 0.12
