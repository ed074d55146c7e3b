"""Who sees whom: one additive mask per kind of layer, by position and not by slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Visibility = Callable[[Tensor, Tensor], Tensor]  # query positions [n, 1], key positions [m] -> [n, m]

SLIDING = {"sliding_attention", "reference_sliding_attention"}


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
