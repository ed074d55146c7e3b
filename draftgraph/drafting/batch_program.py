"""The recorded parts of a draft's run over many texts: see `drafting.device` for one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from draftgraph.engine.capture import Captured, host_memory
from draftgraph.engine.packed import Part
from draftgraph.engine.packed_graph import PackedData
from draftgraph.engine.pages import PAGE
from draftgraph.engine.proposals import best_words
from draftgraph.engine.row_data import Row, RowData
from draftgraph.graph import Floats
from draftgraph.kernels.growth import Growth, Shared, choose, note

NEW_TOKENS = 32  # of one text, read at the root's level; more are read before
USUAL = 4  # new tokens of a text, on average
NARROWEST = 16  # nodes of a reading pass


@runtime_checkable
class GraphSeats(Protocol):
    """A packed engine whose passes can be captured: see `PackedEngine` for the rest of it. Behind its slots it has one
    page more, which no text is given."""

    @property
    def device(self) -> torch.device: ...

    @property
    def slots(self) -> int: ...

    def run(self, parts: Sequence[Part]) -> list[Tensor]: ...

    def graph_pass(self, tokens: Tensor, positions: Tensor, slots: Tensor, data: PackedData) -> Tensor:
        """Logits [nodes, vocabulary], all of it data."""


class Drafting(Protocol):
    """Whose run it is."""

    engine: GraphSeats
    k: int
    width: int  # nodes that a level expands
    most: int  # levels
    pages: int  # of a text, at most
    readable: int
    written: Tensor
    graphs: Any  # memory that recorded parts share: none of them leaves anything there


class BatchProgram:
    """The recorded parts of a run for so many texts: it reads what is new in all of them, then expands some open nodes
    of each, level after level."""

    def __init__(self, draft: Drafting, texts: int, sampled: bool) -> None:
        self.draft, self.texts, self.sampled, self.device = draft, texts, sampled, draft.engine.device
        self.growth = growth = Growth.of(draft.most, draft.width, draft.k, self.device, texts)
        self.data = RowData(texts, draft.pages, texts * NEW_TOKENS, draft.engine.slots, self.device)
        told = self.data.device
        shape = draft.width, growth.bits.shape[-1]
        self.shared = Shared.of(told["pages"], told["levels"], told["ends"], draft.engine.slots, PAGE, *shape)
        self.shared.slots.fill_(draft.engine.slots)
        growth.shared, growth.odds = self.shared, told["odds"]
        self.seconds = 0.0  # that the host gave to the last run, waiting for it included
        self._report = host_memory(growth.report.shape, growth.report.dtype, self.device)
        self._told: Floats = self._report.numpy()
        self._readings: dict[int, Captured] = {}  # by how many new tokens they can read
        self._levels: list[Captured] = []
        self._running: list[Captured] = []

    @property
    def usual(self) -> tuple[int, int]:
        """New tokens that runs have, mostly and sometimes."""
        mostly = max(NARROWEST, USUAL * self.texts)
        return mostly, 2 * mostly

    def prepare(self, new: int) -> Captured:
        """Records what is missing for so many new tokens."""
        self.wait()
        width = max(self.usual[0], 1 << (new - 1).bit_length())
        if width not in self._readings:
            self.data.tell([], width)  # recording must not touch a text
            self._readings[width] = self._reading(width)
        if not self._levels:  # all at once: an answer that needs more than the last should not stand still for it
            self._levels = [self._level(level) for level in range(self.draft.most - 1)]
        self._width = width
        return self._readings[width]

    def start(self, rows: Sequence[Row]) -> None:
        read = self.prepare(sum(len(row.new) for row in rows))
        start = time.perf_counter()
        self.data.tell(rows, self._width)
        self._running = [read, *self._levels[: max(row.levels for row in rows) - 1]]
        for part in self._running:
            part()
        self.seconds = time.perf_counter() - start

    def wait(self) -> None:
        if self._running:
            self._running[-1].wait()

    def arriving(self, row: int, levels: int) -> Iterator[Floats]:
        """What there is for one text, as soon as it is here: all levels of the run but the last, then that."""
        early = len(self._running) - 1
        known, end = 0, 1 + (levels - 1) * self.growth.width
        for place, upto in ((early - 1, 1 + (early - 1) * self.growth.width), (early, end)):
            upto = min(upto, end)
            if place >= 0 and upto > known:
                start = time.perf_counter()
                self._running[place].wait()
                self.seconds += time.perf_counter() - start
                yield np.ascontiguousarray(self._told[known:upto, row])
                known = upto

    def _reading(self, width: int) -> Captured:
        growth, engine, data = self.growth, self.draft.engine, self.data
        tokens, positions, slots, _ = data.nodes(width)
        last, starts, lengths = (data.device[name] for name in ("last", "starts", "lengths"))

        def read() -> None:
            data.arrive(width)
            growth.open.fill_(-torch.inf)
            growth.length.copy_(lengths + starts[1:] - starts[:-1])  # of the texts with their new tokens
            self.shared.find_slots(growth.length, growth.width)
            logits = engine.graph_pass(tokens[None], positions[None], slots, data.reading(width, NEW_TOKENS))
            self._propose(0, logits.index_select(0, last), torch.zeros_like(growth.scores[:, 0]), growth.length)

        return Captured(read, self.device, self.draft.graphs)

    def _level(self, level: int) -> Captured:
        growth, engine = self.growth, self.draft.engine

        def expand() -> None:
            choose(growth, level, self.draft.readable)
            seen = PackedData(*growth.packed_level())
            logits = engine.graph_pass(growth.next_tokens, growth.next_positions, growth.next_slots, seen)
            self._propose(1 + level * growth.width, logits, growth.next_scores, growth.next_positions[0] + 1)

        return Captured(expand, self.device, self.draft.graphs)

    def _propose(self, first: int, logits: Tensor, scores: Tensor, positions: Tensor) -> None:
        """The children of every text's expansions from `first` on, whose next tokens have these positions."""
        told = self.data.device
        noise = (told["keys"], told["temperatures"]) if self.sampled else None
        tokens, chances = best_words(logits, self.draft.written, self.growth.k, positions, noise)
        note(self.growth, first, scores, tokens, chances, None)
        here = slice(first, first + len(logits) // self.texts)
        self._report[here].copy_(self.growth.report[here], non_blocking=True)
