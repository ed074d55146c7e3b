"""The small steps of a pass that `fused_kernel` makes in one kernel each, here in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


class NormStyle(NamedTuple):
    """Where families of models differ in their RMSNorm."""

    offset: float  # added to the weight
    rounds_first: bool  # to the dtype of the states, before the weight is applied


NORM_STYLES = (
    NormStyle(0.0, True),  # Llama, Mistral, Qwen, Phi-3
    NormStyle(1.0, False),  # Gemma
    NormStyle(0.0, False),  # OLMo-2, GPT-OSS
)
MOVED_TOGETHER = 16  # slots; what depends on each other must be among these
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "gelu": gelu,
}


def rms_norm(states: Tensor, weight: Tensor, eps: float, style: NormStyle) -> Tensor:
    """Computed in float32. # [..., size], [size] -> [..., size]"""
    exact = states.float()
    exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
    if style.rounds_first:
        exact = exact.to(states.dtype).float()
    return (exact * (weight.float() + style.offset)).to(states.dtype)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of both. # [rows, heads, nodes, size] twice, [rows, nodes, size] twice"""
    cos, sin = cos[:, None], sin[:, None]
    return query * cos + half_turned(query) * sin, key * cos + half_turned(key) * sin


def half_turned(states: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """What a gated MLP gives to its last layer. # [..., size], [..., size] -> [..., size]"""
    return ACTIVATIONS[activation](gate) * up


def write_slots(keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor) -> None:
    """Into a cache. # [1, heads, capacity, size] twice, [nodes], [1, heads, nodes, size] twice"""
    keys.index_copy_(2, slots, new_keys)
    values.index_copy_(2, slots, new_values)


def move_slots(block: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Slots to other slots of all layers; of every MOVED_TOGETHER all are read before any is written.

    # [layers, heads, capacity, size], [moves] int64 twice: a multiple of MOVED_TOGETHER, those to themselves do nothing
    """
    block.index_copy_(2, targets, block.index_select(2, sources))
