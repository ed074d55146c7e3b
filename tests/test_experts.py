"""Experts whose result for a token depends on that token alone: in Triton's interpreter, compiled for a GPU, on one."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import transformers as tf
from families import VOCAB, target_of
from kernel_tools import in_one_order, ptx_of
from torch import Tensor, nn
from torch.nn.functional import silu

from draftgraph import private
from draftgraph.engine import experts as engine
from draftgraph.engine import paged, selfcheck
from draftgraph.engine.borrowing import borrowed_attention, configs_of
from draftgraph.engine.experts import NAME, experts_forward, implementation_for, is_served
from draftgraph.engine.selfcheck import bit_difference, inexactness
from draftgraph.kernels import experts as kernel
from draftgraph.kernels.experts import combine, combine_reference, linear_reference, tiles_of
from draftgraph.kernels.linear import stages_of, tiling_of

TOKENS = 150
SHAPES = {  # choices, experts, inputs, outputs
    "one choice": (1, 3, 64, 40),
    "two of four": (2, 4, 130, 70),
    "three of many": (3, 32, 256, 33),
    "four of five": (4, 5, 24, 10),
}
PAIR_SHARES = {"every pair its tile": (2, 8), "tiles of all experts": (70, 4)}  # tokens, experts


class Drawn(NamedTuple):
    given: Tensor
    weight: Tensor
    bias: Tensor
    chosen: Tensor
    weights: Tensor

    def of(self, tokens: Any) -> Drawn:
        return self._replace(given=self.given[tokens], chosen=self.chosen[tokens], weights=self.weights[tokens])


def drawn(shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float16, tokens: int = TOKENS) -> Drawn:
    choices, experts, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    given = torch.randn((tokens, inputs), generator=generator).to(dtype)
    weight = (torch.randn((experts, outputs, inputs), generator=generator) / inputs**0.5).to(dtype)
    bias = torch.randn((experts, outputs), generator=generator).to(dtype)
    chosen = torch.rand((tokens, experts), generator=generator).topk(choices).indices
    return Drawn(given, weight, bias, chosen, torch.rand(chosen.shape, generator=generator))


def multiplied(one: Drawn, transposed: bool = False, biased: bool = True) -> tuple[Tensor, Tensor]:
    """Of every pair, and of every token."""
    weight = one.weight.transpose(1, 2).contiguous().transpose(1, 2) if transposed else one.weight
    tiles = tiles_of(one.chosen, len(weight))
    found = kernel.linear(one.given, weight, one.bias if biased else None, tiles)
    return found, combine(found, one.chosen, one.weights, len(weight))


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., tuple[Tensor, Tensor]]]:
    with in_one_order() as call:
        yield lambda *given, **named: call(multiplied, *given, **named)


def check_products(found: tuple[Tensor, Tensor], one: Drawn, biased: bool = True) -> None:
    bias = one.bias.double() if biased else None
    expected = linear_reference(one.given.double(), one.weight.double(), bias, one.chosen)
    torch.testing.assert_close(found[0].double(), expected, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(found[1], combine_reference(found[0], one.chosen, one.weights), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 17, TOKENS])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_they_are_products(interpreted: Callable[..., tuple[Tensor, Tensor]], shape: Any, tokens: int) -> None:
    one = drawn(shape).of(slice(tokens))
    check_products(interpreted(one), one)
    check_products(interpreted(one, transposed=True, biased=False), one, biased=False)


@pytest.mark.parametrize("expert", [0, 3])
def test_one_expert_may_be_given_everything(interpreted: Callable[..., tuple[Tensor, Tensor]], expert: int) -> None:
    one = drawn((1, 4, 64, 40))
    one = one._replace(chosen=torch.full_like(one.chosen, expert))
    check_products(interpreted(one), one)


def test_choices_of_nobody_add_nothing(interpreted: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """Where experts are shared among processes, those of the others have numbers behind the last."""
    one = drawn((2, 4, 64, 40))
    some = one._replace(chosen=torch.cat([one.chosen[:, :1], torch.full_like(one.chosen[:, 1:], 4)], dim=1))
    found, total = interpreted(some)
    alone = one._replace(chosen=one.chosen[:, :1].contiguous(), weights=one.weights[:, :1].contiguous())
    pairs, expected = interpreted(alone)
    assert torch.equal(found[::2], pairs) and torch.equal(total, expected)


@pytest.mark.parametrize("numbers", PAIR_SHARES.values(), ids=PAIR_SHARES)
def test_every_pair_is_in_one_tile_of_its_expert(numbers: tuple[int, int]) -> None:
    tokens, experts = numbers
    chosen = drawn((2, experts, 8, 8), tokens=tokens).chosen
    with in_one_order() as call:
        tiles = call(tiles_of, chosen, experts)
    seen = []
    for expert, count, *pairs in tiles.table.tolist():
        assert all(chosen.flatten()[pair] == expert for pair in pairs[:count])
        seen += pairs[:count]
    assert sorted(seen) == list(range(2 * tokens))
    assert len(tiles.table) == min(2 * tokens, 2 * tokens // tiles.block_pairs + experts)


def parting(call: Callable[..., tuple[Tensor, Tensor]], one: Drawn) -> list[str]:
    """Where bits are others than beside all tokens: alone, among some, in another order."""
    whole, choices = call(one), one.chosen.shape[1]
    found = []
    for first, count in ((0, 1), (149, 1), (40, 17), (70, 64)):
        pairs, tokens = call(one.of(slice(first, first + count)))
        if not torch.equal(pairs, whole[0][first * choices : (first + count) * choices]):
            found.append(f"pairs from {first}, {count}")
        if not torch.equal(tokens, whole[1][first : first + count]):
            found.append(f"tokens from {first}, {count}")
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))
    if not torch.equal(call(one.of(order))[1], whole[1][order]):
        found.append("permuted")
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # float32 hides no bit
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_token_has_the_same_bits_in_every_pass(
    interpreted: Callable[..., tuple[Tensor, Tensor]], shape: Any, dtype: torch.dtype
) -> None:
    assert parting(interpreted, drawn(shape, dtype)) == []


def turn_wide_tiles() -> None:
    """A fault: tiles of 64 columns and more begin at the last input of a step."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    product = InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if b.data.shape[1] >= 64:
            a, b = TensorHandle(a.data[:, ::-1], a.dtype.scalar), TensorHandle(b.data[::-1], b.dtype.scalar)
        return product(self, a, b, *more)

    InterpreterBuilder.create_dot = create_dot


def test_an_order_that_depends_on_the_width_is_found() -> None:
    with in_one_order() as call:
        call(turn_wide_tiles)
        assert parting(lambda one: call(multiplied, one), drawn(SHAPES["two of four"], torch.float32))


@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_compiles_for_a_gpu_with_one_kind_of_product(transposed: bool) -> None:
    pointers = dict.fromkeys(("rows", "weight", "bias", "out"), "*bf16") | {"table": "*i32"}
    for wide in (16, 32, 64, 128):
        tiling = tiling_of(wide, 1)
        fixed = {
            "block_outputs": tiling.outputs,
            "block_pairs": wide,
            "step": tiling.step,
            "even": True,
            "transposed": transposed,
        }
        options = {"num_warps": tiling.warps, "num_stages": stages_of(tiling, 128, 132)}
        code = ptx_of(kernel._linear, pointers, fixed, options)
        assert set(re.findall(r"wgmma\.mma_async\.\S+?\.(m64)n\d+(k16\.\S+)", code)) == {("m64", "k16.f32.bf16.bf16")}
        assert "mma.sync" not in code


def test_the_other_kernels_compile_for_a_gpu() -> None:
    for by_pairs in (True, False):
        fixed: dict[str, Any] = {"block_pairs": 16, "by_pairs": by_pairs, "counted": kernel.COUNTED}
        assert ptx_of(kernel._assign, {"chosen": "*i64", "table": "*i32"}, fixed, {})
    pointers = {"results": "*bf16", "chosen": "*i64", "weights": "*fp32", "out": "*bf16"}
    assert ptx_of(kernel._combine, pointers, {"choices": 8, "columns": kernel.COLUMNS}, {})


class Experts(nn.Module):
    """What the registry of transformers gives its functions."""

    def __init__(self, has_gate: bool, has_bias: bool, is_transposed: bool, has_post_expert_norm: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.has_post_expert_norm, self.num_experts, self._is_expert_parallel = has_post_expert_norm, 4, False
        first = "gate_up_proj" if has_gate else "up_proj"
        for name, outputs, inputs in ((first, 24 * (1 + has_gate), 16), ("down_proj", 16, 24)):
            shape = (4, inputs, outputs) if is_transposed else (4, outputs, inputs)
            setattr(self, name, nn.Parameter(torch.randn(shape) / inputs**0.5))
            if has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(4, outputs)))
        self.act_fn, self.post_expert_norm = silu, nn.LayerNorm(16)

    def _apply_gate(self, found: Tensor) -> Tensor:
        return found[..., ::2] * silu(found[..., 1::2])


KINDS = {
    "gated": (True, False, False, False),
    "with biases, transposed": (True, True, True, False),
    "without gates": (False, True, False, False),
    "with a norm": (True, False, False, "has_post_expert_norm" in inspect.getsource(tf.integrations.moe)),
}


@contextmanager
def on_a_cpu(*dtypes: torch.dtype) -> Iterator[None]:
    """In the place of a GPU, with weights of these."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(engine, "compiles_for", lambda device: True)
        patch.setattr(engine, "DTYPES", dtypes)
        yield


def by_both(kind: tuple[bool, bool, bool, bool]) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    module, states = Experts(*kind), torch.randn(9, 16)
    given = states, torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    with on_a_cpu(torch.float32):
        assert is_served(module)
        return experts_forward(module, *given), private.registered_experts("batched_mm")(module, *given)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_modules_of_the_registry_are_computed_as_transformers_does(kind: Any) -> None:
    with in_one_order() as call:
        found, expected = call(by_both, kind)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def qwen3_moe() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    torch.manual_seed(0)
    config = tf.Qwen3MoeConfig(vocab_size=VOCAB, num_experts=8, num_experts_per_tok=3, **sizes, **heads, **ends)
    return tf.Qwen3MoeForCausalLM(config).eval()


def model_of(family: str) -> Any:
    return qwen3_moe() if family == "qwen3_moe" else target_of(family)


def logits_of(family: str, name: str, dtype: torch.dtype) -> Tensor:
    model = model_of(family).to(dtype)
    calls: list[int] = []
    with on_a_cpu(dtype), pytest.MonkeyPatch.context() as patch:
        mix = kernel.combine
        patch.setattr(kernel, "combine", lambda *given: calls.append(1) or mix(*given))
        with borrowed_attention(model, configs_of(model), {"_experts_implementation": name}):
            logits: Tensor = model(torch.arange(12)[None] % VOCAB).logits
    assert bool(calls) == (name == NAME)
    return logits


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_models_say_what_they_say_with_their_own_experts(family: str) -> None:
    with in_one_order() as call:
        for dtype, off in ((torch.float32, 1e-4), (torch.float16, 3e-2)):
            found = call(logits_of, family, NAME, dtype)
            torch.testing.assert_close(found, logits_of(family, "eager", dtype), rtol=off, atol=off)


def check_in_order() -> str | None:
    """What the check says of a target whose experts are computed as on a GPU."""
    model = qwen3_moe().to(torch.bfloat16)
    with on_a_cpu(torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "WIDTHS", (2, 9))
        patch.setattr(paged, "implementation_for", lambda *_: NAME)
        return bit_difference(model, {"paged": True, "compiled": False})


def test_a_path_has_the_bits_of_passes_over_one_node() -> None:
    with in_one_order() as call:
        assert call(check_in_order) is None


def test_what_the_registry_does_not_serve_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cuda, half = target_of("mixtral"), torch.device("cuda"), torch.bfloat16
    assert implementation_for(model, torch.device("cpu"), half) == "eager"
    assert implementation_for(model, cuda, half) is None
    monkeypatch.setattr(engine, "compiles_for", lambda device: True)
    assert implementation_for(model, cuda, torch.float32) == "batched_mm"
    assert implementation_for(target_of("llama"), cuda, torch.float16) == "batched_mm"
    assert implementation_for(model.to(half), cuda, half) == NAME
    with monkeypatch.context() as patch:
        patch.setattr(engine, "REGISTERED", False)
        assert implementation_for(model, cuda, half) is None


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "batched_mm"), (torch.bfloat16, "grouped_mm")], ids=str)
def test_experts_that_are_not_served_are_those_of_transformers(dtype: torch.dtype, name: str) -> None:
    torch.manual_seed(0)
    module = Experts(True, False, False, False).to(dtype)
    given = torch.randn(9, 16, dtype=dtype), torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    with torch.no_grad():
        assert torch.equal(experts_forward(module, *given), private.registered_experts(name)(module, *given))


GPU_SHAPES = {  # choices, experts, inputs, outputs
    "Mixtral, up": (2, 8, 4096, 28672),
    "Mixtral, down": (2, 8, 14336, 4096),
    "Qwen3-30B, up": (8, 128, 2048, 1536),
    "Qwen3-30B, down": (8, 128, 768, 2048),
    "gpt-oss, up": (4, 32, 2880, 5760),
}


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", GPU_SHAPES.values(), ids=GPU_SHAPES)
def test_a_token_has_the_same_bits_in_every_pass_on_a_gpu(shape: Any, dtype: torch.dtype, transposed: bool) -> None:
    choices, experts, inputs, outputs = shape
    generator = torch.Generator("cuda").manual_seed(0)
    told: dict[str, Any] = {"generator": generator, "device": "cuda"}
    chosen = torch.rand((520, experts), **told).topk(choices).indices
    sizes = (experts, inputs, outputs) if transposed else (experts, outputs, inputs)
    weight = torch.randn(sizes, dtype=dtype, **told) / inputs**0.5
    weight = weight.transpose(1, 2) if transposed else weight
    bias = torch.randn((experts, outputs), dtype=dtype, **told)
    given = torch.randn((520, inputs), dtype=dtype, **told)
    one = Drawn(given, weight, bias, chosen, torch.rand(chosen.shape, **told))

    def call(some: Drawn) -> tuple[Tensor, Tensor]:
        tiles = tiles_of(some.chosen, experts)
        found = kernel.linear(some.given, weight, bias, tiles)
        return found, combine(found, some.chosen, some.weights, experts)

    whole = call(one)
    for first, count in ((0, 1), (519, 1), (7, 2), (3, 8), (40, 17), (70, 64), (100, 200), (1, 512)):
        pairs, tokens = call(one.of(slice(first, first + count)))
        assert torch.equal(pairs, whole[0][first * choices : (first + count) * choices]), (first, count)
        assert torch.equal(tokens, whole[1][first : first + count]), (first, count)
    few = one.of(slice(4))
    expected = linear_reference(few.given.float(), weight.float(), bias.float(), few.chosen)
    torch.testing.assert_close(call(few)[0].float(), expected, rtol=1e-2, atol=2e-2)
    torch.testing.assert_close(whole[1], combine_reference(whole[0], chosen, one.weights), rtol=1e-2, atol=1e-2)


EXACT = ("mixtral", "qwen3_moe", "gpt_oss", "gpt2", "opt", "gpt_neox", "cohere", "deepseek_v3")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", EXACT)
def test_models_with_other_products_are_exact_on_a_gpu(family: str, dtype: torch.dtype) -> None:
    assert inexactness(model_of(family).to("cuda", dtype)) is None
