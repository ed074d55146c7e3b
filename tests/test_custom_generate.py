"""The way in through `generate`; and the user's modules, which are as they were whatever happened."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from families import perturbed, target_of
from interop import LENGTH, MODES, PROMPT, decode, decoder, generate, pair, plain_text, words
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, LogitsProcessor, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput, WatermarkingConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import draftgraph
from draftgraph import GraphConfig, GraphDecoder, UsageError
from draftgraph.cost import FlatCost
from draftgraph.generation import prepare
from draftgraph.hook import KEPT
from draftgraph.proposers.pooling import Calibration

AttentionInterface.register("of_the_user", sdpa_attention_forward)
AttentionMaskInterface.register("of_the_user", sdpa_mask)

PAD = 23
BATCH = {
    "input_ids": torch.tensor([[PAD, 3, 7, 1, 9, 4], [PAD, PAD, PAD, PAD, 12, 5], [PAD, PAD, 8, 8, 2, 6]]),
    "attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]]),
    "pad_token_id": PAD,
}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 6, "top_p": 0.8, "seed": 3}


def through_generate(mode: str = "graph", input_ids: torch.Tensor = PROMPT, **arguments: Any) -> Any:
    """`target.generate(**inputs, custom_generate=draftgraph.custom_generate, ...)`"""
    hook = {"custom_generate": draftgraph.custom_generate, "draft_model": pair()[1]}
    return generate(input_ids, **hook, graph_config=GraphConfig(mode=mode), **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_custom_generate_gives_the_tokens_of_generate(mode):
    for arguments in ({}, {"repetition_penalty": 1.4, "eos_token_id": plain_text()[7]}, {"max_new_tokens": 1}):
        assert through_generate(mode, **arguments).tolist() == generate(**arguments).tolist()
    assert through_generate(mode, **BATCH).tolist() == generate(**BATCH).tolist()


def test_custom_generate_needs_neither_a_draft_nor_a_configuration():
    assert generate(custom_generate=draftgraph.custom_generate).tolist() == generate().tolist()


class TestKeptDecoder:
    """A model keeps the decoder of its last call: what that has recorded and learnt serves the next."""

    def generate(self, target: Any, draft: Any, **arguments: Any) -> list[int]:
        hook = {"custom_generate": draftgraph.custom_generate, "draft_model": draft, "seed": 1}
        given = {"max_new_tokens": 30, "graph_config": GraphConfig(cost=FlatCost())} | arguments
        return target.generate(PROMPT, **hook, **given)[0].tolist()

    def models(self) -> tuple[Any, Any, Any]:
        target = target_of("llama", seed=3)
        return target, perturbed(target, 0.3), perturbed(target, 0.3, seed=5)

    def test_the_next_call_has_the_same_decoder_and_what_it_has_learnt(self):
        target, draft, _ = self.models()
        expected = target.generate(PROMPT, max_new_tokens=30).tolist()[0]
        assert self.generate(target, draft) == expected
        decoder = vars(target)[KEPT].decoder
        learnt, calibration = decoder.learnt, decoder.learnt.calibrations[False]
        curve = calibration.curves.copy()
        assert (curve != Calibration().curves).any()
        assert self.generate(target, draft) == expected
        assert vars(target)[KEPT].decoder is decoder and decoder.learnt is learnt
        assert decoder.learnt.calibrations[False] is calibration and (calibration.curves != curve).any()
        assert self.generate(target, draft, graph_config=GraphConfig(mode="chain")) == expected
        assert vars(target)[KEPT].decoder is decoder, "a configuration needs no decoder of its own"

    def test_another_draft_has_another_decoder(self):
        target, draft, other = self.models()
        decoders = []
        for one in (draft, other, None, None):
            self.generate(target, one)
            decoders.append(vars(target)[KEPT].decoder)
            assert decoders[-1].draft_model is one
        assert len(set(decoders)) == 3 and decoders[2] is decoders[3]

    def test_a_copy_of_the_model_has_a_decoder_of_its_own(self):
        target, draft, _ = self.models()
        expected = self.generate(target, draft)
        for copied in (copy.deepcopy(target), pickle.loads(pickle.dumps(target)), copy.copy(target)):
            assert self.generate(copied, draft) == expected
            assert vars(copied)[KEPT].decoder is not vars(target)[KEPT].decoder
            assert vars(copied)[KEPT].decoder.target_model is copied
        assert b"draftgraph.hook" not in pickle.dumps(target), "who loads it may not have the package"

    def test_a_model_that_nobody_holds_is_freed_with_its_decoder(self):
        target, draft, _ = self.models()
        self.generate(target, draft)
        left = weakref.ref(target), weakref.ref(vars(target)[KEPT].decoder), weakref.ref(draft)
        del target, draft
        gc.collect()
        assert [one() for one in left] == [None, None, None]


def test_custom_generate_returns_what_generate_returns():
    asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "repetition_penalty": 1.4}
    ours, theirs = through_generate(**asked), generate(**asked)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    torch.testing.assert_close(ours.scores, theirs.scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_custom_generate_samples_like_the_decoder_and_warps_once(mode):
    assert through_generate(mode, **SAMPLING)[0].tolist() == decode("off", **SAMPLING).sequences[0].tolist()
    assert through_generate(mode, **BATCH, **SAMPLING).tolist() == decode("off", **BATCH, **SAMPLING).sequences.tolist()
    several = SAMPLING | {"num_return_sequences": 3}
    assert through_generate(mode, **several).tolist() == decode("off", **several).sequences.tolist()


def test_torch_manual_seed_makes_a_sampled_text_repeatable():
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(through_generate("auto", do_sample=True).tolist())
    assert texts[0] == texts[1] != texts[2]


def test_what_upstream_does_not_hand_over_is_refused_not_ignored():
    with pytest.raises(ValueError, match=r"stop strings.*tokenizer"):
        through_generate(stop_strings=["w5"], tokenizer=words())
    with pytest.raises(UsageError, match="attention_mask"):
        through_generate(attention_mask=torch.tensor([[1, 1, 1, 1, 0]]))
    cache = DynamicCache()
    with torch.no_grad():
        pair()[0](PROMPT[:, :3], past_key_values=cache)
    with pytest.raises(UsageError, match="past_key_values"):
        through_generate(past_key_values=cache)


class Alternates(LogitsProcessor):
    """Forbids the best token at every second call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.scatter(1, scores.argmax(dim=-1, keepdim=True), -torch.inf) if self.calls % 2 else scores


def test_processors_of_a_batch_serve_every_row_on_its_own():
    def allowed(batch_id: int, ids: torch.Tensor) -> list[int]:
        return [batch_id, batch_id + 7, batch_id + 13]

    for processing in (
        lambda: {"logits_processor": LogitsProcessorList([Alternates()]), "max_new_tokens": 9},
        lambda: {"prefix_allowed_tokens_fn": allowed},
        lambda: {"guidance_scale": 1.5, "max_new_tokens": 6},
        lambda: {"watermarking_config": WatermarkingConfig(bias=5.0), "max_new_tokens": 6},
    ):
        expected = generate(**BATCH, **processing()).tolist()
        assert through_generate(**BATCH, **processing()).tolist() == expected
        assert decode("graph", **BATCH, **processing()).sequences.tolist() == expected


def test_samples_of_one_prompt_share_no_state():
    """Guidance keeps a cache of its own: the second sample must not go on in the first one's."""
    arguments = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8, "guidance_scale": 1.5}
    alone = []
    for row in range(2):
        decoding = decoder("graph").start(prepare(pair()[0], PROMPT, **arguments), row, seed=1)
        alone.append([token for tokens in decoding for token in tokens])
    assert decode("graph", **arguments, seed=1).new_token_ids == alone


def test_a_processor_made_for_a_whole_batch_is_refused_by_name():
    arguments = BATCH | {"encoder_repetition_penalty": 0.3}
    with pytest.raises(UsageError, match=r"EncoderRepetitionPenalty.*GraphDecoder"):
        through_generate(**arguments)
    rows = [ids[ids != PAD] for ids in BATCH["input_ids"]]
    alone = [decode("off", ids, encoder_repetition_penalty=0.3).new_token_ids[0] for ids in rows]
    assert decode("graph", **arguments).new_token_ids == alone


def state(model: Any) -> dict[str, Any]:
    """Everything of a model that must not change, in a form that can be compared."""
    modules = dict(model.named_modules())
    return {
        "training": {name: module.training for name, module in modules.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "hooks": {name: [list(hooks) for hooks in hooks_of(module)] for name, module in modules.items()},
        "attention": {
            name: getattr(config_of(module), "_attn_implementation", None) for name, module in modules.items()
        },
        "requires_grad": {name: weight.requires_grad for name, weight in model.named_parameters()},
        "weights": {name: weight.detach().sum().item() for name, weight in model.state_dict().items()},
        "generation_config": model.generation_config.to_dict(),
        "config": model.config.to_dict(),
        "gradients": torch.is_grad_enabled(),
    }


def config_of(module: Any) -> Any:
    return getattr(module, "config", None)


def hooks_of(module: torch.nn.Module) -> list[Any]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._state_dict_hooks]


def lived_in() -> tuple[Any, Any]:
    """A target and a draft in a state of their own: half in training, half frozen, with hooks and other settings."""
    target = target_of("llama", seed=3)
    draft = perturbed(target)
    target.train()
    target.model.layers[0].eval()
    target.model.embed_tokens.requires_grad_(False)
    target.model.norm.register_forward_hook(lambda module, inputs, output: None)
    target.generation_config.update(stop_strings=["w1"], temperature=0.3, eos_token_id=[1, 2])
    target.set_attn_implementation("of_the_user")
    return target, draft


class Breaks(LogitsProcessor):
    def __init__(self, error: BaseException, after: int = 3) -> None:
        self.error, self.left = error, after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            raise self.error
        return scores


def breaking_pass(model: Any, error: BaseException, after: int) -> Any:
    """Makes a later forward pass of the model fail in its midst."""
    passes = iter(range(after + 1))

    def fail(module: Any, inputs: Any, output: Any) -> None:
        if next(passes) == after:
            raise error

    return model.model.layers[1].register_forward_hook(fail)


@pytest.mark.parametrize("mode", MODES)
def test_the_users_modules_are_left_as_they_were(mode):
    target, draft = lived_in()
    before = state(target), state(draft)
    arguments = {"max_new_tokens": 8, "tokenizer": words(), "output_scores": True, "return_dict_in_generate": True}
    decoder = GraphDecoder(target, draft, config=GraphConfig(mode=mode))
    assert (state(target), state(draft)) == before
    decoder.generate(PROMPT, **arguments)
    decoder.generate(PROMPT, do_sample=True, guidance_scale=1.2, **arguments)
    assert (state(target), state(draft)) == before


@pytest.mark.parametrize("error", [ZeroDivisionError("planted"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("where", ["processor", "target", "draft"])
def test_the_users_modules_are_left_as_they_were_after_a_failure(where, error):
    target, draft = lived_in()
    before = state(target), state(draft)
    decoder = GraphDecoder(target, draft, config=GraphConfig(mode="graph"))
    arguments = {
        "max_new_tokens": 12,
        "tokenizer": words(),
        "do_sample": False,
        "eos_token_id": PAD,
        "stop_strings": None,
    }
    expected = decoder.generate(PROMPT, **arguments).new_token_ids
    broken: dict[str, Any] = {}
    hook = None
    if where == "processor":
        broken = {"logits_processor": LogitsProcessorList([Breaks(error)])}
    else:
        hook = breaking_pass(target if where == "target" else draft, error, after=2)
    with pytest.raises(type(error)):
        decoder.generate(PROMPT, **arguments, **broken)
    if hook is not None:
        hook.remove()
    assert (state(target), state(draft)) == before
    assert decoder.generate(PROMPT, **arguments).new_token_ids == expected


def test_a_failure_inside_custom_generate_leaves_the_modules_too():
    target, draft = lived_in()
    before = state(target), state(draft)
    hook = {"custom_generate": draftgraph.custom_generate, "draft_model": draft, "stop_strings": None}
    with pytest.raises(KeyboardInterrupt):
        target.generate(PROMPT, logits_processor=LogitsProcessorList([Breaks(KeyboardInterrupt())]), **hook)
    assert vars(target).pop(KEPT) is not None  # all that is left: the decoder, for the next call
    assert (state(target), state(draft)) == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("mode", MODES)
def test_a_model_in_training_decodes_as_in_evaluation(mode, when):
    """It has dropout: with it, the text would be another every time."""
    target, draft = copy.deepcopy(pair())
    assert target.config.resid_pdrop > 0
    if when == "before":
        target.train()
        draft.train()
    decoder = GraphDecoder(target, draft, config=GraphConfig(mode=mode))
    target.train()
    draft.train()
    assert decoder.generate(PROMPT, max_new_tokens=LENGTH, do_sample=False).new_token_ids == [plain_text()]
    assert all(module.training for model in (target, draft) for module in model.modules())
    target.eval()
    decoder.generate(PROMPT, max_new_tokens=4, do_sample=False)
    assert not any(module.training for module in target.modules())


def test_an_attention_implementation_chosen_later_is_kept():
    target = target_of("llama", seed=3)
    decoder = GraphDecoder(target)
    target.set_attn_implementation("of_the_user")
    decoder.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert target.config._attn_implementation == "of_the_user"


def test_gradients_flow_again_after_decoding():
    target = copy.deepcopy(pair()[0]).train()
    GraphDecoder(target, target).generate(PROMPT, max_new_tokens=4, do_sample=False)
    target(PROMPT, labels=PROMPT).loss.backward()
    assert all(weight.grad is not None for weight in target.parameters())
