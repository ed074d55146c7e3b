"""Rows of a batch are decoded one by one: what was given for all of them, made fit for one."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import LogitsProcessorList, PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation.logits_process import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from draftgraph import private
from draftgraph.errors import UsageError
from draftgraph.fields import setting
from draftgraph.generation import Request

OF_ALL_PROMPTS = (EncoderNoRepeatNGramLogitsProcessor, EncoderRepetitionPenaltyLogitsProcessor)
LISTS = {"logits_processor": LogitsProcessorList, "stopping_criteria": StoppingCriteriaList}


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
