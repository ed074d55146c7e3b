"""Preallocated keys and values, as `transformers` models write them: of one sequence in a row, or of many in pages."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from draftgraph.kernels import fused

GROWTH = 256  # slots added when a layer is full, so that a long text is copied rarely
Shape = tuple[int, int, torch.dtype, torch.device]  # heads, size of one, where and how they are kept


class SlotLayer(CacheLayerMixin):
    """One layer's slots. Every layer keeps the whole text: windows are a matter of the mask, so they can be rewound."""

    is_sliding = False

    def __init__(self, capacity: int = GROWTH, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.capacity = capacity
        self.length = 0
        self.index_keys: Tensor | None = None  # of sparse attention: what its indexer compares, [batch, slots, size]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (self._allocate(states, self.capacity) for states in (key_states, value_states))
        self.is_initialized = True

    @staticmethod
    def _allocate(states: Tensor, capacity: int) -> Tensor:
        batch, heads, _, size = states.shape
        return states.new_zeros((batch, heads, capacity, size))

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def reserve(self, capacity: int) -> None:
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, self.capacity + GROWTH)
        if self.is_initialized:
            for name in ("keys", "values"):
                old = getattr(self, name)
                new = self._allocate(old, self.capacity)
                new[:, :, : self.length] = old[:, :, : self.length]
                setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        end = self.length + key_states.shape[-2]
        self.reserve(end)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.slots
        keys[:, :, self.length : end] = key_states
        values[:, :, self.length : end] = value_states
        self.length = end
        return keys[:, :, :end], values[:, :, :end]

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Called after `update`, with as many tokens."""
        start = self.length - indexer_key_states.shape[1]
        kept = indexer_key_states[:, :0] if self.index_keys is None else self.index_keys[:, :start]
        self.index_keys = torch.cat([kept, indexer_key_states], dim=1)
        return self.index_keys

    def gather(self, start: int, slots: Tensor) -> None:
        """Moves the given slots behind the first `start` ones and forgets the rest."""
        if not self.is_initialized:  # a layer that the model skips stays empty
            return
        end = start + len(slots)
        for states in self.slots:
            states[:, :, start:end] = states[:, :, slots.to(states.device)]
        if self.index_keys is not None:
            self.index_keys[:, start:end] = self.index_keys[:, slots.to(self.index_keys.device)]
        self.length = end

    def rewind(self, length: int) -> None:
        self.length = min(self.length, length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return -1


class SlotCache(Cache):
    """What a `transformers` model is given as `past_key_values`; layers appear as the model first writes them."""

    def __init__(self) -> None:
        self.capacity = GROWTH
        super().__init__(layer_class_to_replicate=lambda: SlotLayer(self.capacity))  # type: ignore[arg-type]
        self.offsets: Tensor | None = None  # [queries], in a pass over a tree: see get_seq_length

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """What a model adds to 0, 1, 2, ... for the positions of its tokens: in a tree, another number for each."""
        return super().get_seq_length(layer_idx) if self.offsets is None else self.offsets

    @property
    def slot_layers(self) -> list[SlotLayer]:
        return cast(list[SlotLayer], self.layers)

    def reserve(self, capacity: int) -> None:
        self.capacity = max(self.capacity, capacity)
        for layer in self.slot_layers:
            layer.reserve(capacity)

    def rewind(self, length: int) -> None:
        for layer in self.slot_layers:
            layer.rewind(length)

    def gather(self, start: int, slots: list[int]) -> None:
        """Keeps the scratch slots `start + slots`, in that order, as text; a prefix stays where it is."""
        if slots == list(range(len(slots))):
            return self.rewind(start + len(slots))
        index = start + torch.tensor(slots)
        for layer in self.slot_layers:
            layer.gather(start, index)


class PagedLayer(CacheLayerMixin):
    """One layer's part of a paged cache. A layer that the model skips has none."""

    is_sliding = False

    def __init__(self, owner: PagedCache, keys: Tensor | None, values: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.keys, self.values = owner, keys, values
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        fused.write_slots(self.keys, self.values, self.owner.slots, key_states, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.capacity, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.owner.capacity


class PagedCache(Cache):
    """Keys and values of many sequences: slots of all layers in a few blocks that never move, so that a captured pass
    writes where its data says. A pass sets `slots` before it."""

    def __init__(self, like: SlotCache, capacity: int, dtype: torch.dtype | None = None) -> None:
        """`dtype`: another than that of the keys and values which `like` holds."""
        self.capacity = capacity
        self.slots: Tensor = torch.empty(0, dtype=torch.long)
        self.blocks: dict[Shape, Tensor] = {}
        written = [(layer.slots if layer.is_initialized else ()) for layer in like.slot_layers]
        counts: dict[Shape, int] = {}
        for states in (part for layer in written for part in layer):
            counts[shape_of(states)] = counts.get(shape_of(states), 0) + 1
        for shape, count in counts.items():
            heads, size, held, device = shape
            # Written to, so that memory is short now or never.
            block = torch.empty((count, heads, capacity, size), dtype=dtype or held, device=device)
            self.blocks[shape] = block.fill_(0.0)
        free = {shape: iter(block[:, None]) for shape, block in self.blocks.items()}
        layers: list[Any] = [
            PagedLayer(self, *((next(free[shape_of(states)]) for states in layer) if layer else (None, None)))
            for layer in written
        ]
        super().__init__(layers=layers)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Slots to other slots in every layer, in the order of a path: see `fused.move_slots`."""
        for block in self.blocks.values():
            fused.move_slots(block, sources, targets)

    def take_over(self, other: PagedCache, slots: int) -> None:
        """The first slots of a smaller cache."""
        for shape, block in self.blocks.items():
            block[:, :, :slots] = other.blocks[shape][:, :, :slots]


def shape_of(states: Tensor) -> Shape:
    return states.shape[1], states.shape[3], states.dtype, states.device


def bytes_per_slot(like: SlotCache) -> int:
    parts = [states for layer in like.slot_layers if layer.is_initialized for states in layer.slots]
    return sum(states.shape[1] * states.shape[3] * states.element_size() for states in parts)
