"""One step over one or many sequences: the only place that decides the order.

Grow, prune, merge and flatten the graph of every sequence; verify all of them in one pass of the target, in which
prompts of others are read too; choose and commit for each; start the drafts of the next step; remember and learn while
a device is at work.

Where nobody drafts, the next pass sets off before the host has read this one (`run_ahead`), and a device never waits:
its tokens are those that the device has chosen, and the host learns of them one step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from draftgraph.ahead import Pass, Pieces, arriving, run_ahead, set_off
from draftgraph.cost.reading import ALL, price_of_reading, share
from draftgraph.cost.sharing import Experience, Seconds
from draftgraph.engine.capture import Captured
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.protocol import PassResult, Segment
from draftgraph.proposers.growth import grow_together
from draftgraph.proposers.policies import Hypotheses
from draftgraph.sequence import Engines, Sequence
from draftgraph.stats import Step

LATE = 24  # tokens that a draft may lack when it begins a level beside others: more are read before
CATCH_UP = 1024  # of them in one pass
LEAST_SHARE = 0.1  # of a step that reads, which is not for reading
WAITING = 512  # states of a text that wait for a head, before it reads them though it does not draft


@dataclass
class Taken:
    """What became of a step, and what it took."""

    steps: list[tuple[Sequence, Step | None]] = field(default_factory=list)  # None: it failed
    sequences: int = 0  # in the pass of the target
    drafting: int = 0  # of them have a graph
    nodes: int = 0  # checked
    read: int = 0  # tokens of prompts
    draft_passes: list[int] = field(default_factory=list)  # nodes of each
    seconds: Seconds = field(default_factory=Seconds)
    recorded: int = field(default_factory=lambda: Captured.made)  # passes, before it began


def none_read(ready: Several[Sequence], nodes: int, reading: Several[Sequence]) -> dict[Sequence, Segment]:
    return {}


def step(
    ready: list[Sequence],
    reading: list[Sequence],
    engines: Engines,
    experience: Experience,
    pieces: Pieces = none_read,
    room: int = ALL,
) -> Taken:
    """One step of the sequences that are ready. In the same pass `pieces` of the prompts of others are read; sequences
    whose prompts have been read are ready from then on. `room`: tokens that the draft may read of what it has missed.

    Raises what a pass raises (memory or pages are short) before any sequence has taken its step.
    """
    taken, started = Taken(), time.perf_counter()
    together = len(ready) + len(reading)  # those whose prompts are being read will be there soon
    with engines.threads():
        current = arriving(ready, reading, engines) or launch(ready, reading, pieces, engines, experience, taken)
        following = engines.following = run_ahead(current, ready, reading, pieces, engines, experience)
        verify(current, taken)
        verified = time.perf_counter()
        choose_and_commit(current, taken)
        begun = begin_read(current, reading, taken)
        going_on = [*(one for one in ready if not one.done), *begun]
        drafts = following is None and experience.habit(together).drafts
        starting = start_drafts(going_on, engines, experience, drafts, room)
        anew = [one for one in going_on if one not in current.graphs]
        remember_and_learn(taken, anew, engines.target.asynchronous)
    now = time.perf_counter()
    taken.seconds.other = now - verified - starting
    account(current, together, taken, experience, now - started)
    return taken


def launch(
    ready: list[Sequence],
    reading: list[Sequence],
    pieces: Pieces,
    engines: Engines,
    experience: Experience,
    taken: Taken,
) -> Pass:
    """One pass over the graphs of all sequences, and over pieces of the prompts that are being read."""
    graphs = dict(zip(ready, grow(ready, engines, experience, taken), strict=True))
    steps = {one: Segment.of_tree(one.context, grown.tree, one.sampling) for one, grown in graphs.items()}
    current = set_off(steps, pieces(ready, sum(map(len, steps.values())), reading), engines)
    current.graphs = graphs
    return current


def grow(ready: list[Sequence], engines: Engines, experience: Experience, taken: Taken) -> list[Hypotheses]:
    """Grow, prune, merge and flatten: the graphs of all sequences. A draft that is asked level by level makes one pass
    for the levels of all of them; one on a device set off when the step before was committed."""
    started, on_device, seconds = time.perf_counter(), engines.draft_seconds, taken.seconds

    def run(segments: list[Segment]) -> list[PassResult]:
        assert engines.draft is not None
        start = time.perf_counter()
        results = engines.draft.run(segments)
        engines.draft.wait()
        seconds.levels += time.perf_counter() - start
        taken.draft_passes.append(sum(len(segment.tokens) for segment in segments))
        return results

    drafting = [sequence for sequence in ready if sequence.drafts_next]
    growing = [sequence.grow(experience.prices(sequence.cost(), len(ready))) for sequence in drafting]
    grown = dict(zip(drafting, grow_together(growing, run), strict=True))
    waited = engines.draft_seconds - on_device
    seconds.grow = time.perf_counter() - started - seconds.levels - waited
    seconds.levels += engines.draft_seconds
    taken.drafting = len(drafting)
    taken.draft_passes += engines.draft_passes
    return [grown[sequence] if sequence in grown else sequence.root_alone() for sequence in ready]


def verify(current: Pass, taken: Taken) -> None:
    """What the target says at every node of all graphs, and of the prompts that are read. While it is at work,
    sequences learn from the step before."""
    for sequence, hypotheses in current.graphs.items():
        hypotheses.tree.index()
        sequence.learn()
    current.wait()
    taken.sequences, taken.read = len(current.graphs) + len(current.pieces), sum(map(len, current.pieces.values()))
    taken.nodes = sum(len(hypotheses.tree) for hypotheses in current.graphs.values())
    taken.seconds.verify = time.perf_counter() - current.started


def choose_and_commit(current: Pass, taken: Taken) -> None:
    """The paths that the target agrees with become text. A sequence in which something goes wrong fails alone."""

    def act(sequence: Sequence, hypotheses: Hypotheses) -> None:
        result = current.results[sequence]
        chosen = sequence.choose(hypotheses, result)
        taken.steps.append((sequence, sequence.commit(hypotheses, result, chosen)))

    for sequence, hypotheses in current.graphs.items():
        if not guarded(sequence, act, sequence, hypotheses):
            taken.steps.append((sequence, None))


def begin_read(current: Pass, reading: list[Sequence], taken: Taken) -> list[Sequence]:
    """Pieces of prompts become text. Sequences whose prompts have been read take steps from now on, and others of their
    tenants may begin with what they read."""
    for sequence, piece in current.pieces.items():
        if not guarded(sequence, sequence.read, piece, current.results[sequence]):
            taken.steps.append((sequence, None))
    begun = [sequence for sequence in reading if sequence.failure is None and sequence.is_read]
    for sequence in begun:
        for context in sequence.contexts:
            context.publish()
        sequence.begin()
    return begun


def start_drafts(ready: list[Sequence], engines: Engines, experience: Experience, drafts: bool, room: int) -> float:
    """Decides which sequences draft in the next step and how far, and launches the drafts on a device, all together;
    the seconds that launching took. `drafts`: those who decide by the clock do."""
    for sequence in ready:
        sequence.drafts_next = sequence.proposes(drafts)
    room -= catch_up(ready, engines, room)
    for sequence in ready:
        prices = experience.prices(sequence.cost(), len(ready)) if sequence.drafts_next else None
        sequence.plan_draft(prices)
    start = time.perf_counter()
    engines.launch_drafts(ready, room)
    return time.perf_counter() - start


def catch_up(ready: list[Sequence], engines: Engines, room: int) -> int:
    """A draft that is asked level by level reads what it has missed while a sequence did not draft (`DeviceDrafts`
    reads for those on a device), `room` tokens at most; how many it read. Where they are not all, or memory is short,
    the sequence does without a draft for another step. Heads that do not draft read as well: what they have not read
    takes memory."""
    late = [one for one in ready if one.drafts_next and one.draft is not None and not one.draft.on_device]
    # One alone holds up nobody: it reads when it drafts, if it does. But heads may draft a block in that pass.
    lacking = LATE if len(ready) > 1 or engines.reads else CATCH_UP
    read = 0
    with suppress(OutOfPages, torch.OutOfMemoryError):
        while more := read_draft(late, engines, min(room - read, CATCH_UP), lacking):
            read += more
        while engines.reads and (more := read_draft(ready, engines, min(room - read, CATCH_UP), WAITING)):
            read += more
    for sequence in late:
        sequence.drafts_next = sequence.draft_unread <= lacking
    return read


def read_draft(sequences: Several[Sequence], engines: Engines, room: int, late: int = 0) -> int:
    """The draft reads up to `room` tokens of texts of which it lacks more than `late`; how many it read."""
    lacking = [sequence for sequence in sequences if sequence.draft_unread > late]
    shares = zip(lacking, share([sequence.draft_unread for sequence in lacking], room), strict=True)
    pieces = [sequence.draft_piece(count) for sequence, count in shares if count]
    if pieces and engines.draft is not None:
        engines.draft.run(pieces)
        for piece in pieces:
            piece.commit()
    return sum(len(piece.tokens) for piece in pieces)


def remember_and_learn(taken: Taken, anew: list[Sequence], asynchronous: bool) -> None:
    """What the step has shown; some of it later, if there is time while the target is at work on the next. `anew`:
    sequences that have taken no step, and are going to."""

    def act(sequence: Sequence) -> None:
        sequence.remember()
        if sequence.done or sequence.learnt.observer is not None or not asynchronous:
            sequence.learn()

    for sequence in anew:
        sequence.recall()
    for sequence, found in taken.steps:
        if found is not None:
            guarded(sequence, act, sequence)


def account(current: Pass, together: int, taken: Taken, experience: Experience, seconds: float) -> None:
    """Where the time went, and how it compares with prices. Of a step whose pass set off ahead all of it was for that
    pass: the host worked beside it."""
    ready = list(current.graphs)
    if current.roots is not None:
        taken.seconds.verify, taken.seconds.other = taken.seconds.verify + taken.seconds.other, 0.0
    for sequence in ready:
        taken.seconds.spent_on(sequence.seconds)
    if not ready or Captured.made != taken.recorded:
        return
    if not taken.read:
        experience.learn(ready[0].cost(), len(ready), taken.nodes, taken.draft_passes, taken.seconds, taken.drafting)
    deciding = [sequence for sequence in ready if sequence.decides_by_the_clock]
    as_many = len(ready).bit_length() == together.bit_length()
    if together > 1 and as_many and deciding:
        tokens = sum(len(found.tokens) for _, found in taken.steps if found is not None)
        reading = float(price_of_reading(deciding[0].cost(), np.array([taken.read]))[0])
        experience.habit(together).learn(tokens, max(seconds - reading, LEAST_SHARE * seconds))


def guarded(sequence: Sequence, act: Callable[..., Any], *given: Any) -> bool:
    """What goes wrong in one sequence ends that sequence alone."""
    try:
        act(*given)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        sequence.failure = error
    return sequence.failure is None
