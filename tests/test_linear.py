"""Products whose rows do not depend on each other: in Triton's interpreter, and compiled for a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_tools import in_one_order, ptx_of
from torch import Tensor, nn
from torch.nn.functional import linear

from draftgraph import private
from draftgraph.engine import borrowing
from draftgraph.engine.borrowing import Fusions, Linears
from draftgraph.kernels import fused
from draftgraph.kernels import linear as kernel
from draftgraph.kernels.fused import gated_triton
from draftgraph.kernels.linear import FLOAT32_TILING, _linear, linears, new_counters, splits_of, stages_of, tiling_of

SHAPES = {  # outputs of weights that are multiplied together, inputs
    "split": ((96,), 2048),
    "not split": ((300,), 64),
    "with a rest": ((33,), 1100),
    "smaller than a tile": ((10,), 24),
    "two": ((70, 130), 1024),
    "three": ((96, 32, 40), 600),
}
Drawn = tuple[Tensor, list[Tensor], list[Tensor]]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., list[Tensor]]]:
    with in_one_order() as call:
        yield lambda *arguments: call(linears, *arguments)


def drawn(sizes: tuple[int, ...], inputs: int, rows: int = 150, dtype: torch.dtype = torch.float16) -> Drawn:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn((rows, inputs), generator=generator).to(dtype)
    weights = [(torch.randn((size, inputs), generator=generator) / inputs**0.5).to(dtype) for size in sizes]
    return given, weights, [torch.randn(size, generator=generator).to(dtype) for size in sizes]


def bits(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors, dim=-1).view(torch.int16)


@pytest.mark.parametrize("rows", [1, 17, 150])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_they_are_products(interpreted: Callable[..., list[Tensor]], shape: Any, rows: int) -> None:
    given, weights, biases = drawn(*shape)
    for more in ([None] * len(weights), biases):
        found = interpreted(given[:rows], weights, more)
        for one, weight, bias in zip(found, weights, more, strict=True):
            expected = linear(given[:rows].double(), weight.double(), None if bias is None else bias.double())
            torch.testing.assert_close(one.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # float32 hides no bit
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_every_pass(
    interpreted: Callable[..., list[Tensor]], shape: Any, dtype: torch.dtype
) -> None:
    """At any place, beside any others, in narrow tiles and in wide ones."""
    given, weights, biases = drawn(*shape, dtype=dtype)
    whole = bits(interpreted(given, weights, biases))
    for first, count in ((0, 1), (149, 1), (40, 17), (70, 64), (20, 65)):
        some = interpreted(given[first : first + count], weights, biases)
        assert torch.equal(bits(some), whole[first : first + count]), (first, count)
    turned = [one.flip(0) for one in interpreted(given.flip(0), weights, biases)]
    assert torch.equal(bits(turned), whole)


def with_transposed(given: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    """The same weights with their outputs side by side, as those of GPT-2 lie, and nothing is copied."""
    weights = [weight.t().contiguous().t() for weight in weights]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "contiguous", None)
        return linears(given, weights, biases)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES.values() if len(shape[0]) == 1], ids=str)
def test_weights_may_be_transposed(interpreted: Callable[..., list[Tensor]], shape: Any) -> None:
    given, weights, biases = drawn(*shape, dtype=torch.float32)
    with in_one_order() as call:
        for rows in (1, 65):
            found, expected = (
                call(with_transposed, given[:rows], weights, biases),
                interpreted(given[:rows], weights, biases),
            )
            assert torch.equal(bits(found), bits(expected))


def test_weights_that_lie_in_several_ways_are_multiplied_together(
    interpreted: Callable[..., list[Tensor]],
) -> None:
    given, weights, biases = drawn(*SHAPES["two"], dtype=torch.float32)
    expected = interpreted(given[:3], weights, biases)
    mixed = [weights[0].t().contiguous().t(), weights[1].repeat_interleave(2, dim=1)[:, ::2]]
    assert torch.equal(bits(interpreted(given[:3], mixed, biases)), bits(expected))


def test_splits_that_depend_on_the_rows_are_found(interpreted: Callable[..., list[Tensor]]) -> None:
    """A planted fault: one row is multiplied in more splits than many."""
    given, weights, biases = drawn(*SHAPES["split"], dtype=torch.float32)
    assert splits_of(*weights[0].shape) == 8
    (whole,) = interpreted(given, weights, biases)
    assert torch.equal(interpreted(given[:1], weights, biases)[0], whole[:1])
    with in_one_order(MOST_SPLITS=2) as call:
        assert not torch.equal(call(linears, given[:1], weights, biases)[0], whole[:1])


def counted(given: Tensor, weights: list[Tensor], biases: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    counters = new_counters(given.device)
    linears(given, weights, biases, counters)
    return linears(given, weights, biases, counters), counters


def test_counters_are_ready_for_the_next_launch() -> None:
    given, weights, biases = drawn(*SHAPES["split"])
    with in_one_order() as call:
        (found,), counters = call(counted, given[:3], weights, biases)
        assert torch.equal(found, call(linears, given[:3], weights, biases)[0])
    assert not counters.any()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 512])
def test_the_kernel_compiles_for_a_gpu_with_one_kind_of_product(rows: int, transposed: bool) -> None:
    """Bits would depend on the width of a pass if narrow and wide tiles walked along the inputs in other steps."""
    pointers = dict.fromkeys(("rows", *(f"{name}{one}" for name in ("weight", "out") for one in range(3))), "*bf16")
    pointers |= {"partials": "*fp32", "counters": "*i32"}
    for splits, split_k in ((1, False), (4, False), (4, True)):
        tiling = tiling_of(rows, splits)
        fixed = dict.fromkeys(("bias0", "bias1", "bias2"))
        fixed |= {"block_outputs": tiling.outputs, "block_rows": tiling.rows, "step": tiling.step, "splits": splits}
        options = {"num_warps": tiling.warps, "num_stages": stages_of(tiling, 128, 132)}
        for activation in (None, "silu"):
            told = {"split_k": split_k, "even": True, "transposed": transposed, "activation": activation}
            code = ptx_of(_linear, pointers, fixed | told, options)
            kinds = set(re.findall(r"wgmma\.mma_async\.\S+?\.(m64)n\d+(k16\.\S+)", code))
            assert kinds == {("m64", "k16.f32.bf16.bf16")} and "mma.sync" not in code


def in_single(given: Tensor, weights: list[Tensor], biases: list[Tensor]) -> list[Tensor]:
    return linears(given, weights, biases, tiling=FLOAT32_TILING)


def test_products_in_float32_are_those_of_no_tensor_core(interpreted: Callable[..., list[Tensor]]) -> None:
    given, weights, biases = drawn(*SHAPES["split"], dtype=torch.float32)
    with in_one_order() as call:
        whole = call(in_single, given, weights, biases)
        assert torch.equal(bits(call(in_single, given[40:57], weights, biases)), bits(whole)[40:57])
    torch.testing.assert_close(whole, interpreted(given, weights, biases))
    pointers = dict.fromkeys(
        ("rows", *(f"{name}{one}" for name in ("weight", "out", "bias") for one in range(3))), "*fp32"
    )
    fixed = {
        "block_outputs": FLOAT32_TILING.outputs,
        "block_rows": FLOAT32_TILING.rows,
        "step": FLOAT32_TILING.step,
        "splits": 8,
        "split_k": True,
    }
    options = {"num_warps": FLOAT32_TILING.warps, "num_stages": 6}
    code = ptx_of(
        _linear,
        pointers | {"partials": "*fp32", "counters": "*i32"},
        fixed | {"even": True, "transposed": False, "activation": None},
        options,
    )
    assert "mma" not in code and "fma.rn.f32" in code


GPU_SHAPES = {
    "7B, attention": ((4096, 4096, 4096), 4096),
    "7B, out": ((4096,), 4096),
    "7B, gate": ((11008, 11008), 4096),
    "7B, down": ((4096,), 11008),
    "head": ((32000,), 4096),
    "135M, attention": ((576, 192, 192), 576),
    "135M, down": ((576,), 1536),
    "with a rest": ((33,), 1100),
}


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_a_row_has_the_same_bits_in_every_pass_on_a_gpu(shape: Any, dtype: torch.dtype, transposed: bool) -> None:
    given, weights, biases = drawn(*shape, rows=520, dtype=dtype)
    given, *rest = (one.cuda() for one in (given, *weights, *biases))
    weights, biases = rest[: len(weights)], rest[len(weights) :]
    if transposed:
        weights = [weight.t().contiguous().t() for weight in weights]
    whole = bits(linears(given, weights, biases))
    for first, count in ((0, 1), (519, 1), (7, 2), (3, 8), (40, 17), (9, 33), (70, 64), (20, 65), (100, 200), (1, 512)):
        some = linears(given[first : first + count], weights, biases)
        assert torch.equal(bits(some), whole[first : first + count]), (first, count)
    more = zip(weights, biases, strict=True)
    expected = torch.cat([linear(given.double(), weight.double(), bias.double()) for weight, bias in more], dim=-1)
    torch.testing.assert_close(whole.view(dtype).double(), expected, rtol=1e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [((256,), 7168), ((16,), 4096), ((4096,), 16)], ids=str)
def test_a_row_in_float32_has_the_same_bits_in_every_pass_on_a_gpu(shape: Any) -> None:
    """Routers and adapters."""
    given, (weight,), (bias,) = drawn(*shape, rows=520, dtype=torch.float32)
    given, weight, bias = given.cuda(), weight.cuda(), bias.cuda()
    for one in (weight, weight.t().contiguous().t()):
        (whole,) = in_single(given, [one], [bias])
        for first, count in ((0, 1), (519, 1), (7, 2), (3, 8), (40, 17), (70, 64), (1, 512)):
            (some,) = in_single(given[first : first + count], [one], [bias])
            assert torch.equal(some, whole[first : first + count]), (first, count)
        expected = linear(given.double(), one.double(), bias.double()).float()
        torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-5)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, size, bias=False) for size in (48, 16, 16))
        self.o_proj, self.other = nn.Linear(48, 32), nn.Linear(32, 8)

    def forward(self, states: Tensor) -> Tensor:
        query = self.q_proj(states) + self.k_proj(states).repeat(1, 1, 3) + self.v_proj(states).repeat(1, 1, 3)
        return self.o_proj(query) + self.other(self.o_proj(query)).repeat(1, 1, 4)


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A CPU in the place of a GPU."""
    monkeypatch.setattr(borrowing, "compiles_for", lambda device: True)
    torch.manual_seed(0)
    return nn.ModuleList([Attention().to(torch.bfloat16), nn.Linear(32, 32), nn.Embedding(32, 8)])


def test_layers_that_read_the_same_states_share_a_launch(layers: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[int]] = []

    def noted(given: Tensor, weights: list[Tensor], biases: Any, counters: Any) -> list[Tensor]:
        launched.append([len(weight) for weight in weights])
        return [linear(given, weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    monkeypatch.setattr(kernel, "linears", noted)
    attention, given = layers[0], torch.randn(1, 5, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        before = attention(given)
        with Linears(layers).borrowed():
            assert torch.equal(attention(given), before) and torch.equal(attention(given.clone()), before)
    once = [[48, 16, 16], [32], [32], [8]]
    assert launched == [*once, *once]


def test_only_layers_in_half_precision_are_borrowed_and_all_are_given_back(layers: nn.Module) -> None:
    def changed() -> set[str]:
        return {name for name, module in layers.named_modules() if "forward" in vars(module)}

    with pytest.raises(KeyError), Linears(layers).borrowed():
        assert changed() == {f"0.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "other")}
        raise KeyError
    assert not changed()


def gated(given: Tensor, weights: list[Tensor], biases: Any, activation: str) -> Tensor:
    return linears(given, weights, biases, activation=activation)[0]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("sizes", [((300, 300), 64), ((70, 70), 1024)], ids=["not split", "split"])
def test_a_gated_mlp_is_the_same_in_one_launch(sizes: Any, activation: str) -> None:
    """To the bit what its products and the gate are one after the other, also where a pass is wide."""
    given, weights, biases = drawn(*sizes, dtype=torch.bfloat16)
    with in_one_order() as call:
        for rows in (1, 20, 150):
            for more in (None, biases):
                told = given[:rows], weights, [None, None] if more is None else more
                gate, up = call(linears, *told)
                expected = call(gated_triton, gate, up, activation)
                assert torch.equal(call(gated, *told, activation), expected), rows


class GatedMlp(nn.Module):
    def __init__(self, whole: bool) -> None:
        super().__init__()
        if whole:
            self.gate_up_proj = nn.Linear(32, 128, bias=False)
        else:
            self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down_proj, self.act_fn, self.whole = nn.Linear(64, 32), nn.SiLU(), whole

    def forward(self, states: Tensor) -> Tensor:
        if self.whole:
            gate, up = self.gate_up_proj(states).chunk(2, dim=-1)
        else:
            gate, up = self.gate_proj(states), self.up_proj(states)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("whole", [False, True])
def test_a_fused_mlp_takes_two_launches(layers: nn.Module, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    def noted(given: Tensor, weights: Any, biases: Any, counters: Any, activation: str | None = None) -> list[Tensor]:
        launched.append(activation)
        found = [linear(given, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return found if activation is None else [fused.gated(*found, activation)]

    monkeypatch.setattr(kernel, "linears", noted)
    mlp, given = GatedMlp(whole).to(torch.bfloat16), torch.randn(1, 5, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        before = mlp(given)
        with Fusions(mlp, kinds=("cpu",)).borrowed(), Linears(mlp).borrowed():
            assert torch.equal(mlp(given), before)
            with pytest.MonkeyPatch.context() as patch:  # an adapter adds to a layer
                patch.setattr(private, "is_hooked", lambda module: True)
                assert torch.equal(mlp(given), before)
    assert launched == ["silu", None, None, None]
