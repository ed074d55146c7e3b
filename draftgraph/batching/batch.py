"""Texts that are continued together: in every step all of them draft, one pass checks all their graphs, and each walks
its own. A text may join or leave at any step; a prompt is read in pieces beside the others' steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from draftgraph.batching.ahead import Ahead
from draftgraph.batching.growing import Growth, checked_nodes, cost_of
from draftgraph.batching.seats import SeatEngine, packed_or_apart
from draftgraph.batching.sharing import Experience, Took
from draftgraph.batching.text import Text
from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder
from draftgraph.drafting.batch_program import GraphSeats
from draftgraph.drafting.device_batch import BatchDraft
from draftgraph.drafting.model import ModelProposer
from draftgraph.engine.borrowing import Loan
from draftgraph.engine.capture import Captured
from draftgraph.engine.packed import Part
from draftgraph.engine.packed_static import PackedStaticEngine
from draftgraph.engine.pages import OutOfPages
from draftgraph.models.cache import notice
from draftgraph.trace import Step
from draftgraph.tuning import pricing_of

TEXTS = 64  # continued at a time
CHUNK = 256  # tokens of prompts, read beside the steps of others
CHUNK_ALONE = 1024  # where nobody waits for his next token
LATE = 24  # tokens that a draft may lack when it begins a level: more are read before

experiences: WeakKeyDictionary[GraphDecoder, Experience] = WeakKeyDictionary()  # a new batch knows what others saw
Taken = list[tuple[Text, Step | None]]  # None: it failed


class Batch:
    """Continues texts: `add` them, then `step` until nobody is left."""

    def __init__(self, decoder: GraphDecoder, slots: int | None = None, texts: int = TEXTS) -> None:
        self.decoder = decoder
        self.waiting: deque[Text] = deque()
        self.running: list[Text] = []  # those that came first are first
        self.target: SeatEngine = packed_or_apart(decoder.target_model, slots, texts)
        self.draft: SeatEngine | None = None
        if decoder.draft_model is not None:
            self.draft = packed_or_apart(decoder.draft_model, slots, texts)
        self.ahead: Ahead | None = None
        if isinstance(self.draft, GraphSeats):
            self.ahead = Ahead(self.draft, decoder.draft_vocabulary)
        self.most = min(texts, *(engine.most or texts for engine in self.engines))
        self.experience = experiences.setdefault(decoder, Experience())
        self.took = Took()
        self.size = 0  # texts in the last pass
        self._shortage: torch.OutOfMemoryError | None = None  # of memory, since the last step
        self._loan = Loan(*decoder.models)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def engines(self) -> list[SeatEngine]:
        return [self.target, *([self.draft] if self.draft else [])]

    def prepare(self, config: GraphConfig) -> None:
        """Records and measures what texts of this configuration will need, before anybody waits for it."""
        draft = self.ahead.draft_for(config) if self.ahead is not None else None
        with self._loan:
            with suppress(torch.OutOfMemoryError):  # what is missing is tried again when it is needed
                self._record(draft)
            self._price(config, draft)

    def _record(self, draft: BatchDraft | None) -> None:
        if not isinstance(self.target, PackedStaticEngine):
            return
        notice(f"recording passes over up to {self.most} texts (about a minute)")
        self.target.prepare(self.most)
        if draft is not None and isinstance(self.draft, PackedStaticEngine):
            self.draft.prepare_reading(self.most)
            draft.prepare(self.most)

    def _price(self, config: GraphConfig, draft: BatchDraft | None) -> None:
        seats = [engine.open() for engine in self.engines]
        pricing_of(self.decoder.seated(seats[0], seats[1] if self.draft else None, draft), config)
        for seat in seats:
            seat.rewind(0)
            seat.close()

    def could_hold(self, tokens: int) -> bool:
        """Whether a text of this length would fit if it were alone."""
        return all(engine.slots == 0 or tokens <= engine.slots for engine in self.engines)

    def add(self, text: Text) -> None:
        self.waiting.append(text)

    def remove(self, text: Text) -> None:
        """Its slots are free for the next step."""
        if text in self.running:
            self.running.remove(text)
            text.close()
        elif text in self.waiting:
            self.waiting.remove(text)

    def step(self) -> Taken:
        """One pass for everybody; tells who took a step, and who failed."""
        taken: Taken = []
        with self._loan:
            self._admit(taken)
            while self.running:
                try:
                    taken += self._step()
                    break
                except (OutOfPages, torch.OutOfMemoryError) as error:
                    self._make_room(error, taken)
            for text in [text for text in self.running if text.done]:
                self.remove(text)
        return taken

    def _step(self) -> Taken:
        """Grow everybody's graph, check all in one pass, walk each; pieces of prompts are read in the same pass."""
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage
        begun, ready = time.perf_counter(), [text for text in self.running if text.began]
        growth = Growth.of(ready, self.draft, self.ahead, self.experience)
        start = time.perf_counter()
        pieces = self._pieces(bool(ready))
        recorded = Captured.made
        trees = [Part.of_tree(text.seat, growth.grown[text].tree, text.going.sampling) for text in ready]
        logits = self.target.run([*trees, *pieces.values()]) if trees or pieces else []
        for text in ready:
            text.going.learn()  # from the step before, while the target is at work
        self.target.wait()
        checked, self.size = time.perf_counter(), len(logits)
        taken = [(text, self._walk(text, growth, scores)) for text, scores in zip(ready, logits, strict=False)]
        for (text, piece), scores in zip(pieces.items(), logits[len(ready) :], strict=True):
            if not guarded(text, text.read, piece, scores):
                taken.append((text, None))
        self._begin_read()
        drafting = self._draft_ahead()
        for text, step in taken:
            if step is not None:
                guarded(text, text.look_back)
        took = growth.took
        took.verify, took.other = checked - start, time.perf_counter() - checked - drafting
        if ready and not pieces and Captured.made == recorded:
            self._learn(ready, growth, taken, time.perf_counter() - begun)
        for text in ready:
            text.spend(took)
        self.took = took
        return taken

    def _learn(self, texts: list[Text], growth: Growth, taken: Taken, seconds: float) -> None:
        """From a step in which nothing was read or recorded."""
        told = checked_nodes(growth), growth.levels, growth.took, growth.drafting
        self.experience.learn(cost_of(texts[0]), len(texts), *told)
        if len(texts) > 1 and any(text.decides_by_the_clock for text in texts):
            tokens = sum(len(step.tokens) for _, step in taken if step is not None)
            self.experience.custom(len(texts)).learn(tokens, seconds)

    def _draft_ahead(self) -> float:
        """Whoever has reason to draft in the next step sets off; how many seconds that took."""
        ready = [text for text in self.running if text.began and not text.done]
        custom = self.experience.custom(len(ready)).drafts
        for text in ready:
            text.look_ahead(custom)
        self._catch_up([text for text in ready if text.hungry and isinstance(text.draft, ModelProposer)])
        for text in ready:
            text.going.draft_ahead(self.experience.prices(cost_of(text), len(ready)) if text.hungry else None)
        start = time.perf_counter()
        if self.ahead is not None:
            self.ahead.start(ready)
        return time.perf_counter() - start

    def _walk(self, text: Text, growth: Growth, logits: Tensor) -> Step | None:
        steps: list[Step] = []
        guarded(text, lambda: steps.append(text.walk(growth.grown[text], logits)))
        return steps[0] if steps else None

    def _pieces(self, others: bool) -> dict[Text, Part]:
        """What is read of prompts beside the others' steps; first come, first served. The draft reads its own now."""
        room = CHUNK if others else CHUNK_ALONE
        reading = [text for text in self.running if not text.began]
        pieces: dict[Text, Part] = {}
        for text in reading:
            if room > 0 and (piece := text.piece(room)) is not None:
                pieces[text] = piece
                room -= len(piece.tokens)
        if self.experience.custom(len(self.running)).drafts:
            self._read_draft(reading)
        return pieces

    def _read_draft(self, texts: list[Text], late: int = 0) -> bool:
        """The draft reads a piece of those of which it lacks more tokens than that; whether there were any."""
        pieces = [piece for text in texts if (piece := text.draft_piece(CHUNK_ALONE, late)) is not None]
        if pieces and self.draft is not None:
            self.draft.run(pieces)
            for piece in pieces:
                piece.commit()
        return bool(pieces)

    def _catch_up(self, texts: list[Text]) -> None:
        """Who has not drafted for a while reads what he missed, if there is room for it. The last step has been taken:
        what goes wrong here is a matter of the next."""
        try:
            while self._read_draft(texts, LATE):
                pass
        except (OutOfPages, torch.OutOfMemoryError) as error:
            for text in texts:
                text.hungry = text.draft_piece(1, LATE) is None
            self._shortage = error if isinstance(error, torch.OutOfMemoryError) else None

    def _begin_read(self) -> None:
        for text in self.running:
            if not text.began and text.failure is None and text.piece(1) is None:
                text.begin()

    def _admit(self, taken: Taken) -> None:
        while self.waiting and len(self.running) < self.most and self._has_room(self.waiting[0]):
            text = self.waiting.popleft()
            if guarded(text, text.open, self.decoder, self.target, self.draft, self.ahead):
                self.running.append(text)
            else:
                taken.append((text, None))

    def _has_room(self, text: Text) -> bool:
        """Nobody is let in to be sent away at once."""
        needed = text.length + text.config.nodes
        return not self.running or all(engine.has_room(needed) for engine in self.engines)

    def _make_room(self, error: Exception, taken: Taken) -> None:
        """The newest gives up its slots: for later, if others leave some then."""
        for text in self.running:
            for seat in text.seats:
                seat.forget(0)
            if text.began:
                text.going.learn()
                text.going.begin()
        newest = self.running.pop()
        newest.close()
        if isinstance(error, OutOfPages) and self.running:
            self.waiting.appendleft(newest)
        else:
            newest.failure = error
            taken.append((newest, None))
        self._draft_ahead()
        self._shortage = None  # one at a time


def guarded(text: Text, act: Callable[..., Any], *given: Any) -> bool:
    """What goes wrong in one text ends that text alone."""
    try:
        act(*given)
    except (torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except Exception as error:
        text.failure = error
    return text.failure is None
