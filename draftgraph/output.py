"""What a generation gives back, shaped as `transformers` shapes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftgraph.stats import Stats

if TYPE_CHECKING:
    from draftgraph.decoding import Decoding


@dataclass
class GraphOutput:
    """What `generate` gives back. `sequences` is as `transformers` returns it, the prompt included."""

    sequences: Tensor  # [rows, length], right-padded
    stats: Stats
    finish_reasons: list[str]
    new_token_ids: list[list[int]]
    logprobs: list[list[float]] | None = None  # of the emitted tokens, under the target's raw logits
    scores: tuple[Tensor, ...] | None = None
    logits: tuple[Tensor, ...] | None = None


def gathered(decodings: list[Decoding], prompts: Tensor) -> GraphOutput:
    """Rows as `generate` returns them: prompts as given, then the new tokens, padded to one length."""
    prompts = prompts[None] if prompts.dim() == 1 else prompts
    prompts = prompts.repeat_interleave(len(decodings) // len(prompts), dim=0)
    longest = max(len(decoding.new_tokens) for decoding in decodings)
    sequences = prompts.new_full((len(decodings), prompts.shape[1] + longest), decodings[0].request.pad_id)
    sequences[:, : prompts.shape[1]] = prompts
    for row, decoding in enumerate(decodings):
        new = torch.tensor(decoding.new_tokens)
        sequences[row, prompts.shape[1] : prompts.shape[1] + len(new)] = new
    outputs = [decoding.outputs for decoding in decodings]
    stats = decodings[0].stats
    for decoding in decodings[1:]:
        stats = stats + decoding.stats
    return GraphOutput(
        sequences,
        stats,
        [decoding.finish_reason or "length" for decoding in decodings],
        [decoding.new_tokens for decoding in decodings],
        [kept.logprobs for kept in outputs] if outputs[0].keep_logprobs else None,
        by_step([kept.scores for kept in outputs]) if outputs[0].keep_scores else None,
        by_step([kept.logits for kept in outputs]) if outputs[0].keep_logits else None,
    )


def by_step(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """One tensor [rows, vocabulary] per step, as `generate` has them; rows that ended early repeat their last."""
    longest = max(len(row) for row in rows)
    return tuple(torch.cat([row[min(step, len(row) - 1)] for row in rows]) for step in range(longest))
