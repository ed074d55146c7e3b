"""Products of few rows as a kernel, in Triton's interpreter and on a GPU, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_tools import interpreter
from torch import Tensor
from torch.nn.functional import linear

from draftgraph.kernels import linear as kernel

pytest.importorskip("triton", reason="Triton is not installed")
SHAPES = [(1, 64, 512, False), (5, 70, 512, True), (17, 33, 600, True), (2, 40, 1024, False)]  # rows, out, in, bias


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Tensor]]:
    with interpreter() as call:
        yield lambda *arguments: call(kernel.skinny_linear, *arguments)


def numbers(rows: int, out: int, inputs: int, biased: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(rows)
    given, weight = (torch.randn(count, inputs, generator=draw) for count in (rows, out))
    return given, weight, torch.randn(out, generator=draw) if biased else None


@pytest.mark.parametrize("tiling", kernel.TILINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gives_a_linear_layers_numbers(interpreted: Any, shape: tuple[int, int, int, bool], tiling: Any) -> None:
    given = numbers(*shape)
    torch.testing.assert_close(interpreted(*given, tiling), linear(*given), rtol=1e-4, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", kernel.TILINGS, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1, 4096, 4096, False), (64, 11008, 4096, False)], ids=str)
def test_gives_them_on_a_gpu(shape: tuple[int, int, int, bool], tiling: Any) -> None:
    given = [None if one is None else one.cuda().to(torch.bfloat16) for one in numbers(*shape)]
    found, expected = kernel.skinny_linear(*given, tiling), linear(*given)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=0.5)
