"""Sequences that are continued together. A sequence may join or leave at any step; a prompt is read in pieces beside
the others' steps. What a step does stands in `step`."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Several
from contextlib import suppress

import torch

from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.paged import slot_bytes
from draftgraph.engine.pages import PAGE, OutOfPages
from draftgraph.engine.protocol import Segment
from draftgraph.generation import context_window
from draftgraph.hardware import free_memory
from draftgraph.notices import notice
from draftgraph.sequence import Engines, Sequence, forget_all
from draftgraph.step import Taken, guarded, read_draft, step

SEQUENCES = 64  # continued at a time
CHUNK = 256  # tokens of prompts, read beside the steps of others
CHUNK_ALONE = 1024  # where nobody waits for the next token
SHARE = 0.5  # of the memory that is free: what keys and values may take
USUAL = {"cpu": 512, "cuda": 4096}  # tokens that a pool has room for, for every sequence: more than most have
FEWEST = 4096  # slots of a pool
NODES = 128  # that stand behind a text while they are checked


class Batch:
    """Continues sequences: `add` them, then `step` until nobody is left."""

    def __init__(
        self,
        decoder: GraphDecoder,
        slots: int | None = None,
        sequences: int = SEQUENCES,
        engines: Engines | None = None,
    ) -> None:
        """In a pool of so many slots, or as many as memory allows; or in engines that are there already."""
        self.decoder = decoder
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # those that came first are first
        self.engines = engines or decoder.make_engines(slots or slots_for(decoder, sequences))
        self.most = min(sequences, *(engine.most or sequences for engine in self.engines.all))
        self.taken = Taken()  # the last step
        self._loan = Loan(*decoder.models)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def prepare(self, config: GraphConfig) -> None:
        """Records and measures what sequences of this configuration will need, before anybody waits for it."""
        self.engines.refuse_inexact(config)
        with self._loan:
            with suppress(torch.OutOfMemoryError):  # what is missing is tried again when it is needed
                self._record(config)
            self.decoder.pricing(config, self.engines)

    def _record(self, config: GraphConfig) -> None:
        if not self.engines.target.captured:
            return
        notice(f"recording passes over up to {self.most} texts (about a minute)")
        self.engines.target.prepare(self.most)
        if self.engines.draft is not None and (drafts := self.engines.device_drafts(config)) is not None:
            self.engines.draft.prepare(self.most, reading_only=True)
            drafts.prepare(self.most)

    def could_hold(self, tokens: int) -> bool:
        """Whether a text of this length would fit if it were alone."""
        return all(engine.slots == 0 or tokens <= engine.slots for engine in self.engines.all)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Its slots are free for the next step."""
        if sequence in self.running:
            self.running.remove(sequence)
            sequence.close()
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def step(self) -> Taken:
        """One pass for everybody; tells who took a step, and who failed."""
        self.taken = Taken()
        with self._loan:
            failed = self._admit()
            while self.running:
                try:
                    self.taken = self._step()
                    break
                except (OutOfPages, torch.OutOfMemoryError) as error:
                    failed += self._make_room(error)
            self.taken.steps += [(sequence, None) for sequence in failed]
            for sequence in [sequence for sequence in self.running if sequence.done]:
                self.remove(sequence)
        return self.taken

    def _step(self) -> Taken:
        ready = [sequence for sequence in self.running if sequence.began]
        return step(ready, self._pieces(bool(ready)), self.engines, self.decoder.experience)

    def _pieces(self, others: bool) -> dict[Sequence, Segment | None]:
        """What is read of prompts beside the others' steps; first come, first served. The draft reads its own now."""
        room = CHUNK if others else CHUNK_ALONE
        reading = [sequence for sequence in self.running if not sequence.began]
        pieces: dict[Sequence, Segment | None] = dict.fromkeys(reading)
        for sequence in reading:
            if room > 0 and (piece := sequence.piece(room)) is not None:
                pieces[sequence] = piece
                room -= len(piece.tokens)
        drafts = self.decoder.experience.habit(len(self.running)).drafts
        read_draft([one for one in reading if drafts or not one.decides_by_the_clock], self.engines)
        return pieces

    def _admit(self) -> list[Sequence]:
        """Lets in who has room; tells who failed."""
        failed = []
        while self.waiting and len(self.running) < self.most and self._has_room(self.waiting[0]):
            sequence = self.waiting.popleft()
            if guarded(sequence, self._open, sequence):
                self.running.append(sequence)
            else:
                failed.append(sequence)
        return failed

    def _open(self, sequence: Sequence) -> None:
        if sequence.context is None:
            pricing = self.decoder.pricing(sequence.config, self.engines)
            contexts = [self.engines.target.open(sequence.tenant, sequence.adapter)]
            if self.engines.draft is not None and sequence.config.drafts:
                contexts.append(self.engines.draft.open(sequence.tenant))
            sequence.open(self.engines, self.decoder.learnt, pricing, contexts)
        sequence.begin_with_known()

    def _has_room(self, sequence: Sequence) -> bool:
        """Nobody is let in to be sent away at once."""
        needed = len(sequence.text) + sequence.config.nodes
        return not self.running or all(engine.has_room(needed) for engine in self.engines.all)

    def _make_room(self, error: Exception) -> list[Sequence]:
        """The newest gives up its slots: for later, if others leave some then; else it has failed."""
        newest = self.running.pop()
        for sequence in [*self.running, newest]:
            sequence.restart()
        newest.close()
        self.engines.launch_drafts([sequence for sequence in self.running if sequence.began])
        if isinstance(error, OutOfPages) and self.running:
            self.waiting.appendleft(newest)
            return []
        newest.failure = error
        return [newest]


def slots_for(decoder: GraphDecoder, sequences: int) -> int:
    """As many as texts of usual lengths need, if they fit into memory."""
    found = []
    for model in decoder.models:
        device = model.get_input_embeddings().weight.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        usual = USUAL.get(device.type, USUAL["cuda"])
        longest = (context_window(model) or usual) + NODES
        wanted = max(longest, sequences * min(usual, longest))
        found.append(max(FEWEST, min(wanted, int(SHARE * free / max(1, slot_bytes(model))))))
    return min(found)


def slots_needed(sequences: Several[Sequence]) -> int:
    """As many as those need that are continued at a time."""
    needs = sorted((one.request.max_length + one.config.nodes + 2 * PAGE for one in sequences), reverse=True)
    return sum(needs[:SEQUENCES])


def continue_all(decoder: GraphDecoder, sequences: Several[Sequence]) -> None:
    """Continues sequences together to their ends, in the decoder's own engines; raises what one of them fails with."""
    batch = Batch(decoder, engines=decoder.engines)
    for engine in batch.engines.all:
        engine.reserve(slots_needed(sequences))
    for sequence in sequences:
        batch.add(sequence)
    try:
        while batch.busy:
            for sequence, _ in batch.step().steps:
                if sequence.failure is not None:
                    raise sequence.failure
    except BaseException:
        running = list(batch.running)
        forget_all(running)
        for sequence in running:
            batch.remove(sequence)
        raise
