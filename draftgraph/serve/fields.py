"""Fields of requests that nothing is done about: which are accepted all the same, and why others are refused.

A field that would change the answer is refused by name, so that nobody takes an answer for what it is not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import Any, LiteralString

from pydantic_core import PydanticCustomError

LONGEST_NAME = 64  # that is repeated in an error

# They say who asks, for what, or how fast: the answer does not depend on them.
IGNORED = frozenset(
    [
        "disable_fallback",  # of grammars, as the next: llguidance follows them all
        "guided_decoding_backend",
        "include_obfuscation",  # of a stream's options: padding against eavesdroppers
        "max_tool_calls",  # of tools that a server runs: there are none
        "metadata",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "session_id",
        "spaces_between_special_tokens",  # fast tokenizers have one way to write them
        "store",
        "stream_interval",
        "user",
    ]
)


OWN_TOOLS = "this server runs no tools of its own"
STATELESS = "no answers are kept here: send the whole conversation"
REASONS = {
    "use tools": ("functions", "function_call"),
    "this server reads and writes text only": (
        *("audio", "image", "media_io_kwargs", "mm_processor_kwargs", "modalities"),
    ),
    OWN_TOOLS: ("web_search_options",),
    STATELESS: ("background", "context_management", "conversation", "previous_response_id"),
    "no prompts are kept here: send the text as input": ("prompt",),
    "nothing is moderated here": ("moderation",),
    "say in a message how long the answer is to be": ("verbosity",),
    "shorten the conversation, or use truncate_prompt_tokens": ("truncation",),
    "the last tokens are kept": ("truncation_side",),
    "ask for n answers: each is decoded by itself": ("best_of", "early_stopping", "length_penalty", "use_beam_search"),
    "use logit_bias, bad_words or allowed_token_ids": ("logits_processors",),
    "use /v1/completions with echo and logprobs": ("prompt_logprobs",),
    "use top_logprobs": ("logprob_token_ids",),
    "use return_token_ids": ("return_prompt_text", "return_token_offsets", "return_tokens_as_token_ids"),
    "usage comes with the last event": ("continuous_usage_stats",),
    "write a grammar in Lark, as guided_grammar": (
        *("disable_additional_properties", "disable_any_whitespace", "guided_whitespace_pattern"),
        *("structural_tag", "whitespace_pattern"),
    ),
    "the chat template writes them": ("add_special_tokens",),
    "the model's own template is used": ("chat_template",),
    "give them in chat_template_kwargs, for a template that reads them": ("documents",),
    "reasoning is neither cut nor left out": ("include_reasoning", "thinking_token_budget"),
    "this server has no such extension": (
        *("ec_transfer_params", "kv_transfer_params", "repetition_detection", "vllm_xargs", "watermarking"),
    ),
}
REFUSED = {name: reason for reason, names in REASONS.items() for name in names}
# Values that ask for nothing, where that is not false; null and what is empty never do.
HARMLESS: dict[str, Any] = {
    "best_of": 1,
    "function_call": "none",
    "include_reasoning": True,
    "length_penalty": 1,
    "modalities": ["text"],
    "truncation": "disabled",
    "truncation_side": "left",
    "verbosity": "medium",
}


def refuse_unknown(given: dict[str, Any], known: Collection[str]) -> None:
    """Raises what pydantic makes an error of, for the first field that cannot be accepted."""
    for name, value in given.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in REFUSED:
            raise unacceptable("unknown_parameter", name, f"there is no such field{hint(name, known)}")
        if not asks_for_nothing(name, value):
            raise unacceptable("unsupported_parameter", name, f"not supported: {REFUSED[name]}")


def unacceptable(kind: LiteralString, name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message, "field": name[:LONGEST_NAME]})


def asks_for_nothing(name: str, value: Any) -> bool:
    """0 is not false: it may ask for log-probabilities without alternatives, for one."""
    default = HARMLESS.get(name, False)
    return value in ([], {}, "") or (value == default and isinstance(value, bool) == isinstance(default, bool))


def hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name[:LONGEST_NAME], known, n=2)
    return f": did you mean {' or '.join(near)}?" if near else ""
