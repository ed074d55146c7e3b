"""Sampled tokens of many nodes at once, on their device: the rule of `KeyedChooser` with the usual processors.

Every row is processed as `generate` does it, then the best of its scores plus the noise of its position is chosen.
All but the number of top-k is data, so that the choice can be recorded once and replayed for any request; rows of
several requests may each have their own, and that number too, up to MOST_KEPT.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from draftgraph.noise import gumbel_rows

# In the order of `generate`: each sees what the one before it has left.
FIELDS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
MOST_KEPT = 64  # tokens that top-k may keep where it is data
UNIT = 2.0**40  # the highest probability of a row, as an integer


@dataclass(frozen=True)
class Warping:
    """What `sample` can do to scores."""

    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, processors: LogitsProcessorList) -> Warping | None:
        """What these processors do; None if that is anything else, or in another order."""
        kinds = [type(processor) for processor in processors]
        if kinds != [kind for kind in FIELDS if kind in kinds] or any(map(unusual, processors)):
            return None
        return cls(**{FIELDS[type(processor)]: getattr(processor, FIELDS[type(processor)]) for processor in processors})


def unusual(processor: Any) -> bool:
    filter_value = getattr(processor, "filter_value", -torch.inf)
    return bool(filter_value != -torch.inf or getattr(processor, "min_tokens_to_keep", 1) != 1)


def sample(
    logits: Tensor,  # [rows, vocabulary]
    key: Tensor,  # [1] or [rows] int64, of the noise: `KeyedNoise.stream_key`, signed
    positions: Tensor,  # [rows] int64, of the tokens that are chosen
    temperature: Tensor,  # [1] or [rows] float64, as the two below
    top_p: Tensor,  # 1 keeps all
    min_p: Tensor,  # 0 keeps all
    top_k: int | Tensor = 0,  # or [rows] int64
) -> Tensor:
    """The chosen token of every row, whatever the other rows are. # [rows] int64"""
    if logits.is_cuda and (kernel := sampling_kernel()) is not None:
        lowest = lowest_kept(logits, top_k)
        return kernel.sample(logits, key, positions, lowest, temperature, top_p, min_p)  # type: ignore[no-any-return]
    return reference(logits, key, positions, temperature, top_p, min_p, top_k)


def lowest_kept(logits: Tensor, top_k: int | Tensor) -> Tensor:
    """The lowest logit of each row that top-k keeps. # [rows] float32"""
    if isinstance(top_k, Tensor):
        best = torch.topk(logits, min(MOST_KEPT, logits.shape[1])).values
        last = best.gather(1, (top_k - 1).clamp(0, best.shape[1] - 1)[:, None])[:, 0].float()
        return last.where((top_k > 0) & (top_k < logits.shape[1]), -torch.inf)
    if not 0 < top_k < logits.shape[1]:
        return torch.full((len(logits),), -torch.inf, device=logits.device)
    return torch.topk(logits, top_k, sorted=False).values.amin(dim=-1).float()


def reference(
    logits: Tensor,
    key: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    top_k: int | Tensor = 0,
) -> Tensor:
    scale = temperature.float()[:, None]
    scores = logits.float() / scale
    kept = scores >= lowest_kept(logits, top_k)[:, None] / scale
    scores = scores.masked_fill(~kept, -torch.inf)  # also what is no number
    highest = scores.amax(dim=-1, keepdim=True)
    chances = torch.where(scores == highest, 0.0, scores - highest).exp()  # relative to the highest
    removed = (removed_by_top_p(scores, chances, top_p) | (chances < min_p.float()[:, None])) & (highest < torch.inf)
    tokens = torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel_rows(key, positions, tokens)
    return (scores.masked_fill(removed, -torch.inf).double() + noise).argmax(dim=-1)


def removed_by_top_p(scores: Tensor, chances: Tensor, top_p: Tensor) -> Tensor:
    """The lowest scores, as many as together have at most the rest of the probability; of equals the first tokens.

    Sums of integers are the same in any order; transformers rounds them to float32, and so the bound.
    """
    order = scores.argsort(dim=-1, stable=True)
    below = (chances * UNIT).long().gather(1, order).cumsum(dim=-1)
    share = (below.double() / below[:, -1:].double()).float()
    removed = (share <= (1 - top_p).float()[:, None]) & (top_p < 1)[:, None]
    removed[:, -1] = False
    return torch.empty_like(removed).scatter_(1, order, removed)


def perturbed(logits: Tensor, key: Tensor, positions: Tensor, tokens: Tensor, temperature: Tensor) -> Tensor:
    """What a draft ranks in sampled text: logits [rows, tokens] and the noise of each row's position. # float32

    Rows may be those of several texts, as many of each: then there are as many keys and temperatures.
    """
    if logits.is_cuda and (kernel := noise_kernel()) is not None:
        return kernel.perturbed(logits, key, positions, tokens, temperature)  # type: ignore[no-any-return]
    sharing = len(logits) // len(key)
    keys, temperatures = (given.repeat_interleave(sharing) for given in (key, temperature))
    return (logits.double() + temperatures[:, None] * gumbel_rows(keys, positions, tokens)).float()


@cache
def noise_kernel() -> Any:
    """The kernel's module; None where there is no Triton."""
    try:
        from draftgraph.engine import noise_kernel as kernel
    except ImportError:
        return None
    return kernel


@cache
def sampling_kernel() -> Any:
    """The kernel's module; None where there is no Triton."""
    try:
        from draftgraph.engine import sampling_kernel as kernel
    except ImportError:
        return None
    return kernel
