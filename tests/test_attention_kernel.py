"""Paged attention: a node's values are those of its own path, by the reference, by the kernel and in real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_tools import ancestry, score
from families import FAMILIES, MORE_FAMILIES, SMALL, VOCAB, target_of
from kernel_tools import ptx_of_attention, strict_interpreter
from torch import Tensor

from draftgraph import UnsupportedModelError
from draftgraph.engine.attention import attend
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.kernels.attention import (
    PagedPass,
    attend_reference,
    attend_triton,
    paged_attention,
    supports,
    views_of,
)

TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "long window": {"window": 64},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([1.0, 200.0, -2.0, 3.0] * 4)},
    "all": {"window": 33, "softcap": 5.0, "sinks": torch.tensor([1.0, 200.0, -2.0, 3.0] * 4)},
}


@dataclass(frozen=True)
class Scene:
    """Random trees behind texts in scattered pages; slots that no text has written are not numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    data: PagedPass
    paths: list[list[list[int]]]  # of every text, of every node: the scratch slots it sees

    @property
    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def real(self) -> int:
        """Nodes that belong to a text."""
        return int(self.data.starts[-1])

    def options(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Any:
        sinks = None if sinks is None else sinks[: self.query.shape[1]].to(self.query)
        return {"window": window, "softcap": softcap, "sinks": sinks}

    def to(self, device: str, dtype: torch.dtype) -> Scene:
        query, key, value = (states.to(device, dtype) for states in self.states)
        data = PagedPass(*(part.to(device) for part in self.data.tensors), self.data.most_nodes)
        return replace(self, query=query, key=key, value=value, data=data)


def ancestor_words(visible: Tensor) -> Tensor:
    """bool [..., slots] -> int64 [..., words]"""
    return (visible.unflatten(-1, (-1, 64)).long() << torch.arange(64)).sum(-1)  # the sign is a bit as any other


def scene(
    seed: int = 0,
    lengths: tuple[int, ...] = (70,),
    counts: tuple[int, ...] = (5,),  # nodes of each text
    drafted: tuple[int, ...] | int = 0,  # scratch slots of earlier passes
    groups: int = 2,
    heads: int = 1,  # of a group
    padding: int = 3,  # nodes that only fill the pass up
    size: int = 64,
    value_size: int | None = None,
    spare: int = 2,  # pages of a table that no text fills
    scattered: bool = True,  # the pages of a text, all over the pool
) -> Scene:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    texts, nodes = len(lengths), sum(counts) + padding
    earlier = (drafted,) * texts if isinstance(drafted, int) else drafted
    scratch = [before + count for before, count in zip(earlier, counts, strict=True)]
    words = max(1, math.ceil(max(scratch) / 64))
    most_pages = max(-(-(length + more) // PAGE) for length, more in zip(lengths, scratch, strict=True)) + spare
    pool = rng.permutation(texts * most_pages + 1) if scattered else np.arange(texts * most_pages + 1)
    pages = torch.full((texts, most_pages), 2**30, dtype=torch.int32)  # reading there would be an error
    visible = torch.zeros(nodes, words * 64, dtype=torch.bool)
    positions, scratch_positions = torch.zeros(1, nodes, dtype=torch.int64), torch.zeros(texts, words * 64).int()
    key = torch.full((1, groups, len(pool) * PAGE, size), torch.nan)
    value = torch.full((1, groups, len(pool) * PAGE, value_size or size), torch.nan)
    paths: list[list[list[int]]] = []
    starts = np.concatenate([[0], np.cumsum(counts)])
    for text, (length, before, count) in enumerate(zip(lengths, earlier, counts, strict=True)):
        tree: list[list[int]] = []
        for node in range(before + count):
            recent = max(0, node - 12)  # deep trees, so that windows cut paths
            tree.append([*(tree[int(rng.integers(recent, node))] if node else []), node])
            scratch_positions[text, node] = length + len(tree[node]) - 1
        for node, path in enumerate(tree[before:]):
            visible[starts[text] + node, path] = True
            positions[0, starts[text] + node] = length + len(path) - 1
        paths.append(tree[before:])
        held = -(-(length + before + count) // PAGE)
        pages[text, :held] = torch.from_numpy(pool[text * most_pages : text * most_pages + held])
        place = torch.arange(length + before + count)
        slots = pages[text].long()[place // PAGE] * PAGE + place % PAGE
        for states in (key, value):
            states[:, :, slots] = torch.randn(1, groups, len(place), states.shape[-1], generator=generator)
    query = torch.randn(1, nodes, groups * heads, size, generator=generator).transpose(1, 2)
    data = PagedPass(
        torch.from_numpy(starts).int(),
        torch.tensor(lengths, dtype=torch.int32),
        pages,
        ancestor_words(visible),
        positions,
        scratch_positions,
        nodes,
    )
    return Scene(query, key, value, data, paths)


def naive(scene: Scene, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """One query after the other, over a list of the slots that it sees."""
    _, heads, nodes, _ = scene.query.shape
    shared = heads // scene.key.shape[1]
    out = torch.zeros(1, nodes, heads, scene.value.shape[-1], dtype=torch.float64)
    for text, start in enumerate(scene.data.starts[:-1].tolist()):
        length, pages = int(scene.data.lengths[text]), scene.data.pages[text].tolist()
        for node, path in enumerate(scene.paths[text]):
            seen = {place: place for place in range(length)}
            seen |= {length + j: length + depth for depth, j in enumerate(path)}
            last = length + len(path) - 1
            places = [place for place, position in seen.items() if window is None or last - position < window]
            slots = [pages[place // PAGE] * PAGE + place % PAGE for place in places]
            for head in range(heads):
                key, value = (states[0, head // shared, slots].double() for states in (scene.key, scene.value))
                score = key @ scene.query[0, head, start + node].double() * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if sinks is not None:
                    score = torch.cat([score, sinks[head : head + 1].double()])
                    value = torch.cat([value, torch.zeros(1, value.shape[-1])])
                out[0, start + node, head] = torch.softmax(score, 0) @ value
    return out


LENGTHS = (0, 1, 63, 64, 65, 300)
RAGGED: dict[str, Any] = {"lengths": (0, 1, 65, 30, 130), "counts": (3, 0, 7, 1, 12), "drafted": (0, 4, 9, 0, 60)}


SCENES: dict[str, dict[str, Any]] = {
    "ragged": RAGGED,
    "one node each": {"lengths": LENGTHS, "counts": (1,) * 6},
    "behind earlier levels": {"lengths": (0, 1, 65), "counts": (5,) * 3, "drafted": 9},
    "two words of nodes": {"lengths": (0, 1, 65), "counts": (70,) * 3},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("shape", SCENES.values(), ids=SCENES)
def test_a_node_attends_to_its_own_text_and_path(
    shape: dict[str, Any], scattered: bool, options: dict[str, Any]
) -> None:
    given = scene(**shape, groups=2, heads=3, size=16, value_size=24, scattered=scattered)
    options = given.options(**options)
    found = paged_attention(*given.states, given.data, 0.3, **options)
    torch.testing.assert_close(found.double(), naive(given, 0.3, **options), rtol=0, atol=2e-6)
    assert found[:, given.real :].eq(0).all()


def test_pages_in_a_row_are_read_in_place() -> None:
    for scattered in (False, True):
        views = views_of(scene(lengths=(70, 40), counts=(3, 5), scattered=scattered).data, None)
        assert [isinstance(view.slots, slice) for view in views] == [not scattered] * 2


def blind(given: Scene) -> PagedPass:
    return replace(given.data, ancestors=torch.zeros_like(given.data.ancestors))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_node_that_sees_nothing_gets_nothing(options: dict[str, Any]) -> None:
    given = scene(lengths=(0, 0), counts=(2, 3))
    assert paged_attention(*given.states, blind(given), 1.0, **given.options(**options)).eq(0).all()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Tensor]]:
    """The kernel in Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""
    with strict_interpreter() as call:
        yield lambda *arguments, **options: call(attend_triton, *arguments, **options)


def sixteen_texts(nodes: int) -> dict[str, Any]:
    return {"lengths": tuple(range(0, 16 * 9, 9)), "counts": (nodes, *[1] * 14, 0)}


SHAPES: dict[str, dict[str, Any]] = {
    "one node": {"lengths": (65,), "counts": (1,), "heads": 3, "padding": 7},
    "one text of many nodes": {"lengths": (100,), "counts": (70,), "heads": 3, "padding": 58},
    "ragged": RAGGED | {"heads": 3},
    "all lengths": {"lengths": LENGTHS, "counts": (5,) * 6, "heads": 8, "groups": 1},
    "a word of nodes": {"lengths": (0, 65, 300), "counts": (64,) * 3, "groups": 1},
    "ragged, one head": RAGGED | {"groups": 1},
    "nobody there": {"lengths": (40, 0), "counts": (0, 0), "padding": 8},
    "no padding": {"lengths": (40, 17), "counts": (8, 8), "padding": 0, "spare": 0},
    "one with many, many with one": sixteen_texts(60) | {"heads": 2},
    "a level of a draft": {"lengths": (64, 300), "counts": (8, 8), "drafted": (66, 3), "heads": 3},
    "a size between powers of two": RAGGED | {"heads": 2, "size": 80},
    "a small size": RAGGED | {"heads": 2, "size": 8},
    "a large size": {"lengths": (33, 70), "counts": (2, 1), "size": 256, "groups": 1},
    "smaller values": RAGGED | {"heads": 2, "size": 48, "value_size": 24},
    "larger values": RAGGED | {"heads": 2, "size": 16, "value_size": 80},
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_gives_what_its_reference_gives(
    interpreted: Callable[..., Tensor], shape: dict[str, Any], splits: int
) -> None:
    given = scene(1, **shape).to("cpu", torch.float16)
    found = interpreted(*given.states, given.data, 0.2, splits=splits)
    expected = attend_reference(*given.states, given.data, 0.2)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_kernel_knows_windows_caps_and_sinks(
    interpreted: Callable[..., Tensor], options: dict[str, Any], splits: int
) -> None:
    given = scene(2, **RAGGED, groups=1, heads=3)
    options = given.options(**options)
    found = interpreted(*given.states, given.data, 0.2, splits=splits, **options)
    expected = attend_reference(*given.states, given.data, 0.2, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_the_kernel_takes_any_strides(interpreted: Callable[..., Tensor]) -> None:
    given = scene(3, **RAGGED, heads=2)
    kept = given.key.transpose(1, 2).contiguous().transpose(1, 2)  # slots before heads
    columns = given.value.mT.contiguous().mT  # columns apart
    found = interpreted(given.query.contiguous(), kept, columns, given.data, 0.2, splits=2)
    torch.testing.assert_close(found, attend_reference(*given.states, given.data, 0.2), rtol=0, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_in_the_kernel_too_a_node_that_sees_nothing_gets_nothing(
    interpreted: Callable[..., Tensor], splits: int
) -> None:
    given = scene(lengths=(0,), counts=(2,))
    assert interpreted(*given.states, blind(given), 1.0, splits=splits).eq(0).all()


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_kernel_compiles_for_a_gpu(dtype: torch.dtype, windows: bool) -> None:
    """The interpreter runs what the compiler refuses."""
    for queries, single, size in ((16, False, 128), (64, True, 128), (16, False, 192)):  # the last as in DeepSeek
        assert ptx_of_attention(queries, single, dtype, size, 128, windows)


def _qwen2_moe() -> Any:
    """Its layers leave the window to the mask."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return tf.Qwen2MoeConfig(**SMALL, **experts, use_sliding_window=True, sliding_window=7, max_window_layers=1)


FORGETFUL = {"bloom", "falcon", "stablelm"}  # their attention is not looked up, or not given what the model was given
PASSING_ON = [*sorted(FAMILIES.keys() - FORGETFUL), "cohere2", "deepseek_v3", "gpt_oss", "qwen2_moe"]


@torch.no_grad()
@pytest.mark.parametrize("family", PASSING_ON)
def test_models_score_every_node_as_its_path(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MORE_FAMILIES, "qwen2_moe", _qwen2_moe)
    rng, model = np.random.default_rng(7), target_of(family)
    text, tokens = rng.integers(0, VOCAB, 23).tolist(), rng.integers(0, VOCAB, 12)
    depths, visible = ancestry([-1, *(int(rng.integers(0, node)) for node in range(1, len(tokens)))])
    context = PagedEngine(model).open()
    with Loan(model):
        context.prefill(text)
        found = score(context, tokens, depths, visible)
    model.set_attn_implementation("eager")
    expected = [model(torch.tensor([text + tokens[row].tolist()])).logits[0, -1] for row in visible]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-4)


@torch.no_grad()
def test_layers_that_read_in_chunks_are_refused() -> None:
    context = PagedEngine(target_of("llama4")).open()
    with pytest.raises(UnsupportedModelError, match="Llama4TextAttention reads in chunks"):
        context.prefill([1, 2, 3])


def test_additions_that_only_a_mask_could_hold_are_refused() -> None:
    given = scene()
    with pytest.raises(UnsupportedModelError, match="Linear needs position_bias"):
        attend(torch.nn.Linear(1, 1), *given.states, None, paged_pass=given.data, position_bias=torch.ones(1))
    with pytest.raises(UnsupportedModelError, match="Linear does not pass on"):
        attend(torch.nn.Linear(1, 1), *given.states, None)


def test_a_compiled_model_takes_it_without_a_break() -> None:
    given = scene(**RAGGED)

    def twice(query: Tensor) -> Tensor:
        return 2 * paged_attention(query, given.key, given.value, given.data, 0.2, window=4)

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given.query), twice(given.query))


# Few: each is compiled, which takes seconds.
ON_CUDA = [
    *((shape, options, torch.bfloat16) for shape in SHAPES for options in ("plain", "all")),
    *(("ragged", options, torch.float16) for options in OPTIONS),
    *((shape, "all", torch.float32) for shape in ("one node", "ragged", "a size between powers of two")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options", "dtype"), ON_CUDA)
def test_the_kernel_gives_what_its_reference_gives_on_cuda(shape: str, options: str, dtype: torch.dtype) -> None:
    given = scene(4, **SHAPES[shape]).to("cuda", dtype)
    told = given.options(**OPTIONS[options])
    assert supports(*given.states)
    found = paged_attention(*given.states, given.data, 0.2, **told)
    expected = attend_reference(*given.states, given.data, 0.2, **told)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


LARGE: dict[str, dict[str, Any]] = {
    "64 texts": {"lengths": tuple(range(0, 6400, 100)), "counts": (8,) * 64, "groups": 8, "heads": 4},
    "a long one": {"lengths": (9000,), "counts": (512,), "groups": 8, "heads": 4, "padding": 0},
    "a piece of a prompt among steps": {"lengths": (700,) * 33, "counts": (256, *[2] * 32), "groups": 4},
    "large heads": {"lengths": (3000, 40), "counts": (64, 64), "groups": 2, "heads": 8, "size": 256},
}


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [None, 1, 5])
@pytest.mark.parametrize("shape", LARGE.values(), ids=LARGE)
def test_many_and_long_texts_on_cuda(shape: dict[str, Any], splits: int | None) -> None:
    given = scene(5, **{"size": 128} | shape).to("cuda", torch.bfloat16)
    found = attend_triton(*given.states, given.data, 0.1, splits=splits)
    torch.testing.assert_close(found, attend_reference(*given.states, given.data, 0.1), rtol=0, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(("nodes", "heads", "size"), [(64, 1, 128), (64, 4, 128), (128, 8, 256), (8, 4, 256)])
def test_long_texts_and_large_heads_on_cuda(nodes: int, heads: int, size: int) -> None:
    given = scene(5, (8192,), (nodes,), groups=4, heads=heads, size=size, padding=0).to("cuda", torch.bfloat16)
    expected = attend_reference(*given.states, given.data, size**-0.5)
    found = paged_attention(*given.states, given.data, size**-0.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
def test_a_text_may_be_shared_or_not_on_cuda(splits: int) -> None:
    given = scene(4, LENGTHS, (64,) * 6, heads=3).to("cuda", torch.bfloat16)
    told = given.options(**OPTIONS["all"])
    found = attend_triton(*given.states, given.data, 0.2, **told, splits=splits)
    expected = attend_reference(*given.states, given.data, 0.2, **told)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_a_captured_launch_is_right_for_other_texts_and_trees(window: int | None) -> None:
    shares: list[dict[str, Any]] = [
        {"lengths": (300, 0, 10), "counts": (10, 20, 30), "drafted": 4, "padding": 4, "spare": 0},
        {"lengths": (1, 64, 290), "counts": (0, 0, 64), "drafted": 0, "padding": 0, "spare": 0},
        {"lengths": (65, 300, 7), "counts": (1, 1, 1), "drafted": 9, "padding": 61, "spare": 0},
    ]
    shared: dict[str, Any] = {"heads": 3, "groups": 3}
    scenes = [scene(seed, **shared, **share) for seed, share in enumerate(shares)]
    most = max(given.data.pages.shape[1] for given in scenes)
    slots = max(given.key.shape[2] for given in scenes)
    live: list[Tensor] = []
    for number, given in enumerate(scenes):
        widened = [torch.nn.functional.pad(states, (0, 0, 0, slots - states.shape[2])) for states in given.states[1:]]
        pages = torch.nn.functional.pad(given.data.pages, (0, most - given.data.pages.shape[1]))
        data = replace(given.data, pages=pages)
        scenes[number] = replace(given, key=widened[0], value=widened[1], data=data).to("cuda", torch.bfloat16)
    live = [tensor.clone() for tensor in (*scenes[0].states, *scenes[0].data.tensors)]

    def launch() -> Tensor:
        return paged_attention(*live[:3], PagedPass(*live[3:], scenes[0].data.most_nodes), 0.2, window)

    launch()  # compiles
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = launch()
    for given in scenes[::-1]:
        for buffer, tensor in zip(live, (*given.states, *given.data.tensors), strict=True):
            buffer.copy_(tensor)
        captured.replay()
        expected = attend_reference(*given.states, given.data, 0.2, window)
        torch.testing.assert_close(out, expected, rtol=0, atol=3e-2)
