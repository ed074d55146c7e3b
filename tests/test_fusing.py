"""Steps of a pass as one kernel each: the same numbers as before, only where they are, and only while borrowed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from engine_tools import ALONE, PAGED, ancestry, plain_story, score, story, tokens_of
from families import target_of
from kernel_tools import interpreter
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers.models.llama import modeling_llama

from draftgraph.engine import paged
from draftgraph.engine.borrowing import Fusions, Loan
from draftgraph.engine.paged import PagedEngine
from draftgraph.kernels import fused
from draftgraph.kernels.fused import ACTIVATIONS, NORM_STYLES, NormStyle

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NORMED = [(1, 64), (3, 97), (1, 5, 8192), (1, 3, 5, 40)]
ROTATED = [(1, 4, 2, 5, 16), (2, 3, 1, 7, 10), (1, 9, 3, 1, 64)]  # rows, heads of queries and keys, nodes, size
GATED = [(1, 1, 48), (1, 3, 1500), (5, 1024)]
INTEGERS = ("_outer", "_middle", "_row", "_head", "_node", "_slot", "_layer", "heads", "size")  # no tensors

# What each family has three layers of, and what else; rotary functions are the modeling file's.
FOUND = {
    "llama": {"norms": 7, "mlps": 3, "rotary": 1},
    "mistral": {"norms": 7, "mlps": 3, "rotary": 1},
    "qwen2": {"norms": 7, "mlps": 3, "rotary": 1},
    "qwen3": {"norms": 13, "mlps": 3, "rotary": 1},
    "gemma2": {"norms": 13, "mlps": 3, "rotary": 1},
    "gemma3": {"norms": 19, "mlps": 3, "rotary": 1},
    "phi3": {"norms": 7, "mlps": 3, "rotary": 1},
    "gpt_oss": {"norms": 7},
    "cohere": {"mlps": 3},  # its rotary embedding turns neighbours
    "mixtral": {"norms": 7, "rotary": 1},
    "gpt2": {},
}


def computed(name: str, *given: Any) -> Any:
    """By a kernel, in Triton's interpreter."""
    result = getattr(fused, f"{name}_triton")(*given)
    return given[:2] if result is None else result


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda *given: call(computed, *given)


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm_case(shape: tuple[int, ...], dtype: torch.dtype, style: NormStyle) -> tuple[Any, ...]:
    states = numbers(*shape, dtype=dtype)
    if len(shape) == 4:
        states = states.transpose(1, 2)  # heads before nodes, as Gemma 3 norms them
    return states, numbers(shape[-1], dtype=dtype, seed=1), 1e-5, style


def rotary_case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    rows, heads, key_heads, nodes, size = shape
    together = numbers(rows, nodes, heads + key_heads, size, dtype=dtype).transpose(1, 2)  # as Phi-3 projects them
    cos, sin = (numbers(1, nodes, size, dtype=dtype, seed=seed) for seed in (1, 2))
    return together[:, :heads], together[:, heads:], cos, sin


def gate_case(shape: tuple[int, ...], dtype: torch.dtype, halves: bool) -> tuple[Tensor, ...]:
    both = 3 * numbers(*shape[:-1], 2 * shape[-1], dtype=dtype)
    parts = both.chunk(2, dim=-1)
    return parts if halves else tuple(part.contiguous() for part in parts)


def slots_case(dtype: torch.dtype, size: int, value_size: int) -> tuple[Tensor, ...]:
    slots = torch.tensor([7, 0, 31, 12])
    states = (numbers(1, 4, 3, one, dtype=dtype, seed=one).transpose(1, 2) for one in (size, value_size))
    blocks = (torch.zeros(2, 3, 32, one, dtype=dtype)[1:] for one in (size, value_size))
    return (*blocks, slots, *states)


def assert_same(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(found.dtype).eps, atol=atol)


@pytest.mark.parametrize("style", NORM_STYLES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", NORMED, ids=str)
def test_norms(interpreted: Any, shape: tuple[int, ...], dtype: torch.dtype, style: NormStyle) -> None:
    case = norm_case(shape, dtype, style)
    assert_same(interpreted("rms_norm", *case), fused.rms_norm_reference(*case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ROTATED, ids=str)
def test_rotary_embeddings(interpreted: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    case = rotary_case(shape, dtype)
    for found, expected in zip(interpreted("rotate", *case), fused.rotate_reference(*case), strict=True):
        if dtype == torch.bfloat16:  # the interpreter cuts digits off where a GPU rounds
            assert_same(found, expected, atol=0.05)
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", GATED, ids=str)
def test_gates(interpreted: Any, shape: tuple[int, ...], dtype: torch.dtype, activation: str, halves: bool) -> None:
    case = gate_case(shape, dtype, halves)
    assert_same(interpreted("gated", *case, activation), fused.gated_reference(*case, activation))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (24, 10)])
def test_slots_are_written_and_no_others(interpreted: Any, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    found, case = interpreted("write_slots", *slots_case(dtype, *sizes)), slots_case(dtype, *sizes)
    fused.write_slots_reference(*case)
    for one, expected in zip(found, case[:2], strict=True):
        assert one.any() and torch.equal(one, expected)


def moves_case(dtype: torch.dtype, size: int) -> tuple[Tensor, ...]:
    """Two texts' moves, of which some write where others read, and one more; the rest stay where they are."""
    sources, targets = torch.full((2, 48), 63)
    sources[:9] = torch.tensor([3, 5, 6, 7, 20, 21, 22, 23, 24])
    targets[:9] = torch.tensor([1, 2, 3, 5, 18, 20, 21, 22, 23])
    sources[16], targets[16] = 40, 39
    return numbers(4, 3, 64, size, dtype=dtype)[1:], sources, targets


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, 24])
def test_slots_are_moved_and_no_others(interpreted: Any, dtype: torch.dtype, size: int) -> None:
    (found, _), (block, *moves) = interpreted("move_slots", *moves_case(dtype, size)), moves_case(dtype, size)
    before = block.clone()
    fused.move_slots_reference(block, *moves)
    assert torch.equal(found, block)
    assert torch.equal(block[:, :, 3], before[:, :, 6]) and torch.equal(block[:, :, 39], before[:, :, 40])
    kept = [slot for slot in range(64) if slot not in moves[1].tolist()]
    assert torch.equal(block[:, :, kept], before[:, :, kept])


@pytest.mark.parametrize("ones", [False, True])  # numbers that are 1 are compiled in
@pytest.mark.parametrize(
    ("name", "fixed"),
    [
        ("_rms_norm", {"size": 576, "block": 1024, "rounds_first": True}),
        ("_rotate", {"size": 80, "block": 128}),
        *(("_gate", {"activation": activation, "block": 1024}) for activation in ACTIVATIONS),
        ("_write_slots", {"size": 64, "value_size": 80, "block": 64, "value_block": 128}),
        ("_move_slots", {"size": 80, "block": 128, "together": 16}),
    ],
)
def test_kernels_compile_for_a_gpu(name: str, fixed: dict[str, Any], ones: bool) -> None:
    """The interpreter runs what the compiler refuses."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(fused, name)
    integers = [argument for argument in kernel.arg_names if argument.endswith(INTEGERS)]
    constants = (dict.fromkeys(integers, 1) if ones else {}) | fixed
    kinds = dict.fromkeys(integers, "i32") | {
        "slots": "*i64",
        "sources": "*i64",
        "targets": "*i64",
        "eps": "fp32",
        "offset": "fp32",
    }
    kinds |= dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds.get(argument, "*bf16") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32), options=fused.ROUNDING).asm["cubin"]


def borrowed_by(fusions: Fusions, model: nn.Module) -> dict[str, int]:
    """How many of each kind, seen from the model while it is lent."""
    places = [vars(module) for module in model.modules()] + [vars(sys.modules[type(model).__module__])]
    kinds = ["norms" if "Norm" in type(module).__name__ else "mlps" for module in model.modules()] + ["rotary"]

    def meanings() -> list[Any]:
        return [place.get("apply_rotary_pos_emb", place.get("forward")) for place in places]

    before = meanings()
    with fusions.borrowed():
        return dict(Counter(kind for kind, one, two in zip(kinds, before, meanings(), strict=True) if one is not two))


def namespaces(model: nn.Module) -> list[Any]:
    modeling = sys.modules[type(model).__module__]
    return [list(vars(module).items()) for module in model.modules()] + [list(vars(modeling).items())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str, dtype: torch.dtype) -> None:
    model = target_of(name, dtype=dtype)
    assert borrowed_by(Fusions(model, kinds=("cpu",)), model) == FOUND[name]
    assert not borrowed_by(Fusions(model), model)


@pytest.mark.parametrize("name", FOUND)
def test_all_is_given_back(name: str) -> None:
    model = target_of(name)
    before = namespaces(model)
    with pytest.raises(KeyError), Fusions(model, kinds=("cpu",)).borrowed():
        assert (namespaces(model) == before) == (not FOUND[name])
        raise KeyError
    assert namespaces(model) == before


class MeanRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))


class LateEpsRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        size = hidden_states.float().pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon
        return self.weight * (hidden_states / size).to(hidden_states.dtype)


class AdditiveRMSNorm(modeling_llama.LlamaRMSNorm):
    """A new one's weights are ones: only other weights tell it from the usual."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) / self.weight * (2 - self.weight)


class GateRMSNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(hidden_states if gate is None else hidden_states * gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [MeanRMSNorm, LateEpsRMSNorm, AdditiveRMSNorm, GateRMSNorm])
def test_other_norms_of_that_name_are_left_alone(kind: type[nn.Module], dtype: torch.dtype) -> None:
    model = target_of("llama", dtype=dtype)
    model.model.norm = kind(32).to(dtype)
    fusions = Fusions(model, kinds=("cpu",))
    assert borrowed_by(fusions, model)["norms"] == 6
    with fusions.borrowed():
        assert "forward" not in vars(model.model.norm)


class ScaledMLP(modeling_llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.1)  # type: ignore[no-any-return]


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_mlps_of_those_parts_are_left_alone(dtype: torch.dtype) -> None:
    model = target_of("llama", dtype=dtype)
    layers = model.model.layers
    layers[0].mlp.__class__ = ScaledMLP
    layers[1].mlp.act_fn = QuickGELU()
    layers[2].mlp.act_fn.register_forward_hook(lambda *_: None)
    assert borrowed_by(Fusions(model, kinds=("cpu",)), model) == {"norms": 7, "rotary": 1}


def test_another_rotary_function_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        parts = [torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2) for x in (q, k)]
        return tuple(x * cos[:, None] + turned * sin[:, None] for x, turned in zip((q, k), parts, strict=True))

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", neighbours)
    model = target_of("llama")
    assert borrowed_by(Fusions(model, kinds=("cpu",)), model) == {"norms": 7, "mlps": 3}


def test_what_others_changed_is_left_alone() -> None:
    model = target_of("llama")
    model.model.norm.register_forward_hook(lambda *_: None)
    first = model.model.layers[0]
    first.input_layernorm.forward, first.mlp.forward = first.input_layernorm.forward, first.mlp.forward
    before = namespaces(model)
    assert borrowed_by(Fusions(model, kinds=("cpu",)), model) == {"norms": 5, "mlps": 2, "rotary": 1}
    assert namespaces(model) == before


@torch.no_grad()
def test_calls_that_no_kernel_fits_are_the_modules_own() -> None:
    """A rotary embedding of a part of each head, and states of another dtype than the norm's."""
    model = target_of("phi3")
    modeling = sys.modules[type(model).__module__]
    rotary: Any = modeling.apply_rotary_pos_emb  # type: ignore[attr-defined]
    query, key, *_ = rotary_case((1, 4, 2, 5, 16), torch.float32)
    cos, sin = numbers(1, 5, 8), numbers(1, 5, 8, seed=1)
    states = numbers(1, 3, 32, dtype=torch.bfloat16)
    norm = model.model.norm
    before = [*rotary(query, key, cos, sin), *rotary(query, key, cos, sin, unsqueeze_dim=1), norm(states)]
    with Fusions(model, kinds=("cpu",)).borrowed():
        rotary = modeling.apply_rotary_pos_emb  # type: ignore[attr-defined]
        during = [*rotary(query, key, cos, sin), *rotary(query, key, cos, sin, unsqueeze_dim=1), norm(states)]
    assert all(one.dtype == two.dtype and torch.equal(one, two) for one, two in zip(before, during, strict=True))


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", PAGED)
def test_a_paged_engine_says_the_same(name: str, captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "Fusions", partial(Fusions, kinds=("cpu",)))
    model = target_of(name)
    context = PagedEngine(model, captured=captured).open()
    for found, expected in zip(story(context, model), plain_story(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_modules_are_others_during_a_pass_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "Fusions", partial(Fusions, kinds=("cpu",)))
    model = target_of("llama")
    context, before, replaced = PagedEngine(model, compiled=False).open(), namespaces(model), []
    hook = model.model.register_forward_pre_hook(lambda *_: replaced.append("forward" in vars(model.model.norm)))
    with Loan(model):
        context.prefill([1, 2, 3])
        score(context, tokens_of(1), *ALONE)
        assert replaced == [True, True] and "forward" not in vars(model.model.norm)
    hook.remove()
    assert namespaces(model) == before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_kernels_give_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    def both(name: str, case: tuple[Any, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        case = tuple(part.cuda() if isinstance(part, Tensor) else part for part in case)
        results = [getattr(fused, f"{name}_{way}")(*case) for way in ("triton", "reference")]
        results = [(one,) if isinstance(one, Tensor) else one for one in results]
        yield from zip(*results, strict=True)

    for style in NORM_STYLES:
        for shape in [*NORMED, (1, 128, 4096), (1, 64, 32, 128)]:
            for found, expected in both("rms_norm", norm_case(shape, dtype, style)):
                assert_same(found, expected)
    for shape in [*ROTATED, (1, 32, 8, 128, 128)]:
        for found, expected in both("rotate", rotary_case(shape, dtype)):
            assert torch.equal(found, expected)
    for activation in ACTIVATIONS:
        for shape in [*GATED, (1, 128, 14336)]:
            for found, expected in both("gated", (*gate_case(shape, dtype, True), activation)):
                assert_same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_written_on_a_gpu(dtype: torch.dtype) -> None:
    for sizes in ((16, 16), (24, 10), (128, 128)):
        found, expected = ([part.cuda() for part in slots_case(dtype, *sizes)] for _ in range(2))
        fused.write_slots_triton(*found)
        fused.write_slots_reference(*expected)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_are_moved_on_a_gpu(dtype: torch.dtype) -> None:
    for size in (24, 64, 256):
        found, expected = ([part.cuda() for part in moves_case(dtype, size)] for _ in range(2))
        fused.move_slots_triton(*found)
        fused.move_slots_reference(*expected)
        assert torch.equal(found[0], expected[0])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FOUND)
def test_what_is_found_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model = target_of(name).cuda().to(dtype)
    assert borrowed_by(Fusions(model), model) == FOUND[name]


def unfused(model: nn.Module) -> Fusions:
    return Fusions(model, kinds=())


ROUTED = ("mixtral", "gpt_oss")  # in half precision a token may go to another expert by rounding alone
COMPARABLE = [(name, dtype) for name in FOUND for dtype in DTYPES if dtype == torch.float32 or name not in ROUTED]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "dtype"), COMPARABLE, ids=str)
def test_captured_passes_say_nearly_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of(name).cuda().to(dtype)
    by_kernels = story(PagedEngine(model).open(), model)
    monkeypatch.setattr(paged, "Fusions", unfused)
    for found, expected in zip(by_kernels, story(PagedEngine(model).open(), model), strict=True):
        allowed = (100 if dtype == torch.float32 else 16) * torch.finfo(dtype).eps * expected.abs().max().item()
        torch.testing.assert_close(found, expected, rtol=0, atol=allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, found in FOUND.items() if len(found) == 3])
def test_captured_passes_hold_fewer_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = target_of(name).cuda().to(torch.bfloat16)
    by_kernels = kernels_of_a_pass(model)
    monkeypatch.setattr(paged, "Fusions", unfused)
    plain = kernels_of_a_pass(model)
    print(f"{name}: {plain} kernels, fused {by_kernels}")
    assert by_kernels < 0.7 * plain


def kernels_of_a_pass(model: Any) -> int:
    context, (depths, visible) = PagedEngine(model).open(), ancestry(np.array([-1, 0, 0, 1]))
    with Loan(model):
        context.prefill(tokens_of(9).tolist())
        score(context, tokens_of(4), depths, visible)
        context.forget(0)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as watched:
            score(context, tokens_of(4), depths, visible)
            torch.cuda.synchronize()
    events = [event for event in watched.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in events)
