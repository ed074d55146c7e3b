"""Keys and values of all layers in a few blocks that never move: a captured pass writes where its data says."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftgraph.engine.cache import SlotCache
from draftgraph.kernels.fused import write_slots

Shape = tuple[int, int, torch.dtype, torch.device]  # heads, size of one, where and how they are kept


class FixedLayer(CacheLayerMixin):
    """One layer's slots among those of all layers. A layer that the model skips has none."""

    is_sliding = False

    def __init__(self, owner: Any, keys: Tensor | None, values: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.keys, self.values = owner, keys, values
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def get_max_length(self) -> int:
        return int(self.owner.capacity)


class StaticLayer(FixedLayer):
    """One layer's part of the blocks."""

    owner: StaticCache

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        write_slots(self.keys, self.values, self.owner.slots, key_states, value_states)
        end = self.owner.shown
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.shown or self.owner.capacity, 0

    def get_seq_length(self) -> int:
        return self.owner.length


class StaticCache(Cache):
    """What a model is given as `past_key_values`. A pass sets `slots`, and how much of them is `shown`, before it."""

    def __init__(self, like: SlotCache, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0  # of the text that a prefill goes behind
        self.shown: int | None = None  # slots; None: all, and the attention knows which are seen
        self.slots: Tensor = torch.empty(0, dtype=torch.long)
        self.blocks: dict[Shape, Tensor] = {}
        written = [(layer.slots if layer.is_initialized else ()) for layer in like.slot_layers]
        counts: dict[Shape, int] = {}
        for states in (part for layer in written for part in layer):
            counts[shape_of(states)] = counts.get(shape_of(states), 0) + 1
        for shape, count in counts.items():
            heads, size, dtype, device = shape
            self.blocks[shape] = torch.zeros((count, heads, capacity, size), dtype=dtype, device=device)
        free = {shape: iter(block[:, None]) for shape, block in self.blocks.items()}
        layers: list[Any] = [
            StaticLayer(self, *((next(free[shape_of(states)]) for states in layer) if layer else (None, None)))
            for layer in written
        ]
        super().__init__(layers=layers)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """In every layer at once; no two may be written to one slot unless they are the same."""
        for block in self.blocks.values():
            block.index_copy_(2, targets.to(block.device), block.index_select(2, sources.to(block.device)))

    def take_over(self, other: StaticCache, length: int) -> None:
        """The text of a smaller cache."""
        for shape, block in self.blocks.items():
            block[:, :, :length] = other.blocks[shape][:, :, :length]


def shape_of(states: Tensor) -> Shape:
    return states.shape[1], states.shape[3], states.dtype, states.device
