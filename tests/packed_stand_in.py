"""A packed engine whose passes take all that changes as data, as on a GPU: slow, and for any device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from draftgraph.compiled.passes import WORD
from draftgraph.engine.graph_attention import layer_window, masked_attention
from draftgraph.engine.packed import PackedEngine
from draftgraph.engine.packed_cache import PackedCache
from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE

NAME = "stand_in_for_packed_graphs"


class StandIn(PackedEngine):
    """With one page more than texts are given."""

    def __init__(self, model: Any, slots: int) -> None:
        super().__init__(model, slots)
        self.cache = PackedCache(self._like(), self.slots + PAGE)
        self.passes: list[PackedData] = []

    def graph_pass(self, tokens: Tensor, positions: Tensor, slots: Tensor, data: PackedData) -> Tensor:
        self.cache.slots = slots
        self.passes.append(data)
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = NAME
        out = self.model(
            input_ids=tokens,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            return_dict=True,
            packed_data=data,
        )
        for config, name in zip(self._configs, before, strict=True):
            config._attn_implementation_internal = name
        return out.logits[0]  # type: ignore[no-any-return]


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Every node over all slots of the pool, with a mask that is computed on the device."""
    data: PackedData = kwargs["packed_data"]
    device, nodes = query.device, query.shape[2]
    node = torch.arange(nodes, device=device)
    text = (torch.bucketize(node, data.starts.long(), right=True) - 1).clamp(max=len(data.lengths) - 1)
    lengths, words = data.lengths.long(), data.ancestors.shape[1]
    place = torch.arange(data.pages.shape[1] * PAGE, device=device)
    slots = data.pages.long()[:, place // PAGE] * PAGE + place % PAGE  # [texts, places]
    behind = place - lengths[:, None]
    scratch = behind.clamp(0, words * WORD - 1)
    bit = data.ancestors.gather(1, scratch[text] // WORD) >> (scratch[text] % WORD) & 1
    seen = (behind[text] < 0) | ((bit == 1) & (behind[text] < words * WORD))
    if (window := layer_window(module, kwargs)) is not None:
        position = torch.where(behind < 0, place, data.scratch_positions.long().gather(1, scratch))
        seen &= data.positions[0][:, None] - position[text] < window
    visible = torch.zeros(nodes, key.shape[2], dtype=torch.long, device=device)
    visible.scatter_add_(1, slots[text].where(seen, 0), seen.long())
    scale = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    mixed = masked_attention(query, key, value, visible > 0, scale, kwargs.get("softcap"), kwargs.get("s_aux"))
    return mixed, None


AttentionInterface.register(NAME, attend)
