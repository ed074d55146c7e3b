"""A draft model grows the trees of many texts at once on its device, all levels back to back: see `drafting.device`.

Each text has a draft of its own, which only notes that it is to go on; then one call starts all of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from draftgraph.drafting.batch_program import NEW_TOKENS, BatchProgram, GraphSeats
from draftgraph.drafting.device import WIDTH
from draftgraph.drafting.model import DraftVocabulary
from draftgraph.engine.capture import graph_memory
from draftgraph.engine.packed import Part
from draftgraph.engine.packed_static import at_least, up_to
from draftgraph.engine.pages import OutOfPages, pages_for
from draftgraph.engine.row_data import Row, ends_of
from draftgraph.engine.runner import common_prefix
from draftgraph.graph import Floats, Source
from draftgraph.kernels.growth import EVEN
from draftgraph.models.cache import notice
from draftgraph.noise import signed

TEXTS = (1, 4, 16, 64)  # of a program; between them, texts that are not there fill it up
PAGES = 512  # of a text, to begin with
SPARE = 64  # tokens


class BatchDraft:
    """A draft model for the texts of a batch: `open` a draft for each, let them `begin`, then `start` all of them."""

    def __init__(
        self, engine: GraphSeats, vocabulary: DraftVocabulary, k: int, levels: int, width: int = WIDTH
    ) -> None:
        self.engine, self.vocabulary, self.width, self.most = engine, vocabulary, width, max(1, levels)
        self.readable = vocabulary.readable
        self.written = vocabulary.columns(engine.device)
        self.k = min(k, len(self.written))
        self.pages = PAGES
        self.graphs = graph_memory(engine.device)
        self.fed: list[int] = []  # nodes, level by level of the last run
        self._programs: dict[tuple[int, bool], BatchProgram] = {}
        self._running: BatchProgram | None = None
        self._gave_up = False  # memory was short

    def open(self, seat: Any, ends: frozenset[int]) -> SeatDraft:
        return SeatDraft(self, seat, ends)

    @property
    def seconds(self) -> float:
        """That the last run took of the host's time."""
        return self._running.seconds if self._running else 0.0

    def prepare(self, texts: int) -> None:
        """Records what so many texts need, or fewer: else the first of them wait for it."""
        for most, sampled in product(up_to(TEXTS, texts), (False, True)):
            program = self._program(most, sampled)
            for new in program.usual:
                program.prepare(new)

    def start(self, drafts: Sequence[SeatDraft]) -> None:
        """All of these go on behind their texts; those that want no levels, or for whom there is no room, do not."""
        self._running, self.fed = None, []
        going = [draft for draft in drafts if draft.levels and draft.makes_room()]
        for draft in going[TEXTS[-1] :]:
            draft.levels = 0
        going = going[: TEXTS[-1]]
        if not going or self._gave_up:
            return self._rest(going)
        try:
            self._read_long(going)
            rows = [draft.row() for draft in going]
            program = self._program(len(rows), any(row.temperature for row in rows))
            program.start(rows)
        except torch.OutOfMemoryError:
            self._programs.clear()
            torch.cuda.empty_cache()
            self._gave_up = True
            notice("no GPU memory for drafting: going on without a draft model")
            return self._rest(going)
        self._running = program
        for number, (draft, row) in enumerate(zip(going, rows, strict=True)):
            draft.started(program, number, row)
        deepest = max(row.levels for row in rows)
        self.fed = [sum(len(row.new) for row in rows)]
        self.fed += [self.width * sum(row.levels > level for row in rows) for level in range(1, deepest)]

    def _rest(self, drafts: list[SeatDraft]) -> None:
        for draft in drafts:
            draft.levels = 0

    def _read_long(self, drafts: list[SeatDraft]) -> None:
        """Of texts that have not been drafted on for a while, all but their ends, in one pass."""
        late = [(draft.engine, unread) for draft in drafts if len(unread := draft.unread()) > NEW_TOKENS]
        if late:
            parts = [Part.of_text(seat, unread[:-1]) for seat, unread in late]
            self.engine.run(parts)
            for part in parts:
                part.commit()

    def _program(self, texts: int, sampled: bool) -> BatchProgram:
        key = at_least(TEXTS, texts), sampled
        if key not in self._programs:
            self._programs[key] = BatchProgram(self, *key)
        return self._programs[key]

    def widen(self, pages: int) -> None:
        """Texts have become longer than the tables: recorded programs read the old ones."""
        if pages > self.pages:
            for program in self._programs.values():
                program.wait()
            self.pages = 1 << (pages - 1).bit_length()
            self._programs.clear()
            self.graphs = graph_memory(self.engine.device)


class SeatDraft:
    """One text's draft in a batch."""

    source: Source = "draft"
    free = True  # to ask, once it has been started

    def __init__(self, batch: BatchDraft, seat: Any, ends: frozenset[int]) -> None:
        self.batch, self.engine, self.width, self.k = batch, seat, batch.width, batch.k
        self.levels = 0
        self.odds = EVEN
        self.perturb: Any = None  # a `DraftNoise`, for sampled text
        self.passes = self.tokens_fed = 0
        self._ends = ends_of(ends)
        self._text: list[int] = []
        self._run: tuple[BatchProgram, int, int] | None = None  # its row there, and how many levels count
        self._noise: tuple[int, float] | None = None

    def as_read(self, text: list[int]) -> list[int]:
        """The tokens that the draft reads for these."""
        readable = self.batch.readable
        return [token if token < readable else 0 for token in text]

    def catch_up(self, text: list[int], chunk: int | None = None) -> None:
        """Reads the text but for its last token, keeping what was read before of the same text."""
        known = self.as_read(text[:-1])
        self.engine.rewind(common_prefix(self.engine.text, known))
        self.engine.prefill(known[len(self.engine.text) :], chunk)

    def begin(self, text: list[int]) -> None:
        """It is to draft behind this text, as many levels as `levels` says when all are started."""
        self._text, self._run = text, None
        self.levels = min(self.levels, self.batch.most)

    def arriving(self) -> Iterator[Floats]:
        """What was started, level by level: see `BatchProgram.arriving`."""
        if self._run is None:
            return iter(())
        program, row, levels = self._run
        return program.arriving(row, levels)

    def unread(self) -> list[int]:
        if len(self.engine.text) >= len(self._text):  # begun again: the root has to be read once more
            self.engine.rewind(len(self._text) - 1)
        return self.as_read(self._text[len(self.engine.text) :])

    def makes_room(self) -> bool:
        """For the nodes that are expanded, and for some more tokens: looking for pages takes its time."""
        needed, pages = len(self._text) + (self.levels - 1) * self.width, self.engine.pages
        if pages_for(needed) > len(pages):
            for spare in (SPARE, 0):
                try:
                    self.engine.reserve(needed + spare)
                    break
                except OutOfPages:
                    continue
            else:
                self.levels = 0
        self.batch.widen(len(self.engine.pages) + pages_for(self.batch.most * self.width) + 4)
        return self.levels > 0

    def row(self) -> Row:
        seat = self.engine
        if self._noise is None:
            noise = self.perturb
            self._noise = (0, 0.0) if noise is None else (noise.noise.stream_key(noise.stream), noise.temperature)
        key, temperature = self._noise
        sampling = signed(key), temperature
        return Row(len(seat.text), self.unread(), seat.pages, self.levels, self._ends, *sampling, self.odds)

    def started(self, program: BatchProgram, number: int, row: Row) -> None:
        self._run = program, number, row.levels
        self.engine.text.extend(row.new)
        self.passes += row.levels
        self.tokens_fed += len(row.new) + (row.levels - 1) * self.width
