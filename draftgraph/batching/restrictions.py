"""Answers from a part of the vocabulary, without some words, and not too short."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftgraph.batching.job import Job
from draftgraph.errors import UsageError


class Restrictions(LogitsProcessor):
    """Makes tokens impossible: those that are not allowed, the last of a bad word, an end before `min_tokens`.

    It comes after a grammar: where nothing but an end is left, an answer ends before `min_tokens`.
    """

    def __init__(self, job: Job, ends: frozenset[int]) -> None:
        self.prompt_length, self.least = len(job.tokens), job.min_tokens
        self.ends = torch.tensor(sorted(ends), dtype=torch.long)
        self.allowed = None if job.allowed_token_ids is None else torch.tensor(sorted(set(job.allowed_token_ids)))
        self.words: dict[tuple[int, ...], list[int]] = {}  # their last tokens, by what comes before
        for *before, last in job.bad_words:
            self.words.setdefault(tuple(before), []).append(last)
        self.lengths = sorted(set(map(len, self.words)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        length, device = input_ids.shape[1], scores.device
        found = scores
        if self.allowed is not None:
            allowed = self.allowed.to(device)
            found = torch.full_like(scores, -torch.inf).index_copy_(1, allowed, scores[:, allowed])
        if forbidden := self._forbidden(input_ids[0, self.prompt_length :]):
            found = found.index_fill(1, torch.tensor(forbidden, device=device), -torch.inf)
        if not is_possible(found):
            raise UsageError("allowed_token_ids and bad_words leave no token to go on with: allow more")
        if length - self.prompt_length >= self.least:
            return found
        held_back = found.index_fill(1, self.ends.to(device), -torch.inf)
        return held_back if is_possible(held_back) else found

    def _forbidden(self, answer: Tensor) -> list[int]:
        """The last tokens of the bad words whose other tokens are the last of the answer."""
        if not self.words:
            return []
        text = answer[-max(1, self.lengths[-1]) :].tolist()
        ends = [tuple(text[len(text) - length :]) for length in self.lengths if length <= len(text)]
        return [token for end in ends for token in self.words.get(end, ())]


def is_possible(scores: Tensor) -> bool:
    return bool((scores > -torch.inf).any())
