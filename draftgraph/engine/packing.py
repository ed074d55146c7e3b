"""Copies of weights in the layout that oneDNN computes in: there, up to a dozen rows take hardly longer than one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

SHARE = 0.25  # of the memory that is free: what copies of the weights of one shape may take
ROWS = 8  # that the layout is made for; it serves others as well


@dataclass(frozen=True)
class Copy:
    packed: Tensor
    place: int
    total: float  # of all numbers: tells a weight that was changed in place

    @classmethod
    def of(cls, weight: Tensor) -> Copy:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        return cls(packed, weight.data_ptr(), total(weight))

    def is_of(self, weight: Tensor) -> bool:
        return self.place == weight.data_ptr() and self.total == total(weight)


_copies = WeakTensorKeyDictionary()


def packed(rows: Tensor, weight: Tensor) -> Tensor:
    """The product with a weight that is copied when it is first asked for."""
    copy = _copies.get(weight)
    if copy is None:
        copy = _copies[weight] = Copy.of(weight)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, copy.packed, None, "none", [], "")
    return product


def forget(weights: Iterable[Tensor]) -> None:
    for weight in weights:
        _copies.pop(weight, None)


@torch.no_grad()
def forget_changed(weights: Iterable[Tensor]) -> None:
    """Weights may have been trained or merged since they were copied."""
    forget([weight for weight in weights if (copy := _copies.get(weight)) is not None and not copy.is_of(weight)])


def total(weight: Tensor) -> float:
    return float(weight.detach().sum())


def is_possible(weights: list[Tensor]) -> bool:
    return has_onednn() and sum(weight.numel() * weight.element_size() for weight in weights) <= SHARE * free_memory()


@cache
def has_onednn() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        copy = torch.ops.mkldnn._reorder_linear_weight(torch.ones(32, 32), ROWS)
        product = torch.ops.mkldnn._linear_pointwise(torch.ones(2, 32), copy, None, "none", [], "")
    except (AttributeError, RuntimeError):
        return False
    return bool((product == 32).all())


def free_memory() -> float:
    """In bytes, or half of all where the system does not tell; 0 where it tells nothing."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return 0.5 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0.0
