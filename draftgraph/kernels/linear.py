"""Products of few rows with a large weight on a GPU: the ways to compute them, and the choice of the quickest.

BLAS libraries are made for one row or for many: with a kernel that only reads, a few rows often take less time. Which
way is best is measured for every shape, on the model's own weights, and kept between starts. On a CPU all products of
plain weights are those of `rows`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from draftgraph.files import cache_dir, replacing
from draftgraph.hardware import device_name, digest
from draftgraph.kernels.triton_or_stub import compiles_for, tl, triton

Way = Callable[[Tensor, Tensor], Tensor]  # rows [rows, in], weight [out, in] -> [rows, out]
Record = Callable[[Callable[[], None], torch.device], Callable[[], Any]]  # makes a computation that is called again

KINDS = ("cuda",)  # of devices
WIDTHS = (16, 64)  # rows; in between, as the next: the kernel computes 16 rows at least, fewer take as long
DTYPES = (torch.bfloat16, torch.float16)  # others are left to the library
SAMPLE_BYTES = 256 << 20  # of one shape, read in turn: more than caches hold
SMALLEST = 1 << 16  # numbers of a weight: smaller ones are not worth choosing for
ROUNDS = 3
GAIN = 1.03  # what another way must be better by
SHARED_BYTES = 200 << 10  # of a multiprocessor, for what the kernel loads ahead


def direct(rows: Tensor, weight: Tensor) -> Tensor:
    return linear(rows, weight)


class Tiling(NamedTuple):
    """How a weight is shared among programs."""

    outputs: int  # rows of the weight that a program reads
    inputs: int  # columns at a time
    splits: int  # of the columns, each to a program of its own
    warps: int
    stages: int


TILINGS = (
    Tiling(16, 256, 1, 4, 4),
    Tiling(16, 512, 1, 4, 3),
    Tiling(32, 256, 1, 4, 4),
    Tiling(32, 128, 4, 4, 4),
    Tiling(64, 128, 4, 4, 4),
    Tiling(64, 128, 1, 4, 4),
)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def _product(  # type: ignore[no-untyped-def]
    given, weight, bias, out, parts, rows, outputs, inputs, given_row, weight_row,
    most_rows: tl.constexpr, tile: tl.constexpr, step: tl.constexpr, splits: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    column, split = tl.program_id(0) * tile + tl.arange(0, tile), tl.program_id(1)
    row, inner = tl.arange(0, most_rows), tl.arange(0, step)
    there = column < outputs
    total = tl.zeros([most_rows, tile], tl.float32)
    places = weight + column[:, None].to(tl.int64) * weight_row + inner[None, :]
    for start in range(split * step, inputs, splits * step):
        if whole:
            w = tl.load(places + start, mask=there[:, None], other=0.0, eviction_policy="evict_first")
            x = tl.load(given + row[:, None] * given_row + start + inner[None, :], mask=row[:, None] < rows, other=0.0)
        else:
            inside = start + inner < inputs
            w = tl.load(places + start, mask=there[:, None] & inside[None, :], other=0.0)
            seen = (row[:, None] < rows) & inside[None, :]
            x = tl.load(given + row[:, None] * given_row + start + inner[None, :], mask=seen, other=0.0)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
    seen = (row[:, None] < rows) & there[None, :]
    if splits > 1:
        tl.store(parts + (split * rows + row[:, None]) * outputs + column[None, :], total, mask=seen)
    else:
        if bias is not None:
            total += tl.load(bias + column, mask=there, other=0.0)[None, :].to(tl.float32)
        tl.store(out + row[:, None] * outputs + column[None, :], total.to(out.dtype.element_ty), mask=seen)


@triton.jit  # type: ignore[untyped-decorator]
def _sum(parts, bias, out, count, outputs, splits: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * block + tl.arange(0, block)
    total = tl.zeros([block], tl.float32)
    for split in tl.static_range(splits):
        total += tl.load(parts + split * count + place, mask=place < count, other=0.0)
    if bias is not None:
        total += tl.load(bias + place % outputs, mask=place < count, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < count)


def skinny_linear(given: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling) -> Tensor:
    """As `torch.nn.functional.linear` for at most 128 rows; reads the weight once, at the memory's speed.

    # [rows, in], [out, in] -> [rows, out]
    """
    rows, inputs = given.shape
    outputs = len(weight)
    given = given if given.stride(1) == 1 else given.contiguous()
    out = torch.empty((rows, outputs), dtype=given.dtype, device=given.device)
    splits = tiling.splits
    parts = torch.empty((splits, rows, outputs), dtype=torch.float32, device=given.device) if splits > 1 else out
    grid = (triton.cdiv(outputs, tiling.outputs), splits)
    most_rows = max(16, triton.next_power_of_2(rows))
    ahead = SHARED_BYTES // ((most_rows + tiling.outputs) * tiling.inputs * weight.element_size())
    _product[grid](
        given, weight, bias, out, parts, rows, outputs, inputs, given.stride(0), weight.stride(0),
        most_rows=most_rows, tile=tiling.outputs, step=tiling.inputs, splits=splits,
        whole=inputs % (tiling.inputs * splits) == 0, num_warps=tiling.warps,
        num_stages=max(1, min(tiling.stages, ahead)),
    )  # fmt: skip
    if splits > 1:
        count = rows * outputs
        _sum[(triton.cdiv(count, 1024),)](parts, bias, out, count, outputs, splits=splits, block=1024)
    return out


SKINNY: list[Way] = [partial(skinny_linear, bias=None, tiling=tiling) for tiling in TILINGS]


def ways_for(device: torch.device) -> list[Way]:
    return [direct, *(SKINNY if compiles_for(device) else ())]


class Choices:
    """Names by what they were chosen for; read when first asked, written with every new one."""

    def __init__(self) -> None:
        self._known: dict[Path, dict[str, str]] = {}

    def get(self, device: torch.device, what: str) -> str | None:
        return self._of(device).get(what)

    def put(self, device: torch.device, what: str, name: str) -> None:
        known, file = self._of(device), file_of(device)
        known |= read(file) | known | {what: name}  # what others have chosen in the meantime stays
        with suppress(OSError):  # only time is lost
            file.parent.mkdir(parents=True, exist_ok=True)
            with replacing(file) as partial:
                partial.write_text(json.dumps(known, indent=1), encoding="utf-8")

    def forget(self, device: torch.device) -> None:
        """So that all are chosen again."""
        self._of(device).clear()
        with suppress(OSError):
            file_of(device).unlink()

    def _of(self, device: torch.device) -> dict[str, str]:
        file = file_of(device)
        if file not in self._known:
            self._known[file] = read(file)
        return self._known[file]


def read(file: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(file.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    return {}


def file_of(device: torch.device) -> Path:
    return cache_dir() / "products" / f"{digest([device_name(device), torch.__version__])}.json"


CHOSEN: dict[tuple[Any, ...], Way] = {}
CHOICES = Choices()


def way_for(rows: int, group: list[nn.Linear], record: Record) -> Way:
    """The quickest on this machine for weights of this shape, measured when it is first asked for."""
    weight = group[0].weight
    width = next((width for width in WIDTHS if rows <= width), None)
    if width is None or not rows:
        return direct
    key = (width, *weight.shape, weight.dtype, weight.device)
    if key not in CHOSEN:
        CHOSEN[key] = known_or_quickest(width, [module.weight for module in group], record)
    return CHOSEN[key]


def choose_again(device: torch.device) -> None:
    """If the machine is not what it was. Never unasked: every way rounds in its own manner."""
    CHOICES.forget(device)
    CHOSEN.clear()


def known_or_quickest(rows: int, weights: list[Tensor], record: Record) -> Way:
    weight = weights[0]
    what = f"{rows} rows of {tuple(weight.shape)}, {weight.dtype}"
    name = CHOICES.get(weight.device, what)
    known = {name_of(way): way for way in ways_for(weight.device)} if name else {}
    if name not in known:
        way = quickest(rows, weights, record)
        CHOICES.put(weight.device, what, name_of(way))
        return way
    return known[name]


def name_of(way: Way) -> str:
    return f"skinny {tuple(way.keywords['tiling'])}" if isinstance(way, partial) else way.__name__


@torch.no_grad()
def quickest(rows: int, weights: list[Tensor], record: Record) -> Way:
    weight = weights[0]
    ways = ways_for(weight.device)
    weights = weights[: max(1, SAMPLE_BYTES // (weight.numel() * weight.element_size()))]
    given = torch.ones((rows, weight.shape[1]), dtype=weight.dtype, device=weight.device)
    runs = [record(partial(all_products, way, given, weights), weight.device) for way in ways]
    rounds = [[seconds(run, weight.device) for run in runs] for _ in range(ROUNDS)]
    times = [min(taken) for taken in zip(*rounds, strict=True)]
    best = times.index(min(times))
    return ways[best] if times[best] * GAIN < times[0] else direct


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
