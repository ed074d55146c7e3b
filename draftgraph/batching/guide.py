"""Answers that conform to a grammar."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftgraph.batching.grammar import check
from draftgraph.graph import Bools, TokenTree


class Guide(LogitsProcessor):
    """Makes tokens that the grammar does not allow impossible.

    Asked along the accepted walk alone, so its state is always that of the true text. An answer may end only where
    the grammar does: `ends` are the tokens that end it.
    """

    def __init__(self, matcher: Any, prompt_length: int, ends: frozenset[int]) -> None:
        self.matcher, self.read, self.ends = matcher, prompt_length, sorted(ends)

    def possible(self, text: list[int], tree: TokenTree) -> Bools:
        """Nodes of a tree behind this text that the grammar allows. Tokens that end an answer stay: whether it may end
        is decided when they are chosen."""
        self._read(text[self.read :])
        kept, children = np.zeros(len(tree), dtype=bool), set(tree.parents.tolist())
        kept[0] = True
        for leaf in (node for node in range(1, len(tree)) if node not in children):
            path = np.flatnonzero(tree.mask[leaf])[1:]
            tokens = tree.tokens[path].tolist()
            ends = tokens[-1] in self.ends
            allowed = self.matcher.validate_tokens(tokens[:-1] if ends else tokens)
            kept[path[: allowed + (ends and allowed == len(tokens) - 1)]] = True
        return kept

    def _read(self, new: list[int]) -> None:
        self.read += len(new)
        self.matcher.consume_tokens(new)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._read(input_ids[0, self.read :].tolist())
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        check(self.matcher)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
        seen = torch.zeros(scores.shape[1], dtype=torch.bool)
        seen[: len(allowed)] = torch.from_numpy(allowed)
        seen[self.ends] = self.matcher.is_accepting()
        return scores.masked_fill(~seen.to(scores.device), -torch.inf)
