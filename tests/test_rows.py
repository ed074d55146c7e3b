"""Products and attention of plain tensors on a CPU: right, and each row with its own bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers.pytorch_utils import Conv1D

from draftgraph.kernels import linear as tiles
from draftgraph.kernels import rows
from draftgraph.kernels.attention import masked_attention
from draftgraph.kernels.rows import RowByRow, is_plain, row_attention, row_product, rows_apart

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
OPTIONS: list[dict[str, Any]] = [{}, {"softcap": 3.0}, {"sinks": SINKS}, {"softcap": 3.0, "sinks": SINKS}]
SHAPES = [(100, 33), (4, 8), (768, 256), (17, 64), (1, 5), (67, 16)]


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    tolerance = TOLERANCE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=tolerance)


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(rows, "PER_THREAD", 1)
    monkeypatch.setattr(rows, "thread_count", lambda: request.param)
    return int(request.param)


@pytest.mark.parametrize("turned", [False, True], ids=["", "turned"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_is_right_and_its_rows_have_their_own_bits(
    dtype: torch.dtype, shape: tuple[int, int], turned: bool, threads: int
) -> None:
    torch.manual_seed(0)
    given, weight, bias = torch.randn(2, 9, shape[1]).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[0])
    if turned:
        weight = weight.t().contiguous().t()
    found = row_product(given, weight, bias.to(dtype))
    close(found, linear(given.float(), weight.float(), bias.to(dtype).float()), dtype)
    alone = [row_product(row, weight, bias.to(dtype)) for row in given.reshape(-1, 1, shape[1])]
    assert torch.equal(torch.cat(alone), found.reshape(-1, shape[0]))


@pytest.mark.parametrize("more", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_is_right(dtype: torch.dtype, more: dict[str, Any], threads: int) -> None:
    query, key, value = (torch.randn(1, *shape).to(dtype) for shape in ((4, 7, 24), (2, 40, 24), (2, 40, 20)))
    seen = torch.rand(7, 40) > 0.3
    seen[2] = False
    found = row_attention(query, key, value, seen, 0.2, **more)
    expected = masked_attention(query.float(), key.float(), value.float(), seen, 0.2, **more)
    close(found, expected, dtype)
    assert not found[0, 2].any()
    everything = row_attention(query, key, value, None, 0.2, **more)
    whole = torch.ones(7, 40, dtype=torch.bool)
    close(everything, masked_attention(query.float(), key.float(), value.float(), whole, 0.2, **more), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_attention_depend_on_what_is_seen_alone(dtype: torch.dtype, threads: int) -> None:
    """Among other queries, and with keys between that it does not see, which may hold anything."""
    query, key, value = (torch.randn(1, heads, count, 16).to(dtype) for heads, count in ((4, 5), (2, 33), (2, 33)))
    seen = torch.rand(5, 33) > 0.4
    together = row_attention(query, key, value, seen, 0.25)
    for number in range(5):
        mine = seen[number]
        few = row_attention(query[:, :, number : number + 1], key[:, :, mine], value[:, :, mine], None, 0.25)
        assert torch.equal(few[0, 0], together[0, number])
    nobody = ~seen.any(dim=0)
    key[:, :, nobody], value[:, :, nobody] = torch.nan, torch.inf
    assert torch.equal(row_attention(query, key, value, seen, 0.25), together)


def test_a_library_is_not_asked_while_rows_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a product: layers, functions, operators, GPT-2's own layer."""
    asked: list[Any] = []
    own = rows.row_product
    monkeypatch.setattr(rows, "row_product", lambda *given: asked.append(given) or own(*given))
    torch.manual_seed(0)
    layer, turned, x = nn.Linear(8, 6), Conv1D(6, 8), torch.randn(1, 3, 8)
    with torch.no_grad():
        calls = [
            lambda: layer(x),
            lambda: linear(x, layer.weight),
            lambda: x @ layer.weight.t(),
            lambda: torch.matmul(x, layer.weight.t()),
            lambda: turned(x),
        ]
        for number, call in enumerate(calls, start=1):
            plain = call()
            with RowByRow():
                found = call()
            assert len(asked) == number
            torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_on_a_gpu_products_of_plain_weights_go_in_tiles(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands in for it: nothing is computed there."""
    told: list[Any] = []

    def linears(given: Tensor, weights: list[Tensor], *more: Any) -> list[Tensor]:
        told.append((given.shape, [weight.shape for weight in weights], *more))
        return [torch.empty((len(given), len(weights[0])), dtype=given.dtype, device=given.device)]

    monkeypatch.setattr(tiles, "linears", linears)
    monkeypatch.setattr(rows, "compiles_for", lambda device: device.type == "meta")
    here, met = torch.device("meta"), torch.zeros(1)
    layer, turned = nn.Linear(8, 6, device=here, dtype=dtype), Conv1D(6, 8).to(here, dtype)
    x, stack = torch.empty(1, 3, 8, device=here, dtype=dtype), torch.empty(1, 8, 5, device=here, dtype=dtype)
    tiling = tiles.FLOAT32_TILING if dtype == torch.float32 else None
    with torch.no_grad(), rows_apart(here, met):
        for found, bias in (
            (layer(x), layer.bias),
            (linear(x, layer.weight), None),
            (x @ layer.weight.T, None),
            (torch.mm(x[0], layer.weight.t())[None], None),
            (turned(x), turned.bias),
        ):
            assert found.shape == (1, 3, 6)
            shape, weights, biases, counters, given_tiling = told.pop(0)
            assert (shape, weights) == ((3, 8), [(6, 8)]) and biases[0] is bias
            assert counters is met and given_tiling == tiling
        assert (x @ stack).shape == (1, 3, 5)
        linear(x.double(), layer.weight.double())
    with torch.enable_grad(), rows_apart(here, met):
        layer(x)
    with torch.no_grad(), rows_apart(here):
        layer(x)
    assert not told


def test_attention_of_a_mask_is_taken_over_and_an_added_bias_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    own = rows.row_attention
    monkeypatch.setattr(rows, "row_attention", lambda *given: asked.append(given) or own(*given))
    query, key, value = (torch.randn(1, 4, count, 8) for count in (3, 6, 6))
    mask = torch.zeros(1, 1, 3, 6).masked_fill(torch.rand(3, 6) > 0.7, torch.finfo(torch.float32).min)
    for number, given in enumerate([{}, {"attn_mask": mask}, {"attn_mask": mask == 0}, {"scale": 0.3}], start=1):
        plain = scaled_dot_product_attention(query, key, value, **given)  # type: ignore[arg-type]
        with RowByRow():
            found = scaled_dot_product_attention(query, key, value, **given)  # type: ignore[arg-type]
        assert len(asked) == number
        torch.testing.assert_close(found, plain)
    with RowByRow():
        scaled_dot_product_attention(query, key, value, attn_mask=mask + torch.randn(3, 6))
    assert len(asked) == 4


@pytest.mark.parametrize("size", [32, 48, 5])
def test_functions_of_single_numbers_do_not_know_other_rows(size: int) -> None:
    x = torch.randn(9, size)
    for function in rows.SINGLE:
        with RowByRow():
            found = function(x)
            assert torch.equal(found, torch.cat([function(row[None]) for row in x]))
        torch.testing.assert_close(found, function(x))


def test_training_and_other_tensors_are_left_to_torch() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    assert not is_plain(weight) and not is_plain(torch.zeros(2, dtype=torch.float64))
    assert not is_plain(torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16))
    with RowByRow():
        (torch.ones(2, 4) @ weight).sum().backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert is_plain(weight)
