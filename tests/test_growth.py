"""Trees that grow on a device: each as it would grow alone, by the rule of `proposers.growth`, in plain PyTorch and in
the kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from kernel_tools import interpreter
from torch import Tensor

from draftgraph import GraphConfig
from draftgraph.engine.pages import PAGE
from draftgraph.graph import ROOT, TokenGraph, TokenTree
from draftgraph.kernels import growth as kernels
from draftgraph.kernels.growth import ENDS, Growth
from draftgraph.proposers.growth import grow_together, growing

Run = Callable[..., Growth]
SHAPES = [(2, 8, 8), (3, 1, 1), (5, 8, 4), (12, 8, 2), (4, 4, 5)]  # levels, width, k
WISHES = [0, 1, 2, 3, 12, 2, 0]  # levels, by sequence
LENGTHS = [0, 19, 16, 1, 31, 7, 0]
ALL = tuple(range(len(WISHES)))
TRASH = 3 * PAGE


def run(way: str, step: str, growth: Growth, *arguments: Any) -> Growth:
    getattr(kernels, f"{step}_{way}")(growth, *arguments)
    return growth


def plain(step: str, growth: Growth, *arguments: Any) -> Growth:
    return run("reference", step, growth, *arguments)


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    pytest.importorskip("triton", reason="Triton is not installed")
    with interpreter() as call:
        yield lambda *given: call(run, "triton", *given)


def growth_of(
    sequences: tuple[int, ...],
    levels: int,
    width: int,
    k: int,
    device: str = "cpu",
    wishes: list[int] = WISHES,
    deepest: list[int] | None = None,
) -> Growth:
    """Of some of the sequences, nothing grown yet."""
    generator = torch.Generator().manual_seed(5)
    pages = torch.stack([torch.randperm(40, generator=generator)[:16] for _ in WISHES]).int()
    ends = torch.full((len(WISHES), ENDS), -1)
    for sequence in ALL:
        ends[sequence, : sequence + 1] = torch.arange(sequence + 1) * 7
    odds = torch.tensor([[1 - 0.1 * sequence, 1.0 + sequence] for sequence in ALL], dtype=torch.float64)
    here = list(sequences)
    told = pages[here], torch.tensor(wishes)[here].clamp(max=levels), ends[here], odds[here]
    bound = None if deepest is None else torch.tensor(deepest)[here].to(device)
    growth = Growth.of(*(part.to(device) for part in told), TRASH, levels, width, k, bound)
    growth.begin(torch.tensor(LENGTHS)[here].to(device))
    return growth


def proposals(sequences: tuple[int, ...], rows: int, k: int, seed: int, device: str) -> tuple[Tensor, Tensor]:
    """What a draft would say at so many nodes of each."""
    tokens, chances = [], []
    for sequence in sequences:
        generator = torch.Generator().manual_seed(100 * seed + sequence)
        tokens += [torch.randperm(50, generator=generator)[:k] for _ in range(rows)]
        chances.append(torch.log_softmax(torch.randn(rows, k, generator=generator) * 3, dim=1))
    return torch.stack(tokens).to(device), torch.cat(chances).to(device)


def grow(
    levels: int, width: int, k: int, step: Run, device: str = "cpu", sequences: tuple[int, ...] = ALL
) -> list[Growth]:
    """The states of all trees after every step."""
    growth = growth_of(sequences, levels, width, k, device)
    zeros = torch.zeros(len(sequences), device=device)
    states = [step("note", growth, 0, zeros, *proposals(sequences, 1, k, 0, device))]
    for level in range(levels - 1):
        growth = step("choose", copy.deepcopy(states[-1]), level, 45)
        children = proposals(sequences, width, k, 1 + level, device)
        scores = growth.next_scores.clone()
        states += [growth, step("note", copy.deepcopy(growth), 1 + level * width, scores, *children)]
    return states


def assert_same(found: Growth, expected: Growth) -> None:
    for field in fields(Growth):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(one, Tensor):
            torch.testing.assert_close(
                one.cpu(), other.cpu(), rtol=1e-5, atol=1e-5, msg=lambda text, name=field.name: name + text
            )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same(interpreted: Run, shape: tuple[int, int, int]) -> None:
    for sequences in (ALL, (4,)):
        found, expected = grow(*shape, interpreted, sequences=sequences), grow(*shape, plain, sequences=sequences)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_do_the_same_on_a_gpu(shape: tuple[int, int, int]) -> None:
    def on_gpu(step: str, growth: Growth, *arguments: Any) -> Growth:
        return run("triton", step, growth, *arguments)

    for sequences in (ALL, (4,)):
        found, expected = grow(*shape, on_gpu, "cuda", sequences), grow(*shape, plain, sequences=sequences)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)


def test_the_compiled_steps_on_a_cpu_do_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(step: str, growth: Growth, *arguments: Any) -> Growth:
        getattr(kernels, step)(growth, *arguments)
        return growth

    expected = grow(4, 4, 5, plain)
    for step in ("choose", "note"):
        monkeypatch.setattr(kernels, f"{step}_triton", None)
    for found, one in zip(grow(4, 4, 5, chosen), expected, strict=True):
        assert_same(found, one)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_sequence_proposes_what_it_would_alone(shape: tuple[int, int, int]) -> None:
    levels, width, _ = shape
    found = grow(*shape, plain)[-1]
    for sequence, wish in enumerate(WISHES):
        if wish:
            alone, known = grow(*shape, plain, sequences=(sequence,))[-1], 1 + (min(wish, levels) - 1) * width
            assert torch.equal(found.report[:known, sequence], alone.report[:known, 0])
            assert torch.equal(found.bits[sequence, :known], alone.bits[0, :known])
            assert torch.equal(found.positions[sequence, : known - 1], alone.positions[0, : known - 1])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nodes_see_and_write_their_own_sequence_and_behind_its_levels_nothing(shape: tuple[int, int, int]) -> None:
    width = shape[1]
    for level, growth in enumerate(grow(*shape, plain)[1::2]):
        data = growth.level()
        assert data.starts.tolist() == [width * sequence for sequence in range(len(WISHES) + 1)]
        for sequence, wish in enumerate(WISHES):
            here = slice(sequence * width, (sequence + 1) * width)
            slots = growth.next_slots[here].tolist()
            if level + 1 < wish:
                places = [LENGTHS[sequence] + level * width + rank for rank in range(width)]
                pages = growth.pages[sequence].tolist()
                assert slots == [pages[place // PAGE] * PAGE + place % PAGE for place in places]
                assert int(data.lengths[sequence]) == LENGTHS[sequence]
                first = 1 + level * width
                assert torch.equal(data.ancestors[here], growth.bits[sequence, first : first + width])
            else:
                assert slots == [TRASH] * width and int(data.lengths[sequence]) == 0
                assert data.ancestors[here, 0].tolist() == [1] * width and not data.ancestors[here, 1:].any()
                assert growth.expanded[sequence, level * width : (level + 1) * width].tolist() == [-1] * width


def test_the_likeliest_open_nodes_are_expanded_and_nothing_behind_an_end() -> None:
    states, sequence = grow(4, 4, 5, plain), 4
    ends = set(growth_of(ALL, 4, 4, 5).ends[sequence].tolist())
    for before, after, level in zip(states[0::2], states[1::2], range(3), strict=False):
        chosen = [node for node in after.expanded[sequence, level * 4 : level * 4 + 4].tolist() if node >= 0]
        least = min(before.open[sequence, node] for node in chosen)
        others = [score for node, score in enumerate(before.open[sequence].tolist()) if node not in chosen]
        assert max(others) <= least
        assert not any(int(before.tokens[sequence, node]) in ends for node in chosen)
        for rank, node in enumerate(chosen):
            row, above = 1 + level * 4 + rank, int(before.parents[sequence, node])
            assert after.depths[sequence, row] == after.depths[sequence, above] + 1
            bits = int(after.bits[sequence, above, 0])
            assert int(after.bits[sequence, row, 0]) == bits | 1 << (level * 4 + rank)
            position = int(after.next_positions[0, 4 * sequence + rank])
            assert position == LENGTHS[sequence] - 1 + int(after.depths[sequence, row])


BY_DEPTH = [(20, 6, 8), (4, 4, 1), (10, 1, 4)]  # expansions, depths, k


def grow_by_depth(shape: tuple[int, int, int], step: Run, device: str = "cpu") -> Growth:
    expansions, depths, k = shape
    wishes = [0 if wish == 0 else expansions for wish in WISHES]
    growth = growth_of(ALL, expansions, 1, k, device, wishes, [min(1 + wish, depths) for wish in WISHES])
    tokens, chances = (said.view(-1, depths, k) for said in proposals(ALL, depths, k, 3, device))
    return step("grow_by_depth", growth, tokens, chances, 45)


@pytest.mark.parametrize("shape", BY_DEPTH, ids=str)
def test_one_kernel_grows_what_levels_of_one_node_grow(interpreted: Run, shape: tuple[int, int, int]) -> None:
    found, expected = (grow_by_depth(shape, step).report for step in (interpreted, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", BY_DEPTH, ids=str)
def test_one_kernel_grows_what_levels_of_one_node_grow_on_a_gpu(shape: tuple[int, int, int]) -> None:
    def on_gpu(step: str, growth: Growth, *arguments: Any) -> Growth:
        return run("triton", step, growth, *arguments)

    found, expected = grow_by_depth(shape, on_gpu, "cuda"), grow_by_depth(shape, plain, "cuda")
    torch.testing.assert_close(found.report, expected.report, rtol=1e-5, atol=1e-5)


def test_words_hold_a_bit_for_every_expansion() -> None:
    told = torch.zeros(1, 4).int(), torch.ones(1).long(), torch.zeros(1, ENDS).long(), torch.ones(1, 2).double()
    shapes = [Growth.of(*told, TRASH, 1 + expansions, 1, 2).bits.shape for expansions in (0, 1, 64, 65, 120)]
    assert [words for *_, words in shapes] == [1, 1, 1, 2, 2]


def test_of_equal_nodes_the_first_are_expanded() -> None:
    """As on the host, where the heap of `graph.unroll` goes by the order of arrival."""
    told = torch.zeros(1, 4).int(), torch.full((1,), 9), torch.full((1, ENDS), -1), torch.ones(1, 2).double()
    growth = Growth.of(*told, TRASH, 9, 4, 8)
    growth.open.fill_(-1.0)
    growth.open[0, 5] = -0.5
    kernels.choose(growth, 0, 40)
    assert growth.expanded[0, :4].tolist() == [5, 0, 1, 2]


class Oracle:
    """A draft without a model: what follows a path is drawn from the path."""

    source, free = "draft", False

    def __init__(self, seed: int, k: int, width: int) -> None:
        self.seed, self.k, self.width = seed, k, width
        self.asked: list[list[tuple[int, ...]]] = []  # paths, level by level

    def children(self, path: tuple[int, ...]) -> tuple[Any, Any]:
        draw = np.random.default_rng([self.seed, *path])
        chances = np.sort(draw.dirichlet(np.full(self.k + 1, 0.5))[: self.k])[::-1]
        return draw.permutation(40)[: self.k], np.maximum(chances, 1e-4)

    def begin(self, text: list[int]) -> None: ...

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Generator[Any, Any, tuple[Any, Any]]:
        paths = []
        for node in frontier:
            path: list[int] = []
            while node != ROOT:
                path, node = [int(graph.tokens[node]), *path], int(graph.parents[node])
            paths.append(tuple(path))
        self.asked.append(paths)
        found = [self.children(path) for path in paths]
        return np.array([tokens for tokens, _ in found]), np.array([chances for _, chances in found])
        yield  # it needs no pass

    def worth_drafting(self, tree: TokenTree, scores: Any) -> int:
        """As a budget: always the `width` best open nodes."""
        return min(self.width, len(scores))


class DepthOracle(Oracle):
    """What follows a path is drawn from its length; asking it costs nothing."""

    free = True

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any:
        found = [self.children((int(depth),)) for depth in graph.depths[frontier]]
        return np.array([tokens for tokens, _ in found]), np.array([chances for _, chances in found])


@pytest.mark.parametrize(("depths", "nodes", "k"), [(15, 64, 8), (4, 64, 8), (3, 24, 4), (5, 6, 1), (9, 120, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_said_by_depth_grows_the_tree_of_the_host(seed: int, depths: int, nodes: int, k: int) -> None:
    """The best paths, as many as the target may check."""
    ends = frozenset({3, 11, 17, 29})
    config = GraphConfig(
        mode="tree", k=k, theta_prob=0.0, theta_sib=0.0, growth="best-first", max_nodes=nodes, max_depth=depths
    )
    graph, oracle = TokenGraph(7, config, depths, ends), DepthOracle(seed, k, nodes)
    (tree,) = grow_together([growing(graph, [oracle])], lambda segments: [])  # type: ignore[list-item]
    assert len(tree) > 1

    known = torch.full((1, ENDS), -1)
    known[0, : len(ends)] = torch.tensor(sorted(ends))
    told = torch.arange(64).int()[None], torch.tensor([nodes - 1]), known, torch.ones(1, 2).double()
    growth = Growth.of(*told, 64 * PAGE, nodes - 1, 1, k, torch.tensor([depths]))
    growth.begin(torch.tensor([9]))
    said = [oracle.children((depth,)) for depth in range(depths)]
    tokens, chances = (torch.tensor(np.array(part))[None] for part in zip(*said, strict=True))
    kernels.grow_by_depth(growth, tokens, chances.log().float(), 40)
    report = growth.report[:, 0]
    paths: dict[int, tuple[tuple[int, ...], float]] = {-1: ((), 1.0)}
    for row, node in enumerate(report[:, -1].long().tolist()):
        if row and node < 0:
            continue
        path, score = paths[node]
        for rank in range(k):
            child = (*path, int(report[row, rank])), score * float(report[row, k + rank].exp())
            paths[row * k + rank] = child
    best = sorted(paths.values(), key=lambda one: -one[1])[:nodes]
    on_host: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        on_host.append(() if parent < 0 else (*on_host[parent], token))
    assert [path for path, _ in best] == on_host
    np.testing.assert_allclose([score for _, score in best], tree.scores, rtol=1e-4)


@pytest.mark.parametrize("shape", [(2, 8, 8), (6, 1, 1), (5, 8, 4), (7, 3, 2), (4, 4, 5)], ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_the_rule_on_a_device_is_the_rule_on_the_host(seed: int, shape: tuple[int, int, int]) -> None:
    """With levels of a fixed width and nothing merged: the same nodes are expanded in the same levels."""
    levels, width, k = shape
    ends = frozenset({3, 11, 17, 29})
    config = GraphConfig(
        mode="tree", k=k, theta_prob=0.0, theta_sib=0.0, growth="best-first", max_nodes=4096, max_depth=levels
    )
    graph, oracle = TokenGraph(7, config, levels, ends), Oracle(seed, k, width)
    grow_together([growing(graph, [oracle], budget=oracle)], lambda segments: [])  # type: ignore[arg-type, list-item]

    known = torch.full((1, ENDS), -1)
    known[0, : len(ends)] = torch.tensor(sorted(ends))
    told = torch.arange(64).int()[None], torch.tensor([levels]), known, torch.ones(1, 2).double()
    growth = Growth.of(*told, 64 * PAGE, levels, width, k)
    growth.begin(torch.tensor([9]))
    paths: dict[int, tuple[int, ...]] = {}  # of proposed nodes
    on_device: dict[tuple[int, ...], float] = {}  # their scores
    expanded: list[list[tuple[int, ...]]] = []

    def note(first: int, scores: Tensor, nodes: list[tuple[int, ...] | None]) -> None:
        found = [oracle.children(path or ()) for path in nodes]
        tokens = torch.tensor(np.array([tokens for tokens, _ in found]))
        chances = torch.tensor(np.array([chances for _, chances in found])).log().float()
        kernels.note(growth, first, scores, tokens, chances)
        for row, path in enumerate(nodes):
            if path is not None:
                found_scores = (scores[row] + chances[row]).exp().tolist()
                on_device.update({(*path, int(tokens[row, rank])): found_scores[rank] for rank in range(k)})
                paths.update({(first + row) * k + rank: (*path, int(tokens[row, rank])) for rank in range(k)})
        expanded.append([path for path in nodes if path is not None])

    note(0, torch.zeros(1), [()])
    for level in range(levels - 1):
        kernels.choose(growth, level, 40)
        chosen = growth.expanded[0, level * width : (level + 1) * width].tolist()
        note(1 + level * width, growth.next_scores.clone(), [paths[node] if node >= 0 else None for node in chosen])
    assert [set(level) for level in expanded if level] == [set(level) for level in oracle.asked]
    tree = graph.unroll()
    on_host = {}
    for node, parent in enumerate(tree.parents.tolist()):
        on_host[node] = () if parent < 0 else (*on_host[parent], int(tree.tokens[node]))
    assert {*paths.values()} == {*on_host.values()} - {()}
    for node, path in on_host.items():
        assert on_device.get(path, 1.0) == pytest.approx(tree.scores[node], rel=1e-4)


KINDS = {
    **dict.fromkeys(("open_scores", "scores", "next_scores", "paths", "chances"), "*fp32"),
    **dict.fromkeys(("report", "odds"), "*fp64"),
    **dict.fromkeys(("first", "nodes", "words", "last_token", "count", "k", "expansions"), "i32"),
    "lengths": "*i32",
}
FIXED: list[tuple[str, dict[str, int]]] = [
    ("_choose", {"width": 8, "block": 512, "padded_words": 1}),
    ("_choose", {"width": 1, "block": 16, "padded_words": 2}),
    ("_note", {"block": 64}),
    ("_note", {"block": 1}),
    ("_grow_by_depth", {"block": 512}),
    ("_grow_by_depth", {"block": 8}),
]


@pytest.mark.parametrize(("name", "fixed"), FIXED, ids=str)
def test_the_kernels_compile_for_a_gpu(name: str, fixed: dict[str, int]) -> None:
    """The interpreter runs what the compiler refuses."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, name)
    kinds = KINDS | dict.fromkeys(fixed, "constexpr")
    if name == "_grow_by_depth":
        kinds["depths"] = "i32"
    signature = {argument: kinds.get(argument, "*i64") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=fixed)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
