"""Products of few rows. BLAS libraries are made for one row or for many: turned around or packed on a CPU, or with a
kernel that only reads on a GPU, a few rows often take a fraction of the time. Which way is best is measured for every
shape, on the model's own weights."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftgraph.engine.capture import Captured
from draftgraph.engine.choices import Choices
from draftgraph.engine.packing import forget, forget_changed, is_possible, packed

Way = Callable[[Tensor, Tensor], Tensor]  # rows [rows, in], weight [out, in] -> [rows, out]

WIDTHS = {  # rows; in between, as the next
    "cpu": (1, 2, 4, 6, 8, 12, 16, 24, 32),
    "cuda": (16, 64),  # the kernel computes 16 rows at least: fewer take as long
}
DTYPES = {"cpu": (torch.float32,), "cuda": (torch.bfloat16, torch.float16)}  # others are left to the library
SAMPLE_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}  # of one shape, read in turn: more than caches hold
SMALLEST = 1 << 16  # numbers of a weight: smaller ones are not worth choosing for
ROUNDS = 3
GAIN = {"cpu": 1.1, "cuda": 1.03}  # what another way must be better by


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


def ways_for(rows: int, weights: list[Tensor]) -> list[Way]:
    if weights[0].device.type != "cpu":
        return [direct, *skinny_ways()]
    return [direct, turned, *([doubled] if rows == 1 else []), *([packed] if is_possible(weights) else [])]


@cache
def skinny_ways() -> list[Way]:
    """None where there is no Triton, or a GPU too old for it."""
    if torch.cuda.get_device_capability() < (8, 0):
        return []
    try:
        from draftgraph.engine.skinny_kernel import TILINGS, skinny_linear
    except ImportError:
        return []
    return [partial(skinny_linear, bias=None, tiling=tiling) for tiling in TILINGS]


class NarrowLinears:
    """The large linear layers of a model, which take the best way while `borrowed`, if there are few rows."""

    def __init__(self, model: nn.Module, kinds: tuple[str, ...] = ("cpu", "cuda")) -> None:
        groups: dict[tuple[Any, ...], list[nn.Linear]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear) and is_borrowable(module) and module.weight.device.type in kinds:
                groups.setdefault((module.weight.shape, module.weight.dtype, module.weight.device), []).append(module)
        self._modules = [module for group in groups.values() for module in group]
        self._most = max((WIDTHS[device.type][-1] for _, _, device in groups), default=0)
        self._forwards: list[tuple[dict[str, Any], Callable[[Tensor], Tensor]]] = [
            (vars(module), partial(product, group, module)) for group in groups.values() for module in group
        ]

    def begin(self) -> None:
        """Before a text: what was copied of weights must still be so."""
        forget_changed(module.weight for module in self._modules)

    @contextmanager
    def borrowed(self, rows: int) -> Iterator[None]:
        if rows > self._most:
            yield
            return
        for attributes, forward in self._forwards:
            attributes["forward"] = forward
        try:
            yield
        finally:
            for attributes, _ in self._forwards:
                del attributes["forward"]


def is_borrowable(module: nn.Linear) -> bool:
    """A plain layer whose product is worth choosing for."""
    weight = module.weight
    untouched = type(module) is nn.Linear and "forward" not in vars(module)
    plain = type(weight) is nn.Parameter and weight.dtype in DTYPES.get(weight.device.type, ())
    return untouched and plain and weight.numel() >= SMALLEST


def product(group: list[nn.Linear], module: nn.Linear, given: Tensor) -> Tensor:
    """What a layer of this group does with few rows."""
    rows = given.reshape(-1, given.shape[-1])
    found = way_for(len(rows), group)(rows, module.weight)
    if module.bias is not None:
        found = found + module.bias
    return found.reshape(*given.shape[:-1], len(module.weight))


CHOSEN: dict[tuple[Any, ...], Way] = {}
CHOICES = Choices()


def way_for(rows: int, group: list[nn.Linear]) -> Way:
    """The quickest on this machine for weights of this shape, measured when it is first asked for."""
    weight = group[0].weight
    width = next((width for width in WIDTHS[weight.device.type] if rows <= width), None)
    if width is None or not rows:
        return direct
    key = (width, *weight.shape, weight.dtype, weight.device, torch.get_num_threads())
    if key not in CHOSEN:
        CHOSEN[key] = known_or_quickest(width, [module.weight for module in group])
    return CHOSEN[key]


def choose_again(device: torch.device) -> None:
    """If the machine is not what it was. Never unasked: every way rounds in its own manner."""
    CHOICES.forget(device)
    CHOSEN.clear()


def known_or_quickest(rows: int, weights: list[Tensor]) -> Way:
    weight = weights[0]
    what = f"{rows} rows of {tuple(weight.shape)}, {weight.dtype}"
    name = CHOICES.get(weight.device, what)
    known = {name_of(way): way for way in ways_for(rows, weights)} if name else {}
    if name not in known:
        way = quickest(rows, weights)
        CHOICES.put(weight.device, what, name_of(way))
        return way
    return known[name]


def name_of(way: Way) -> str:
    return f"skinny {tuple(way.keywords['tiling'])}" if isinstance(way, partial) else way.__name__


@torch.no_grad()
def quickest(rows: int, weights: list[Tensor]) -> Way:
    """For so many rows and those down to the next width: some ways are slow at odd numbers."""
    weight = weights[0]
    kind, ways = weight.device.type, ways_for(rows, weights)
    fewest = 1 + max((width for width in WIDTHS[kind] if width < rows), default=rows - 1)
    weights = weights[: max(1, SAMPLE_BYTES[kind] // (weight.numel() * weight.element_size()))]
    times = [0.0] * len(ways)
    for count in {fewest, rows} if kind == "cpu" else {rows}:
        given = torch.ones((count, weight.shape[1]), dtype=weight.dtype, device=weight.device)
        runs = [Captured(partial(all_products, way, given, weights), weight.device) for way in ways]
        rounds = [[seconds(run, weight.device) for run in runs] for _ in range(ROUNDS)]
        times = [time + min(taken) for time, taken in zip(times, zip(*rounds, strict=True), strict=True)]
    best = times.index(min(times))
    if packed not in (ways[best], *CHOSEN.values()):
        forget(weights)
    return ways[best] if times[best] * GAIN[kind] < times[0] else direct


def all_products(way: Way, given: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        way(given, weight)


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    marks[0].record()
    run()
    marks[1].record()
    marks[1].synchronize()
    return float(marks[0].elapsed_time(marks[1])) / 1e3
