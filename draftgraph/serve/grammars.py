"""From a request to the grammar that its answers must conform to, in the form in which a job carries it."""

from __future__ import annotations

import json
import re
from typing import Any

from draftgraph.batching.grammar import matcher_of
from draftgraph.errors import UsageError
from draftgraph.serve.errors import refusal
from draftgraph.serve.schemas import GenerationRequest

LONGEST_SCHEMA = 64 * 1024  # characters: the time to compile one grows with their square
DEEPEST_SCHEMA = 1000  # levels, with its references followed: at 2000 llguidance overflows the stack
REFERENCE = re.compile(r'"\$ref": ("(?:[^"\\]|\\.)*")')


def grammar_of(request: GenerationRequest) -> dict[str, Any] | None:
    """None where any text will do."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.json_schema is None:
        raise refusal("response_format of type json_schema needs a json_schema", "response_format")
    return {"type": "json_schema", "schema": wanted.json_schema.given}


def check_grammar(grammar: dict[str, Any], tokenizer: Any, vocabulary: int) -> None:
    """Refuses one that cannot be followed, before it takes a place in the queue."""
    text = json.dumps(grammar)
    if (
        len(text) > LONGEST_SCHEMA
        or levels(grammar.get("schema")) * (1 + len(set(REFERENCE.findall(text)))) > DEEPEST_SCHEMA
    ):
        raise refusal("the JSON schema is too large, or its references lead too deep", "response_format")
    try:
        matcher_of(grammar, tokenizer, vocabulary)
    except UsageError as error:
        raise refusal(str(error), "response_format") from error


def levels(value: Any) -> int:
    """Of a JSON value that a body may have: those are not deep."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + max(map(levels, inner), default=0)
