"""Fields of requests that nothing is done about: which are accepted all the same, and why others are refused.

A field that would change the answer is refused by name, so that nobody takes an answer for what it is not.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Refused:
    instead: str
    harmless: tuple[Any, ...] = ()  # values that ask for nothing, besides null, false and what is empty


TOOLS, ONE_BEAM = "use tools", "one answer is decoded at a time: ask for n answers"
TEXT_ONLY = "this server reads and writes text only"
STATELESS = "no answers are kept here: send the whole conversation"
GRAMMARS = "write a grammar in Lark, as guided_grammar"
OWN_TOOLS = "this server runs no tools of its own"

REFUSED = {
    # of OpenAI's chats
    "audio": Refused(TEXT_ONLY),
    "function_call": Refused(TOOLS, ("none",)),
    "functions": Refused(TOOLS),
    "modalities": Refused(TEXT_ONLY, (["text"],)),
    "moderation": Refused("nothing is moderated here"),
    "verbosity": Refused("say in a message how long the answer is to be", ("medium",)),
    "web_search_options": Refused(OWN_TOOLS),
    # of OpenAI's responses
    "background": Refused(STATELESS),
    "context_management": Refused(STATELESS),
    "conversation": Refused(STATELESS),
    "image": Refused(TEXT_ONLY),
    "previous_response_id": Refused(STATELESS),
    "prompt": Refused("no prompts are kept here: send the text as input"),
    "truncation": Refused("shorten the conversation, or use truncate_prompt_tokens", ("disabled",)),
    # of vLLM
    "add_special_tokens": Refused("the chat template writes them"),
    "chat_template": Refused("the model's own template is used"),
    "disable_additional_properties": Refused(GRAMMARS),
    "disable_any_whitespace": Refused(GRAMMARS),
    "guided_whitespace_pattern": Refused(GRAMMARS),
    "structural_tag": Refused(GRAMMARS),
    "whitespace_pattern": Refused(GRAMMARS),
    "continuous_usage_stats": Refused("usage comes with the last event"),
    "documents": Refused("give them in chat_template_kwargs, for a template that reads them"),
    "early_stopping": Refused(ONE_BEAM),
    "include_reasoning": Refused("it cannot be left out", (True,)),
    "kv_transfer_params": Refused("keys and values stay on this server"),
    "length_penalty": Refused(ONE_BEAM, (1,)),
    "logits_processors": Refused("use logit_bias, bad_words or allowed_token_ids"),
    "mm_processor_kwargs": Refused(TEXT_ONLY),
    "prompt_logprobs": Refused("use /v1/completions with echo and logprobs"),
    "return_tokens_as_token_ids": Refused("use return_token_ids"),
    "truncation_side": Refused("the last tokens are kept", ("left",)),
    "use_beam_search": Refused(ONE_BEAM),
    "vllm_xargs": Refused("this server has no such extensions"),
}


def refuse_unknown(given: dict[str, Any], known: Collection[str]) -> None:
    """Raises what pydantic makes an error of, for the first field that cannot be accepted."""
    for name, value in given.items():
        if name in known or name in IGNORED or value is None:
            continue
        if name not in REFUSED:
            raise unacceptable("unknown_parameter", name, f"there is no such field{hint(name, known)}")
        if not asks_for_nothing(value, REFUSED[name].harmless):
            raise unacceptable("unsupported_parameter", name, f"not supported: {REFUSED[name].instead}")


def unacceptable(kind: LiteralString, name: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, "{message}", {"message": message, "field": name[:LONGEST_NAME]})


def asks_for_nothing(value: Any, harmless: tuple[Any, ...]) -> bool:
    """0 may ask for something: for log-probabilities without alternatives, for one."""
    return value is False or value in ([], {}, "") or any(value == one for one in harmless)


def hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name[:LONGEST_NAME], known, n=2)
    return f": did you mean {' or '.join(near)}?" if near else ""
