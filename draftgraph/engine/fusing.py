"""A model's norms, rotary embeddings and gated MLPs with one kernel for each, wherever that was proved to be the same.

A pass of a small model over few tokens takes hardly longer than its kernels take to start: so there are fewer of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from draftgraph.engine.fusible import (
    ROTARY,
    epsilon,
    gate_activation,
    is_plain_rotary,
    is_untouched,
    norm_style,
    rotary_namespaces,
)
from draftgraph.kernels import fused
from draftgraph.kernels.fused import NormStyle
from draftgraph.kernels.triton_or_stub import compiles_for

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Fusions:
    """What one kernel can do for a model, and does while `borrowed`."""

    def __init__(self, model: nn.Module, kinds: tuple[str, ...] = ("cuda",)) -> None:
        self._replacements: list[tuple[dict[str, Any], str, Callable[..., Any]]] = []  # names, one of them, its meaning
        self._proved: dict[Any, Any] = {}
        like = next(model.parameters())
        needless = like.is_cuda and not compiles_for(like.device)
        if like.device.type in kinds and like.dtype in DTYPES and not needless:
            self._find(model, like)

    @torch.no_grad()
    def _find(self, model: nn.Module, like: Tensor) -> None:
        for module in filter(is_untouched, model.modules()):
            forward: Callable[..., Any] | None = None
            if (style := self._once(norm_style, module)) is not None:
                forward = partial(normed, module, module.forward, style)
            elif (activation := self._once(gate_activation, module, like)) is not None:
                forward = partial(gated, module, activation)
            if forward is not None:
                self._replacements.append((vars(module), "forward", forward))
        for names in rotary_namespaces(model):
            if is_plain_rotary(names[ROTARY], like):
                self._replacements.append((names, ROTARY, rotary(names[ROTARY])))

    def _once(self, proof: Callable[..., Any], module: nn.Module, *more: Tensor) -> Any:
        """A proof holds for all modules of a class that have the same settings, weights and parts."""
        settings = [(name, value) for name, value in vars(module).items() if isinstance(value, int | float | str)]
        weights = [(name, weight.shape, weight.dtype) for name, weight in module.named_parameters(recurse=False)]
        parts = [(name, type(part), is_untouched(part)) for name, part in module.named_children()]
        key = (proof, type(module), *settings, *weights, *parts)
        if key not in self._proved:
            self._proved[key] = proof(module, *more)
        return self._proved[key]

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        before: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for names, name, quicker in self._replacements:
                if names.get(name) is not quicker:  # a modeling file may be borrowed by another thread already
                    before.append((names, name, names.get(name)))
                    names[name] = quicker
            yield
        finally:
            for names, name, own in before:
                if own is None:
                    del names[name]
                else:
                    names[name] = own


def normed(module: Any, own: Callable[[Tensor], Tensor], style: NormStyle, *given: Tensor, **named: Tensor) -> Tensor:
    (states,) = *given, *named.values()
    eps = epsilon(module)
    if eps is None or states.dtype != module.weight.dtype or states.dim() > 4:
        return own(states)
    return fused.rms_norm(states, module.weight, eps, style)


def gated(module: Any, activation: str, *given: Tensor, **named: Tensor) -> Tensor:
    (states,) = *given, *named.values()
    if hasattr(module, "gate_up_proj"):
        gate, up = module.gate_up_proj(states).chunk(2, dim=-1)
    else:
        gate, up = module.gate_proj(states), module.up_proj(states)
    return module.down_proj(fused.gated(gate, up, activation))  # type: ignore[no-any-return]


@cache
def rotary(own: Callable[..., Any]) -> Callable[..., Any]:
    """In a modeling file others may call it too, with whatever its own takes."""

    def apply_rotary_pos_emb(*given: Any, **named: Any) -> Any:
        if named or len(given) != 4 or torch.is_grad_enabled() or not turns_whole_heads(*given):
            return own(*given, **named)
        return fused.rotate(*given)

    return apply_rotary_pos_emb


def turns_whole_heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    given = (query, key, cos, sin)
    alike = {(part.shape[-1], part.shape[-2], part.dtype) for part in given}
    dims = [part.dim() for part in given]
    return len(alike) == 1 and dims == [4, 4, 3, 3] and query.dtype in DTYPES and query.shape[-1] % 2 == 0
