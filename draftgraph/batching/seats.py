"""Where the texts of a batch are read: all in one packed pass, or, where a model cannot do that, each by itself."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.borrowing import unwrapped
from draftgraph.engine.packed import PackedEngine, Part
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.engine.pages import PAGE
from draftgraph.engine.rope import RopeSwitch
from draftgraph.engine.runner import EagerEngine
from draftgraph.engine.selfcheck import (
    PARENTS,
    checked_engine,
    problem_of,
    short_windows,
    static_wanted,
    tree_difference,
)
from draftgraph.generation import context_window
from draftgraph.graph import Bools, Ints
from draftgraph.hardware import free_memory
from draftgraph.models.cache import notice

SHARE = 0.5  # of the memory that is free: what keys and values may take
TEXT = {"cpu": 512, "cuda": 4096}  # tokens that a pool has room for, for every text at a time: more than most have
CHECKED = 4096  # slots of a pool that only a check uses
NODES = 128  # that stand behind a text while they are checked
MORE = 2 * PAGE  # tokens that a check reads, so that it turns some pages


class SeatEngine(Protocol):
    """A model and the places of its texts. A place is an `Engine` for one text."""

    most: int | None  # texts at a time; None: as many as there is room for

    def open(self, tenant: str = "") -> Any: ...

    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        """Logits of every part, none of one that is not scored; all nodes are scratch after it."""

    def wait(self) -> None:
        """Until the last pass is done."""

    def has_room(self, tokens: int) -> bool:
        """For one more text of this length."""

    @property
    def used(self) -> int:
        """Slots that texts hold."""

    @property
    def slots(self) -> int: ...


class Apart:
    """Every text has an engine of its own."""

    slots = 0
    used = 0

    def __init__(self, model: Any) -> None:
        self.model = model
        self.most = 1 if RopeSwitch.of(model) is not None else None  # it remembers the text that it last saw

    def open(self, tenant: str = "") -> OwnSeat:
        engine = checked_engine(self.model)
        return OwnSeat(self.model, engine.branching, getattr(engine, "_offsets", False))

    def run(self, parts: Sequence[Part]) -> list[Tensor]:
        return [self._scored(part) for part in parts]

    def wait(self) -> None: ...

    def _scored(self, part: Part) -> Tensor:
        logits = part.seat.forward(part.tokens, part.depths, part.visible)
        return logits if part.scored else logits[:0]

    def has_room(self, tokens: int) -> bool:
        return True


class OwnSeat(EagerEngine):
    """What a place can do besides: there is nothing to share."""

    expected = 0

    def begin_with(self, tokens: list[int], following: int) -> int:
        """Reads it all at once: its rotary embedding may depend on the length."""
        self.prefill(tokens, None, following)
        return 0

    def settle(self) -> None: ...

    def close(self) -> None:
        self.rewind(0)


def packed_or_apart(model: Any, slots: int | None, texts: int) -> SeatEngine:
    """Packed, if a small tree among others comes out as in plain passes; where they can be, in captured passes."""
    name = type(unwrapped(model)).__name__
    if static_wanted(model):
        if (problem := crowd_problem(model, PackedStaticEngine)) is None:
            return PackedStaticEngine(model, slots or slots_for(model, texts))
        notice(f"{name} reads many texts without CUDA graphs, and slower: {problem}")
    if (problem := crowd_problem(model, PackedEngine)) is None:
        return PackedEngine(model, slots or slots_for(model, texts))
    notice(f"{name} reads one text at a time, and slower: {problem}")
    return Apart(model)


def crowd_problem(model: Any, kind: type[PackedEngine]) -> str | None:
    """What goes wrong with a tree among others, or None."""
    with short_windows(model):
        problem = problem_of(partial(tree_difference, model, PARENTS, partial(Crowd, kind), MORE))
    if model.get_input_embeddings().weight.is_cuda:
        gc.collect()  # recorded passes and who recorded them hold each other
        torch.cuda.empty_cache()
    return problem


class Crowd:
    """For the check: a text whose pages do not lie in a row, and in every pass another one goes before it."""

    def __init__(self, kind: type[PackedEngine], model: Any) -> None:
        self.engine = kind(model, CHECKED)
        self.other, self.seat = self.engine.open(), self.engine.open()
        for length in range(PAGE, MORE + 2 * PAGE, PAGE):
            self.other.reserve(length)
            self.seat.reserve(length)

    def prefill(self, tokens: list[int]) -> None:
        self.seat.prefill(tokens)
        self.other.prefill(tokens[::-1])

    def forward(self, tokens: Ints, depths: Ints, visible: Bools) -> Tensor:
        self.other.forget(0)
        others = Part(self.other, tokens, np.arange(len(tokens)), np.tri(len(tokens), dtype=bool))
        return self.engine.run([others, Part(self.seat, tokens, depths, visible)])[1]


def slots_for(model: Any, texts: int) -> int:
    """As many as texts of usual lengths need, if they fit into memory."""
    device = model.get_input_embeddings().weight.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    usual = TEXT.get(device.type, TEXT["cuda"])
    longest = (context_window(model) or usual) + NODES
    wanted = max(longest, texts * min(usual, longest))
    return max(CHECKED, min(wanted, int(SHARE * free / max(1, PackedEngine.bytes_per_slot(model)))))
