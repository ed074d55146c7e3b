"""Our implementation of experts in half precision on a GPU, registered with `transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftgraph import private
from draftgraph.kernels import experts
from draftgraph.kernels.linear import DTYPES
from draftgraph.kernels.triton_or_stub import compiles_for

NAME = "draftgraph"
SETTINGS = ("has_gate", "has_bias", "is_transposed", "num_experts")  # that the registry gives its modules


def implementation_for(model: nn.Module, device: torch.device, dtype: torch.dtype) -> str | None:
    """The experts of a model in passes; None: those that the user chose."""
    if device.type == "cpu":
        return "eager"  # one by one
    if REGISTERED and any(map(is_served, model.modules())):
        return NAME
    return capturable(dtype)


def capturable(dtype: torch.dtype) -> str | None:
    return None if dtype == torch.bfloat16 else "batched_mm"  # torch asks the host for the sizes of groups


def is_served(module: Any) -> bool:
    """Experts with plain weights of 16 bits on a GPU that our kernels are made for."""
    if any(not hasattr(module, name) for name in SETTINGS):
        return False
    if module.has_gate and private.gate_of_experts(module) is None:
        return False
    first = "gate_up_proj" if module.has_gate else "up_proj"
    return all(is_plain(getattr(module, name, None)) for name in (first, "down_proj"))


def is_plain(weight: Any) -> bool:
    if type(weight) is not nn.Parameter or weight.dim() != 3 or 1 not in weight.stride()[1:]:
        return False
    return weight.dtype in DTYPES and compiles_for(weight.device)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A token's result depends on that token alone. # [tokens, size], [tokens, choices] twice -> [tokens, size]"""
    if not is_served(module) or hidden_states.dtype != module.down_proj.dtype:
        instead = private.registered_experts(capturable(hidden_states.dtype) or "grouped_mm")
        return instead(module, hidden_states, top_k_index, top_k_weights)
    gate, tiles = private.gate_of_experts(module), experts.tiles_of(top_k_index, module.num_experts)
    if module.has_gate and gate is not None:
        states = gate(expert_linear(module, "gate_up_proj", hidden_states, tiles))
    else:
        states = module.act_fn(expert_linear(module, "up_proj", hidden_states, tiles))
    states = expert_linear(module, "down_proj", states, tiles)
    if getattr(module, "has_post_expert_norm", False):
        states = module.post_expert_norm(states)
    return experts.combine(states, top_k_index, top_k_weights, module.num_experts)


def expert_linear(module: Any, name: str, rows: Tensor, tiles: experts.Tiles) -> Tensor:
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    return experts.linear(rows, weight.transpose(1, 2) if module.is_transposed else weight, bias, tiles)


REGISTERED = private.register_experts(NAME, experts_forward)
