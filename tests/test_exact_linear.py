"""Products whose rows do not depend on each other: in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_tools import in_one_order, ptx_of
from torch import Tensor
from torch.nn.functional import linear

from draftgraph.kernels.exact_linear import _exact_product, exact_linear, parts_of, tiling_of

SHAPES = {  # outputs, inputs
    "in parts": (96, 2048),
    "in one": (300, 64),
    "with a rest": (33, 1100),
    "smaller than a tile": (10, 24),
}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Tensor]]:
    with in_one_order() as call:
        yield lambda *arguments: call(exact_linear, *arguments)


def drawn(outputs: int, inputs: int, rows: int = 150, dtype: torch.dtype = torch.float16) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((rows, inputs), (outputs, inputs), (outputs,))
    given, weight, bias = (torch.randn(size, generator=generator) for size in sizes)
    return given.to(dtype), (weight / inputs**0.5).to(dtype), bias.to(dtype)


@pytest.mark.parametrize("rows", [1, 17, 150])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_it_is_a_product(interpreted: Callable[..., Tensor], shape: tuple[int, int], rows: int) -> None:
    given, weight, bias = drawn(*shape)
    for more in (None, bias):
        found = interpreted(given[:rows], weight, more)
        expected = linear(given[:rows].double(), weight.double(), None if more is None else more.double())
        torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # float32 hides no bit
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_every_pass(
    interpreted: Callable[..., Tensor], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    """At any place, beside any others, in narrow tiles and in wide ones."""
    given, weight, bias = drawn(*shape, dtype=dtype)
    whole = interpreted(given, weight, bias)
    for first, count in ((0, 1), (149, 1), (40, 17), (70, 64), (20, 65)):
        some = interpreted(given[first : first + count], weight, bias)
        assert torch.equal(some.view(torch.int16), whole[first : first + count].view(torch.int16)), (first, count)
    turned = interpreted(given.flip(0), weight, bias).flip(0)
    assert torch.equal(turned.view(torch.int16), whole.view(torch.int16))


def test_parts_that_depend_on_the_rows_are_found(interpreted: Callable[..., Tensor]) -> None:
    """A planted fault: one row is multiplied in more parts than many."""
    given, weight, bias = drawn(*SHAPES["in parts"], dtype=torch.float32)
    assert parts_of(*weight.shape) == 4
    whole = interpreted(given, weight, bias)
    assert torch.equal(interpreted(given[:1], weight, bias), whole[:1])
    with in_one_order(MOST_PARTS=2) as call:
        assert not torch.equal(call(exact_linear, given[:1], weight, bias), whole[:1])


@pytest.mark.parametrize("rows", [1, 64, 512])
def test_the_kernel_compiles_for_a_gpu_with_one_kind_of_product(rows: int) -> None:
    """Bits would depend on the width of a pass if narrow and wide tiles walked along the inputs in other steps."""
    tiling, stages = tiling_of(rows, 2)
    pointers = dict.fromkeys(("given", "weight", "out"), "*bf16") | {"sums": "*fp32"}
    fixed = {"bias": None, "tile": tiling.outputs, "wide": tiling.rows, "step": tiling.step, "parts": 4}
    for apart in (True, False):
        options = {"num_warps": tiling.warps, "num_stages": stages}
        code = ptx_of(_exact_product, pointers, fixed | {"apart": apart, "whole": True}, options)
        assert set(re.findall(r"wgmma\.mma_async\.\S+?\.(m64)n\d+(k16\.\S+)", code)) == {("m64", "k16.f32.bf16.bf16")}
        assert "mma.sync" not in code
