"""Compiled passes on a CPU: which models they serve, and that a node's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from engine_tools import ancestry, let_libraries_sum, plain_story, story
from families import SMALL, VOCAB, perturbed, target_of

from draftgraph import GraphConfig, GraphDecoder
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.program import Program, UnknownStructure, program_of
from draftgraph.engine.protocol import Segment
from draftgraph.engine.selfcheck import engine_for
from draftgraph.kernels.packed import PackedTensor
from draftgraph.kernels.threads import team_of
from draftgraph.models.packed_model import compress

SERVED = ("llama", "mistral", "qwen2", "qwen2_window", "qwen3", "gemma2", "gemma3", "granite", "phi3")
OTHERS = ("gpt2", "cohere", "mixtral")
# With heads and layers that packed weights can have.
ROOMY = SMALL | {"hidden_size": 64, "intermediate_size": 96}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**ROOMY),
    "mistral": lambda: tf.MistralConfig(**ROOMY, sliding_window=9),
    "qwen2": lambda: tf.Qwen2Config(**ROOMY),
    "qwen3": lambda: tf.Qwen3Config(**ROOMY, head_dim=16),
    "gemma2": lambda: tf.Gemma2Config(
        **ROOMY, head_dim=16, sliding_window=6, query_pre_attn_scalar=16, final_logit_softcapping=30.0
    ),
    "gemma3": lambda: tf.Gemma3TextConfig(
        **ROOMY, head_dim=16, sliding_window=6, query_pre_attn_scalar=16, sliding_window_pattern=2
    ),
    "olmo2": lambda: tf.Olmo2Config(**ROOMY),
}
FORMATS = ("float32", "bfloat16", "int8", "int4")


@cache
def model_of(family: str, form: str) -> Any:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[family]()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
        probe = torch.randint(0, VOCAB, (1, 64), generator=torch.Generator().manual_seed(0))
        model.get_output_embeddings().weight.mul_(3.0 / model(probe).logits.std())
    return in_form(model, form)


def in_form(model: Any, form: str) -> Any:
    if form.startswith("int"):
        compress(model, int(form[3:]))
        return model
    return model.to(getattr(torch, form))


@pytest.mark.parametrize("family", SERVED)
def test_models_of_known_parts_are_compiled(family: str) -> None:
    assert PagedEngine(target_of(family)).compiled


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_keep_their_modules(family: str) -> None:
    assert not PagedEngine(target_of(family)).compiled


@pytest.mark.parametrize("family", FAMILIES)
def test_a_compiled_pass_says_what_plain_passes_say(family: str) -> None:
    model = model_of(family, "float32")
    if family == "olmo2":  # it norms queries as a whole, not by heads
        assert program_of(model) is None
        return
    engine = PagedEngine(model)
    assert engine.compiled
    for found, expected in zip(story(engine.open(), model), plain_story(model), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_weight_without_a_place_is_not_overlooked() -> None:
    model = target_of("llama")
    model.model.layers[1].self_attn.extra = torch.nn.Linear(32, 32)
    with pytest.raises(UnknownStructure):
        Program(model)
    model = target_of("llama")
    model.model.layers[1].self_attn.register_parameter("sinks", torch.nn.Parameter(torch.zeros(4)))
    with pytest.raises(UnknownStructure):
        Program(model)


def test_hooks_and_replaced_layers_are_called() -> None:
    model, calls = target_of("llama"), []
    decoder = GraphDecoder(model, config=GraphConfig(mode="off"))
    assert decoder.engines.target.compiled
    expected = decoder.generate([[1, 2, 3]], max_new_tokens=6).sequences.tolist()
    hook = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    assert decoder.generate([[1, 2, 3]], max_new_tokens=6).sequences.tolist() == expected
    assert calls and not decoder.engines.target.compiled
    hook.remove()
    assert decoder.generate([[1, 2, 3]], max_new_tokens=6).sequences.tolist() == expected
    assert decoder.engines.target.compiled


def test_changed_weights_are_used() -> None:
    model = target_of("llama")
    decoder = GraphDecoder(model, config=GraphConfig(mode="off"))
    decoder.generate([[1, 2, 3]], max_new_tokens=8)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-2.0)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).contiguous())
    fresh = GraphDecoder(model, config=GraphConfig(mode="off")).generate([[1, 2, 3]], max_new_tokens=8)
    assert decoder.generate([[1, 2, 3]], max_new_tokens=8).sequences.tolist() == fresh.sequences.tolist()


# Bits


def path_logits(engine: PagedEngine, text: list[int], path: list[int]) -> torch.Tensor:
    """Of every node of a path behind a text, token by token, as plain decoding computes them."""
    context, found = engine.open(), []
    context.prefill(text)
    for token in path:
        found.append(engine.run([Segment.of_text(context, [token], scored=True)])[0].logits)
        context.commit([0], [token])
    return torch.cat(found)


def random_tree(nodes: int, seed: int) -> tuple[Any, Any, Any, Any]:
    random = np.random.default_rng(seed)
    parents = np.array([-1, *(int(random.integers(max(0, node - 6), node)) for node in range(1, nodes))])
    return parents, random.integers(0, VOCAB, nodes), *ancestry(parents)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "olmo2"])
def test_a_nodes_logits_have_the_same_bits_in_every_pass(family: str, form: str) -> None:
    engine = PagedEngine(model_of(family, form))
    assert engine.compiled
    text = np.random.default_rng(5).integers(0, VOCAB, 37).tolist()
    for nodes in (1, 2, 3, 8, 17, 33, 64):
        _, tokens, depths, visible = random_tree(nodes, nodes)
        context = engine.open()
        context.prefill(text, chunk=1 + nodes % 7)  # prompts in any pieces
        tree = engine.run([Segment(context, tokens, depths, visible)])[0].logits
        for node in {0, nodes // 2, nodes - 1}:
            path = np.flatnonzero(visible[node])
            assert torch.equal(tree[path], path_logits(engine, text, tokens[path].tolist())), (nodes, node)


@pytest.mark.parametrize("form", FORMATS)
def test_a_nodes_logits_have_the_same_bits_beside_any_texts(form: str) -> None:
    engine = PagedEngine(model_of("llama", form))
    texts = [np.random.default_rng(seed).integers(0, VOCAB, 3 + 5 * seed % 60).tolist() for seed in range(64)]
    expected = [path_logits(engine, text, [7, 3])[-1] for text in texts]
    for count in (1, 5, 16, 64):
        contexts = [engine.open() for _ in range(count)]
        for context, text in zip(contexts, texts, strict=False):
            context.prefill(text)
        found = engine.run([Segment.of_text(context, [7, 3], scored=True) for context in contexts])
        assert all(torch.equal(one.logits[-1], other) for one, other in zip(found, expected, strict=False))
        for context in contexts:
            context.close()


@pytest.mark.parametrize("form", FORMATS)
def test_a_prefix_from_the_cache_has_the_bits_of_one_computed_now(form: str) -> None:
    engine = PagedEngine(model_of("llama", form))
    text = np.random.default_rng(9).integers(0, VOCAB, 3 * PAGE + 5).tolist()
    first = engine.open("tenant")
    first.prefill(text)
    first.close()
    second = engine.open("tenant")
    known = second.begin_with(text, 1)
    assert known == 3 * PAGE
    second.prefill(text[known:])
    found = engine.run([Segment.of_text(second, [4], scored=True)])[0].logits
    assert torch.equal(found, path_logits(PagedEngine(model_of("llama", form)), text, [4]))


@pytest.mark.parametrize("form", FORMATS)
def test_the_number_of_threads_changes_no_bit(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for threads in (1, 2, 3):
        engine = PagedEngine(model_of("gemma2", form))
        assert engine._program is not None
        monkeypatch.setattr(engine._program, "_team", team_of(threads))
        context, (_, tokens, depths, visible) = engine.open(), random_tree(21, 3)
        context.prefill(list(range(20)))
        found.append(engine.run([Segment(context, tokens, depths, visible)])[0].logits)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_passes_in_another_order_of_sums_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits' test can fail: modules add up in whatever order a library likes."""
    let_libraries_sum(monkeypatch)
    engine, text = PagedEngine(model_of("llama", "bfloat16")), list(range(20))
    _, tokens, depths, visible = random_tree(33, 1)
    context, path = engine.open(), np.flatnonzero(visible[-1])
    with Loan(engine.model):
        context.prefill(text)
        tree = engine.run([Segment(context, tokens, depths, visible)])[0].logits
        assert not torch.equal(tree[path], path_logits(engine, text, tokens[path].tolist()))


# The promise


PROMISED = (
    GraphConfig(mode="chain"),
    GraphConfig(mode="tree", k=8, theta_prob=0.0, theta_sib=0.0, max_nodes=24),
    GraphConfig(mode="graph", k=8, tau=1, theta_prob=0.02, theta_sib=0.05),
    GraphConfig(),
)
STYLES: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.2},
    {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "top_k": 0, "seed": 7},
)


@pytest.mark.parametrize("form", FORMATS[1:])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
def test_every_mode_gives_the_tokens_of_plain_decoding_in_few_bits(family: str, form: str) -> None:
    target = model_of(family, form)
    assert engine_for(target).compiled
    draft = in_form(perturbed(model_of(family, "float32"), 0.2), form)
    prompts = torch.randint(0, VOCAB, (3, 23), generator=torch.Generator().manual_seed(2))
    for style in STYLES:
        given: dict[str, Any] = {"max_new_tokens": 40, **style}
        plain = GraphDecoder(target, config=GraphConfig(mode="off"))
        expected = [plain.generate(row[None], **given).new_token_ids[0] for row in prompts]
        for config in PROMISED:
            decoder = GraphDecoder(target, draft, config=config)
            found = [decoder.generate(row[None], **given) for row in prompts]
            assert [one.new_token_ids[0] for one in found] == expected, config
            assert sum(one.stats.mean_accepted_length for one in found) > 3.2, config


def test_compressed_models_are_as_small_as_they_say() -> None:
    model = model_of("llama", "int4")
    held = [weight for weight in model.parameters() if isinstance(weight, PackedTensor)]
    assert len(held) == 3 * 7 + 2
    assert sum(weight.blocks.numel() for weight in held) < 0.17 * sum(4 * weight.numel() for weight in held)
