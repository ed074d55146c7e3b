"""Sequences that are continued together. A sequence may join or leave at any step; a prompt is read in pieces beside
the others' steps. What a step does stands in `step`."""

from __future__ import annotations

import time
from collections.abc import Sequence as Several
from contextlib import suppress

import numpy as np
import torch

from draftgraph.batching.waiting import Waiting
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.reading import ALL, Pace, price_of_reading, share
from draftgraph.decoder import GraphDecoder
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.capture import Captured
from draftgraph.engine.paged import slot_bytes
from draftgraph.engine.pages import PAGE, OutOfPages
from draftgraph.generation import context_window
from draftgraph.hardware import free_memory
from draftgraph.notices import notice
from draftgraph.sequence import Engines, Sequence, forget_all
from draftgraph.step import Taken, guarded, read_draft, step

SEQUENCES = 64  # continued at a time
CHUNK = 256  # tokens of prompts that are read beside the steps of others, at most: see `Pace`
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
        chunk: int = CHUNK,
    ) -> None:
        """In a pool of so many slots, or as many as memory allows; or in engines that are there already."""
        self.decoder = decoder
        self.waiting = Waiting()
        self.running: list[Sequence] = []  # those that came first are first
        self.engines = engines or decoder.make_engines(slots or slots_for(decoder, sequences))
        self.most = min(sequences, *(engine.most or sequences for engine in self.engines.all))
        self.taken = Taken()  # the last step
        self._pace = Pace(chunk)
        self._nodes = 0  # checked in the last step
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

    def longest(self, nodes: int) -> int | None:
        """Tokens of a text that would fit if it were alone, with so many nodes behind it; None: no bound is known."""
        pools = [engine.slots for engine in self.engines.all if engine.slots]
        return min(pools) - nodes if pools else None

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

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
        started = time.perf_counter()
        ready = [sequence for sequence in self.running if sequence.began]
        reading = [sequence for sequence in self.running if not sequence.began]
        prices = prices_behind(reading)
        room = self._room(ready, prices)
        missed = room - self._read_draft(reading, room)
        shares = share([sequence.unread for sequence in reading], room)
        pieces = {one: one.piece(count) if count else None for one, count in zip(reading, shares, strict=True)}
        taken = step(ready, pieces, self.engines, self.decoder.experience, missed)
        if Captured.made == taken.recorded:
            read = 0.0 if prices is None else float(price_of_reading(prices, np.array([sum(shares)]))[0])
            self._pace.learn(time.perf_counter() - started, price_of_pass(ready, taken.nodes), read)
        self._nodes = taken.nodes
        return taken

    def _room(self, ready: list[Sequence], prices: CostModel | None) -> int:
        """Tokens that each model may read in this step: of prompts, and of what the draft has missed."""
        if prices is None:
            return self._pace.most if len(ready) > 1 else ALL
        return self._pace.room(price_of_pass(ready, max(self._nodes, len(ready))), prices)

    def _read_draft(self, reading: list[Sequence], room: int) -> int:
        """The draft reads prompts beside the target, if it is going to draft."""
        drafts = self.decoder.experience.habit(len(self.running)).drafts
        return read_draft([one for one in reading if drafts or not one.decides_by_the_clock], self.engines, room)

    def _admit(self) -> list[Sequence]:
        """Lets in who has room; tells who failed."""
        failed = []
        while len(self.running) < self.most and (sequence := self.waiting.take(self._has_room)) is not None:
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
        self.engines.launch_drafts([sequence for sequence in self.running if sequence.began], self._pace.most)
        if isinstance(error, OutOfPages) and self.running:
            newest.put_back += 1
            self.waiting.put_back(newest)
            return []
        newest.failure = error
        return [newest]


def price_of_pass(sequences: Several[Sequence], nodes: int) -> float:
    """Of a pass over so many nodes of these sequences; 0 if there are none."""
    return float(sequences[0].cost().of_pass(np.array([nodes]))[0]) if sequences else 0.0


def prices_behind(reading: Several[Sequence]) -> CostModel | None:
    """What passes cost behind the longest of the texts that are being read, as far as that has been read."""
    if not reading:
        return None
    longest = max(reading, key=lambda sequence: len(sequence.context.text))
    return longest.pricing.at(len(longest.context.text))


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
