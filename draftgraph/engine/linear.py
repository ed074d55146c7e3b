"""Products of few rows on a CPU. BLAS libraries are made for one row or for many: turned around, a few rows are often
read several times as fast. Which way is best is measured for every shape, on the model's own weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Way = Callable[[Tensor, Tensor], Tensor]  # rows [rows, in], weight [out, in] -> [rows, out]

WIDTHS = (1, 2, 4, 8, 16)  # rows; in between, as the next
SMALLEST = 1 << 16  # numbers of a weight: smaller ones are not worth choosing for
SAMPLE_BYTES = 64 << 20  # of weights of one shape, read in turn: more than a processor's cache holds
ROUNDS = 3
GAIN = 1.1  # what another way must be better by


def direct(rows: Tensor, weight: Tensor) -> Tensor:
    return linear(rows, weight)


def turned(rows: Tensor, weight: Tensor) -> Tensor:
    return torch.mm(weight, rows.t()).t().contiguous()


def doubled(rows: Tensor, weight: Tensor) -> Tensor:
    """One row beside an empty one: two are a matrix."""
    if len(rows) != 1:
        return turned(rows, weight)
    pair = torch.cat([rows, torch.zeros_like(rows)])
    return torch.mm(weight, pair.t())[:, 0].contiguous()[None]


class NarrowLinears:
    """The large linear layers of a model, which take the best way while `borrowed`, if there are few rows."""

    def __init__(self, model: nn.Module) -> None:
        self._groups: dict[tuple[int, int], list[nn.Linear]] = {}
        for module in model.modules():
            if type(module) is nn.Linear and is_large(module.weight) and "forward" not in vars(module):
                out, width = module.weight.shape
                self._groups.setdefault((out, width), []).append(module)
        self._forwards: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
            (vars(module), partial(self._product, group, module)) for group in self._groups.values() for module in group
        ]

    @contextmanager
    def borrowed(self, rows: int) -> Iterator[None]:
        if rows > WIDTHS[-1]:
            yield
            return
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in self._forwards:
                del attributes["forward"]

    @staticmethod
    def _product(group: list[nn.Linear], module: nn.Linear, given: Tensor) -> Tensor:
        rows = given.reshape(-1, given.shape[-1])
        product = way_for(len(rows), group)(rows, module.weight)
        if module.bias is not None:
            product = product + module.bias
        return product.reshape(*given.shape[:-1], len(module.weight))


def is_large(weight: Tensor) -> bool:
    plain = type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and weight.numel() >= SMALLEST


CHOSEN: dict[tuple[int, ...], Way] = {}


def way_for(rows: int, group: list[nn.Linear]) -> Way:
    """The quickest on this machine for weights of this shape, measured when it is first asked for."""
    width = next((width for width in WIDTHS if rows <= width), None)
    if width is None or not rows:
        return direct
    key = (width, *group[0].weight.shape, torch.get_num_threads())
    if key not in CHOSEN:
        CHOSEN[key] = quickest(width, [module.weight for module in group])
    return CHOSEN[key]


def quickest(rows: int, weights: list[Tensor]) -> Way:
    weights = weights[: max(1, SAMPLE_BYTES // (weights[0].numel() * weights[0].element_size()))]
    given = torch.ones(rows, weights[0].shape[1])
    ways = [direct, turned, *([doubled] if rows == 1 else [])]
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):
        for way in ways:
            start = time.perf_counter()
            for weight in weights:
                way(given, weight)
            times[way] = min(times[way], time.perf_counter() - start)
    best = min(ways, key=times.__getitem__)
    return best if times[best] * GAIN < times[direct] else direct
