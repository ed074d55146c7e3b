"""Between `transformers` conventions and the decoder: every GenerationConfig field is honoured or refused by name.

`generate` itself prepares a request (defaults, processors, stop conditions, lengths) and hands it over through its
`custom_generate` hook, so a field means here what it means there. Rows of a batch are decoded as requests of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import UsageError

HONOURED = frozenset(
    [
        "max_length",
        "max_new_tokens",
        "min_length",
        "min_new_tokens",
        "max_time",
        "stop_strings",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "top_h",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "repetition_penalty",
        "encoder_repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "renormalize_logits",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
        "sequence_bias",
        "guidance_scale",
        "watermarking_config",
        "num_return_sequences",
        "output_scores",
        "output_logits",
        "return_dict_in_generate",
        "pad_token_id",
        "eos_token_id",
        "prefill_chunk_size",
        "use_cache",
    ]
)
# With a prompt, and without beams or an assistant, these change nothing, here as in `generate`.
WITHOUT_EFFECT = frozenset(
    [
        "bos_token_id",
        "decoder_start_token_id",
        "early_stopping",
        "length_penalty",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "assistant_ensemble_weight",
        "assistant_lookbehind",
        "target_lookbehind",
        "max_matching_ngram_size",
        "compile_config",
        "disable_compile",
    ]
)
REFUSED = {
    "num_beams": "draftgraph decodes one beam",
    "num_beam_groups": "draftgraph decodes one beam",
    "diversity_penalty": "draftgraph decodes one beam",
    "constraints": "draftgraph decodes one beam",
    "force_words_ids": "draftgraph decodes one beam",
    "penalty_alpha": "contrastive search is another method",
    "low_memory": "contrastive search is another method",
    "dola_layers": "DoLa is another method",
    "prompt_lookup_num_tokens": 'mode="auto" copies from the text by itself',
    "assistant_early_exit": "pass a draft model instead",
    "speculation_type": "draftgraph has its own drafting: see GraphConfig",
    "use_mtp": 'draftgraph has its own drafting: load the target with draft="mtp"',
    "is_assistant": "draftgraph decodes a target, not an assistant",
    "token_healing": "heal the prompt with target.heal_tokens before generating",
    "cache_implementation": "draftgraph keeps its own cache",
    "cache_config": "draftgraph keeps its own cache",
    "max_cache_len": "draftgraph keeps its own cache",
    "continuous_batching_config": "draftgraph keeps its own cache",
    "output_attentions": "a token graph has no attention matrix of the text",
    "output_hidden_states": "only logits and scores are kept: output_logits, output_scores",
}
# Arguments of `generate` that are not fields, and that would silently be something else here.
OTHER_METHODS = frozenset(
    ["assistant_model", "assistant_tokenizer", "custom_generate", "inputs_embeds", "position_ids", "past_key_values"]
)
UNSET_BY_GENERATE = ("cache_implementation", "hybrid")  # stands in the files of older models
OF_ALL_PROMPTS = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)
LISTS = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}
# What `generate` adds to every request by itself.
PASSED_ALONG = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"))
PREPARING = RLock()  # stop strings are taken out of a model's own configuration meanwhile


def setting(name: str, model: Any, arguments: dict[str, Any]) -> Any:
    """A field as `generate` finds it: a keyword, else the given configuration's, else the model's own."""
    if name in arguments:
        return arguments[name]
    configs = (arguments.get("generation_config"), model.generation_config)
    values = (getattr(config, name, None) for config in configs)
    return next((value for value in values if value is not None), None)


@dataclass(frozen=True)
class Request:
    """A prompt, ready to be decoded as `generate` would decode it."""

    input_ids: Tensor  # [rows, length], rows repeated for num_return_sequences
    attention_mask: Tensor | None
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig

    @property
    def samples(self) -> bool:
        return bool(self.config.do_sample)

    @property
    def temperature(self) -> float:
        return float(self.config.temperature or 1.0) if self.samples else 1.0

    @property
    def max_length(self) -> int:
        """The longest text, prompt and padding included."""
        limits = [criterion.max_length for criterion in self.criteria if isinstance(criterion, MaxLengthCriteria)]
        return min(limits, default=int(self.config.max_length))

    @property
    def eos_ids(self) -> frozenset[int]:
        return private.eos_ids(self.config)

    @property
    def pad_id(self) -> int:
        return private.pad_id(self.config)

    @property
    def may_be_invalid(self) -> bool:
        """Whether the user asked for NaN logits to be patched instead of refused."""
        return any(isinstance(processor, InfNanRemoveLogitsProcessor) for processor in self.processors)


def capture(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    **model_kwargs: Any,
) -> Request:
    """Stands in for a decoding method of `generate`: takes what was prepared and decodes nothing."""
    extra = [name for name, value in model_kwargs.items() if name not in PASSED_ALONG and not is_absent(value)]
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        extra.append("past_key_values")
    if extra:
        raise UsageError(f"{extra[0]} cannot be used with draftgraph: pass input_ids and attention_mask only")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise UsageError("attention_mask hides more than padding on the left: pad with tokenizer.padding_side='left'")
    request = Request(input_ids, mask, logits_processor, stopping_criteria, generation_config)
    refuse_past_window(model, request)
    return request


def prepare(target: Any, input_ids: Tensor, tokenizer: Any = None, **arguments: Any) -> Request:
    """Lets `generate` prepare one prompt [1, length]: its defaults, processors and stop conditions."""
    model = unwrapped(target)
    refuse_fields(model, arguments)
    with PREPARING, own_stop_strings(model, arguments, tokenizer) as arguments:
        mask = torch.ones_like(input_ids)
        try:
            return model.generate(input_ids, attention_mask=mask, custom_generate=capture, **arguments)  # type: ignore[no-any-return]
        except UsageError:
            raise
        except ValueError as error:  # a value out of range, or an argument that the model does not have
            raise UsageError(str(error).strip().splitlines()[0]) from error


def is_absent(value: Any) -> bool:
    """`generate` hands models for pictures an empty dictionary where there are none."""
    return value is None or (isinstance(value, dict) and not value)


def refuse_fields(model: Any, arguments: dict[str, Any]) -> None:
    """Refuses, by name, what would silently be something else here."""
    for name in sorted(OTHER_METHODS & arguments.keys()):
        if arguments[name] is not None:
            raise UsageError(f"{name} cannot be used with draftgraph: give GraphDecoder token ids and a draft model")
    defaults = private.generation_defaults()
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")} - {"transformers_version"}
    for name in sorted((fields | REFUSED.keys()) - HONOURED - WITHOUT_EFFECT):
        value = setting(name, model, arguments)
        is_default = value is None or value is False or value == defaults.get(name)
        if not is_default and (name, value) != UNSET_BY_GENERATE:
            reason = REFUSED.get(name, "this field is not known to draftgraph")
            raise UsageError(f"{name}={value!r} cannot be used with draftgraph: {reason}")
    new_tokens = arguments.get("max_new_tokens")
    if new_tokens is not None and new_tokens < 1:
        raise UsageError(f"max_new_tokens must be at least 1, not {new_tokens}")


def refuse_past_window(model: Any, request: Request) -> None:
    """A text cannot grow past the positions that the model knows."""
    window = context_window(model)
    padding = 0 if request.attention_mask is None else int((request.attention_mask == 0).sum(dim=-1).min())
    prompt = request.input_ids.shape[1] - padding
    longest = request.max_length - padding
    if window is None or longest <= window:
        return
    if prompt >= window:
        raise UsageError(
            f"the prompt has {prompt} tokens, the model's context window holds {window}: shorten the prompt"
        )
    raise UsageError(
        f"{prompt} prompt tokens and {longest - prompt} new ones pass the model's context window of {window}: "
        f"ask for at most {window - prompt} new tokens"
    )


def context_window(model: Any) -> int | None:
    config = unwrapped(model).config.get_text_config(decoder=True)
    window = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if not isinstance(window, int):
        return None
    return int(window * rope.get("factor", 1)) if rope.get("rope_type") == "dynamic" else window


@contextmanager
def own_stop_strings(model: Any, arguments: dict[str, Any], tokenizer: Any) -> Iterator[dict[str, Any]]:
    """Stop strings as a criterion of ours: `generate` passes no tokenizer through its hook."""
    given = arguments.get("generation_config")
    configs = [config for config in (given, model.generation_config) if config is not None]
    originals = [config.stop_strings for config in configs]
    strings = setting("stop_strings", model, arguments)
    arguments = {name: value for name, value in arguments.items() if name != "stop_strings"}
    if strings:
        if tokenizer is None:
            raise UsageError("stop_strings need the tokenizer: pass tokenizer=... to generate")
        criterion = StopStringCriteria(tokenizer, strings)
        arguments["stopping_criteria"] = StoppingCriteriaList([*(arguments.get("stopping_criteria") or []), criterion])
    try:
        for config in configs:
            config.stop_strings = None
        yield arguments
    finally:
        for config, original in zip(configs, originals, strict=True):
            config.stop_strings = original


def unpadded_rows(input_ids: Any, attention_mask: Tensor | None, pad: int | None, eos: Any) -> list[Tensor]:
    """The rows of a left-padded batch without their padding, each [1, length]."""
    try:
        ids = torch.as_tensor(input_ids)
    except (TypeError, ValueError) as error:
        raise UsageError(f"input_ids must be rows of one length, padded on the left: {error}") from error
    if ids.numel() == 0:
        raise UsageError("the prompt is empty: give at least one token")
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.is_floating_point():
        raise UsageError(f"input_ids must be whole numbers of shape [batch, length], not {list(ids.shape)} {ids.dtype}")
    mask = inferred_mask(ids, pad, eos) if attention_mask is None else torch.as_tensor(attention_mask)
    if mask.numel() != ids.numel():
        raise UsageError(
            f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}: make them the same"
        )
    mask = mask.to(ids.device).bool().reshape(ids.shape)
    if not bool(mask[:, -1].all()):
        raise UsageError("input_ids are padded on the right: pad on the left (tokenizer.padding_side='left')")
    return [row[seen][None] for row, seen in zip(ids, mask, strict=True)]


def inferred_mask(ids: Tensor, pad: int | None, eos: int | list[int] | None) -> Tensor:
    """As `generate` infers it: padding is the pad token, unless that also ends a text."""
    ends = eos if isinstance(eos, list) else [eos]
    if pad is None or pad in ends:
        return torch.ones_like(ids)
    mask: Tensor = ids != pad
    if len(ids) == 1:
        mask[:, -1] = True  # a prompt alone needs no padding on the right: that is its text
    return mask


def stop_ids_of(model: Any) -> frozenset[int]:
    """The tokens at which the model's own generation stops."""
    eos = setting("eos_token_id", unwrapped(model), {})
    return frozenset([] if eos is None else eos if isinstance(eos, list) else [eos])


def row_arguments(model: Any, arguments: dict[str, Any], row: int, rows: int, padding: int = 0) -> dict[str, Any]:
    """The arguments of `generate` for one row of a batch, whose padding is left out."""
    if rows == 1:
        return arguments
    given = dict(arguments)
    for name in ("max_length", "min_length"):  # count the padding
        if padding and (length := setting(name, model, arguments)) is not None:
            given[name] = length - padding
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if given.get(name) is not None:
            given[name] = given[name][row : row + 1]
    for name, kind in LISTS.items():
        if given.get(name):
            given[name] = kind(own_copy(item, model) for item in given[name])
    if (allowed := given.get("prefix_allowed_tokens_fn")) is not None:
        first = row * (setting("num_return_sequences", model, arguments) or 1)
        given["prefix_allowed_tokens_fn"] = lambda batch_id, ids: allowed(first + batch_id, ids)
    return given


def apart(request: Request, row: int, model: Any) -> Request:
    """A request whose processors and stop conditions serve one row only, and keep no state of another."""
    if len(request.input_ids) == 1:
        return request
    processors = LogitsProcessorList(own_processor(item, row, request, model) for item in request.processors)
    criteria = StoppingCriteriaList(own_copy(item, model) for item in request.criteria)
    return replace(request, processors=processors, criteria=criteria)


def own_processor(processor: Any, row: int, request: Request, model: Any) -> Any:
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        allowed = private.allowed_tokens_function(processor)
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row, ids), 1)
    if isinstance(processor, OF_ALL_PROMPTS) and len(request.input_ids) != request.config.num_return_sequences:
        name = type(processor).__name__
        raise UsageError(f"{name} was made for a whole batch: use GraphDecoder, or one prompt at a time")
    return own_copy(processor, model)


def own_copy(item: Any, model: Any) -> Any:
    """A copy with a state of its own; models and tokenizers that it holds are shared."""
    held = [model, *(value for value in vars(item).values() if isinstance(value, nn.Module | PreTrainedTokenizerBase))]
    try:
        return copy.deepcopy(item, {id(one): one for one in held})
    except Exception as error:
        name = type(item).__name__
        raise UsageError(f"{name} cannot be copied for every row ({error}): decode one prompt at a time") from error
