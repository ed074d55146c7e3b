"""Grammars that answers must conform to: from the form in which a job carries one to a matcher of llguidance.

Without torch, and a job's grammar is built here alone: the API tries with it what the engine will follow.
"""

from __future__ import annotations

import json
import re
import weakref
from copy import copy
from typing import Any

from draftgraph.errors import UsageError
from draftgraph.extras import needed

LIMITS: dict[
    str, Any
] = {  # of what a grammar may take: a step of one that is allowed by them takes a tenth of a second at most
    "max_items_in_row": 1000,
    "initial_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
}
FIELDS = {"json_schema": "schema", "json_object": "", "regex": "pattern", "choice": "choices", "lark": "grammar"}
GBNF_RULE = re.compile(r"(?m)^\s*[\w-]+\s*::=")  # rules of Lark have one colon
LONGEST_ERROR = 300

vocabularies: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of tokenizers


def matcher_of(wanted: dict[str, Any], vocabulary: Any) -> Any:
    """At the beginning of an answer; raises a UsageError for a grammar that cannot be followed."""
    from llguidance import LLMatcher, LLParserLimits

    grammar = json.dumps({"grammars": parts_of(wanted)})
    matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**LIMITS))
    check(matcher)
    return matcher


def check(matcher: Any) -> None:
    """Raises what has gone wrong with it: that is always the grammar's fault."""
    if matcher.is_error():
        said = matcher.get_error().strip().splitlines()[0][:LONGEST_ERROR]
        said = "no text conforms to it" if said.startswith("NoExtension") else said
        raise UsageError(f"the grammar cannot be followed: {said}")


def parts_of(wanted: dict[str, Any]) -> list[dict[str, Any]]:
    """The grammars of llguidance that a job's grammar is made of, the outermost first.

    A job's is one of {"type": "json_schema", "schema": S}, {"type": "json_object"}, {"type": "regex", "pattern": P},
    {"type": "choice", "choices": [...]} and {"type": "lark", "grammar": TEXT}. The last may be GBNF too, and refer to
    another of these, its "answer", as @answer.
    """
    from llguidance import regex_to_lark

    kind = wanted.get("type")
    if kind not in FIELDS:
        raise UsageError(f"a grammar of type {kind!r} is not known: {', '.join(FIELDS)}")
    given = wanted.get(FIELDS[kind])
    if kind == "json_object":
        return [{"json_schema": {"type": "object"}}]
    if kind == "json_schema" and isinstance(given, dict | bool):
        return [{"json_schema": given}]
    if kind == "regex" and isinstance(given, str):
        return [{"lark_grammar": f"start: /{regex_to_lark(given, '')}/"}]
    if kind == "choice" and isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        # One terminal, because of a rule every alternative is followed by itself.
        return [{"lark_grammar": "start: TEXT\nTEXT: " + " | ".join(map(json.dumps, given))}]
    if kind == "lark" and isinstance(given, str):
        inner = [{"name": "answer"} | part for part in parts_of(wanted["answer"])] if "answer" in wanted else []
        return [{"lark_grammar": lark_of(given)}, *inner]
    raise UsageError(f"the {FIELDS[kind]} of a grammar of type {kind} cannot be {json.dumps(given)[:100]}")


def lark_of(grammar: str) -> str:
    """Of what may be GBNF, the form of llama.cpp and of vLLM."""
    if GBNF_RULE.search(grammar) is None:
        return grammar
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(grammar)
    except Exception as error:  # its own is not the only one that it raises
        raise UsageError(f"the grammar cannot be read: {' '.join(str(error).split())[:LONGEST_ERROR]}") from error


def opaque_tokens(tokenizer: Any) -> dict[str, int]:
    """Added tokens that matchers know by their numbers and never read as text: llguidance takes what stands in angle
    brackets for special too."""
    added = ((str(token), int(id), token.special) for id, token in tokenizer.added_tokens_decoder.items())
    return {text: id for text, id, special in added if special or (text.startswith("<") and text.endswith(">"))}


def vocabulary_of(tokenizer: Any, size: int) -> Any:
    """The tokens that matchers for this tokenizer know; made once, which takes a quarter of a second or more."""
    if tokenizer not in vocabularies:
        vocabularies[tokenizer] = vocabulary_from(**described(tokenizer) | {"n_vocab": max(size, len(tokenizer))})
    return vocabularies[tokenizer]


def described(tokenizer: Any) -> dict[str, Any]:
    """What `vocabulary_from` makes one from, fit for a wire."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError("this model's answers cannot conform to a grammar: that needs a fast tokenizer")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    return {"tokenizer": backend.to_str(), "eos_token": tokenizer.eos_token_id}


def vocabulary_from(**described: Any) -> Any:
    return needed("llguidance", "a grammar needs llguidance", "serve").LLTokenizer(**described)
