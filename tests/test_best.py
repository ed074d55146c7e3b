"""The best tokens of rows of logits: the kernel in Triton's interpreter, and on a GPU, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from kernel_tools import interpreter
from torch import Tensor

from draftgraph.kernels.best import best_logits, best_tokens, best_tokens_reference, best_tokens_triton

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


@pytest.mark.parametrize("columns", [5, 16, 97, 49152])
def test_the_compiled_search_gives_the_same_and_of_equals_the_first(columns: int) -> None:
    logits = logits_of(3, columns).mul(4).round().div(4)  # many are equal
    logits[1] = -torch.inf
    logits[1, columns // 2] = 3.0
    k = min(16, columns)
    order = logits.sort(dim=-1, descending=True, stable=True)
    tokens, values = best_logits(logits, k)
    assert torch.equal(tokens, order.indices[:, :k]) and torch.equal(values, order.values[:, :k])
    tokens, chances = best_tokens(logits, k)
    assert torch.equal(tokens, order.indices[:, :k])
    torch.testing.assert_close(chances, torch.log_softmax(logits, dim=-1).gather(1, tokens))


@pytest.mark.parametrize("columns", [5, 97, 4096])
def test_what_is_no_number_is_found_among_numbers(columns: int) -> None:
    """So that a model with broken weights is refused, wherever in a row it shows."""
    for place in {0, columns // 2, columns - 1}:
        logits = logits_of(1, columns)
        logits[0, place] = torch.nan
        tokens, values = best_logits(logits, 4)
        assert int(tokens[0, 0]) == place and bool(values[0, 0].isnan()) and bool(values[0, 1:].isfinite().all())
