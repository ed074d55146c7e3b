"""The trees of many texts that grow side by side: each as it would grow alone, in plain PyTorch and in the kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kernel_tools import interpreter
from test_growth import FIXED, KINDS, NUMBERS, assert_same, plain, run
from torch import Tensor

from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE
from draftgraph.kernels import growth as kernels
from draftgraph.kernels.growth import ENDS, Growth, Shared, words_for

Run = Callable[..., Growth]
SHAPES = [(2, 8, 8), (5, 8, 4), (12, 8, 2), (4, 4, 5)]  # levels, width, k
WISHES = [0, 1, 2, 3, 12, 2, 0]  # levels, by text
LENGTHS = [0, 19, 16, 1, 31, 7, 0]
TRASH = 3 * PAGE


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda *given: call(run, "triton", *given)


def shared_of(growth: Growth, levels: int, device: str) -> Shared:
    generator = torch.Generator().manual_seed(5)
    pages = torch.stack([torch.randperm(40, generator=generator)[:16] for _ in WISHES]).int()
    ends = torch.full((len(WISHES), ENDS), -1)
    for text in range(len(WISHES)):
        ends[text, : text + 1] = torch.arange(text + 1) * 7
    told = pages.to(device), torch.tensor(WISHES).clamp(max=levels).to(device), ends.to(device)
    return Shared.of(*told, TRASH, PAGE, growth.width, growth.bits.shape[-1])


def proposals(rows: int, k: int, seed: int, text: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + text)
    tokens = torch.stack([torch.randperm(50, generator=generator)[:k] for _ in range(rows)])
    return tokens, torch.log_softmax(torch.randn(rows, k, generator=generator) * 3, dim=1)


def odds_of(text: int) -> Tensor:
    return torch.tensor([1 - 0.1 * text, 1.0 + text], dtype=torch.float64)


def proposals_of_all(rows: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    parts = [proposals(rows, k, seed, text) for text in range(len(WISHES))]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def grow_rows(levels: int, width: int, k: int, step: Run, device: str = "cpu") -> list[Growth]:
    """The states of all trees after every step."""
    growth = Growth.of(levels, width, k, torch.device(device), len(WISHES))
    growth.shared = shared_of(growth, levels, device)
    growth.open.fill_(-torch.inf)
    growth.length.copy_(torch.tensor(LENGTHS))
    growth.odds.copy_(torch.stack([odds_of(text) for text in range(len(WISHES))]))
    growth.shared.find_slots(growth.length, width)
    tokens, chances = (part.to(device) for part in proposals_of_all(1, k, 0))
    zeros = torch.zeros(len(WISHES), device=device)
    states = [step("note", growth, 0, zeros, tokens, chances, None)]
    for level in range(levels - 1):
        growth = step("choose", copy.deepcopy(states[-1]), level, 45)
        tokens, chances = (part.to(device) for part in proposals_of_all(width, k, 1 + level))
        states += [growth]
        scores = growth.next_scores.clone()
        states += [step("note", copy.deepcopy(growth), 1 + level * width, scores, tokens, chances, None)]
    return states


def grow_alone(levels: int, width: int, k: int, text: int) -> Growth:
    growth = Growth.of(levels, width, k, torch.device("cpu"))
    growth.open.fill_(-torch.inf)
    growth.length.fill_(LENGTHS[text])
    growth.odds.copy_(odds_of(text))
    is_end = torch.zeros(50, dtype=torch.bool)
    is_end[torch.arange(text + 1) * 7] = True
    plain("note", growth, 0, torch.zeros(1), *proposals(1, k, 0, text), is_end)
    for level in range(min(levels, WISHES[text]) - 1):
        plain("choose", growth, level, 45)
        scores = growth.next_scores.clone()
        plain("note", growth, 1 + level * width, scores, *proposals(width, k, 1 + level, text), is_end)
    return growth


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_text_proposes_what_it_would_alone(shape: tuple[int, int, int]) -> None:
    levels, width, _ = shape
    found = grow_rows(*shape, plain)[-1]
    for text, wish in enumerate(WISHES):
        if wish:
            alone, known = grow_alone(*shape, text), 1 + (min(wish, levels) - 1) * width
            assert torch.equal(found.report[:known, text], alone.report[:known])
            assert torch.equal(found.bits[text, :known], alone.bits[:known])
            assert torch.equal(found.positions[text, : known - 1], alone.positions[0, : known - 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_see_and_write_their_own_text_and_who_is_through_sees_nothing(shape: tuple[int, int, int]) -> None:
    width = shape[1]
    for level, growth in enumerate(grow_rows(*shape, plain)[1::2]):
        shared, data = growth.shared, PackedData(*growth.packed_level())
        assert shared is not None and data.starts.tolist() == [width * text for text in range(len(WISHES) + 1)]
        for text, wish in enumerate(WISHES):
            here = slice(text * width, (text + 1) * width)
            slots = growth.next_slots[here].tolist()
            if level + 1 < wish:
                places = [LENGTHS[text] + level * width + rank for rank in range(width)]
                pages = shared.pages[text].tolist()
                assert slots == [pages[place // PAGE] * PAGE + place % PAGE for place in places]
                assert int(data.lengths[text]) == LENGTHS[text]
                first = 1 + level * width
                assert torch.equal(data.ancestors[here], growth.bits[text, first : first + width])
            else:
                assert slots == [TRASH] * width and int(data.lengths[text]) == 0
                assert data.ancestors[here, 0].tolist() == [1] * width and not data.ancestors[here, 1:].any()
                assert growth.expanded[text, level * width : (level + 1) * width].tolist() == [-1] * width


def assert_all_same(found: Growth, expected: Growth) -> None:
    assert_same(found, expected)
    assert found.shared is not None and expected.shared is not None
    for name, one in vars(found.shared).items():
        if isinstance(one, Tensor):
            assert torch.equal(one.cpu(), getattr(expected.shared, name)), name


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same(interpreted: Run, shape: tuple[int, int, int]) -> None:
    for found, expected in zip(grow_rows(*shape, interpreted), grow_rows(*shape, plain), strict=True):
        assert_all_same(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same_on_a_gpu(shape: tuple[int, int, int]) -> None:
    def on_gpu(step: str, growth: Growth, *arguments: Any) -> Growth:
        return run("triton", step, growth, *arguments)

    for found, expected in zip(grow_rows(*shape, on_gpu, "cuda"), grow_rows(*shape, plain), strict=True):
        assert_all_same(found, expected)


def test_words_hold_a_bit_for_every_expansion() -> None:
    assert [words_for(expansions) for expansions in (0, 1, 64, 65, 120)] == [1, 1, 1, 2, 2]


ALONE = {"_choose": ("levels", "slots", "lengths", "ancestors"), "_note": ("ends",)}
AMONG_MANY = {"_choose": (), "_note": ("is_end",)}


@pytest.mark.parametrize("missing", [ALONE, AMONG_MANY], ids=["alone", "among many"])
@pytest.mark.parametrize(("name", "fixed"), FIXED, ids=str)
def test_the_kernels_compile_for_a_gpu(name: str, fixed: dict[str, int], missing: dict[str, tuple[str, ...]]) -> None:
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, name)
    constants: dict[str, Any] = fixed | dict.fromkeys(missing[name])
    kinds = KINDS | dict.fromkeys(NUMBERS, "i32") | {"lengths": "*i32"} | dict.fromkeys(constants, "constexpr")
    signature = {argument: kinds.get(argument, "*i64") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
