"""Attention of one new token per row over that row's text: heads that share keys are taken together, no key copied."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "draftgraph_rows"
ADDITIONS = ("softcap", "s_aux", "sliding_window", "position_bias")  # what the kernel does not know


def row_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` while many texts are continued at once. `row_places` [rows]: where each text ends."""
    rows, heads, length, size = query.shape
    places, scale = kwargs.pop("row_places", None), kwargs.get("scaling")
    if length > 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    grouped = query.reshape(rows, key.shape[1], -1, size)
    plain = not any(kwargs.get(name) for name in ADDITIONS) and size in (32, 64, 128) and value.shape == key.shape
    if places is not None and plain and (kernel := rows_kernel()) is not None:
        mixed = kernel(grouped, key, value, places, size**-0.5 if scale is None else scale)
    else:
        mixed = reference(grouped, key, value, attention_mask, scale)
    return mixed.reshape(rows, 1, heads, -1), None


def reference(grouped: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """The heads of a group as queries of one head. # [rows, groups, heads of a group, size]"""
    kernels = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # cuDNN would plan anew for every shape
    with sdpa_kernel(kernels) if grouped.is_cuda else nullcontext():
        return scaled_dot_product_attention(grouped, key, value, mask, scale=scale)


AttentionInterface.register(NAME, row_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@cache
def rows_kernel() -> Any:
    """A kernel that reads of every row only what is written there; None where there is no Triton."""
    if not torch.cuda.is_available():
        return None
    try:
        from draftgraph.distillation.rowkernel import attend
    except ImportError:
        return None
    return attend
