"""Attention of the nodes of many texts in one pass: each sees its own text and its own ancestors, and nobody else's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from draftgraph.engine.graph_attention import UNKNOWN, layer_window, masked_attention
from draftgraph.engine.pages import PAGE
from draftgraph.errors import UnsupportedModelError
from draftgraph.graph import Bools, Ints

NAME = "draftgraph_packed"


@dataclass
class TextPart:
    """One text's nodes in a pass: where they stand among all, and what they see."""

    nodes: slice
    pages: list[int]
    length: int  # tokens of text, in the first slots
    positions: Ints  # of all scratch slots; those of this pass are the last
    visible: Bools  # [nodes, scratch slots]
    device: torch.device
    _slots: slice | Tensor | None = None
    _masks: dict[int | None, Tensor | None] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.length + len(self.positions)

    def of(self, states: Tensor) -> Tensor:
        """This text's slots of keys or values: as they stand if the pages do, else gathered."""
        if self._slots is None:
            pages = self.pages[: -(-self.end // PAGE)]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                self._slots = slice(pages[0] * PAGE, pages[0] * PAGE + self.end)
            else:
                self._slots = torch.from_numpy(slots_of(pages, np.arange(self.end))).to(self.device)
        if isinstance(self._slots, slice):
            return states[:, :, self._slots]
        return states.index_select(2, self._slots)

    def mask(self, window: int | None) -> Tensor | None:
        """Which slots each node sees; None: all. # [nodes, end] bool"""
        if window not in self._masks:
            self._masks[window] = self._mask(window)
        return self._masks[window]

    def _mask(self, window: int | None) -> Tensor | None:
        seen = np.ones((len(self.visible), self.end), dtype=bool)
        seen[:, self.length :] = self.visible
        if window is not None:
            places = np.concatenate([np.arange(self.length), self.positions])
            seen &= self.positions[-len(self.visible) :, None] - places < window
        return None if seen.all() else torch.from_numpy(seen).to(self.device)


@dataclass
class PackedPass:
    """What one pass tells the attention, as `packed_pass=` to a model."""

    parts: list[TextPart]


def packed_attention(
    query: Tensor,  # [1, heads, nodes, size]
    key: Tensor,  # [1, groups, slots of the pool, size]
    value: Tensor,
    packed: PackedPass,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attended values. # [1, nodes, heads, value size]"""
    attended = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
    for part in packed.parts:
        mine, keys, values, mask = query[:, :, part.nodes], part.of(key), part.of(value), part.mask(window)
        if softcap is None and sinks is None:
            grouped = query.shape[1] != key.shape[1]
            found = scaled_dot_product_attention(mine, keys, values, mask, scale=scale, enable_gqa=grouped)
            attended[:, part.nodes] = found.transpose(1, 2)
        else:
            if mask is None:
                mask = torch.ones((), dtype=torch.bool, device=query.device)
            attended[:, part.nodes] = masked_attention(mine, keys, values, mask, scale, softcap, sinks)
    return attended


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """In place of `sdpa` in `transformers` models."""
    packed = kwargs.get("packed_pass")
    if packed is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not pass on what packed attention needs")
    return packed_attention(query, key, value, packed, **layer_options(module, query, kwargs)), None


def layer_options(module: Any, query: Tensor, kwargs: dict[str, Any]) -> dict[str, Any]:
    """How a layer of a model attends, from what it tells its attention."""
    if unknown := [name for name in UNKNOWN if kwargs.get(name) is not None]:
        raise UnsupportedModelError(f"{type(module).__name__} needs {unknown[0]}: packed attention knows no such thing")
    scale = kwargs.get("scaling")
    return {
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "window": layer_window(module, kwargs),
        "softcap": kwargs.get("softcap"),
        "sinks": kwargs.get("s_aux"),
    }


def slots_of(pages: list[int], places: Ints) -> Ints:
    """The slots of tokens at these places of a text."""
    slots: Ints = np.array(pages, dtype=np.int64)[places // PAGE] * PAGE + places % PAGE
    return slots


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
