"""Every field of `GenerationConfig` is honoured as `generate` honours it, or refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from interop import PROMPT, decode, decoder, first_after, generate, pair, plain_text, words
from transformers import GenerationConfig
from transformers.generation import (
    CompileConfig,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkingConfig,
)
from transformers.generation.logits_process import TopHLogitsWarper

import draftgraph.generation
from draftgraph import GraphConfig, GraphDecoder, UsageError, custom_generate
from draftgraph.generation import HONOURED, REFUSED, WITHOUT_EFFECT
from draftgraph.noise import KeyedNoise

MODES = ("off", "graph", "auto")
DRAFTING = ("graph", "auto")


def fields() -> set[str]:
    """Those of the installed version."""
    return {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}


def middle(text: list[int]) -> int:
    """A token that first stands in the middle of the text: as eos it ends the text there."""
    return text[first_after(text, 5)]


# Field -> arguments that set it, given the tokens of plain decoding; each changes those tokens.
CHANGING: dict[str, Any] = {
    "max_length": lambda text: {"max_length": PROMPT.shape[1] + 7, "max_new_tokens": None},
    "max_new_tokens": lambda text: {"max_new_tokens": 7},
    "max_time": lambda text: {"max_time": 1e-9},
    "stop_strings": lambda text: {"stop_strings": [f"w{middle(text)}"], "tokenizer": words()},
    "eos_token_id": lambda text: {"eos_token_id": middle(text)},
    "forced_eos_token_id": lambda text: {"forced_eos_token_id": next(id for id in range(24) if id != text[-1])},
    "exponential_decay_length_penalty": lambda text: {
        "exponential_decay_length_penalty": (1, 3.0),
        "eos_token_id": 23 if text[-1] != 23 else 22,
    },
    "repetition_penalty": lambda text: {"repetition_penalty": 1.8},
    "encoder_repetition_penalty": lambda text: {"encoder_repetition_penalty": 0.2},
    "no_repeat_ngram_size": lambda text: {"no_repeat_ngram_size": 1, "max_new_tokens": 12},
    "encoder_no_repeat_ngram_size": lambda text: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda text: {"bad_words_ids": [[text[2]], [text[4], text[5]]]},
    "suppress_tokens": lambda text: {"suppress_tokens": [text[3]]},
    "begin_suppress_tokens": lambda text: {"begin_suppress_tokens": [text[0]]},
    "sequence_bias": lambda text: {"sequence_bias": [[[text[1]], -30.0], [[text[0], text[2]], 30.0]]},
    "guidance_scale": lambda text: {"guidance_scale": 2.5},
    "watermarking_config": lambda text: {"watermarking_config": WatermarkingConfig(bias=6.0)},
}
# These change the tokens only together with another field, which comes second.
COMPANIONS: dict[str, Any] = {
    "min_length": lambda text: ({"min_length": PROMPT.shape[1] + 12}, {"eos_token_id": middle(text)}),
    "min_new_tokens": lambda text: ({"min_new_tokens": 12}, {"eos_token_id": middle(text)}),
}
# Tokens stay; what else must be seen is in the test of that name.
OUTPUTS: dict[str, dict[str, Any]] = {
    "output_scores": {"output_scores": True, "return_dict_in_generate": True},
    "output_logits": {"output_logits": True, "return_dict_in_generate": True},
    "return_dict_in_generate": {"return_dict_in_generate": True},
    "renormalize_logits": {"renormalize_logits": True, "output_scores": True, "return_dict_in_generate": True},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "use_cache": {"use_cache": False},
    "pad_token_id": {"pad_token_id": 0},
}
SAMPLING: dict[str, Any] = {
    "do_sample": None,
    "temperature": TemperatureLogitsWarper(0.5),
    "top_k": TopKLogitsWarper(2),
    "top_p": TopPLogitsWarper(0.5),
    "min_p": MinPLogitsWarper(0.3),
    "top_h": TopHLogitsWarper(0.3),
    "typical_p": TypicalLogitsWarper(0.4),
    "epsilon_cutoff": EpsilonLogitsWarper(0.1),
    "eta_cutoff": EtaLogitsWarper(0.3),
}
SAMPLING_VALUES = {"do_sample": True, "temperature": 0.5, "top_k": 2, "top_p": 0.5, "min_p": 0.3, "top_h": 0.3}
SAMPLING_VALUES |= {"typical_p": 0.4, "epsilon_cutoff": 0.1, "eta_cutoff": 0.3}
ELSEWHERE = {"forced_bos_token_id", "remove_invalid_values", "num_return_sequences"}  # tests of their own below

IGNORED: dict[str, Any] = {
    "bos_token_id": 2,
    "decoder_start_token_id": 1,
    "early_stopping": True,
    "length_penalty": 3.0,
    "num_assistant_tokens": 2,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "max_matching_ngram_size": 5,
    "compile_config": CompileConfig(),
    "disable_compile": True,
}
REFUSED_VALUES: dict[str, Any] = {
    "num_beams": 3,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["a constraint"],
    "force_words_ids": [[1]],
    "penalty_alpha": 0.6,
    "low_memory": True,
    "dola_layers": "high",
    "prompt_lookup_num_tokens": 3,
    "assistant_early_exit": 1,
    "speculation_type": "mtp",
    "use_mtp": True,
    "is_assistant": True,
    "token_healing": True,
    "cache_implementation": "static",
    "cache_config": {"backend": "quanto"},
    "max_cache_len": 64,
    "continuous_batching_config": {"block_size": 4},
    "output_attentions": True,
    "output_hidden_states": True,
}


def test_every_field_is_either_honoured_or_without_effect_or_refused():
    places = [HONOURED, WITHOUT_EFFECT, REFUSED.keys()]
    assert {name: sum(name in place for place in places) for name in fields()} == dict.fromkeys(fields(), 1)


def test_every_field_is_tried_in_this_file():
    assert CHANGING.keys() | COMPANIONS.keys() | OUTPUTS.keys() | SAMPLING.keys() | ELSEWHERE == HONOURED
    assert SAMPLING.keys() == SAMPLING_VALUES.keys()
    assert IGNORED.keys() == WITHOUT_EFFECT
    assert REFUSED_VALUES.keys() == REFUSED.keys()


@pytest.mark.parametrize("field", CHANGING)
def test_an_honoured_field_gives_the_tokens_of_generate(field):
    arguments = CHANGING[field](plain_text())
    expected = generate(**arguments)[0].tolist()
    assert expected != PROMPT[0].tolist() + plain_text(), "this value changes nothing: try another"
    for mode in MODES:
        assert decode(mode, **arguments).sequences[0].tolist() == expected, mode


@pytest.mark.parametrize("field", COMPANIONS)
def test_an_honoured_field_with_its_companion_gives_the_tokens_of_generate(field):
    arguments, companion = COMPANIONS[field](plain_text())
    expected = generate(**arguments, **companion)[0].tolist()
    assert expected != generate(**companion)[0].tolist()
    for mode in MODES:
        assert decode(mode, **arguments, **companion).sequences[0].tolist() == expected, mode


@pytest.mark.parametrize("field", OUTPUTS)
def test_a_field_about_outputs_leaves_the_tokens(field):
    for mode in MODES:
        assert decode(mode, **OUTPUTS[field]).new_token_ids == [plain_text()], mode


def test_scores_are_renormalized():
    asked = {"output_scores": True, "return_dict_in_generate": True}
    for mode in MODES:
        scores = torch.cat(decode(mode, **asked, renormalize_logits=True).scores)
        torch.testing.assert_close(scores.exp().sum(dim=-1), torch.ones(len(scores)))
        assert not torch.allclose(torch.cat(decode(mode, **asked).scores), scores)


def test_the_prompt_is_read_in_chunks_of_the_size_asked_for():
    target, draft = pair()
    read: list[int] = []
    with target.register_forward_pre_hook(
        lambda _, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    ):
        GraphDecoder(target, draft, config=GraphConfig(mode="off")).generate(
            torch.cat([PROMPT, PROMPT], dim=1), prefill_chunk_size=4, max_new_tokens=1, do_sample=False
        )
    assert read[-4:] == [4, 4, 1, 1]


def test_rows_that_end_early_are_filled_with_the_pad_token():
    rows = torch.cat([PROMPT, PROMPT.flip(1)])
    eos = middle(plain_text())
    expected = generate(rows, eos_token_id=eos, pad_token_id=21)
    assert expected[0, -1] == 21, "the first row should end first"
    for mode in MODES:
        assert decode(mode, rows, eos_token_id=eos, pad_token_id=21).sequences.tolist() == expected.tolist()


def test_forced_bos_token_id_forces_the_first_token_behind_a_single_one():
    expected = generate(PROMPT[:, :1], forced_bos_token_id=19)
    assert expected[0, 1] == 19 != generate(PROMPT[:, :1])[0, 1]
    for mode in MODES:
        assert decode(mode, PROMPT[:, :1], forced_bos_token_id=19).sequences.tolist() == expected.tolist()


def test_remove_invalid_values_patches_what_would_else_be_refused():
    target, draft = copy.deepcopy(pair())
    planted = [GraphDecoder(target, draft, config=GraphConfig(mode=mode)) for mode in MODES]
    with torch.no_grad():
        target.get_output_embeddings().weight[plain_text()[3]] = torch.nan
    arguments = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 12, "do_sample": False}
    expected = target.generate(PROMPT, **arguments, remove_invalid_values=True).tolist()
    for nan_decoder in planted:
        assert nan_decoder.generate(PROMPT, **arguments, remove_invalid_values=True).sequences.tolist() == expected
        with pytest.raises(draftgraph.DraftGraphError, match="not finite"):
            nan_decoder.generate(PROMPT, **arguments)


def sampled_by_hand(warper: Any, seed: int, length: int) -> list[int]:
    """One forward pass per token, upstream's own warper, noise of the token's position."""
    ids, noise = PROMPT, KeyedNoise(seed)
    while ids.shape[1] < PROMPT.shape[1] + length:
        with torch.no_grad():
            scores = pair()[0](ids).logits[:, -1].float()
        scores = warper(ids, scores) if warper else scores
        best = (scores[0].double() + noise.gumbel(ids.shape[1], scores.shape[1], scores.device)).argmax()
        ids = torch.cat([ids, best.reshape(1, 1)], dim=1)
    return ids[0, PROMPT.shape[1] :].tolist()


@pytest.mark.parametrize("field", SAMPLING)
def test_a_sampling_field_is_upstreams_and_the_same_in_every_mode(field):
    arguments = {"do_sample": True, "max_new_tokens": 16, field: SAMPLING_VALUES[field]}
    texts = {seed: sampled_by_hand(SAMPLING[field], seed, 16) for seed in range(3)}
    unchanged = [plain_text()[:16]] * 3 if field == "do_sample" else [sampled_by_hand(None, s, 16) for s in range(3)]
    assert list(texts.values()) != unchanged, "this value changes nothing: try another"
    for mode in MODES:
        assert {seed: decode(mode, **arguments, seed=seed).new_token_ids[0] for seed in texts} == texts, mode


def test_num_return_sequences_gives_every_sample_its_own_text():
    outputs = [decode(mode, do_sample=True, num_return_sequences=4, seed=5) for mode in MODES]
    for output in outputs:
        assert output.new_token_ids == outputs[0].new_token_ids
    assert len({tuple(row) for row in outputs[0].new_token_ids}) == 4
    assert outputs[0].new_token_ids[0] == decode("off", do_sample=True, seed=5).new_token_ids[0]


@pytest.mark.parametrize("field", IGNORED)
def test_a_field_without_effect_has_none_here_and_none_in_generate(field):
    arguments = {field: IGNORED[field]}
    assert generate(**arguments)[0, PROMPT.shape[1] :].tolist() == plain_text()
    for mode in DRAFTING:
        assert decode(mode, **arguments).new_token_ids == [plain_text()]


@pytest.mark.parametrize("field", REFUSED_VALUES)
def test_a_refused_field_is_named_wherever_it_stands(field, monkeypatch):
    value = REFUSED_VALUES[field]
    with pytest.raises(UsageError, match=rf"^{field}=.* cannot be used with draftgraph: \w"):
        decode("graph", **{field: value})
    config = GenerationConfig()
    setattr(config, field, value)
    with pytest.raises(UsageError, match=f"^{field}="):
        decode("graph", generation_config=config)
    monkeypatch.setattr(pair()[0].generation_config, field, value)
    with pytest.raises(UsageError, match=f"^{field}="):
        decode("graph")


@pytest.mark.parametrize("field", ["num_beams", "cache_implementation", "use_mtp", "output_attentions"])
def test_a_refused_field_is_named_through_custom_generate(field):
    with pytest.raises(UsageError, match=f"^{field}="):
        generate(custom_generate=custom_generate, **{field: REFUSED_VALUES[field]})


def test_a_field_that_a_newer_version_adds_is_refused_until_it_is_known(monkeypatch):
    monkeypatch.setattr(draftgraph.generation, "HONOURED", HONOURED - {"top_h"})
    with pytest.raises(UsageError, match=r"^top_h=0\.3 .* not known to draftgraph"):
        decode("auto", do_sample=True, top_h=0.3)


@pytest.mark.parametrize(("name", "value"), [("chat_format", "chatml"), ("cache_implementation", "hybrid")])
def test_what_generate_ignores_in_a_models_own_file_is_ignored_here(name, value, monkeypatch):
    monkeypatch.setattr(pair()[0].generation_config, name, value, raising=False)
    assert decode("graph").new_token_ids == [plain_text()]


@pytest.mark.parametrize("field", ["num_beams", "cache_implementation"])
def test_a_keyword_takes_back_what_the_model_asks_for(field, monkeypatch):
    monkeypatch.setattr(pair()[0].generation_config, field, REFUSED_VALUES[field])
    default = 1 if field == "num_beams" else None
    assert decode("graph", **{field: default}).new_token_ids == [plain_text()]


@pytest.mark.parametrize("field", ["eos_token_id", "repetition_penalty", "max_new_tokens", "stop_strings"])
@pytest.mark.parametrize("place", ["the model's", "given"])
def test_values_of_a_generation_config_are_used_as_generate_uses_them(field, place, monkeypatch):
    arguments = CHANGING[field](plain_text()) | {"max_new_tokens": 9}
    tokenizer = {"tokenizer": arguments.pop("tokenizer")} if "tokenizer" in arguments else {}
    if field == "eos_token_id":
        arguments[field] = [arguments[field], 99]
    if place == "given":
        monkeypatch.setattr(pair()[0].generation_config, field, 2)  # must not be looked at
        tokenizer["generation_config"] = GenerationConfig(**arguments)
    else:
        for name, value in arguments.items():
            monkeypatch.setattr(pair()[0].generation_config, name, value)
    target = pair()[0]
    expected = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **tokenizer)[0].tolist()
    for mode in MODES:
        assert decoder(mode).generate(PROMPT, **tokenizer).sequences[0].tolist() == expected
    assert target.generation_config.stop_strings in (None, 2, arguments.get("stop_strings"))


def test_sampling_arguments_of_the_model_are_used_and_keywords_come_first(monkeypatch):
    given = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 12}
    for name, value in given.items():
        monkeypatch.setattr(pair()[0].generation_config, name, value)
    for mode in MODES:
        sampled = decoder(mode).generate(PROMPT, seed=1).new_token_ids[0]
        assert sampled == sampled_by_hand(TemperatureLogitsWarper(0.5), 1, 12)
        sampled = decoder(mode).generate(PROMPT, seed=1, temperature=1.5, top_k=3).new_token_ids[0]
        both = LogitsProcessorList([TemperatureLogitsWarper(1.5), TopKLogitsWarper(3)])
        assert sampled == sampled_by_hand(both, 1, 12)
        assert decoder(mode).generate(PROMPT, do_sample=False).new_token_ids[0] == plain_text()[:12]


MODEL_INPUTS = ["pixel_values", "token_type_ids", "inputs_embeds", "position_ids", "past_key_values", "assistant_model"]


@pytest.mark.parametrize("name", [*MODEL_INPUTS, "no_such_argument"])
def test_other_inputs_of_a_model_are_refused_by_name(name):
    with pytest.raises(UsageError, match=name):
        decode("graph", **{name: torch.zeros_like(PROMPT)})


@pytest.mark.parametrize("name", ["token_type_ids", "inputs_embeds"])
def test_other_inputs_of_a_model_are_refused_by_name_through_custom_generate(name):
    value = torch.zeros(1, 5, 32) if name == "inputs_embeds" else torch.zeros_like(PROMPT)
    ids = None if name == "inputs_embeds" else PROMPT
    with pytest.raises(UsageError, match=name):
        pair()[0].generate(ids, **{name: value}, custom_generate=custom_generate, max_new_tokens=2)


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_new_tokens": 0},
        {"max_new_tokens": -3},
        {"max_new_tokens": None, "max_length": PROMPT.shape[1]},
        {"do_sample": True, "temperature": -1.0},
        {"do_sample": True, "top_p": -0.5},
        {"do_sample": True, "top_k": -1},
        {"repetition_penalty": -0.5},
        {"num_return_sequences": 2},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused_in_one_line_that_names_it(arguments):
    name = "penalty" if "repetition_penalty" in arguments else [*arguments][-1]
    with pytest.raises(UsageError, match=name) as refusal:
        decode("graph", **arguments)
    assert len(str(refusal.value).splitlines()) == 1
