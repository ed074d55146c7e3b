"""How often a student says what the target said, and what that is worth."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftgraph.distillation.faults import naming_batch_tokens
from draftgraph.distillation.texts import Text, epoch_of, padded
from draftgraph.engine.borrowing import evaluating

CHAIN = 8
SCORED_TOKENS = 16384  # in one batch


@dataclass(frozen=True)
class Scores:
    """Of the target's greedy answers to prompts that were not learnt from, over the full vocabulary."""

    agreement: float  # share of tokens that are the student's best
    tokens_per_pass: float  # of a chain of eight, the target's own token included
    texts: int

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


def score(student: Any, texts: list[Text], batch_tokens: int = SCORED_TOKENS) -> Scores:
    """Exact for chains: as long as a draft agrees, it goes on from the target's own text."""
    with naming_batch_tokens(batch_tokens):
        hits = hits_of(student, texts, min(batch_tokens, SCORED_TOKENS))
    steps = sum(passes(row) for row in hits)
    tokens = sum(map(len, hits))
    return Scores(sum(int(row.sum()) for row in hits) / max(tokens, 1), tokens / max(steps, 1), len(texts))


def hits_of(student: Any, texts: list[Text], batch_tokens: int = SCORED_TOKENS) -> list[NDArray[np.bool_]]:
    """For every token of every answer, whether the student's best token is the target's."""
    device = student.get_input_embeddings().weight.device
    token_map = getattr(student, "token_map", None)
    lengths = np.array([len(text.tokens) for text in texts])
    hits: list[NDArray[np.bool_]] = [np.zeros(0, dtype=bool) for _ in texts]
    head = student.get_output_embeddings()
    chosen: list[torch.Tensor] = []

    def best(_: Any, __: Any, logits: torch.Tensor) -> torch.Tensor:
        chosen.append(logits.argmax(dim=-1))
        return logits[:, :1]

    hook = head.register_forward_hook(best)
    try:
        with torch.no_grad(), evaluating(student):
            for rows in epoch_of(lengths, batch_tokens, 0):
                tokens = padded([texts[row] for row in rows]).to(device)
                with mixed_precision(student):
                    student(input_ids=tokens, use_cache=False)
                said = chosen.pop()
                said = said if token_map is None else token_map[said]
                agrees = (said[:, :-1] == tokens[:, 1:]).cpu().numpy()
                for row, agree in zip(rows, agrees, strict=True):
                    hits[row] = agree[texts[row].prompt_length - 1 : lengths[row] - 1]
    finally:
        hook.remove()
    return hits


def mixed_precision(student: Any) -> AbstractContextManager[None]:
    """Own weights in float32 behind an embedding in half precision need it; a GPU is faster with it."""
    borrowed = student.get_input_embeddings().weight
    half = borrowed.dtype in (torch.bfloat16, torch.float16)
    return torch.autocast(borrowed.device.type, torch.bfloat16, enabled=half or borrowed.is_cuda)


def passes(hits: NDArray[np.bool_], chain: int = CHAIN) -> int:
    """Target passes for an answer: each takes the drafted tokens up to the first miss, and one more.

    >>> passes(np.array([True, True, False, True]))
    2
    """
    count = at = 0
    while at < len(hits):
        ahead = hits[at : at + chain]
        at += (len(ahead) if ahead.all() else int(np.argmin(ahead))) + 1
        count += 1
    return count
