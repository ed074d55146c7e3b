"""Keys and values of many texts, a row each; a token's slot is its position."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass
class Rows:
    """What all layers of a cache share. They do not know the cache: a cycle would keep its memory from being freed."""

    count: int
    capacity: int
    ragged: bool  # rows of different lengths: all slots are shown, and a mask tells them apart
    length: int = 0  # of the text in every row, where they share one
    reading: slice | None = None  # the rows whose prompts are being read
    places: Tensor | None = None  # [rows] where decoding writes; None while prompts are read
    index: Tensor | None = None  # [rows] 0, 1, 2, ...


class RowLayer(CacheLayerMixin):
    """One layer. Reading a prompt fills rows from their start; decoding writes one slot of every row."""

    is_sliding = False

    def __init__(self, rows: Rows, **kwargs: Any) -> None:
        super().__init__(**kwargs)  # type: ignore[no-untyped-call]
        self.rows = rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros((self.rows.count, states.shape[1], self.rows.capacity, states.shape[3]))
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
        (keys, values), rows = self.slots, self.rows
        if rows.places is None:
            keys[rows.reading, :, : key_states.shape[2]] = key_states
            values[rows.reading, :, : key_states.shape[2]] = value_states
            return key_states, value_states
        keys[rows.index, :, rows.places] = key_states[:, :, 0]
        values[rows.index, :, rows.places] = value_states[:, :, 0]
        end = rows.capacity if rows.ragged else rows.length + 1
        return keys[:, :, :end], values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.rows.length + query_length, 0

    def get_seq_length(self) -> int:
        return self.rows.length

    def get_max_length(self) -> int:
        return self.rows.capacity


class RowCache(Cache):
    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        super().__init__(layer_class_to_replicate=lambda: RowLayer(rows))  # type: ignore[arg-type]

    def read_into(self, rows: slice) -> None:
        self.rows.reading, self.rows.places, self.rows.length = rows, None, 0

    def write_at(self, places: Tensor) -> None:
        """From now on tokens are written at these places, which the caller moves on."""
        self.rows.places = places
        self.rows.index = torch.arange(self.rows.count, device=places.device)

    def narrowed(self, kept: Tensor) -> RowCache:
        """The rows at these indices alone; this cache is given up, layer by layer: two copies may not fit."""
        other = RowCache(replace(self.rows, count=len(kept)))
        for layer in cast(list[RowLayer], self.layers):
            copy = RowLayer(other.rows)
            if layer.is_initialized:
                keys, values = layer.slots
                copy.keys, copy.values = keys[kept], values[kept]
                copy.dtype, copy.device, copy.is_initialized = layer.dtype, layer.device, True
                layer.keys = layer.values = None
            other.layers.append(copy)
        return other
