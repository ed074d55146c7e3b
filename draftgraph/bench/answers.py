"""What the target itself answers, generated once and kept: another draft or structure is measured on the same text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from draftgraph.decoder import GraphDecoder
from draftgraph.distillation.sampler import Sampler
from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.selfcheck import plain_logits
from draftgraph.files import cache_dir, replacing
from draftgraph.generation import setting
from draftgraph.noise import KeyedNoise
from draftgraph.notices import Report

LONGEST_PERIOD = 24
REPEATS = 3
FINGERPRINT_TOKENS = 64


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt: the tokens of keyed decoding with this seed."""

    prompt: list[int]
    tokens: list[int]  # a final stop token included
    temperature: float
    seed: int

    @cached_property
    def loops(self) -> bool:
        return loops(self.tokens)


def loops(tokens: list[int]) -> bool:
    """Whether a text ends in a loop: a period of at most 24 tokens, three times or more and over 24 tokens or more.

    >>> loops([5, 9, *[1, 2] * 12]), loops([1, 2] * 11)
    (True, False)
    """
    for period in range(1, LONGEST_PERIOD + 1):
        repeated = max(REPEATS * period, LONGEST_PERIOD)
        end = tokens[-repeated:]
        if len(end) == repeated and end[period:] == end[:-period]:
            return True
    return False


class TargetAnswers:
    """The answers of a decoder's target to lists of prompts."""

    def __init__(self, decoder: GraphDecoder, max_new_tokens: int, seed: int = 0) -> None:
        self.target = decoder.target_model
        self.vocabulary_size = decoder.vocabulary_size
        self.device = decoder.engines.target.device
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        eos = setting("eos_token_id", unwrapped(self.target), {})
        self.stop_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    @cached_property
    def sampler(self) -> Sampler:
        return Sampler(self.target, self.stop_ids)

    def to(self, prompts: list[list[int]], temperature: float, report: Report | None = None) -> list[Answer]:
        """One answer per prompt, from the cache if this target was asked the same before."""
        file = cache_dir() / "answers" / f"{self._key(prompts, temperature)}.json"
        answers = None
        with suppress(OSError, ValueError, TypeError):
            answers = [[int(token) for token in answer] for answer in json.loads(file.read_text())]
        if answers is None or len(answers) != len(prompts):
            noise = self._noise(len(prompts)) if temperature > 0 else None
            answers = self.sampler.continue_texts(
                prompts, self.max_new_tokens, temperature, self.seed, noise=noise, report=report
            )
            with suppress(OSError):  # only speed is lost
                file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(file) as partial:
                    partial.write_text(json.dumps(answers))
        rows = zip(prompts, answers, strict=True)
        return [Answer(prompt, tokens, temperature, self.seed + row) for row, (prompt, tokens) in enumerate(rows)]

    def _noise(self, rows: int) -> Callable[[int, int], Tensor]:
        """The noise of keyed decoding: a draft that shares it can predict sampled tokens."""
        noises = [KeyedNoise(self.seed + row) for row in range(rows)]

        def gumbel(row: int, position: int) -> Tensor:
            noises[row].forget_before(position)
            return noises[row].gumbel(position, self.vocabulary_size, self.device)

        return gumbel

    def _key(self, prompts: list[list[int]], temperature: float) -> str:
        """A digest of the question and of the target's logits: names and dates of files do not identify weights."""
        ids = torch.tensor([prompts[0][:FINGERPRINT_TOKENS]], device=self.device)
        said = plain_logits(self.target, ids)[-1].float().cpu().numpy().tobytes()
        asked = [prompts, temperature, self.max_new_tokens, self.seed, sorted(self.stop_ids)]
        return hashlib.sha256(json.dumps(asked).encode() + said).hexdigest()
