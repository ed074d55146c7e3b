"""Attention of the nodes of many texts in one pass, with all that changes from pass to pass as data on the device.

Each node sees its own text, page by page, and its own ancestors. A captured CUDA graph takes the next pass by copying
into the tensors of `PackedData`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from draftgraph.compiled.passes import WORD
from draftgraph.engine.graph_attention import masked_attention
from draftgraph.engine.packed_attention import layer_options
from draftgraph.engine.pages import PAGE
from draftgraph.errors import UnsupportedModelError

NAME = "draftgraph_packed_graph"  # without a mask of its own: transformers makes none for it


@dataclass(frozen=True)
class PackedData:
    """What one pass over many texts tells the attention, as `packed_data=` to a model.

    Place p of text t is slot pages[t, p // PAGE] * PAGE + p % PAGE of the pool; scratch slot j of it is place
    lengths[t] + j. What lies behind a text's last page in `pages` is never read. Nodes behind starts[-1] only fill the
    pass up: they see nothing, and get nothing.
    """

    starts: Tensor  # int32 [texts + 1]: text t has the nodes starts[t] to starts[t + 1]; those not there are empty
    lengths: Tensor  # int32 [texts]: slots of committed text
    pages: Tensor  # int32 [texts, most pages]
    ancestors: Tensor  # int64 [nodes, words]: bit j % 64 of word j // 64 says that the node sees scratch slot j
    positions: Tensor  # int64 [1, nodes]
    scratch_positions: Tensor  # int [texts, words * 64]
    most_nodes: int  # of any one text: a shape

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.starts, self.lengths, self.pages, self.ancestors, self.positions, self.scratch_positions


def packed_graph_attention(
    query: Tensor,  # [1, heads, nodes, size]
    key: Tensor,  # [1, groups, slots of the pool, size]
    value: Tensor,  # [1, groups, slots of the pool, value size]
    data: PackedData,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [heads]: a weight that goes to no slot
) -> Tensor:
    """The attended values. # [1, nodes, heads, value size]

    A window hides the keys that are `window` positions or more before the query.
    """
    told = (*data.tensors, data.most_nodes)
    attended: Tensor = _packed_graph_attention(query, key, value, *told, scale, window, softcap, sinks)
    return attended


@torch.library.custom_op("draftgraph::packed_graph_attention", mutates_args=())  # one node in a graph of torch.compile
def _packed_graph_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    lengths: Tensor,
    pages: Tensor,
    ancestors: Tensor,
    positions: Tensor,
    scratch_positions: Tensor,
    most_nodes: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    data = PackedData(starts, lengths, pages, ancestors, positions, scratch_positions, most_nodes)
    if not query.is_cuda:
        return reference(query, key, value, data, scale, window, softcap, sinks)
    if (kernel := packed_kernel()) is None or not kernel.supports(query, key, value):
        sizes = f"{query.shape[-1]} and {value.shape[-1]}"
        raise UnsupportedModelError(f"no packed kernel for {query.dtype} and heads of {sizes} on this GPU")
    return kernel.attend(query, key, value, data, scale, window, softcap, sinks)  # type: ignore[no-any-return]


@_packed_graph_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
    rows, heads, nodes, _ = query.shape
    return query.new_empty(rows, nodes, heads, value.shape[-1])


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    data: PackedData,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """What `packed_graph_attention` means, text by text, in plain PyTorch and at least float32. Reads the data on the
    host, so it cannot be captured."""
    attended = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
    starts = data.starts.tolist()
    for text, (start, end) in enumerate(pairwise(starts)):
        if start < end:
            slots, seen = visible_slots(data, text, start, end, window)
            mine, keys, values = query[:, :, start:end], key[:, :, slots], value[:, :, slots]
            written = seen.any(0)[:, None]  # what nobody sees may hold anything, and 0 times that is not always 0
            found = masked_attention(mine, keys, values.where(written, 0), seen, scale, softcap, sinks)
            attended[:, start:end] = found
    return attended


def visible_slots(data: PackedData, text: int, start: int, end: int, window: int | None) -> tuple[Tensor, Tensor]:
    """The slots of a text and of its scratch nodes, as far as any node here sees, and which node sees which.

    # [slots], [nodes, slots]
    """
    device, length = data.pages.device, int(data.lengths[text])
    bits = data.ancestors[start:end, :, None] >> torch.arange(WORD, device=device) & 1
    is_ancestor = bits.flatten(1) == 1  # [nodes, words * 64]
    scratch = int((is_ancestor.any(0) * torch.arange(1, is_ancestor.shape[1] + 1, device=device)).max())
    place = torch.arange(length + scratch, device=device)
    slots = data.pages[text].long()[place // PAGE] * PAGE + place % PAGE
    seen = torch.ones(end - start, length + scratch, dtype=torch.bool, device=device)
    seen[:, length:] = is_ancestor[:, :scratch]
    if window is not None:
        position = torch.cat([place[:length], data.scratch_positions[text, :scratch].long()])
        seen &= data.positions[0, start:end, None] - position < window
    return slots, seen


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` in `transformers` models."""
    data = kwargs.get("packed_data")
    if data is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass on what packed attention needs")
    return packed_graph_attention(query, key, value, data, **layer_options(module, query, kwargs)), None


AttentionInterface.register(NAME, attend)


@cache
def packed_kernel() -> Any:
    """The kernel's module; None where there is no Triton."""
    try:
        from draftgraph.engine import packed_kernel as kernel
    except ImportError:
        return None
    return kernel
