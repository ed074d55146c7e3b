"""The best tokens of rows of logits: the kernel in Triton's interpreter, and on a GPU, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_tools import interpreter
from torch import Tensor

from draftgraph.kernels.best import best_tokens, best_tokens_reference, best_tokens_triton

Best = Callable[[Tensor, int], tuple[Tensor, Tensor]]
SHAPES = [(1, 97, 4), (3, 2048, 8), (2, 2049, 1), (2, 12288, 16)]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Best]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda logits, k: call(best_tokens_triton, logits, k)


def logits_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * 3


def test_the_reference_is_a_softmax() -> None:
    logits = logits_of(2, 30)
    tokens, chances = best_tokens_reference(logits, 3)
    plain = torch.softmax(logits, dim=-1).sort(descending=True)
    assert tokens.tolist() == plain.indices[:, :3].tolist()
    torch.testing.assert_close(chances.exp(), plain.values[:, :3])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_gives_the_same(interpreted: Best, shape: tuple[int, int, int]) -> None:
    logits = logits_of(*shape[:2])
    (tokens, chances), (expected, values) = interpreted(logits, shape[2]), best_tokens_reference(logits, shape[2])
    assert tokens.tolist() == expected.tolist()
    torch.testing.assert_close(chances, values)


def test_impossible_tokens_come_last_and_are_impossible(interpreted: Best) -> None:
    logits = torch.full((1, 3000), -torch.inf)
    logits[0, [2500, 7]] = torch.tensor([1.0, 2.0])
    tokens, chances = interpreted(logits, 4)
    assert tokens[0, :2].tolist() == [7, 2500]
    torch.testing.assert_close(chances[0, :2].exp().sum(), torch.tensor(1.0))
    assert (chances[0, 2:] == -torch.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [97, 2500, 49152])
def test_rows_that_are_no_numbers_have_columns_all_the_same(columns: int) -> None:
    """Triton's interpreter cannot compare what is no number."""
    tokens, chances = best_tokens(torch.full((2, columns), torch.nan, device="cuda"), 4)
    assert ((tokens >= 0) & (tokens < columns)).all()
    assert not (chances > -torch.inf).any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, (64, 49152, 16)], ids=str)
def test_the_kernel_gives_the_same_on_a_gpu(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    logits = logits_of(*shape[:2]).cuda().to(dtype)
    (_, chances), (_, values) = best_tokens(logits, shape[2]), best_tokens_reference(logits, shape[2])
    torch.testing.assert_close(chances, values, rtol=1e-4, atol=1e-5)
