"""Passes of the target that are under way. The next one may set off before the host has read the one before it: then a
device never waits for the host.

What the next pass needs is known or stays on the device: every sequence goes on with the one token that the device has
chosen, one place further on. The host learns of it a step later. Where a sequence has ended meanwhile, or the host has
chosen another token, a row was computed in vain, and nobody reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from functools import partial

import torch

from draftgraph.cost.sharing import Experience
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.protocol import PassResult, Segment
from draftgraph.proposers.policies import Hypotheses
from draftgraph.sequence import Engines, Sequence

# For those who step together with so many nodes, what is read beside them of the prompts of others.
Pieces = Callable[[Several[Sequence], int, Several[Sequence]], dict[Sequence, Segment]]


@dataclass
class Pass:
    """A pass of the target that has set off."""

    steps: dict[Sequence, Segment]
    pieces: dict[Sequence, Segment]  # of prompts
    results: dict[Sequence, PassResult]
    wait: Callable[[], None]
    started: float  # when the host began with it, or with the step that reads it
    launched: int  # passes of the target, with this one
    graphs: dict[Sequence, Hypotheses] = field(default_factory=dict)  # of those that step
    roots: dict[Sequence, Callable[[], int]] | None = None  # of one that set off ahead: the tokens that it went on with

    @property
    def leaves_logits(self) -> bool:
        """Whether the host reads nothing of it but the tokens that the device has chosen: the next pass may write over
        the rest."""
        alone = all(
            len(one.tree) == 1 and self.results[sequence].row is not None for sequence, one in self.graphs.items()
        )
        chosen = not any(sequence.chooser.reads_logits(self.results[sequence]) for sequence in self.graphs)
        return alone and chosen and not any(sequence.scores_prompt for sequence in self.pieces)


def set_off(steps: dict[Sequence, Segment], pieces: dict[Sequence, Segment], engines: Engines) -> Pass:
    started, segments = time.perf_counter(), steps | pieces
    results = engines.target.run(list(segments.values())) if segments else []
    for sequence in steps:
        sequence.under_way += 1
    for sequence, piece in pieces.items():
        sequence.under_way += len(piece)
    found, target = dict(zip(segments, results, strict=True)), engines.target
    return Pass(steps, pieces, found, target.mark(), started, target.launched)


def run_ahead(
    current: Pass,
    ready: Several[Sequence],
    reading: Several[Sequence],
    pieces: Pieces,
    engines: Engines,
    experience: Experience,
) -> Pass | None:
    """Sets off the pass after this one; None: something of it depends on what the host has not read yet, or it would be
    more than one pass, the second of which would be written where this one is read."""
    if not engines.goes_ahead or not current.leaves_logits:
        return None
    going_on = [one for one in ready if not one.is_ending] + [one for one in reading if not one.unread]
    drafts = experience.habit(len(ready) + len(reading)).drafts
    if any(one.proposes(drafts) for one in going_on):
        return None
    before = {one: current.results[one] for one in going_on if one in current.graphs}
    rows = {one: result.row for one, result in before.items()}
    steps = {
        one: Segment.of_root(one.context, one.text[-1], one.sampling, one.under_way, rows.get(one)) for one in going_on
    }
    read = pieces(going_on, len(going_on), [one for one in reading if one.unread])
    if not (steps or read) or not engines.target.fits_one_pass([*steps.values(), *read.values()]):
        return None
    try:
        following = set_off(steps, read, engines)
    except (OutOfPages, torch.OutOfMemoryError):  # the next step makes room, where nothing is under way
        return None
    following.roots = {one: partial(went_on_with, before.get(one), one.text[-1]) for one in going_on}
    return following


def went_on_with(before: PassResult | None, known: int) -> int:
    return known if before is None else before.chosen


def arriving(ready: Several[Sequence], reading: Several[Sequence], engines: Engines) -> Pass | None:
    """The pass that set off ahead, for those who are still there and whose token it went on with; None: there is none,
    or nobody is left."""
    current: Pass | None = engines.following
    engines.following = None
    if current is None or current.roots is None:
        return None
    here, others_ran = {*ready, *reading}, engines.target.launched != current.launched  # prices were measured, say
    for one in [*current.steps, *current.pieces]:
        if others_ran or one not in here:
            one.under_way = 0
    current.started = time.perf_counter()
    for one in ready:
        if one in current.steps and one.under_way:
            if current.roots[one]() == one.text[-1]:
                current.graphs[one] = one.root_alone()
            else:
                one.under_way = 0
    current.pieces = {one: current.pieces[one] for one in reading if one in current.pieces and one.under_way}
    return current if current.graphs or current.pieces else None
