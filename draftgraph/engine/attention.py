"""Who sees whom: masks for plain passes, by position and not by slot, and our attention function for paged passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from draftgraph.errors import UnsupportedModelError
from draftgraph.kernels.attention import paged_attention

Visibility = Callable[[Tensor, Tensor], Tensor]  # query positions [n, 1], key positions [m] -> [n, m]

SLIDING = {"sliding_attention", "reference_sliding_attention"}
NAME = "draftgraph_paged"  # without a mask of its own: transformers makes none for it
UNKNOWN = ("position_bias", "indices", "block_indices")  # what only a mask or a model's own code could apply


def layer_kinds(config: Any) -> list[str]:
    """The distinct kinds of attention layers of a text model's configuration."""
    if kinds := getattr(config, "layer_types", None):
        return sorted(set(kinds))
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"]
    if getattr(config, "attention_chunk_size", None) is not None:
        return ["chunked_attention"]
    return ["full_attention"]


def in_reach(kind: str, config: Any) -> Visibility | None:
    """What a kind of layer hides of the text before a token; None where it hides nothing."""
    window, chunk = getattr(config, "sliding_window", None), getattr(config, "attention_chunk_size", None)
    if kind in SLIDING and window is not None:
        return lambda query, key: key > query - window
    if kind == "chunked_attention" and chunk is not None:
        return lambda query, key: key // chunk == query // chunk
    return None


def graph_masks(
    config: Any, visible: Tensor, query_positions: Tensor, key_positions: Tensor, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """The mask of a pass, `visible` being [queries, keys]; one per kind for models whose layers differ."""
    kinds = layer_kinds(config)
    masks = {}
    for kind in kinds:
        reach = in_reach(kind, config)
        seen = visible if reach is None else visible & reach(query_positions[:, None], key_positions)
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks[kind] = mask.masked_fill_(~seen, torch.finfo(dtype).min)[None, None]
    return masks if len(kinds) > 1 else masks[kinds[0]]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` in `transformers` models: over the sequences of the pass that is given as `paged_pass`."""
    data, name = kwargs.get("paged_pass"), type(module).__name__
    if data is None:
        raise UnsupportedModelError(f"{name} does not pass on what paged attention needs")
    if unknown := [argument for argument in UNKNOWN if kwargs.get(argument) is not None]:
        raise UnsupportedModelError(f"{name} needs {unknown[0]}, which paged attention does not support")
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    window, softcap, sinks = layer_window(module, kwargs), kwargs.get("softcap"), kwargs.get("s_aux")
    return paged_attention(query, key, value, data, scale, window, softcap, sinks), None


def layer_window(module: Any, kwargs: dict[str, Any]) -> int | None:
    """A layer's window; some families (Qwen2-MoE, Phi-MoE) leave it to the mask, which paged attention has not."""
    if "sliding_window" in kwargs:
        return kwargs["sliding_window"]  # type: ignore[no-any-return]
    config = module.config
    kinds = getattr(config, "layer_types", None)
    kind = kinds[module.layer_idx] if kinds else layer_kinds(config)[0]
    if kind == "chunked_attention":
        raise UnsupportedModelError(f"{type(module).__name__} reads in chunks, which paged attention does not support")
    return config.sliding_window if kind in SLIDING else None


AttentionInterface.register(NAME, attend)
