"""Graph attention: a node's values are those of its path, by the reference, by the kernel and in real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from families import FAMILIES, MORE_FAMILIES, SMALL, VOCAB, target_of
from kernel_tools import strict_interpreter
from torch import Tensor

from draftgraph import UnsupportedModelError
from draftgraph.engine.cache import SlotCache
from draftgraph.engine.graph_attention import (
    NAME,
    GraphPass,
    attend,
    graph_attention,
    graph_kernel,
    reference,
)

LENGTHS = (0, 1, 63, 64, 65, 300)
CAPACITY = 512
TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Scene:
    """Random trees behind texts of several lengths; slots that are neither text nor scratch are not numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    graph: GraphPass
    paths: list[list[list[int]]]  # of every row, of every node: the scratch slots it sees

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        graph = self.graph
        data = (graph.lengths, graph.ancestors, graph.positions, graph.scratch_positions)
        return (self.query, self.key, self.value, *data)

    def options(self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None) -> Any:
        """Every option of graph attention, with a sink for each head."""
        sinks = None if sinks is None else sinks[: self.query.shape[1]].to(self.query)
        return {"window": window, "softcap": softcap, "sinks": sinks}

    def to(self, device: str, dtype: torch.dtype) -> Scene:
        states = [tensor.to(device, dtype) for tensor in self.arguments[:3]]
        return replace(self, query=states[0], key=states[1], value=states[2], graph=moved(self.graph, device))


def ancestor_words(visible: Tensor) -> Tensor:
    """bool [..., slots] -> int64 [..., words]"""
    return (visible.unflatten(-1, (-1, 64)).long() << torch.arange(64)).sum(-1)  # the sign is a bit as any other


def moved(graph: GraphPass, device: str) -> GraphPass:
    return GraphPass(*(getattr(graph, field).to(device) for field in GraphPass.__dataclass_fields__))


def scene(
    seed: int = 0,
    lengths: tuple[int, ...] = (70,),
    groups: int = 2,
    heads: int = 1,  # of a group
    nodes: int = 5,
    drafted: int = 0,  # scratch slots of earlier levels
    size: int = 64,
    value_size: int | None = None,
    capacity: int = CAPACITY,
) -> Scene:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows, scratch = len(lengths), drafted + nodes
    slots = math.ceil(scratch / 64) * 64
    visible = torch.zeros(rows, scratch, slots, dtype=torch.bool)
    scratch_positions = torch.zeros(rows, slots, dtype=torch.int64)
    paths: list[list[list[int]]] = []
    for row, length in enumerate(lengths):
        tree: list[list[int]] = []
        for node in range(scratch):
            recent = max(0, node - 12)  # deep trees, so that windows cut paths
            tree.append([*(tree[int(rng.integers(recent, node))] if node else []), node])
            visible[row, node, tree[node]] = True
            scratch_positions[row, node] = length + len(tree[node]) - 1
        paths.append(tree[drafted:])
    positions = scratch_positions[:, drafted:scratch].clone()
    query = torch.randn(rows, nodes, groups * heads, size, generator=generator).transpose(1, 2)
    key = torch.randn(rows, groups, capacity, size, generator=generator)
    value = torch.randn(rows, groups, capacity, value_size or size, generator=generator)
    for row, length in enumerate(lengths):
        for states in (key, value):
            states[row, :, length + scratch :] = torch.nan
    ancestors = ancestor_words(visible[:, drafted:])
    graph = GraphPass(torch.tensor(lengths, dtype=torch.int32), ancestors, positions, scratch_positions)
    return Scene(query, key, value, graph, paths)


def naive(scene: Scene, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """One query after the other, over a list of the slots that it sees."""
    rows, heads, nodes, _ = scene.query.shape
    shared = heads // scene.key.shape[1]
    out = torch.zeros(rows, nodes, heads, scene.value.shape[-1], dtype=torch.float64)
    for row in range(rows):
        length = int(scene.graph.lengths[row])
        for node, path in enumerate(scene.paths[row]):
            seen = {slot: slot for slot in range(length)} | {length + j: length + depth for depth, j in enumerate(path)}
            last = length + len(path) - 1
            slots = [slot for slot, position in seen.items() if window is None or last - position < window]
            for head in range(heads):
                key, value = (states[row, head // shared, slots].double() for states in (scene.key, scene.value))
                score = key @ scene.query[row, head, node].double() * scale
                if softcap is not None:
                    score = softcap * torch.tanh(score / softcap)
                if sinks is not None:
                    score = torch.cat([score, sinks[head : head + 1].double()])
                    value = torch.cat([value, torch.zeros(1, value.shape[-1])])
                out[row, node, head] = torch.softmax(score, 0) @ value
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "long window": {"window": 64},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([1.0, 200.0, -2.0, 3.0] * 4)},
    "all": {"window": 33, "softcap": 5.0, "sinks": torch.tensor([1.0, 200.0, -2.0, 3.0] * 4)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("nodes", "drafted"), [(1, 0), (5, 9), (70, 0)])
def test_a_node_attends_to_its_text_and_its_path(options: dict[str, Any], nodes: int, drafted: int) -> None:
    given = scene(lengths=(0, 1, 65), groups=2, heads=3, nodes=nodes, drafted=drafted, size=16, value_size=24)
    options = given.options(**options)
    found = graph_attention(*given.arguments[:3], given.graph, 0.3, **options)
    torch.testing.assert_close(found.double(), naive(given, 0.3, **options), rtol=0, atol=2e-6)


def test_who_sees_nothing_gets_nothing() -> None:
    given = scene(lengths=(0,), nodes=2)
    blind = replace(given.graph, ancestors=torch.zeros_like(given.graph.ancestors))
    assert graph_attention(*given.arguments[:3], blind, 1.0).eq(0).all()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Tensor]]:
    """The kernel in Triton's interpreter, which must be chosen before Triton is imported: in a process of its own."""
    kernel = graph_kernel()
    with strict_interpreter() as call:
        yield lambda *arguments, **options: call(kernel.attend, *arguments, **options)


SHAPES: dict[str, dict[str, Any]] = {
    "one node": {"nodes": 1, "groups": 2, "heads": 3},
    "a few nodes": {"nodes": 5, "heads": 8},
    "a word of nodes": {"nodes": 64},
    "two words of nodes": {"nodes": 70},
    "many nodes and heads": {"nodes": 64, "heads": 3},
    "a level of a draft": {"nodes": 5, "drafted": 66, "heads": 3},
    "a size between powers of two": {"nodes": 5, "heads": 3, "size": 80},
    "a small size": {"nodes": 5, "heads": 3, "size": 8},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernel_gives_what_its_reference_gives(interpreted: Callable[..., Tensor], shape: dict[str, Any]) -> None:
    lengths = LENGTHS if shape["nodes"] < 64 else (0, 65, 300)  # the interpreter is slow
    given = scene(1, **{"groups": 1} | shape, lengths=lengths).to("cpu", torch.float16)
    found = interpreted(*given.arguments, 0.2, splits=3)
    expected = reference(*given.arguments[:3], given.graph, 0.2)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.float16])


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_kernel_knows_windows_caps_and_sinks(
    interpreted: Callable[..., Tensor], options: dict[str, Any], splits: int
) -> None:
    given = scene(2, lengths=(0, 64, 140), groups=1, heads=3, nodes=9, drafted=60)
    options = given.options(**options)
    found = interpreted(*given.arguments, 0.2, splits=splits, **options)
    expected = reference(*given.arguments[:3], given.graph, 0.2, **options)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("splits", [1, 3])
def test_in_the_kernel_too_who_sees_nothing_gets_nothing(interpreted: Callable[..., Tensor], splits: int) -> None:
    given = scene(lengths=(0,), nodes=2)
    blind = (*given.arguments[:4], torch.zeros_like(given.graph.ancestors), *given.arguments[5:])
    assert interpreted(*blind, 1.0, splits=splits).eq(0).all()


def test_the_kernel_takes_any_strides_and_a_full_cache(interpreted: Callable[..., Tensor]) -> None:
    given = scene(3, lengths=(95, 60), nodes=5, heads=2, capacity=100)
    kept = given.key.transpose(1, 2).contiguous().transpose(1, 2)  # slots before heads
    columns = given.value.mT.contiguous().mT  # columns apart
    found = interpreted(given.query.contiguous(), kept, columns, *given.arguments[3:], 0.2, splits=2)
    torch.testing.assert_close(found, reference(*given.arguments[:3], given.graph, 0.2), rtol=0, atol=1e-5)


def test_splits_fill_the_device_and_no_more() -> None:
    if (kernel := graph_kernel()) is None:
        pytest.skip("Triton is not installed")
    assert kernel.split_count(programs=32, capacity=8192, places=264) == 8
    assert kernel.split_count(programs=1000, capacity=8192, places=264) == 1
    assert kernel.split_count(programs=1, capacity=64, places=264) == 1
    assert kernel.split_count(programs=1, capacity=100_000, places=264) <= kernel.MOST_SPLITS


def _qwen2_moe() -> Any:
    """Its layers leave the window to the mask."""
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    return tf.Qwen2MoeConfig(**SMALL, **experts, use_sliding_window=True, sliding_window=7, max_window_layers=1)


FORGETFUL = {"bloom", "falcon", "stablelm"}  # their attention is not looked up, or not given what the model was given
PASSING_ON = [*sorted(FAMILIES.keys() - FORGETFUL), "cohere2", "deepseek_v3", "gpt_oss", "qwen2_moe"]


def model_with(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(MORE_FAMILIES, "qwen2_moe", _qwen2_moe)
    model = target_of(family)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation_internal = attention
    return model


def score_tree(model: Any, text: list[int], tokens: list[int], paths: list[list[int]]) -> Tensor:
    """Logits of a tree's nodes in one graph pass behind the text, with masks that hide nothing."""
    cache = SlotCache()
    model(input_ids=torch.tensor([text]), past_key_values=cache)
    visible = torch.zeros(1, len(tokens), 64, dtype=torch.bool)
    for node, path in enumerate(paths):
        visible[0, node, path] = True
    positions = torch.tensor([[len(text) + len(path) - 1 for path in paths]])
    scratch_positions = torch.nn.functional.pad(positions, (0, 64 - len(tokens)))
    lengths = torch.tensor([len(text)], dtype=torch.int32)
    graph = GraphPass(lengths, ancestor_words(visible), positions, scratch_positions)
    kinds = set(getattr(model.config, "layer_types", None) or [])
    no_mask = torch.zeros(1, 1, 1, 1)
    mask = dict.fromkeys(kinds, no_mask) if len(kinds) > 1 else no_mask
    arguments = {"position_ids": positions, "attention_mask": mask, "past_key_values": cache, "graph_pass": graph}
    return model(input_ids=torch.tensor([tokens]), **arguments).logits[0]


@torch.no_grad()
@pytest.mark.parametrize("family", PASSING_ON)
def test_models_score_every_node_as_its_path(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(7)
    text, tokens = rng.integers(0, VOCAB, 23).tolist(), rng.integers(0, VOCAB, 12).tolist()
    paths: list[list[int]] = []
    for node in range(len(tokens)):
        paths.append([*(paths[int(rng.integers(0, node))] if node else []), node])
    plain = model_with(family, "eager", monkeypatch)
    expected = [plain(torch.tensor([text + [tokens[j] for j in path]])).logits[0, -1] for path in paths]
    found = score_tree(model_with(family, NAME, monkeypatch), text, tokens, paths)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-4)


@torch.no_grad()
def test_layers_that_read_in_chunks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match="Llama4TextAttention reads in chunks"):
        score_tree(model_with("llama4", NAME, monkeypatch), [1, 2, 3], [4], [[0]])


def test_additions_that_only_a_mask_could_hold_are_refused() -> None:
    given = scene()
    with pytest.raises(UnsupportedModelError, match="Linear needs position_bias"):
        attend(torch.nn.Linear(1, 1), *given.arguments[:3], None, graph_pass=given.graph, position_bias=torch.ones(1))


def test_a_compiled_model_takes_it_without_a_break() -> None:
    given = scene(lengths=(3, 9))

    def twice(graph: GraphPass) -> Tensor:
        return 2 * graph_attention(*given.arguments[:3], graph, 0.2, window=4)

    compiled = torch.compile(twice, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(given.graph), twice(given.graph))


# Few: each is compiled, which takes seconds.
ON_CUDA = [
    *((shape, options, torch.bfloat16) for shape in SHAPES for options in ("plain", "all")),
    *(("a level of a draft", options, torch.float16) for options in OPTIONS),
    *((shape, "all", torch.float32) for shape in ("one node", "two words of nodes", "a size between powers of two")),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "options", "dtype"), ON_CUDA)
def test_the_kernel_gives_what_its_reference_gives_on_cuda(shape: str, options: str, dtype: torch.dtype) -> None:
    given = scene(4, **{"groups": 2} | SHAPES[shape], lengths=LENGTHS).to("cuda", dtype)
    kernel, told = graph_kernel(), given.options(**OPTIONS[options])
    assert kernel is not None and kernel.supports(*given.arguments[:3])
    found = graph_attention(*given.arguments[:3], given.graph, 0.2, **told)
    expected = reference(*given.arguments[:3], given.graph, 0.2, **told)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.gpu
def test_one_split_needs_no_second_kernel_on_cuda() -> None:
    given = scene(4, lengths=LENGTHS, nodes=64, heads=3).to("cuda", torch.bfloat16)
    told = given.options(**OPTIONS["all"])
    found = graph_kernel().attend(*given.arguments, 0.2, **told, splits=1)
    expected = reference(*given.arguments[:3], given.graph, 0.2, **told)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


@pytest.mark.gpu
@pytest.mark.parametrize(("nodes", "heads", "size"), [(64, 1, 128), (64, 4, 128), (128, 8, 256), (8, 4, 256)])
def test_long_texts_and_large_heads_on_cuda(nodes: int, heads: int, size: int) -> None:
    shape: dict[str, Any] = {"nodes": nodes, "heads": heads, "size": size, "groups": 4, "capacity": 9000}
    given = scene(5, **shape, lengths=(8192,)).to("cuda", torch.bfloat16)
    expected = reference(*given.arguments[:3], given.graph, size**-0.5)
    found = graph_attention(*given.arguments[:3], given.graph, size**-0.5)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 50])
def test_a_captured_launch_is_right_for_other_lengths_and_trees(window: int | None) -> None:
    shape: dict[str, Any] = {"nodes": 64, "drafted": 20, "heads": 3, "groups": 3}
    scenes = [
        scene(seed, **shape, lengths=lengths).to("cuda", torch.bfloat16)
        for seed, lengths in enumerate([(300, 0), (1, 64), (65, 411), (0, 63)])
    ]
    live = [tensor.clone() for tensor in scenes[0].arguments]

    def launch() -> Tensor:
        return graph_attention(*live[:3], GraphPass(*live[3:]), 0.2, window)

    launch()  # compiles
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = launch()
    for given in scenes[::-1]:
        for buffer, tensor in zip(live, given.arguments, strict=True):
            buffer.copy_(tensor)
        captured.replay()
        expected = reference(*given.arguments[:3], given.graph, 0.2, window)
        torch.testing.assert_close(out, expected, rtol=0, atol=3e-2)
