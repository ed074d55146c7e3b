"""Sequences that are continued together. A sequence may join or leave at any step; a prompt is read in pieces beside
the others' steps. What a step does stands in `step`."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as Several
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from draftgraph.batching.waiting import Waiting
from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.prices import Pricing
from draftgraph.cost.reading import ALL, Pace, price_of_reading, share
from draftgraph.decoder import GraphDecoder
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.capture import Captured
from draftgraph.engine.paged import slot_bytes
from draftgraph.engine.pages import PAGE, OutOfPages
from draftgraph.engine.protocol import Engine, Segment
from draftgraph.engine.ranks import rank_count
from draftgraph.generation import context_window
from draftgraph.hardware import free_memory
from draftgraph.notices import notice
from draftgraph.sequence import Engines, Sequence, forget_all
from draftgraph.step import Taken, guarded, read_draft, step

SEQUENCES = 64  # continued at a time
CHUNK = 512  # tokens of prompts that are read beside the steps of others, at most: see `Pace`
SHARE = 0.5  # of the memory that is free: what keys and values may take
USUAL = {"cpu": 512, "cuda": 4096}  # tokens that a pool has room for, for every sequence: more than most have
FEWEST = 4096  # slots of a pool
NODES = 128  # that stand behind a text while they are checked
PUT_BACK = 4  # times at most that a text gives up its place for one of another tenant


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
        self._paces = {in_seconds: Pace(chunk) for in_seconds in (False, True)}  # by the kind of prices
        self._chunk = chunk
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
        room, pricing = self._room(ready, reading), self._pricing
        missed = room - self._read_draft(reading, room)
        taken = step(ready, reading, self.engines, self.decoder.experience, self._pieces, missed)
        if Captured.made == taken.recorded:
            read = float(price_of_reading(prices_behind(pricing, reading), np.array([taken.read]))[0])
            seconds, others = time.perf_counter() - started, price_of_pass(pricing, ready, taken.nodes)
            self._paces[pricing.in_seconds].learn(seconds, taken.seconds.verify, others, read)
        self._nodes = taken.nodes
        return taken

    def _pieces(self, ready: Several[Sequence], nodes: int, reading: Several[Sequence]) -> dict[Sequence, Segment]:
        """What one pass reads of prompts beside the steps of others: also what it has room for anyway."""
        room = self._room(ready, reading)
        fitting = min(self.engines.target.fitting(nodes, room), max(room, self._chunk))
        shares = share([sequence.unread for sequence in reading], fitting)
        return {one: one.piece(count) for one, count in zip(reading, shares, strict=True) if count}

    def _room(self, ready: Several[Sequence], reading: Several[Sequence]) -> int:
        """Tokens that each model may read in this step: of prompts, and of what the draft has missed."""
        if not reading:
            return self._chunk if len(ready) > 1 else ALL
        pricing = self._pricing
        others = price_of_pass(pricing, ready, max(self._nodes, len(ready)))
        return self._paces[pricing.in_seconds].room(others, prices_behind(pricing, reading))

    @property
    def _pricing(self) -> Pricing:
        """What tells what passes cost: in seconds, if it does so for anybody."""
        return max((sequence.pricing for sequence in self.running), key=lambda pricing: pricing.in_seconds)

    def _read_draft(self, reading: list[Sequence], room: int) -> int:
        """The draft reads prompts beside the target, if it is going to draft."""
        drafts = self.decoder.experience.habit(len(self.running)).drafts
        return read_draft([one for one in reading if drafts or not one.decides_by_the_clock], self.engines, room)

    def _admit(self) -> list[Sequence]:
        """Lets in who has room; tells who failed."""
        failed = []
        while self.waiting and (sequence := self._next()) is not None:
            if guarded(sequence, self._open, sequence):
                self.running.append(sequence)
            else:
                failed.append(sequence)
        return failed

    def _next(self) -> Sequence | None:
        texts = Counter(sequence.tenant for sequence in self.running)
        [first, *_] = self.waiting.order(texts)
        if texts and first.tenant not in texts:
            self._give_way(first, *texts.most_common(1)[0])
        return self.waiting.take(self._has_place, texts) if len(self.running) < self.most else None

    def _give_way(self, first: Sequence, tenant: str, texts: int) -> None:
        """Of the tenant that has most running, the newest are put back until there is a place for the first of one that
        has none. A text is put back so often at most, one of each tenant stays, and none goes in vain."""
        newest = [one for one in self.running if one.tenant == tenant and one.put_back < PUT_BACK][1 - texts :]
        if texts > 1 and self._has_place(first, newest):
            while newest and not self._has_place(first):
                self._put_back(newest.pop())

    def _open(self, sequence: Sequence) -> None:
        if sequence.context is None:
            pricing = self.decoder.pricing(sequence.config, self.engines)
            contexts = [self.engines.target.open(sequence.reuse_key, sequence.adapter)]
            if self.engines.draft is not None and sequence.config.drafts:
                contexts.append(self.engines.draft.open(sequence.reuse_key))
            sequence.open(self.engines, self.decoder.learnt, pricing, contexts)
        sequence.begin_with_known()

    def _has_place(self, sequence: Sequence, without: Several[Sequence] = ()) -> bool:
        """Nobody is let in to be sent away at once, nor to send away others. `without`: these give up theirs."""
        stay = [one for one in self.running if one not in without]
        reading = sum(one.unread + one.config.nodes for one in stay if not one.began)
        needed = len(sequence.text) + sequence.config.nodes + reading
        return not stay or (
            len(stay) < self.most
            and all(engine.has_room(needed, contexts_in(engine, without)) for engine in self.engines.all)
        )

    def _make_room(self, error: Exception) -> list[Sequence]:
        """The newest gives up its slots: for later, if others leave some then; else it has failed."""
        for sequence in self.running:
            sequence.restart()
        newest = self.running[-1]
        if isinstance(error, OutOfPages) and len(self.running) > 1:
            self._put_back(newest)
        else:
            newest.failure = error
            self.remove(newest)
        self.engines.launch_drafts([sequence for sequence in self.running if sequence.began], self._chunk)
        return [newest] if newest.failure is not None else []

    def _put_back(self, sequence: Sequence) -> None:
        """It waits, and goes on later behind what it has written."""
        self.remove(sequence)
        sequence.put_back += 1
        self.waiting.put_back(sequence)


def contexts_in(engine: Engine, sequences: Several[Sequence]) -> list[Any]:
    return [context for one in sequences for context in one.contexts if context.engine is engine]


def price_of_pass(pricing: Pricing, sequences: Several[Sequence], nodes: int) -> float:
    """Of a pass over so many nodes of these sequences; 0 if there are none."""
    return float(pricing.at(len(sequences[0].text)).of_pass(np.array([nodes]))[0]) if sequences else 0.0


def prices_behind(pricing: Pricing, reading: Several[Sequence]) -> CostModel:
    """What passes cost behind the longest of the texts that are being read, as far as that has been read."""
    return pricing.at(max((len(sequence.context.text) for sequence in reading), default=0))


def slots_for(decoder: GraphDecoder, sequences: int) -> int:
    """As many as texts of usual lengths need, if they fit into memory."""
    found = []
    for model in decoder.models:
        device = model.get_input_embeddings().weight.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        usual = USUAL.get(device.type, USUAL["cuda"])
        longest = (context_window(model) or usual) + NODES
        wanted = max(longest, sequences * min(usual, longest))
        places = torch.cuda.device_count() if device.type == "cuda" else 1
        share = SHARE / -(-rank_count(model) // places)  # of several ranks that share a memory
        found.append(max(FEWEST, min(wanted, int(share * free / max(1, slot_bytes(model))))))
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
