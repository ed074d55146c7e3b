"""Grammars that answers must conform to: from the form in which a job carries one to a matcher of llguidance.

Without torch, and a job's grammar is built here alone: the API checks with it what the engine will follow.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

from draftgraph.errors import UsageError

vocabularies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of tokenizers
FIELDS = {"json_schema": "schema", "json_object": "", "regex": "pattern", "choice": "choices", "lark": "grammar"}


def llguidance_grammar(wanted: dict[str, Any]) -> str:
    """Of the grammar in a job: {"type": "json_schema", "schema": S}, {"type": "json_object"},
    {"type": "regex", "pattern": P}, {"type": "choice", "choices": [...]} or {"type": "lark", "grammar": TEXT}."""
    try:
        from llguidance import LLMatcher
    except ImportError as error:
        raise UsageError("a grammar needs llguidance: pip install 'draftgraph[serve]'") from error
    kind = wanted.get("type")
    if kind not in FIELDS:
        raise UsageError(f"a grammar of type {kind!r} is not known: {', '.join(FIELDS)}")
    given = wanted.get(FIELDS[kind])
    if kind == "json_object":
        kind, given = "json_schema", {"type": "object"}
    if kind == "json_schema" and isinstance(given, dict | bool):
        return LLMatcher.grammar_from_json_schema(json.dumps(given))
    if kind == "regex" and isinstance(given, str):
        return LLMatcher.grammar_from_regex(given)
    if kind == "lark" and isinstance(given, str):
        return LLMatcher.grammar_from_lark(given)
    if kind == "choice" and isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, given)))
    raise UsageError(f"the {FIELDS[kind]} of a grammar of type {kind} cannot be {json.dumps(given)[:100]}")


def matcher_of(wanted: dict[str, Any], tokenizer: Any, vocabulary: int) -> Any:
    """At the beginning of an answer; raises a UsageError where none can conform."""
    grammar = llguidance_grammar(wanted)
    from llguidance import LLMatcher
    from llguidance.hf import from_tokenizer

    if tokenizer not in vocabularies:
        vocabularies[tokenizer] = from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)))
    matcher = LLMatcher(vocabularies[tokenizer], grammar, log_level=0)
    check(matcher)
    return matcher


def check(matcher: Any) -> None:
    """Raises what has gone wrong with it: that is always the grammar's fault, or the text's."""
    if matcher.is_error():
        raise UsageError(f"the grammar cannot be followed: {matcher.get_error().strip().splitlines()[0]}")
