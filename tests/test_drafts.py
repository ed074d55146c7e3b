"""Drafts of other shapes: padded and reduced vocabularies, adapters, quantised modules, switching rotary embeddings."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from families import SMALL, VOCAB, perturbed, target_of

from draftgraph import DraftGraphError, GraphConfig, GraphDecoder, UnsupportedModelError
from draftgraph.cost import FlatCost
from draftgraph.engine.eager import EagerEngine
from draftgraph.engine.paged import PagedEngine
from draftgraph.engine.passes import slots_of
from draftgraph.engine.selfcheck import engine_for
from draftgraph.graph import NO_TOKEN, ROOT, TokenGraph
from draftgraph.proposers.draft_model import DraftVocabulary, ModelProposer

PROMPT = torch.randint(0, VOCAB, (1, 10), generator=torch.Generator().manual_seed(5))
MODES = ("chain", "tree", "graph", "auto")


def same_in_every_mode(target: Any, draft: Any, new_tokens: int = 40, prompt: Any = PROMPT, **arguments: Any) -> float:
    """Asserts that all modes give the tokens of `off`; returns the largest mean accepted length."""
    plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(
        prompt, max_new_tokens=new_tokens, **arguments
    )
    lengths = []
    for mode in MODES:
        config = GraphConfig(mode=mode, cost=FlatCost(0.0))
        result = GraphDecoder(target, draft, config=config).generate(prompt, max_new_tokens=new_tokens, **arguments)
        assert result.sequences.tolist() == plain.sequences.tolist(), mode
        lengths.append(result.stats.mean_accepted_length)
    return max(lengths)


def resized(model: Any, rows: int) -> Any:
    model = copy.deepcopy(model)
    model.resize_token_embeddings(rows)
    return model


@pytest.mark.parametrize(("target_rows", "draft_rows"), [(VOCAB, VOCAB + 8), (VOCAB + 8, VOCAB), (VOCAB, VOCAB - 5)])
def test_vocabularies_padded_to_different_sizes_are_fine(target_rows: int, draft_rows: int) -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.1)
    arguments = {"do_sample": True, "temperature": 1.2, "top_k": 0, "seed": 4}
    assert same_in_every_mode(resized(target, target_rows), resized(draft, draft_rows), **arguments) > 1.5


@pytest.mark.parametrize("place", ["module", "config"])
def test_a_draft_may_write_a_reduced_vocabulary(place: str) -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.1)
    kept = torch.tensor([token for token in range(VOCAB) if token % 4])
    head = torch.nn.Linear(draft.config.hidden_size, len(kept), bias=False)
    head.weight.data = draft.lm_head.weight.data[kept].clone()
    draft.lm_head = head
    if place == "module":
        draft.register_buffer("token_map", kept)
    else:
        draft.config.draftgraph_token_map = kept.tolist()
    assert same_in_every_mode(target, draft) > 1.5
    logits = DraftVocabulary(draft, VOCAB).to_target(torch.zeros(2, len(kept)))
    assert torch.isfinite(logits[0]).nonzero().flatten().tolist() == kept.tolist()


def test_the_draft_is_fed_exactly_what_it_lacks() -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.2)
    decoder = GraphDecoder(target, draft, config=GraphConfig(mode="graph", tau=1, k=4, theta_prob=0.02, theta_sib=0.0))
    seen: list[int] = []

    def draft_knows_a_prefix_of_the_text(step: Any) -> None:
        known = decoder._alone.contexts[1].text
        text = decoder._alone.holder.text  # type: ignore[union-attr]
        assert text[: len(known)] == known
        seen.append(len(text) - len(known))

    decoder.observer = draft_knows_a_prefix_of_the_text
    decoder.generate(PROMPT, max_new_tokens=60, do_sample=True, top_k=0, seed=1)
    assert min(seen) == 1  # the bonus token alone, when the whole path was fed
    assert max(seen) > 1  # merged nodes and leaves too


def states_of(context: Any) -> list[torch.Tensor]:
    """The keys and values of its text, whatever the engine."""
    length = len(context.text)
    if isinstance(context.engine, PagedEngine):
        context.engine.settle()
        slots = torch.from_numpy(slots_of(context.pages, np.arange(length)))
        return [block[:, :, slots] for block in context.engine.cache.blocks.values()]
    return [states[:, :, :length] for layer in context._cache.layers for states in (layer.keys, layer.values)]


@pytest.mark.parametrize("engine", ["eager", "static", None])
def test_draft_keys_after_merges_are_those_of_the_text(engine: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine is not None:
        monkeypatch.setenv("DRAFTGRAPH_ENGINE", engine)
    target = target_of("llama", dtype=torch.float64)
    draft = perturbed(target, 0.2)
    decoder = GraphDecoder(target, draft, config=GraphConfig(mode="graph", tau=1, k=4, theta_prob=0.02, theta_sib=0.0))
    decoder.generate(PROMPT, max_new_tokens=60, do_sample=True, top_k=0, seed=1)
    kept, fresh = decoder._alone.contexts[1], engine_for(draft).open()
    assert isinstance(kept.engine, PagedEngine) == (engine != "eager") and len(kept.text) > 60
    with torch.no_grad():
        fresh.prefill(kept.text)
    for one, recomputed in zip(states_of(kept), states_of(fresh), strict=True):
        assert torch.allclose(one, recomputed)


def test_a_draft_with_broken_weights_costs_acceptance_not_the_answer() -> None:
    target = target_of("llama")
    draft = perturbed(target, 0.1)
    draft.lm_head.weight.data.fill_(torch.nan)
    proposer = ModelProposer(EagerEngine(draft).open(), DraftVocabulary(draft, VOCAB), k=4)
    proposer.begin([1, 2, 3])
    proposing = proposer.propose(TokenGraph(3, GraphConfig()), [ROOT])
    with torch.no_grad(), pytest.raises(StopIteration) as done:
        segment = next(proposing)
        proposing.send(segment.context.engine.run([segment])[0])
    tokens, _ = done.value.value
    assert (tokens == NO_TOKEN).all()


def test_a_target_that_says_nan_is_named_with_a_remedy() -> None:
    target = target_of("llama")
    decoder = GraphDecoder(target)
    target.lm_head.weight.data[3] = torch.nan
    with pytest.raises(DraftGraphError, match=r"logits are not finite.*dtype"):
        decoder.generate(PROMPT, max_new_tokens=4)


@pytest.mark.parametrize("boundary", [16, 30])
def test_longrope_switches_for_the_whole_text(boundary: int) -> None:
    half = SMALL["hidden_size"] // SMALL["num_attention_heads"] // 2
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * half,
        "long_factor": [4.0] * half,
        "original_max_position_embeddings": boundary,
        "factor": 4096 / boundary,
    }
    config = tf.Phi3Config(
        **SMALL | {"original_max_position_embeddings": boundary}, rope_parameters=rope, sliding_window=None
    )
    torch.manual_seed(0)
    target = tf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.mul_(5.0)
    expected = PROMPT.tolist()[0]
    with torch.no_grad():
        while len(expected) < PROMPT.shape[1] + 40:  # without a cache: nothing computed before the switch is kept
            expected.append(int(target(torch.tensor([expected])).logits[0, -1].argmax()))
    plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=40)
    assert plain.sequences[0].tolist() == expected
    assert same_in_every_mode(target, perturbed(target, 0.1)) > 1.2


def test_dynamic_rope_is_decoded_plainly_past_its_window() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    target = tf.AutoModelForCausalLM.from_config(
        tf.LlamaConfig(**SMALL | {"max_position_embeddings": 24}, rope_parameters=rope)
    ).eval()
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.mul_(5.0)
    assert same_in_every_mode(target, perturbed(target, 0.1), new_tokens=40) > 1.0


def test_a_lora_adapter_on_top_works_and_switching_it_is_noticed() -> None:
    from peft import LoraConfig, get_peft_model

    base = target_of("llama")
    model = get_peft_model(copy.deepcopy(base), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)
    expected = model.generate(
        input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=40, do_sample=False
    )
    plain = GraphDecoder(model, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=40)
    assert plain.sequences.tolist() == expected.tolist()
    assert same_in_every_mode(model, perturbed(base, 0.1)) > 1.2
    decoder = GraphDecoder(model, perturbed(base, 0.1))
    adapted = decoder.generate(PROMPT, max_new_tokens=40).sequences
    with model.disable_adapter():
        without = decoder.generate(PROMPT, max_new_tokens=40).sequences
    assert adapted.tolist() == expected.tolist()
    of_base = GraphDecoder(base, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=40).sequences
    assert without.tolist() == of_base.tolist() != adapted.tolist()


def test_prompt_learning_adapters_are_refused() -> None:
    from peft import PromptTuningConfig, TaskType, get_peft_model

    model = get_peft_model(target_of("llama"), PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3))
    with pytest.raises(UnsupportedModelError, match="learned prompts"):
        GraphDecoder(model)


def test_int8_quantised_modules_work() -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    target = target_of("llama")
    draft = perturbed(target, 0.1)
    quantize_(target, Int8WeightOnlyConfig())
    expected = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=40, do_sample=False)
    plain = GraphDecoder(target, config=GraphConfig(mode="off")).generate(PROMPT, max_new_tokens=40)
    assert plain.sequences.tolist() == expected.tolist()
    assert same_in_every_mode(target, draft) > 1.2


def test_a_cached_prefix_is_kept_between_turns() -> None:
    target = target_of("llama")
    decoder = GraphDecoder(target, perturbed(target, 0.1))
    from draftgraph.generation import prepare

    first = prepare(target, PROMPT, max_new_tokens=20)
    for _ in (decoding := decoder.start(first)):
        pass
    longer = torch.tensor([[*decoding.text, 3, 1, 4]])
    fed: list[int] = []
    context = decoder._alone.contexts[0]
    honest = context.prefill
    context.prefill = lambda tokens, *rest: (fed.append(len(tokens)), honest(tokens, *rest))[1]
    again = decoder.start(prepare(target, longer, max_new_tokens=20), reuse_cache=True)
    for _ in again:
        pass
    assert fed[0] <= 4
    alone = GraphDecoder(target, config=GraphConfig(mode="off")).generate(longer, max_new_tokens=20)
    assert again.text == alone.sequences[0].tolist()
    assert np.all(np.array(again.text[:10]) == PROMPT.numpy())
