"""Trees that grow on a device: the kernels in Triton's interpreter, and on a GPU, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from kernel_tools import interpreter
from torch import Tensor

from draftgraph.kernels import growth as kernels
from draftgraph.kernels.growth import Growth

Run = Callable[..., Growth]
SHAPES = [(2, 8, 8), (3, 1, 1), (5, 8, 4), (12, 8, 2), (4, 4, 5)]  # levels, width, k


def run(way: str, step: str, growth: Growth, *arguments: Any) -> Growth:
    getattr(kernels, f"{step}_{way}")(growth, *arguments)
    return growth


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda *given: call(run, "triton", *given)


def proposals(rows: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(50, generator=generator)[:k] for _ in range(rows)])
    return tokens, torch.log_softmax(torch.randn(rows, k, generator=generator) * 3, dim=1)


def grow(levels: int, width: int, k: int, step: Run, device: str = "cpu") -> list[Growth]:
    """The states of a tree after every step."""
    growth = Growth.of(levels, width, k, torch.device(device))
    growth.open.fill_(-torch.inf)
    growth.length.fill_(19)
    growth.odds.copy_(torch.tensor([[0.6, 3.0]]))
    is_end = (torch.arange(50) % 7 == 0).to(device)
    tokens, chances = (part.to(device) for part in proposals(1, k, 0))
    states = [step("note", growth, 0, torch.zeros(1, device=device), tokens, chances, is_end)]
    for level in range(levels - 1):
        growth = step("choose", copy.deepcopy(states[-1]), level, 45)
        tokens, chances = (part.to(device) for part in proposals(width, k, 1 + level))
        states += [growth]
        scores = growth.next_scores.clone()
        states += [step("note", copy.deepcopy(growth), 1 + level * width, scores, tokens, chances, is_end)]
    return states


def plain(step: str, growth: Growth, *arguments: Any) -> Growth:
    return run("reference", step, growth, *arguments)


def assert_same(found: Growth, expected: Growth) -> None:
    for field in fields(Growth):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, Tensor):
            torch.testing.assert_close(
                one.cpu(), other.cpu(), rtol=1e-5, atol=1e-5, msg=lambda text, name=field.name: name + text
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same(interpreted: Run, shape: tuple[int, int, int]) -> None:
    for found, expected in zip(grow(*shape, interpreted), grow(*shape, plain), strict=True):
        assert_same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same_on_a_gpu(shape: tuple[int, int, int]) -> None:
    def on_gpu(step: str, growth: Growth, *arguments: Any) -> Growth:
        return run("triton", step, growth, *arguments)

    for found, expected in zip(grow(*shape, on_gpu, "cuda"), grow(*shape, plain), strict=True):
        assert_same(found, expected)


def test_the_likeliest_open_nodes_are_expanded_and_nothing_behind_an_end() -> None:
    states = grow(4, 4, 5, plain)
    for before, after, level in zip(states[0::2], states[1::2], range(3), strict=False):
        chosen = [node for node in after.expanded[level * 4 : level * 4 + 4].tolist() if node >= 0]
        least = min(before.open[node] for node in chosen)
        others = [score for node, score in enumerate(before.open.tolist()) if node not in chosen]
        assert max(others) <= least
        assert not any(int(before.tokens[node]) % 7 == 0 for node in chosen)
        for rank, node in enumerate(chosen):
            row, above = 1 + level * 4 + rank, int(before.parents[node])
            assert after.depths[row] == after.depths[above] + 1
            assert int(after.bits[row, 0]) == int(after.bits[above, 0]) | 1 << (level * 4 + rank)
            assert int(after.next_positions[0, rank]) == 18 + int(after.depths[row])


def test_the_steps_on_a_cpu_are_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(step: str, growth: Growth, *arguments: Any) -> Growth:
        getattr(kernels, step)(growth, *arguments)
        return growth

    expected = grow(4, 4, 5, plain)
    for step in ("choose", "note"):
        monkeypatch.setattr(kernels, f"{step}_triton", None)
    for found, one in zip(grow(4, 4, 5, chosen), expected, strict=True):
        assert_same(found, one)


KINDS = {
    "open_scores": "*fp32",
    "scores": "*fp32",
    "next_scores": "*fp32",
    "paths": "*fp32",
    "chances": "*fp32",
    "is_end": "*i1",
    "report": "*fp64",
}
NUMBERS = ("first", "nodes", "words", "last_token", "count", "k")
FIXED: list[tuple[str, dict[str, int]]] = [
    ("_choose", {"width": 8, "block": 512, "padded_words": 1}),
    ("_choose", {"width": 1, "block": 16, "padded_words": 2}),
    ("_note", {"block": 64}),
    ("_note", {"block": 1}),
]


@pytest.mark.parametrize(("name", "fixed"), FIXED, ids=str)
def test_the_kernels_compile_for_a_gpu(name: str, fixed: dict[str, int]) -> None:
    """The interpreter runs what the compiler refuses."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, name)
    kinds = KINDS | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(fixed, "constexpr")
    signature = {argument: kinds.get(argument, "*i64") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
