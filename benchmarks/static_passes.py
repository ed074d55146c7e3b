"""Passes of transformers modules over preallocated keys and values, and their capture as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, CacheLayerMixin

from draftgraph.engine.attention import graph_masks
from draftgraph.graph import Bools, Ints
from draftgraph.kernels.best import best_tokens
from draftgraph.models.draft import layer_stack, text_config

BEST = 8  # children of a node
CHUNK = 512  # tokens of the text that are read at once
SLOT_MULTIPLE = 64  # of keys and values: kernels want masks with aligned rows
WARM_UPS = 3
TOLERANCE = 0.1  # between an eager pass and its captured form, in the largest number of either: half precision


class FixedLayer(CacheLayerMixin):
    """Slots of one layer, all of them shown at every pass: a mask tells which are seen."""

    is_sliding = False

    def __init__(self, capacity: int, slots: Tensor) -> None:
        super().__init__()
        self.capacity, self.slots = capacity, slots

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self.slots, key_states)
        self.values.index_copy_(2, self.slots, value_states)
        return self.keys, self.values

    def writing_at(self, slots: Tensor) -> FixedLayer:
        """The same keys and values; a pass writes at these slots."""
        other = FixedLayer(self.capacity, slots)
        other.keys, other.values, other.is_initialized = self.keys, self.values, self.is_initialized
        other.dtype, other.device = self.dtype, self.device
        return other

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> int:
        return self.capacity

    def get_max_length(self) -> int:
        return self.capacity


class StaticText:
    """A text that a model has read into preallocated keys and values, with room for nodes behind it."""

    def __init__(self, model: Any, text: list[int], nodes: int) -> None:
        self.model, self.length = model, len(text)
        self.device = model.get_input_embeddings().weight.device
        self.capacity = -(-(len(text) + nodes) // SLOT_MULTIPLE) * SLOT_MULTIPLE
        everywhere = torch.arange(self.capacity, device=self.device)
        count = len(layer_stack(model)[1])
        self.layers = [FixedLayer(self.capacity, everywhere[:0]) for _ in range(count)]
        for start in range(0, len(text), CHUNK):
            places = everywhere[start : min(start + CHUNK, len(text))]
            for layer in self.layers:
                layer.slots = places
            mask = self._mask(everywhere <= places[:, None], places, everywhere)
            tokens = torch.tensor([text[start : start + CHUNK]], device=self.device)
            static_forward(model, tokens, places[None], mask, Cache(layers=list(self.layers)))

    def behind(self, tokens: list[int], depths: Ints, visible: Bools) -> dict[str, Any]:
        """Buffers of a pass over nodes behind the text, for `static_forward` and `draft_level`."""
        end = self.length + len(tokens)
        slots = torch.arange(self.length, end, device=self.device)
        positions = self.length + torch.from_numpy(depths).to(self.device)
        seen = torch.zeros((len(tokens), self.capacity), dtype=torch.bool, device=self.device)
        seen[:, : self.length] = True
        seen[:, self.length : end] = torch.from_numpy(visible).to(self.device)
        places = torch.arange(self.capacity, device=self.device)
        places[self.length : end] = positions
        return {
            "tokens": torch.tensor([tokens], device=self.device),
            "positions": positions[None],
            "mask": self._mask(seen, positions, places),
            "cache": Cache(layers=[layer.writing_at(slots) for layer in self.layers]),
        }

    def _mask(self, seen: Tensor, positions: Tensor, places: Tensor) -> Any:
        return graph_masks(text_config(self.model.config), seen, positions, places, self.model.dtype)


def static_forward(model: Any, tokens: Tensor, positions: Tensor, mask: Any, cache: Cache) -> Tensor:
    """Logits [nodes, vocabulary] of a pass that allocates no slots and asks nothing of the host."""
    return model(
        input_ids=tokens,
        position_ids=positions,
        attention_mask=mask,
        past_key_values=cache,
        use_cache=True,
        return_dict=True,
    ).logits[0]


def draft_level(model: Any, tokens: Tensor, positions: Tensor, mask: Any, cache: Cache) -> tuple[Tensor, Tensor]:
    """The best children of nodes in the target's vocabulary, and their log-probabilities. # [nodes, BEST] each"""
    best, chances = best_tokens(static_forward(model, tokens, positions, mask, cache), BEST)
    token_map = getattr(model, "token_map", None)
    return best if token_map is None else token_map[best], chances


def masked_kernels() -> Any:
    """Attention kernels that take a mask and need no plan for every shape, as cuDNN's would."""
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


@contextmanager
def many_recompiles() -> Iterator[None]:
    """One function is compiled for every model and width; past a small limit PyTorch would quietly run it eagerly."""
    from torch._dynamo import config

    with config.patch(recompile_limit=1024, accumulated_recompile_limit=1024):
        yield


class Captured:
    """A pass as a CUDA graph."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self.step = step  # kept: the graph uses its buffers
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UPS):
                eager = step()
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = step()
        self.replay()
        refuse_difference(eager, self.output)

    def replay(self) -> None:
        self.graph.replay()


def refuse_difference(eager: Any, captured: Any) -> None:
    """A graph that left something out would be fast."""
    one, other = (found[-1] if isinstance(found, tuple) else found for found in (eager, captured))
    off = ((one - other).abs().max() / one.abs().max()).item()
    if not off <= TOLERANCE:  # not a number included
        raise RuntimeError(f"a captured pass gives other numbers than an eager one: {off:.1e} off")
