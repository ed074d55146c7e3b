"""The best few tokens of every row of logits, and their probabilities: what a level of a draft is for."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor


def best_tokens(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Columns and log-probabilities of the k best of each row, best first. # [rows, k] int64, [rows, k] float32"""
    k = min(k, logits.shape[-1])
    if logits.is_cuda and (kernel := best_kernel()) is not None:
        return kernel.best_tokens(logits, k)  # type: ignore[no-any-return]
    return reference(logits, k)


def best_logits(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The same, with the logits themselves."""
    k = min(k, logits.shape[-1])
    if logits.is_cuda and logits.dtype != torch.float64 and (kernel := best_kernel()) is not None:
        return kernel.best_tokens(logits, k, normalised=False)  # type: ignore[no-any-return]
    best = torch.topk(logits, k)
    return best.indices, best.values


def reference(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best = torch.topk(torch.log_softmax(logits.float(), dim=-1), k)
    return best.indices, best.values


@cache
def best_kernel() -> Any:
    """The kernel's module; None where there is no Triton."""
    try:
        from draftgraph.engine import best_kernel as kernel
    except ImportError:
        return None
    return kernel
