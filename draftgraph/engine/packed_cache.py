"""Keys and values of many texts in one pool of slots: a pass writes its nodes wherever its texts have their pages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from draftgraph.engine.cache import SlotCache
from draftgraph.engine.static_cache import FixedLayer


class PackedLayer(FixedLayer):
    """One layer's slots of the pool."""

    owner: PackedCache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        self.keys[:, :, self.owner.slots] = key_states
        self.values[:, :, self.owner.slots] = value_states
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.capacity, 0

    def get_seq_length(self) -> int:
        return 0


class PackedCache(Cache):
    """What a model is given as `past_key_values`. A pass sets `slots` before it."""

    def __init__(self, like: SlotCache, capacity: int) -> None:
        self.capacity = capacity
        self.slots: Tensor = torch.empty(0, dtype=torch.long)
        self.states: list[Tensor] = []  # [1, heads, slots, size], of all layers
        layers: list[Any] = []
        for layer in like.slot_layers:
            parts = [self._slots_for(states) for states in layer.slots] if layer.is_initialized else [None, None]
            layers.append(PackedLayer(self, *parts))
        super().__init__(layers=layers)

    def _slots_for(self, states: Tensor) -> Tensor:
        room = states.new_empty((1, states.shape[1], self.capacity, states.shape[3]))
        self.states.append(room.fill_(0.0))  # written to, so that memory is short now or never
        return self.states[-1]

    def move(self, sources: Any, targets: Any) -> None:
        """Slots to other slots, in every layer; all are read before any is written."""
        for states in self.states:
            read, written = (torch.as_tensor(places, device=states.device) for places in (sources, targets))
            states.index_copy_(2, written, states.index_select(2, read))


def bytes_per_slot(like: SlotCache) -> int:
    parts = [states for layer in like.slot_layers if layer.is_initialized for states in layer.slots]
    return sum(states.shape[1] * states.shape[3] * states.element_size() for states in parts)
