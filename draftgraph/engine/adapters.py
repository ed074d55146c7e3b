"""LoRA adapters beside one model: every row of a pass has its own, or none, and the model's weights are as they are.

To what a linear layer computes of a row, the row's adapter adds a product with two narrow weights. Passes of modules
have them added by hooks; a compiled pass reads the same weights by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.sharding import LinearPart, is_split, linear_parts
from draftgraph.errors import UnsupportedModelError, UsageError

SIZES = (("in_features", "out_features"), ("nx", "nf"))  # of linear layers, and of GPT-2's


class LowRank(NamedTuple):
    """What an adapter has for one layer, in float32; its factor is in `up`."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [rank, outputs]


Adapter = Mapping[str, LowRank]  # by the names of a model's modules


@dataclass(frozen=True)
class AdaptedLayer:
    """The weights of all adapters for one layer, one after the other."""

    down: Tensor  # [ranks, inputs]
    up: Tensor  # [ranks, outputs]
    owners: Tensor  # numbers of the adapters that the ranks belong to # [ranks]
    part: LinearPart | None = None  # of a layer that is split over processes: the weights are those of this one

    def of(self, number: int) -> LowRank:
        """One adapter's own, where they lie."""
        here = (self.owners == number).nonzero().flatten().tolist()
        own = slice(here[0], here[-1] + 1) if here else slice(0, 0)
        return LowRank(self.down[own], self.up[own])

    def add(self, numbers: Tensor, module: nn.Module, given: tuple[Tensor, ...], found: Tensor) -> Tensor:
        """A forward hook, for rows with adapters of these numbers. It computes in float32, as PEFT does."""
        rows = given[0].reshape(-1, self.down.shape[1]).to(self.down)
        own = numbers.to(rows.device)[: len(rows), None] == self.owners  # an output layer is given the first rows alone
        low = torch.where(own, rows @ self.down.t(), 0.0)
        if self.part is not None and self.part.sums:
            low = self.part.total(low)
        return (found + (low @ self.up).view(found.shape)).to(found.dtype)


class Adapters:
    """Adapters of a model, by number: the first is 1, and 0 is none."""

    def __init__(self, model: Any, given: Mapping[str, Adapter]) -> None:
        self.given = given
        self._numbers = {"": 0} | {name: number for number, name in enumerate(given, start=1)}
        modules = dict(unwrapped(model).named_modules())
        for name, adapter in given.items():
            for place, weights in adapter.items():
                refuse_misfit(f"the adapter {name} was made for another model", place, modules.get(place), weights)
        places = dict.fromkeys(place for adapter in given.values() for place in adapter)
        parts = {one.module: one for one in linear_parts(unwrapped(model))} if given else {}
        self.layers = {
            modules[place]: joined(modules[place], place, [*given.values()], parts.get(modules[place]))
            for place in places
        }

    @property
    def names(self) -> list[str]:
        return [*self._numbers][1:]

    def number(self, name: str) -> int:
        if name not in self._numbers:
            raise UsageError(f"there is no adapter {name!r}: there is {', '.join(self.names) or 'none'}")
        return self._numbers[name]

    @contextmanager
    def added(self, numbers: Tensor | None) -> Iterator[None]:
        """For one pass of the model's modules, over rows with adapters of these numbers; None: nobody has one."""
        hooks = []
        if numbers is not None:
            hooks = [module.register_forward_hook(partial(one.add, numbers)) for module, one in self.layers.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def refuse_misfit(complaint: str, place: str, module: nn.Module | None, weights: LowRank) -> None:
    if module is None:
        raise UnsupportedModelError(f"{complaint}: it has weights for {place}, which this one lacks")
    own = next(([getattr(module, name) for name in names] for names in SIZES if hasattr(module, names[0])), None)
    if own is None:
        raise UnsupportedModelError(f"{complaint}: {place} is no linear layer but a {type(module).__name__} here")
    sizes = [weights.down.shape[1], weights.up.shape[1]]
    if own != sizes:
        raise UnsupportedModelError(
            f"{complaint}: {place} is {own[0]} to {own[1]} here, and {sizes[0]} to {sizes[1]} there"
        )


def joined(module: nn.Module, place: str, adapters: list[Adapter], part: LinearPart | None) -> AdaptedLayer:
    own = [(number, adapter[place]) for number, adapter in enumerate(adapters, start=1) if place in adapter]
    owners = torch.tensor([number for number, weights in own for _ in weights.down])
    down, up = (torch.cat([weights[side] for _, weights in own]) for side in (0, 1))
    first = next(module.parameters())
    if part is not None:
        down, up = part.own(down) if part.sums else down, part.own(up) if part.splits else up
    elif is_split(first):
        raise UnsupportedModelError(f"{place} is split over processes in a way that adapters do not support")
    down, up, owners = (weight.to(first.device) for weight in (down, up, owners))
    return AdaptedLayer(down, up, owners, part)
