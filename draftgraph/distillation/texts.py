"""Texts to learn from: a prompt and the target's answer as token ids, packed into batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.graph import Ints

BATCHES_TO_SORT = 64  # a batch holds similar lengths, but an epoch stays shuffled


@dataclass(frozen=True)
class Text:
    tokens: Any  # int32 [length], prompt and answer
    prompt_length: int
    kind: str = ""
    temperature: float = 0.0

    @property
    def answer(self) -> Any:
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True)
class Batch:
    """Texts side by side, padded behind. A position's weight is that of the token it predicts."""

    tokens: Tensor  # [rows, length]
    weights: Tensor  # [rows, length] 0 where nothing is learnt

    def to(self, device: torch.device) -> Batch:
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in (self.tokens, self.weights)))


def batch_of(texts: list[Text], prompt_weight: float) -> Batch:
    longest = max(len(text.tokens) for text in texts)
    tokens = np.zeros((len(texts), longest), dtype=np.int64)
    weights = np.zeros((len(texts), longest), dtype=np.float32)
    for row, text in enumerate(texts):
        end = len(text.tokens)
        tokens[row, :end] = text.tokens
        weights[row, : text.prompt_length - 1] = prompt_weight
        weights[row, text.prompt_length - 1 : end - 1] = 1.0
    return Batch(torch.from_numpy(tokens), torch.from_numpy(weights))


def epoch_of(lengths: Ints, batch_tokens: int, seed: int) -> Iterator[list[int]]:
    """All texts once, in batches of at most so many tokens, padding counted."""
    random = np.random.default_rng(seed)
    order = random.permutation(len(lengths))
    mean = max(float(lengths.mean()), 1.0)
    window = max(1, int(BATCHES_TO_SORT * batch_tokens / mean))
    batches: list[list[int]] = []
    for start in range(0, len(order), window):
        part = order[start : start + window]
        rows: list[int] = []
        for index in part[np.argsort(-lengths[part], kind="stable")].tolist():
            if rows and (len(rows) + 1) * int(lengths[rows[0]]) > batch_tokens:
                batches.append(rows)
                rows = []
            rows.append(index)
        batches.append(rows)
    for place in random.permutation(len(batches)).tolist():
        yield batches[place]


def frequent_tokens(texts: list[Text], size: int, vocabulary: int, always: frozenset[int]) -> Tensor | None:
    """The tokens most frequent in answers, then in prompts, in ascending order; None where that is all of them."""
    if not 0 < size < vocabulary:
        return None
    answers = np.concatenate([text.answer for text in texts])
    prompts = np.concatenate([text.tokens[: text.prompt_length] for text in texts])
    in_answers, in_prompts = (np.bincount(tokens, minlength=vocabulary).astype(float) for tokens in (answers, prompts))
    in_answers[list(always)] = np.inf
    order = np.lexsort((np.arange(vocabulary), -in_prompts, -in_answers))
    return torch.from_numpy(np.sort(order[:size]))
