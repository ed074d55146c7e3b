"""Answers that conform to a JSON schema: tokens that the grammar does not allow are impossible.

A processor that is asked along the accepted walk alone, so its state is always that of the true text.
"""

from __future__ import annotations

import json
import weakref
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftgraph.errors import UsageError

_vocabularies: weakref.WeakKeyDictionary[Any, Any] = (
    weakref.WeakKeyDictionary()
)  # of tokenizers, as the library has them


class Grammar(LogitsProcessor):
    """Follows one answer, which may end only where the grammar does: `ends` are the tokens that end it."""

    def __init__(self, matcher: Any, prompt_length: int, ends: frozenset[int]) -> None:
        self.matcher, self.read, self.ends = matcher, prompt_length, sorted(ends)

    @classmethod
    def of(
        cls, wanted: dict[str, Any], tokenizer: Any, prompt_length: int, vocabulary: int, ends: frozenset[int]
    ) -> Grammar:
        try:
            from llguidance import LLMatcher
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise UsageError("response_format needs llguidance: pip install 'draftgraph[serve]'") from error
        if wanted.get("type") not in ("json_schema", "json_object"):
            raise UsageError(f"a grammar of type {wanted.get('type')!r} is not known: json_schema or json_object")
        schema = wanted.get("schema") if wanted["type"] == "json_schema" else {"type": "object"}
        if not isinstance(schema, dict | bool):
            raise UsageError("a JSON schema must be an object")
        grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": True})
        if tokenizer not in _vocabularies:
            _vocabularies[tokenizer] = from_tokenizer(tokenizer, n_vocab=max(vocabulary, len(tokenizer)))
        matcher = LLMatcher(_vocabularies[tokenizer], grammar)
        if problem := matcher.get_error():
            raise UsageError(f"the JSON schema cannot be used: {problem.strip().splitlines()[0]}")
        return cls(matcher, prompt_length, ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.read :].tolist()
        self.read += len(new)
        if new and not self.matcher.consume_tokens(new):
            raise UsageError(f"the answer left its grammar: {self.matcher.get_error()}")
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
        seen = torch.zeros(scores.shape[1], dtype=torch.bool)
        seen[: len(allowed)] = torch.from_numpy(allowed)
        seen[self.ends] = self.matcher.is_accepting()
        return scores.masked_fill(~seen.to(scores.device), -torch.inf)
