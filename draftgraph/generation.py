"""Between `transformers` conventions and the decoder: every GenerationConfig field is honoured or refused by name.

`generate` itself prepares a request (defaults, processors, stop conditions, lengths) and hands it over through its
`custom_generate` hook, so a field means here what it means there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.logits_process import InfNanRemoveLogitsProcessor

from draftgraph import private
from draftgraph.engine.borrowing import unwrapped
from draftgraph.errors import UsageError
from draftgraph.fields import HONOURED, OTHER_METHODS, REFUSED, UNSET_BY_GENERATE, WITHOUT_EFFECT, setting

# What `generate` adds to every request by itself.
PASSED_ALONG = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"))
PREPARING = RLock()  # stop strings are taken out of a model's own configuration meanwhile


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
