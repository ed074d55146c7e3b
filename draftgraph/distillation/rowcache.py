"""Keys and values of many texts, a row each; a token's slot is its position."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class RowLayer(CacheLayerMixin):
    """One layer. Reading a prompt fills rows from their start; decoding writes one slot of every row."""

    is_sliding = False

    def __init__(self, cache: RowCache, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros((self.cache.rows, states.shape[1], self.cache.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    @property
    def slots(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.slots
        places = self.cache.places
        if places is None:
            keys[self.cache.reading, :, : key_states.shape[2]] = key_states
            values[self.cache.reading, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        keys[self.cache.every_row, :, places] = key_states[:, :, 0]
        values[self.cache.every_row, :, places] = value_states[:, :, 0]
        end = self.cache.capacity if self.cache.ragged else self.cache.length + 1
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.cache.length

    def get_max_length(self) -> int:
        return self.cache.capacity


class RowCache(Cache):
    def __init__(self, rows: int, capacity: int, ragged: bool) -> None:
        self.rows, self.capacity = rows, capacity
        self.ragged = ragged  # rows of different lengths: all slots are shown, and a mask tells them apart
        self.length = 0  # of the text in every row, where they share one
        self.reading = slice(0, rows)
        self.places: Tensor | None = None  # [rows] where decoding writes; None while prompts are read
        super().__init__(layer_class_to_replicate=lambda: RowLayer(self))  # type: ignore[arg-type]

    def read_into(self, rows: slice) -> None:
        self.reading, self.places, self.length = rows, None, 0

    def write_at(self, places: Tensor) -> None:
        """From now on tokens are written at these places, which the caller moves on."""
        self.places = places
        self.every_row = torch.arange(self.rows, device=places.device)

    def narrowed(self, kept: Tensor) -> RowCache:
        """The rows at these indices alone."""
        other = RowCache(len(kept), self.capacity, self.ragged)
        other.length = self.length
        for layer in cast(list[RowLayer], self.layers):
            copy = RowLayer(other)
            if layer.is_initialized:
                keys, values = layer.slots
                copy.keys, copy.values = keys[kept], values[kept]
                copy.dtype, copy.device, copy.is_initialized = layer.dtype, layer.device, True
                layer.keys = layer.values = None  # freed layer by layer: two copies may not fit
            other.layers.append(copy)
        return other
