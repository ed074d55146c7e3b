"""Small steps of a pass, one kernel each: RMSNorm, rotary embedding, gated MLP, and slots of a cache.

Each kernel rounds where PyTorch would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from draftgraph.kernels.triton_or_stub import ROUNDING, compiles_for, tl, triton


class NormStyle(NamedTuple):
    """Where families of models differ in their RMSNorm."""

    offset: float  # added to the weight
    rounds_first: bool  # to the dtype of the states, before the weight is applied


NORM_STYLES = (
    NormStyle(0.0, True),  # Llama, Mistral, Qwen, Phi-3
    NormStyle(1.0, False),  # Gemma
    NormStyle(0.0, False),  # OLMo-2, GPT-OSS
)
GATE_BLOCK = 1024  # columns of a program
MOVED_TOGETHER = 16  # slots; what depends on each other must be among these
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}


def rms_norm(states: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    """Computed in float32. # [..., size], [size] -> [..., size]"""
    compute = rms_norm_triton if compiles_for(states.device) else rms_norm_reference
    return compute(states, weight, eps, style)


def rms_norm_reference(states: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    exact = states.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    if style.rounds_first:
        exact = exact.to(states.dtype).float()
    return (exact * (weight.float() + style.offset)).to(states.dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    states, weight, out, eps, offset, states_outer, states_middle, states_row, out_outer, out_middle, out_row,
    size: tl.constexpr, block: tl.constexpr, rounds_first: tl.constexpr,
):  # fmt: skip
    row, middle, outer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    column = tl.arange(0, block)
    there = column < size
    place = states + outer * states_outer + middle * states_middle + row * states_row + column
    x = tl.load(place, mask=there, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=0) / size + eps)
    if rounds_first:
        x = x.to(out.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=there, other=0.0).to(tl.float32) + offset
    place = out + outer * out_outer + middle * out_middle + row * out_row + column
    tl.store(place, (x * factor).to(out.dtype.element_ty), mask=there)


def rms_norm_triton(states: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    states = states if states.stride(-1) == 1 else states.contiguous()
    out = torch.empty_like(states)
    outer, middle, rows, size = (1,) * (4 - states.dim()) + states.shape
    strides = [stride for part in (states, out) for stride in (0,) * (4 - part.dim()) + part.stride()[:-1]]
    block = triton.next_power_of_2(size)
    _rms_norm[(rows, middle, outer)](
        states, weight, out, eps, style.offset, *strides,
        size=size, block=block, rounds_first=style.rounds_first, num_warps=max(1, min(16, block // 512)),
        **ROUNDING,
    )  # fmt: skip
    return out


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of both. # [rows, heads, nodes, size] twice, [rows, nodes, size] twice"""
    compute = rotate_triton if compiles_for(query.device) else rotate_reference
    return compute(query, key, cos, sin)


def rotate_reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + half_turned(query) * sin, key * cos + half_turned(key) * sin


def half_turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(states, out, cos, sin, size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, block)
    there = column < size
    dtype = out.dtype.element_ty
    x = tl.load(states + column, mask=there, other=0.0).to(tl.float32)
    partner = tl.load(states + (column + size // 2) % size, mask=there, other=0.0).to(tl.float32)
    partner = tl.where(column < size // 2, -partner, partner)
    along = x * tl.load(cos + column, mask=there, other=0.0).to(tl.float32)
    across = partner * tl.load(sin + column, mask=there, other=0.0).to(tl.float32)
    turned = along.to(dtype).to(tl.float32) + across.to(dtype).to(tl.float32)
    tl.store(out + column, turned.to(dtype), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    query, key, cos, sin, turned_query, turned_key, query_heads,
    query_row, query_head, query_node, key_row, key_head, key_node, cos_row, cos_node, sin_row, sin_node,
    tquery_row, tquery_head, tquery_node, tkey_row, tkey_head, tkey_node,
    size: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """One head of one node: first those of the queries, then those of the keys."""
    node, head, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    cos += row * cos_row + node * cos_node
    sin += row * sin_row + node * sin_node
    if head < query_heads:
        place = query + row * query_row + head * query_head + node * query_node
        written = turned_query + row * tquery_row + head * tquery_head + node * tquery_node
        _turn(place, written, cos, sin, size, block)
    else:
        head -= query_heads
        place = key + row * key_row + head * key_head + node * key_node
        written = turned_key + row * tkey_row + head * tkey_head + node * tkey_node
        _turn(place, written, cos, sin, size, block)


def rotate_triton(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, nodes, size = query.shape
    given = [part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, cos, sin)]
    given[2:] = [part.expand(rows, -1, -1) for part in given[2:]]
    turned = torch.empty_like(given[0]), torch.empty_like(given[1])
    strides = [stride for part in (*given, *turned) for stride in part.stride()[:-1]]
    block = triton.next_power_of_2(size)
    _rotate[(nodes, heads + key.shape[1], rows)](
        *given, *turned, heads, *strides, size=size, block=block, num_warps=1, **ROUNDING
    )  # fmt: skip
    return turned


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """What a gated MLP gives to its last layer. # [..., size], [..., size] -> [..., size]"""
    compute = gated_triton if compiles_for(gate.device) else gated_reference
    return compute(gate, up, activation)


def gated_reference(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    return ACTIVATIONS[activation](gate) * up


@triton.jit  # type: ignore[untyped-decorator]
def activated(x, activation: tl.constexpr):  # type: ignore[no-untyped-def]
    if activation == "silu":
        x = tl.div_rn(x, 1.0 + tl.exp(-x))
    elif activation == "gelu_tanh":  # (1 + tanh(y)) / 2 is a sigmoid of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3)
        x = tl.div_rn(x, 1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _gate(  # type: ignore[no-untyped-def]
    gate, up, out, gate_row, up_row, size, activation: tl.constexpr, block: tl.constexpr
):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    x = tl.load(gate + row * gate_row + column, mask=column < size, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_row + column, mask=column < size, other=0.0).to(tl.float32)
    x = activated(x, activation).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + column, (x * u).to(out.dtype.element_ty), mask=column < size)


def gated_triton(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    size = gate.shape[-1]
    rows = [part.reshape(-1, size) for part in (gate, up)]
    flat, flat_up = (part if part.stride(1) == 1 else part.contiguous() for part in rows)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _gate[(len(flat), triton.cdiv(size, GATE_BLOCK))](
        flat, flat_up, out, flat.stride(0), flat_up.stride(0), size, activation=activation, block=GATE_BLOCK, **ROUNDING
    )
    return out


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Into a cache. # [1, heads, capacity, size] twice, [nodes], [1, heads, nodes, size] twice"""
    compute = write_slots_triton if compiles_for(keys.device) else write_slots_reference
    compute(keys, values, slots, new_keys, new_values)


def write_slots_reference(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    keys.index_copy_(2, slots, new_keys)
    values.index_copy_(2, slots, new_values)


@triton.jit  # type: ignore[untyped-decorator]
def _copy(source, target, size: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    column = tl.arange(0, block)
    tl.store(target + column, tl.load(source + column, mask=column < size), mask=column < size)


@triton.jit  # type: ignore[untyped-decorator]
def _write_slots(  # type: ignore[no-untyped-def]
    keys, values, slots, new_keys, new_values, heads,
    keys_head, keys_slot, values_head, values_slot, new_keys_head, new_keys_node, new_values_head, new_values_node,
    size: tl.constexpr, value_size: tl.constexpr, block: tl.constexpr, value_block: tl.constexpr,
):  # fmt: skip
    """One head of one node: first those of the keys, then those of the values."""
    node, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + node)
    if head < heads:
        source = new_keys + head * new_keys_head + node * new_keys_node
        _copy(source, keys + head * keys_head + slot * keys_slot, size, block)
    else:
        head -= heads
        source = new_values + head * new_values_head + node * new_values_node
        _copy(source, values + head * values_head + slot * values_slot, value_size, value_block)


def write_slots_triton(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    new_keys, new_values = (part if part.stride(-1) == 1 else part.contiguous() for part in (new_keys, new_values))
    strides = [stride for part in (keys, values, new_keys, new_values) for stride in part.stride()[1:3]]
    sizes = keys.shape[-1], values.shape[-1]
    blocks = [triton.next_power_of_2(size) for size in sizes]
    _write_slots[(len(slots), keys.shape[1] + values.shape[1])](
        keys, values, slots.contiguous(), new_keys, new_values, keys.shape[1], *strides,
        size=sizes[0], value_size=sizes[1], block=blocks[0], value_block=blocks[1], num_warps=1, **ROUNDING
    )  # fmt: skip


def move_slots(block: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Slots to other slots of all layers; of every MOVED_TOGETHER all are read before any is written.

    # [layers, heads, capacity, size], [moves] int64 twice: a multiple of MOVED_TOGETHER, those to themselves do nothing
    """
    compute = move_slots_triton if compiles_for(block.device) else move_slots_reference
    compute(block, sources, targets)


def move_slots_reference(block: Tensor, sources: Tensor, targets: Tensor) -> None:
    block.index_copy_(2, targets, block.index_select(2, sources))


@triton.jit  # type: ignore[untyped-decorator]
def _move_slots(  # type: ignore[no-untyped-def]
    states, sources, targets, states_layer, states_head, states_slot,
    size: tl.constexpr, block: tl.constexpr, together: tl.constexpr,
):  # fmt: skip
    """Some moves within one head of one layer."""
    layer, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2) * together
    move, column = first + tl.arange(0, together), tl.arange(0, block)
    source, target = tl.load(sources + move), tl.load(targets + move)
    there = source != target
    if tl.max(there.to(tl.int32), axis=0) > 0:
        mask = there[:, None] & (column < size)[None, :]
        place = states + layer * states_layer + head * states_head + column[None, :]
        moved = tl.load(place + source[:, None] * states_slot, mask=mask)
        tl.debug_barrier()  # a slot may be read by one thread and written by another
        tl.store(place + target[:, None] * states_slot, moved, mask=mask)


def move_slots_triton(block: Tensor, sources: Tensor, targets: Tensor) -> None:
    layers, heads, _, size = block.shape
    _move_slots[(layers, heads, len(sources) // MOVED_TOGETHER)](
        block, sources.contiguous(), targets.contiguous(), *block.stride()[:3],
        size=size, block=triton.next_power_of_2(size), together=MOVED_TOGETHER, num_warps=4, **ROUNDING
    )  # fmt: skip
