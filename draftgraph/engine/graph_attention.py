"""Attention of the nodes of token trees: each sees its row's text and its own ancestors, whatever the text's length."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from draftgraph.compiled.passes import WORD
from draftgraph.engine.attention import SLIDING, layer_kinds
from draftgraph.errors import UnsupportedModelError

NAME = "draftgraph_graph"
UNKNOWN = ("position_bias", "indices", "block_indices")  # what only a mask or a model's own code could apply


@dataclass(frozen=True)
class GraphPass:
    """What one pass over token trees tells the attention, as `graph_pass=` to a model.

    All of it is data on the device and none of it a shape, so a captured CUDA graph takes the next pass by copying
    into these tensors. Scratch slot j of a row is slot lengths[row] + j of its cache. Padding nodes may see only
    themselves; give them the position of a real node, for a window is read from the earliest position on.
    """

    lengths: Tensor  # int [rows]: slots of text; slot s holds position s
    ancestors: Tensor  # int64 [rows, nodes, words]: bit j % 64 of word j // 64 says that the node sees scratch slot j
    positions: Tensor  # int [rows, nodes], of the nodes
    scratch_positions: Tensor  # int [rows, words * 64], of the scratch slots


def graph_attention(
    query: Tensor,  # [rows, heads, nodes, size]
    key: Tensor,  # [rows, groups, slots, size]: text, scratch, and behind them anything
    value: Tensor,  # [rows, groups, slots, value size]
    graph: GraphPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a weight that goes to no slot
) -> Tensor:
    """The attended values. # [rows, nodes, heads, value size]

    A window hides the keys that are `window` positions or more before the query.
    """
    data = (graph.lengths, graph.ancestors, graph.positions, graph.scratch_positions)
    attended: Tensor = _graph_attention(query, key, value, *data, scale, window, softcap, sinks)
    return attended


@torch.library.custom_op("draftgraph::graph_attention", mutates_args=())  # one node in a graph of torch.compile
def _graph_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    ancestors: Tensor,
    positions: Tensor,
    scratch_positions: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    arguments = (query, key, value, lengths, ancestors, positions, scratch_positions, scale, window, softcap, sinks)
    if query.is_cuda and (kernel := graph_kernel()) is not None and kernel.supports(query, key, value):
        return kernel.attend(*arguments)  # type: ignore[no-any-return]
    return reference(query, key, value, GraphPass(*arguments[3:7]), scale, window, softcap, sinks)


@_graph_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    rows, heads, nodes, _ = query.shape
    return query.new_empty(rows, nodes, heads, value.shape[-1])


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    graph: GraphPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `graph_attention` means, in plain PyTorch and at least float32."""
    seen = visible_slots(graph, key.shape[2], window)[:, None]
    written = seen.any(-2)[..., None]  # what nobody sees may hold anything, and 0 times that is not always 0
    return masked_attention(query, key, value.where(written, 0), seen, scale, softcap, sinks)


def visible_slots(graph: GraphPass, capacity: int, window: int | None = None) -> Tensor:
    """Which node sees which slot of the cache. # [rows, nodes, capacity]"""
    nodes, words = graph.ancestors.shape[1:]
    slot = torch.arange(capacity, device=graph.lengths.device)
    behind = slot - graph.lengths[:, None]  # [rows, capacity]: the scratch slot, under 0 in the text
    scratch = behind.clamp(0, words * WORD - 1)
    word = graph.ancestors.gather(2, (scratch // WORD)[:, None].expand(-1, nodes, -1))
    is_ancestor = (word >> (scratch % WORD)[:, None]) & 1 == 1
    seen = (behind < 0)[:, None] | (is_ancestor & (behind < words * WORD)[:, None])
    if window is not None:
        position = torch.where(behind < 0, slot, graph.scratch_positions.gather(1, scratch))
        seen &= graph.positions[:, :, None] - position[:, None] < window
    return seen


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,  # broadcasts to [rows, heads, queries, slots]: what is seen, or what is added
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention with additions that `scaled_dot_product_attention` does not know. # [rows, queries, heads, size]"""
    dtype = torch.promote_types(query.dtype, torch.float32)
    rows, heads, queries, size = query.shape
    groups, slots = key.shape[1:3]
    grouped = query.to(dtype).reshape(rows, groups, -1, size)  # the heads of a group share their keys
    score = (grouped @ key.to(dtype).mT * scale).view(rows, heads, queries, slots)
    if softcap is not None:
        score = torch.tanh(score / softcap) * softcap
    score = score.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else score + mask
    best = score.amax(-1, keepdim=True).clamp(min=torch.finfo(dtype).min)
    if sinks is not None:
        sink = sinks.to(dtype)[:, None, None]
        best = best.maximum(sink)
    weight = torch.exp(score - best)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - best)
    share = weight / total.where(total != 0, 1)  # who sees nothing gets nothing
    mixed = share.view(rows, groups, -1, slots) @ value.to(dtype)
    return mixed.view(rows, heads, queries, -1).transpose(1, 2).to(query.dtype).contiguous()


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` in `transformers` models: over the graph given as `graph_pass`, else by the mask as ever."""
    graph, scale = kwargs.pop("graph_pass", None), kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if graph is not None:
        if unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]:
            raise UnsupportedModelError(
                f"{type(module).__name__} needs {unknown[0]}: graph attention knows no such thing"
            )
        return graph_attention(query, key, value, graph, scale, layer_window(module, kwargs), softcap, sinks), None
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if attention_mask is None:  # left out by `sdpa_mask`: one query sees all, many are a text from its beginning
        everything = query.new_ones(query.shape[2], key.shape[2], dtype=torch.bool)
        attention_mask = everything.tril() if len(everything) > 1 else everything
    return masked_attention(query, key, value, attention_mask, scale, softcap, sinks), None


def layer_window(module: Any, kwargs: dict[str, Any]) -> int | None:
    """A layer's window; some families (Qwen2-MoE, Phi-MoE) leave it to the mask, where a graph cannot read it."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]  # type: ignore[no-any-return]
    config = module.config
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else layer_kinds(config)[0]
    if kind == "chunked_attention":
        raise UnsupportedModelError(f"{type(module).__name__} reads in chunks: graph attention knows no such thing")
    return config.sliding_window if kind in SLIDING else None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@cache
def graph_kernel() -> Any:
    """The kernel's module; None where there is no Triton."""
    try:
        from draftgraph.engine import graph_kernel as kernel
    except ImportError:
        return None
    return kernel
