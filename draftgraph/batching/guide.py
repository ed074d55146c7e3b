"""Answers that conform to a grammar."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftgraph.batching.grammar import check


class Guide(LogitsProcessor):
    """Makes tokens that the grammar does not allow impossible.

    Asked along the accepted walk alone, so its state is always that of the true text. An answer may end only where
    the grammar does: `ends` are the tokens that end it.
    """

    def __init__(self, matcher: Any, prompt_length: int, ends: frozenset[int]) -> None:
        self.matcher, self.read, self.ends = matcher, prompt_length, sorted(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.read :].tolist()
        self.read += len(new)
        self.matcher.consume_tokens(new)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        check(self.matcher)
        allowed = np.unpackbits(bits, bitorder="little")[: scores.shape[1]].astype(bool)
        seen = torch.zeros(scores.shape[1], dtype=torch.bool)
        seen[: len(allowed)] = torch.from_numpy(allowed)
        seen[self.ends] = self.matcher.is_accepting()
        return scores.masked_fill(~seen.to(scores.device), -torch.inf)
