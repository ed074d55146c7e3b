"""Hidden states that drafts read: taken from a target's modules while a pass runs.

h[i] is the state behind i layers, as transformers numbers `output_hidden_states`: h[0] are the embeddings, and the last
one comes behind the final norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph.engine.borrowing import pass_lock, unwrapped
from draftgraph.errors import UnsupportedModelError


class Taps:
    """Reads the states h[i] of chosen i during passes of a model; with none chosen it does nothing."""

    def __init__(self, model: Any, reads: tuple[int, ...] = ()) -> None:
        self.reads = reads
        self._lock = pass_lock(model)
        self._places = places_of(model, set(reads)) if reads else {}
        self._found: dict[int, Tensor] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For one pass, whose states `found` gives afterwards."""
        if not self.reads:
            yield
            return
        hooks = []
        with self._lock:
            try:
                for number, (module, comes_in) in self._places.items():
                    hooks.append(self._hook(number, module, comes_in))
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    def _hook(self, number: int, module: nn.Module, comes_in: bool) -> Any:
        def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            self._found[number] = given[0] if given else named["hidden_states"]

        def behind(_: Any, given: Any, out: Any) -> None:
            self._found[number] = out if isinstance(out, Tensor) else out[0]

        if comes_in:
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(behind)

    def found(self) -> Tensor | None:
        """Of all nodes of the last pass, in the order of `reads`. # [nodes, len(reads) * hidden]"""
        if not self.reads:
            return None
        found, self._found = self._found, {}
        return torch.cat([found[number][0] for number in self.reads], dim=-1)


def places_of(model: Any, numbers: set[int]) -> dict[int, tuple[nn.Module, bool]]:
    """The module that gives each state, and whether it is what goes into it, not what comes out."""
    layers, base = decoder_layers(model)
    if wrong := [number for number in sorted(numbers) if not 0 <= number <= len(layers)]:
        raise UnsupportedModelError(f"the draft reads state {wrong[0]} of a target that has {len(layers)} layers")
    inside = {number: (layers[number], True) for number in numbers if number < len(layers)}
    return inside | ({len(layers): (base, False)} if len(layers) in numbers else {})


def decoder_layers(model: Any) -> tuple[Any, nn.Module]:
    """A model's layers, and the module whose output is the last state: the one that holds the layers."""
    whole = unwrapped(model)
    count = whole.config.get_text_config(decoder=True).num_hidden_layers
    for module in whole.modules():
        for part in module.children():
            if isinstance(part, nn.ModuleList) and len(part) == count:
                return part, module
    raise UnsupportedModelError(f"{type(whole).__name__} has no list of {count} layers whose states could be read")


def memory_for(model: Any, reads: tuple[int, ...], nodes: int) -> Tensor:
    """Where recorded passes over so many nodes leave these states. # [nodes, len(reads) * hidden]"""
    hidden = unwrapped(model).config.get_text_config(decoder=True).hidden_size
    device = model.get_input_embeddings().weight.device
    return torch.zeros((nodes, len(reads) * hidden), dtype=model.dtype, device=device)


def place_in(memory: Tensor, rows: Tensor) -> int | None:
    """The place in memory of the first of these rows; None: they are a copy."""
    if rows.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
        return None
    return rows.storage_offset() // memory.shape[1]


def own_states(out: Any, taps: Taps) -> Tensor | None:
    """What a pass left of hidden states: those that a head hands on, or those that are read of a target."""
    handed_on: Tensor | None = getattr(out, "states", None)
    return taps.found() if handed_on is None else handed_on[0]
