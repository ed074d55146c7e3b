"""One text of a batch: where it is read, and how far it has got."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from draftgraph.batching.ahead import Ahead
from draftgraph.batching.seats import SeatEngine
from draftgraph.batching.sharing import Took
from draftgraph.choose import Outputs, Scored
from draftgraph.config import GraphConfig
from draftgraph.decoder import GraphDecoder
from draftgraph.decoding import Decoding
from draftgraph.drafting.device_batch import SeatDraft
from draftgraph.drafting.growers import Grown
from draftgraph.drafting.model import ModelProposer
from draftgraph.drafting.past import Past
from draftgraph.engine.packed import Part
from draftgraph.generation import Request
from draftgraph.trace import Step
from draftgraph.tuning.latency import MeasuredCost


@dataclass(eq=False)
class Text:
    """A text to be continued among others."""

    request: Request
    seed: int
    config: GraphConfig
    sample: int = 0
    outputs: Outputs = field(default_factory=Outputs)
    tenant: str = ""  # it may begin with what this one's texts left behind
    past: Past | None = None  # it may copy from
    on_prompt: Callable[[Tensor], None] | None = None  # is given the logits of every piece of the prompt
    decoding: Decoding | None = None
    failure: Exception | None = None
    reused: int = 0  # tokens that did not have to be read
    admitted: float | None = None  # when it first had a place
    began: bool = False  # it has been read: it takes steps
    hungry: bool = True  # it is to have a graph in the next step

    @property
    def going(self) -> Decoding:
        assert self.decoding is not None
        return self.decoding

    @property
    def done(self) -> bool:
        return self.failure is not None or (self.decoding is not None and self.decoding.finish_reason is not None)

    @property
    def length(self) -> int:
        return len(self.decoding.text) if self.decoding else int(self.request.input_ids.shape[1])

    @property
    def seat(self) -> Any:
        """Its place in the target."""
        return self.going.target

    @property
    def draft(self) -> ModelProposer | SeatDraft | None:
        draft = self.going.draft
        assert draft is None or isinstance(draft, ModelProposer | SeatDraft)
        return draft

    @property
    def seats(self) -> list[Any]:
        return [self.seat, *([self.draft.engine] if self.draft else [])]

    def open(self, decoder: GraphDecoder, target: SeatEngine, draft: SeatEngine | None, ahead: Ahead | None) -> None:
        """Takes places, where something of it may be known already."""
        self.admitted = self.admitted or time.monotonic()
        if self.decoding is None:
            seat = draft.open(self.tenant) if draft is not None and self.config.drafts else None
            together = ahead.draft_for(self.config) if ahead is not None and seat is not None else None
            seated = decoder.seated(target.open(self.tenant), seat, together)
            self.decoding = seated.begun(self.request, 0, self.seed, self.outputs, self.config, self.sample)
            if self.decoding.sources.copied is not None:
                self.decoding.sources.copied.past = self.past
        known, found = self.going.text[:-1], []
        for seat, tokens in zip(self.seats, (known, self.draft.as_read(known) if self.draft else []), strict=False):
            seat.expected = self.going.request.max_length + self.config.nodes
            seat.begin(len(self.going.text), False)
            if self.on_prompt is None:
                found.append(seat.begin_with(tokens, self.going.text[-1]))
        self.reused = found[0] if found else 0

    def close(self) -> None:
        self.began = False
        for seat in self.seats:
            seat.close()

    def begin(self) -> None:
        """All but its last token has been read."""
        for seat in self.seats:
            seat.settle()
        self.going.begin()
        self.began = True

    def piece(self, most: int) -> Part | None:
        """What is to be read next, of the prompt."""
        start = len(self.seat.text)
        unread = self.going.text[start : min(start + most, len(self.going.text) - 1)]
        return Part.of_text(self.seat, unread, self.on_prompt is not None) if unread else None

    def draft_piece(self, most: int, late: int = 0) -> Part | None:
        """The same for the draft, where it lacks more than `late` tokens."""
        start, end = len(self.draft.engine.text) if self.draft else 0, len(self.going.text) - 1
        if self.draft is None or end - start <= late:
            return None
        seat: Any = self.draft.engine
        return Part.of_text(seat, self.draft.as_read(self.going.text[start : min(start + most, end)]))

    def read(self, part: Part, logits: Tensor) -> None:
        """A piece of the prompt is text now."""
        part.commit()
        if self.on_prompt is not None:
            self.on_prompt(logits)

    def walk(self, grown: Grown, logits: Tensor) -> Step:
        """What the target made of its graph."""
        decoding = self.going
        target = decoding.target
        grown.tree.index()
        remembers = decoding.sources.recycled is not None and self.hungry
        ranking = target.rank(logits) if remembers or target.ranks else None
        scored = Scored(logits, ranking, target.sample(logits, decoding.sampling) if decoding.sampling else None)
        walked = decoding.walk(grown.tree, scored)
        return decoding.accept(grown, scored if remembers else replace(scored, ranking=None), walked)

    @property
    def decides_by_the_clock(self) -> bool:
        return self.config.mode == "auto" and isinstance(self.going.cost, MeasuredCost)

    def look_ahead(self, custom: bool) -> None:
        """Says whether it is to draft for the next step, among others whose custom that is or is not."""
        self.hungry = custom or not self.decides_by_the_clock

    def look_back(self) -> None:
        """Takes in what its last step has shown, some of it later if there is time while the target is at work. Who is
        not hungry needs no memories in the next."""
        self.going.remember(begin=self.hungry)
        if self.done or not self.going.target.works_alone:
            self.going.learn()

    def spend(self, took: Took) -> None:
        seconds = self.going.seconds
        seconds["draft"] += took.grow + took.levels
        seconds["verify"] += took.verify
        seconds["other"] += took.other
