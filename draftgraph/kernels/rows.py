"""Products and attention of plain tensors, each row of which has the same bits whatever else is computed.

Libraries choose the order of a sum by the number of rows, and share rows among threads. Here the sums of a row have an
order of their own: products along the inputs, attention along the keys that a query sees, one after the other. What is
not seen takes no part, so a node of a tree adds up as plain decoding does. `RowByRow` puts both in place of torch's,
for models whose passes are not compiled as a whole (`cpu_pass`). On a GPU it does so for products that no linear layer
asks for, with the kernel of `linear`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import gelu, linear, pad, scaled_dot_product_attention, silu
from torch.overrides import TorchFunctionMode

from draftgraph.compiled import compiled
from draftgraph.kernels import linear as tiles
from draftgraph.kernels.products import (
    DTYPES,
    OUTPUTS,
    ROW_BLOCK,
    dense_product,
    multiplies_pairs,
    paired_product,
    turned_product,
)
from draftgraph.kernels.threads import team_of, thread_count, torch_alone
from draftgraph.kernels.triton_or_stub import compiles_for
from draftgraph.kernels.vectors import (
    LANES,
    everywhere,
    exp,
    fma,
    larger,
    largest,
    load,
    load_first,
    load_kind,
    meet,
    store,
    store_first,
    store_number,
    total,
)

NEVER = np.float32(-1e30)
PER_THREAD = 1 << 17  # multiplications that make another thread worth waking
Ints = NDArray[np.int64]


def is_plain(*tensors: Any) -> bool:
    """Whether these are tensors of torch's own class, of one dtype that is known here, on a CPU."""
    return are_alike(tensors) and tensors[0].device.type == "cpu" and tensors[0].dtype in DTYPES


def is_in_tiles(*tensors: Any) -> bool:
    """Whether these are such tensors on a GPU that our kernels are made for."""
    known = (*tiles.DTYPES, torch.float32)
    return are_alike(tensors) and tensors[0].dtype in known and compiles_for(tensors[0].device)


def are_alike(tensors: tuple[Any, ...]) -> bool:
    own = all(type(one) in (Tensor, Parameter) for one in tensors)
    alike = own and len({(one.dtype, one.device) for one in tensors}) == 1
    return alike and not (torch.is_grad_enabled() and any(one.requires_grad for one in tensors))


def row_product(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `torch.nn.functional.linear`. # [..., in], [out, in] -> [..., out]"""
    outputs, inputs = weight.shape
    order = TURNED if not weight.is_contiguous() and weight.t().is_contiguous() else STRAIGHT
    weight = weight if order == TURNED else weight.contiguous()
    if order == STRAIGHT and given.dtype == torch.bfloat16 and multiplies_pairs(inputs):
        order = PAIRED
    rows = (given if order == PAIRED else given.float()).reshape(-1, inputs).contiguous()
    out = torch.empty((len(rows), outputs))
    told = np.array([DTYPES[weight.dtype], weight.data_ptr(), outputs, inputs, 0, 0], dtype=np.int64)
    team = team_of(threads_for(len(rows) * outputs * inputs))
    team.run(multiply_rows, told, order, rows.data_ptr(), inputs * rows.element_size(), out.data_ptr(), len(rows))
    if bias is not None:
        out += bias
    return out.to(given.dtype).reshape(*given.shape[:-1], outputs)


def threads_for(multiplications: int) -> int:
    return max(1, min(thread_count(), multiplications // PER_THREAD))


STRAIGHT, TURNED, PAIRED = range(3)  # how a weight lies, or rows are multiplied with it


@compiled
def multiply_rows(
    thread: int, threads: int, shared: int, weight: Ints, order: int, given: int, given_row: int, out: int, rows: int
) -> None:
    tiles, out_row = (weight[OUTPUTS] + LANES - 1) // LANES, weight[OUTPUTS] * 4
    first = tiles * thread // threads * LANES
    last = min(weight[OUTPUTS], tiles * (thread + 1) // threads * LANES)
    for start in range(0, rows, ROW_BLOCK):
        x, y, count = given + start * given_row, out + start * out_row, min(rows - start, ROW_BLOCK)
        if order == TURNED:
            turned_product(weight, first, last, x, given_row, y, out_row, count)
        elif order == PAIRED:
            paired_product(weight, first, last, x, given_row, y, out_row, count)
        else:
            dense_product(weight, first, last, x, given_row, y, out_row, count)
    meet(shared, threads)


def row_attention(
    query: Tensor,  # [1, heads, queries, size]
    key: Tensor,  # [1, groups, slots, size]
    value: Tensor,  # [1, groups, slots, value size]
    seen: Tensor | None,  # bool [queries, slots]; None: all of it
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a weight that goes to no slot
) -> Tensor:
    """The attended values; who sees nothing gets nothing. # [1, queries, heads, value size]"""
    _, heads, queries, size = query.shape
    groups, slots = key.shape[1:3]
    rows = query[0].transpose(0, 1).float().contiguous()  # [queries, heads, size]
    key, value = (states if states.stride(-1) == 1 else states.contiguous() for states in (key, value))
    out = torch.empty((queries, heads, value.shape[-1]))
    numbers = np.array(
        [queries, heads, groups, slots, size, value.shape[-1], DTYPES[key.dtype], key.element_size(),
         key.data_ptr(), key.stride(1), key.stride(2), value.data_ptr(), value.stride(1), value.stride(2)],
        dtype=np.int64,
    )  # fmt: skip
    mask = np.ones((0, 0), dtype=np.bool_) if seen is None else seen.contiguous().numpy()
    sink = np.zeros(0, dtype=np.float32) if sinks is None else sinks.detach().float().numpy()
    team = team_of(threads_for(2 * queries * heads * slots * size))
    room = slots + 1 + 2 * LANES
    scores, places = np.empty((team.threads, room), dtype=np.float32), np.empty((team.threads, room), dtype=np.int64)
    factors = np.array([scale, softcap or 0.0], dtype=np.float32)
    team.run(attend_rows, numbers, factors, rows.data_ptr(), mask, sink, scores, places, out.data_ptr())
    return out[None].to(query.dtype)


QUERIES, HEADS, GROUPS, SLOTS, SIZE, VALUE_SIZE, KIND, BYTES = range(8)
KEYS, KEY_GROUP, KEY_SLOT, VALUES, VALUE_GROUP, VALUE_SLOT = range(8, 14)


@compiled
def attend_rows(
    thread: int, threads: int, shared: int, numbers: Ints, factors: NDArray[np.float32], query: int,
    seen: NDArray[np.bool_], sinks: NDArray[np.float32], all_scores: NDArray[np.float32], all_places: Ints, out: int,
) -> None:  # fmt: skip
    """One head of one query after the other."""
    queries, heads, size, values = numbers[QUERIES], numbers[HEADS], numbers[SIZE], numbers[VALUE_SIZE]
    kind, width = numbers[KIND], numbers[BYTES]
    scores, places = all_scores[thread], all_places[thread]
    row = all_scores.ctypes.data + thread * all_scores.shape[1] * 4
    for unit in range(queries * heads * thread // threads, queries * heads * (thread + 1) // threads):
        node, head = unit // heads, unit % heads
        group = head // (heads // numbers[GROUPS])
        first = numbers[KEYS] + group * numbers[KEY_GROUP] * width
        given, count = query + unit * size * 4, 0
        for slot in range(numbers[SLOTS]):
            if len(seen) and not seen[node, slot]:
                continue
            key, found = first + slot * numbers[KEY_SLOT] * width, everywhere(np.float32(0.0))
            for column in range(0, size, LANES):
                lanes = min(LANES, size - column)
                found = fma(load_first(given + 4 * column, lanes), load_kind(key + width * column, lanes, kind), found)
            scores[count], places[count] = total(found), slot
            count += 1
        scale_scores(row, 0, count, factors[0], factors[1])
        if len(sinks):
            scores[count] = sinks[head]
        softmax(row, 0, count + (len(sinks) > 0))
        first = numbers[VALUES] + group * numbers[VALUE_GROUP] * width
        for column in range(0, values, LANES):
            lanes, mixed = min(LANES, values - column), everywhere(np.float32(0.0))
            for number in range(count):
                value = first + (places[number] * numbers[VALUE_SLOT] + column) * width
                mixed = fma(everywhere(scores[number]), load_kind(value, lanes, kind), mixed)
            store_first(out + (unit * values + column) * 4, mixed, lanes)
    meet(shared, threads)


class RowByRow(TorchFunctionMode):
    """While entered, products and attention of plain tensors are computed here, row by row, whoever asks for them:
    linear layers, routers, experts, adapters."""

    def __init__(self, replaced: Replaced | None = None) -> None:
        super().__init__()
        self._replaced = REPLACED if replaced is None else replaced

    def __torch_function__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        compute, named = self._replaced.get(function), named or {}
        if compute is not None and not torch.compiler.is_compiling():
            found = compute(*given, **named)
            if found is not None:
                return found
        return function(*given, **named)


@compiled
def scale_scores(scores: int, start: int, last: int, scale: np.float32, softcap: np.float32) -> None:
    """Those from `start` to `last`; of the vectors at both ends all is written."""
    factor = everywhere(scale)
    for place in range(start // LANES * LANES, last, LANES):
        found = load(scores + 4 * place) * factor
        if softcap > 0:
            cap, one, two = everywhere(softcap), everywhere(np.float32(1.0)), everywhere(np.float32(2.0))
            found = cap * (one - two / (one + exp(found / cap * two)))
        store(scores + 4 * place, found)


@compiled
def softmax(scores: int, start: int, last: int) -> None:
    """The same."""
    first = start // LANES * LANES
    for place in range(first, start):
        store_number(scores + 4 * place, NEVER)
    for place in range(last, (last + LANES - 1) // LANES * LANES):
        store_number(scores + 4 * place, NEVER)
    most, sums = everywhere(NEVER), everywhere(np.float32(0.0))
    for place in range(first, last, LANES):
        most = larger(most, load(scores + 4 * place))
    highest = everywhere(largest(most))
    for place in range(first, last, LANES):
        found = exp(load(scores + 4 * place) - highest)
        store(scores + 4 * place, found)
        sums = sums + found
    whole = everywhere(total(sums))
    for place in range(first, last, LANES):
        store(scores + 4 * place, load(scores + 4 * place) / whole)


@contextmanager
def rows_apart(device: torch.device, counters: Tensor | None = None) -> Iterator[None]:
    """In which the modules of a model run: on a CPU row by row, and PyTorch's threads keep still beside ours; on a GPU
    in tiles, if their counters are given: see `linear.linears`."""
    if device.type == "cpu":
        with torch_alone(), RowByRow():
            yield
    elif counters is not None:
        with RowByRow({function: partial(own_tiles, counters, factors) for function, factors in FACTORS.items()}):
            yield
    else:
        yield


Factors = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]  # as `torch.nn.functional.linear` is given them


def own_rows(factors: Callable[..., Factors | None], *given: Any, **named: Any) -> Tensor | None:
    told = factors(*given, **named)
    return row_product(*told) if told is not None and is_plain(*told) else None


def own_tiles(counters: Tensor, factors: Callable[..., Factors | None], *given: Any, **named: Any) -> Tensor | None:
    told = factors(*given, **named)
    if told is None or not is_in_tiles(*told):
        return None
    rows, weight, *bias = told
    tiling = tiles.FLOAT32_TILING if rows.dtype == torch.float32 else None
    (found,) = tiles.linears(rows.reshape(-1, rows.shape[-1]), [weight], bias or [None], counters, tiling)
    return found.reshape(*rows.shape[:-1], len(weight))


def linear_factors(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> Factors | None:
    if weight.dim() != 2:
        return None
    return (given, weight) if bias is None else (given, weight, bias)


def matmul_factors(one: Tensor, other: Tensor, **named: Any) -> Factors | None:
    return None if named or one.dim() < 2 or other.dim() != 2 else (one, other.t())


def addmm_factors(more: Tensor, one: Tensor, other: Tensor, **named: Any) -> Factors | None:
    return None if named or more.dim() != 1 else (one, other.t(), more)


def own_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not is_plain(query, key, value) or query.dim() != 4 or len(query) != 1 or dropout_p:
        return None
    seen, shape = attn_mask, (query.shape[2], key.shape[2])
    if seen is not None and seen.dtype != torch.bool:
        nothing = seen <= torch.finfo(seen.dtype).min
        if not bool((nothing | (seen == 0)).all()):
            return None  # it is added
        seen = ~nothing
    if is_causal:
        seen = torch.ones(shape, dtype=torch.bool).tril()
    elif seen is not None:
        if any(size != 1 for size in seen.shape[:-2]):
            return None
        seen = seen.reshape(seen.shape[-2:]).expand(shape)
    found = row_attention(query, key, value, seen, query.shape[-1] ** -0.5 if scale is None else scale)
    return found.transpose(1, 2)


def whole_tiles(function: Any) -> Callable[..., Tensor | None]:
    """A function of single numbers. torch computes those that do not fill a vector in another way, and which these are
    depends on all rows: here every row fills vectors of its own."""

    def compute(given: Tensor, *more: Any, **named: Any) -> Tensor | None:
        rest = -given.shape[-1] % (2 * LANES) if is_plain(given) and given.dim() else 0
        if not rest or named.get("inplace") or True in more:
            return None
        found: Tensor = function(pad(given, (0, rest)), *more, **named)
        return found[..., : given.shape[-1]].contiguous()

    return compute


Replaced = Mapping[Any, Callable[..., Tensor | None]]
SINGLE = (silu, gelu, torch.tanh, torch.sigmoid, torch.exp, Tensor.tanh, Tensor.sigmoid, Tensor.exp)
FACTORS: dict[Any, Callable[..., Factors | None]] = {
    linear: linear_factors,
    torch.matmul: matmul_factors,
    Tensor.matmul: matmul_factors,
    Tensor.__matmul__: matmul_factors,
    torch.mm: matmul_factors,
    Tensor.mm: matmul_factors,
    torch.addmm: addmm_factors,
    Tensor.addmm: addmm_factors,
}
REPLACED: Replaced = {
    **{function: partial(own_rows, factors) for function, factors in FACTORS.items()},
    scaled_dot_product_attention: own_attention,
    **{one: whole_tiles(one) for one in SINGLE},
}
