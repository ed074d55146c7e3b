"""Everybody's graph for one step: who has reason to draft does, and the levels of all of them go through the draft
together."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftgraph.batching.ahead import Ahead
from draftgraph.batching.seats import SeatEngine
from draftgraph.batching.sharing import Experience, Took
from draftgraph.batching.text import Text
from draftgraph.drafting.growers import Grown, SheetGrower
from draftgraph.drafting.model import Asked, Told
from draftgraph.engine.packed import Part
from draftgraph.tuning.latency import MeasuredCost


@dataclass
class Growth:
    """The graphs of a step, and what they cost."""

    grown: dict[Text, Grown] = field(default_factory=dict)
    drafting: int = 0  # texts
    levels: list[int] = field(default_factory=list)  # nodes that the draft was fed, pass by pass
    took: Took = field(default_factory=Took)

    @classmethod
    def of(cls, texts: list[Text], draft: SeatEngine | None, ahead: Ahead | None, experience: Experience) -> Growth:
        start, begun = time.perf_counter(), ahead.seconds if ahead is not None else 0.0
        growth = cls()
        asking: dict[Text, Generator[Asked, Told, Grown]] = {}
        for text in texts:
            if not text.hungry:
                growth.grown[text] = text.going.ungrown()
                continue
            growth.drafting += 1
            asking[text] = text.going.growing(experience.prices(cost_of(text), len(texts)))
            if isinstance(text.going.grower, SheetGrower):
                text.going.grower.listen()
        growth._together(asking, draft)
        waited = ahead.seconds - begun if ahead is not None else 0.0
        growth.took.grow = time.perf_counter() - start - growth.took.levels - waited
        if ahead is not None:  # what the drafts have cost that set off by themselves
            growth.levels += ahead.fed
            growth.took.levels += ahead.seconds
        return growth

    def _together(self, asking: dict[Text, Generator[Asked, Told, Grown]], draft: SeatEngine | None) -> None:
        answers: dict[Text, Told | None] = dict.fromkeys(asking)
        while answers:
            asked: dict[Text, Asked] = {}
            for text, answer in answers.items():
                try:
                    asked[text] = next(asking[text]) if answer is None else asking[text].send(answer)
                except StopIteration as done:
                    self.grown[text] = done.value
            answers = {}
            if asked and draft is not None:
                start = time.perf_counter()
                answers = dict(zip(asked, draft.run([part_of(one) for one in asked.values()]), strict=True))
                draft.wait()
                self.took.levels += time.perf_counter() - start
                self.levels.append(sum(len(one.tokens) for one in asked.values()))


def part_of(asked: Asked) -> Part:
    seat: Any = asked.engine
    return Part(seat, asked.tokens, asked.depths, asked.visible)


def cost_of(text: Text) -> Any:
    """The prices for a text of its length, alone."""
    cost = text.going.cost
    return cost.at(text.length) if isinstance(cost, MeasuredCost) else cost


def checked_nodes(growth: Growth) -> int:
    return int(np.sum([len(one.tree) for one in growth.grown.values()]))
