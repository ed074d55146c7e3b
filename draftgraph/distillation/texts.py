"""Texts to learn from: a prompt and the target's answer as token ids, packed into batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.distillation.recipe import digest
from draftgraph.errors import UsageError
from draftgraph.graph import Ints

BATCHES_TO_SORT = 64  # a batch holds similar lengths, but an epoch stays shuffled
HELD_OUT = 512  # prompts that are not learnt from, at most; and at most one in ten


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
    """Texts side by side, padded behind, and the positions whose next token is learnt."""

    tokens: Tensor  # [rows, length]
    places: Tensor  # [positions] in the flattened tokens, one text after the other


def padded(texts: list[Text]) -> Tensor:
    """[rows, length]"""
    tokens = np.zeros((len(texts), max(len(text.tokens) for text in texts)), dtype=np.int64)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = text.tokens
    return torch.from_numpy(tokens)


def batch_of(texts: list[Text], places: list[Ints]) -> Batch:
    tokens = padded(texts)
    flat = np.concatenate([row * tokens.shape[1] + one for row, one in enumerate(places)])
    return Batch(tokens, torch.from_numpy(flat))


def learnt_places(text: Text, prompt_share: float) -> Ints:
    """The positions before every token of the answer, and before this share of the prompt's, always the same ones."""
    prompt = np.arange(text.prompt_length - 1)
    drawn = (prompt * 2654435761 + 40503 * len(text.tokens)) % (1 << 32) < prompt_share * (1 << 32)
    return np.concatenate([prompt[drawn], np.arange(text.prompt_length - 1, len(text.tokens) - 1)])


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
    return torch.from_numpy(np.sort(order[: max(size, len(always))]))


def parted(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """What is learnt from, and greedy answers to prompts that are not: every answer to one prompt is on one side."""
    names = [digest(text.tokens[: text.prompt_length].tobytes()) for text in texts]
    prompts = sorted(set(names))
    apart = set(prompts[: max(1, min(HELD_OUT, len(prompts) // 10))])
    learnt = [text for text, name in zip(texts, names, strict=True) if name not in apart]
    kept: dict[str, Text] = {}
    for text, name in sorted(zip(texts, names, strict=True), key=lambda pair: pair[0].temperature):
        if name in apart:
            kept.setdefault(name, text)
    if not learnt:
        raise UsageError("one prompt is too little to learn from: give more prompts")
    return learnt, list(kept.values())


def digest_of(texts: list[Text]) -> str:
    return digest(*(text.tokens.tobytes() + text.prompt_length.to_bytes(4, "little") for text in texts))
