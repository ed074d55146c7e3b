"""Times passes of a pair through its engines: widths in turns, target and draft in turns."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from draftgraph.config import GraphConfig
from draftgraph.cost.latency import Curve, Latencies
from draftgraph.engine.protocol import Context, Engine, PassResult, Segment
from draftgraph.graph import ROOT, Bools, Ints, TokenGraph, TokenTree

SECONDS = 4.0  # for all of it, about; on a busy machine up to twice as long
BOUND = 64  # nodes, at least: one measurement serves most configurations
FIRST, SHORT, LONG = 32, 128, 1024  # lengths of texts
READING = 0.3  # of the time: what reading a text may take
ROUNDS = 9
BETWEEN = (3, 5, 6, 7, 12)  # widths that are no power of two: on a CPU three nodes may cost more than four
NEEDED = 4  # widths, however long they take
DEAR = 3.0  # of the others, one that costs so many passes over one token is the last
TRIES = 3  # before a width is called dear
SLOW = 0.25  # seconds: a model whose passes take longer is not waited for
PREPARED = 16  # nodes, before the clock starts

Clock = Callable[[], float]


@dataclass
class Passes:
    """One model under the stopwatch: passes whose result is read as the decoder reads it."""

    engine: Engine
    context: Context
    rows: int  # of its embedding
    vocabulary: Any = None  # of a draft, whose passes are levels: see `proposers.draft_model`
    k: int = 8
    clock: Clock = time.perf_counter
    reserve: int = BOUND  # slots beside the text
    widths: list[int] = field(default_factory=list)
    table: list[list[float]] = field(default_factory=list)  # seconds [contexts, widths]

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(0)
        self.offered = self.engine.widths  # an engine that pads names its widths

    def read(self, context: int) -> None:
        """Makes the text this long, and waits until that is done."""
        if len(self.context.text) == context:
            return
        self.context.reserve(context + self.reserve)
        self.context.prefill(self._tokens(context - len(self.context.text)).tolist())
        self.timed(1)

    def timed(self, nodes: int) -> float:
        tokens, graph = self._tokens(nodes), star(nodes, self.k)
        start = self.clock()
        if self.vocabulary is None:
            tree = branches(tokens) if self.engine.branching else chain(tokens)
            self._pass(tree.tokens, tree.depths, tree.mask).best(0)  # waits for the device
        else:
            depths, visible = level(nodes) if self.engine.branching else chained(nodes)
            result = self._pass(tokens, depths, visible)
            tokens, probs = result.proposed or self.vocabulary.best(result.logits, self.k)
            graph.extend(list(range(1, nodes + 1)), np.ones(nodes), tokens, probs, "draft")
            graph.unroll()
        taken = self.clock() - start
        self.context.forget(0)
        return taken

    def _pass(self, tokens: Ints, depths: Ints, visible: Bools) -> PassResult:
        wanted = None if self.vocabulary is None else self.vocabulary.wanted(self.k, None, self.engine.device)
        return self.engine.run([Segment(self.context, tokens, depths, visible, wanted=wanted)])[0]

    def prepare(self) -> None:
        """Lets the engine choose how to compute, and record: that takes long once, and is no price."""
        for width in self.engine.widths:
            self.context.reserve(len(self.context.text) + width)
            self._pass(self._tokens(width), *chained(width))
            self.context.forget(0)
        for width in widths_up_to(PREPARED, self.offered):
            if self.timed(width) > SLOW and self.timed(width) > SLOW:
                break

    def warm_up(self, bound: int, deadline: float) -> None:
        """Finds the widths that are worth timing; what they take meanwhile is kept until it is known better."""
        first: dict[int, float] = {}
        for width in widths_up_to(bound, self.offered):
            first[width] = taken = self._warm(width, min(first.values(), default=math.inf), deadline)
            if len(first) >= NEEDED and (taken > DEAR * first[1] or self.clock() > deadline):
                break
        for width in () if self.offered else BETWEEN:
            if width < max(first) and first[1] < SLOW:
                first[width] = self._warm(width, min(first.values()), deadline)
        self.widths = sorted(first)
        self.table = [[first[width] for width in self.widths]]

    def _warm(self, width: int, least: float, deadline: float) -> float:
        """The quickest of some passes: an engine may prepare for a width, and others may use the machine."""
        taken = self.timed(width)
        for _ in range(TRIES):
            if self.clock() > deadline and taken <= 2 * least:
                break
            taken = min(taken, self.timed(width))
            if taken <= DEAR * least:
                break
        return taken

    def curve(self, contexts: list[int]) -> Curve:
        return Curve.of(contexts, self.widths, self.table, bool(self.offered))

    def _tokens(self, count: int) -> Ints:
        return self._rng.integers(0, self.rows, max(count, 0))


@dataclass
class Levels(Passes):
    """A draft that grows on its device: a level, or a block of them, costs its share of a run, whatever its width."""

    draft: Any = None  # see `proposers.device_draft`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.offered = tuple(sorted({1, self.draft.block or self.draft.width}))

    def timed(self, nodes: int) -> float:
        known, (root,) = len(self.context.text), self._tokens(1).tolist()
        start = self.clock()
        self.draft.rehearse(root)
        self.draft.group.launch([self.draft])
        for _ in self.draft.arriving():  # waits for the device
            pass
        taken = self.clock() - start
        self.context.rewind(known)
        return taken / int(self.draft.group.passes)


def measure(subjects: list[Passes], window: int | None, bound: int = BOUND, seconds: float = SECONDS) -> Latencies:
    """The curves of a target and, if there is one, of its draft; their engines are left without text.

    To be called inside a `Loan` of both models.
    """
    clock = subjects[0].clock
    start, bound = clock(), max(bound, BOUND)
    try:
        for one in subjects:
            one.reserve = bound
            one.context.begin(1, False)
            one.read(1)
            one.prepare()
        start = clock()
        first, half = text_length(subjects, window, bound, FIRST), start + seconds / 2
        affordable = read(subjects, first, seconds)
        short = text_length(subjects, window, bound, min(SHORT, affordable))
        contexts = [first]
        if short >= 2 * first:
            affordable, contexts = max(affordable, read(subjects, short, seconds)), [short]
        for one in subjects:
            one.warm_up(bound, half)
        longer = text_length(subjects, window, bound, min(LONG, affordable))
        if longer >= 2 * contexts[0] and clock() < half:
            count_rounds(subjects, half)
            for one in subjects:
                one.read(longer)
                one.table.append([one.timed(width) for width in one.widths])
            contexts.append(longer)
        end = start + seconds
        if subjects[0].table[0][0] < SLOW:
            end = max(end, clock() + seconds / 2)  # a machine that is busy needs more samples, not fewer
        count_rounds(subjects, end)
    finally:
        for one in subjects:
            one.context.rewind(0)
    curves = [one.curve(contexts) for one in subjects]
    return Latencies(curves[0], curves[1] if len(curves) > 1 else None, bound, clock() - start)


def read(subjects: list[Passes], context: int, seconds: float) -> int:
    """Lets all read a text of this length, and tells how long a text there is time for."""
    clock, known = subjects[0].clock, len(subjects[0].context.text)
    start = clock()
    for one in subjects:
        one.read(context)
    return int(READING * seconds * (context - known) / max(clock() - start, 1e-9))


def count_rounds(subjects: list[Passes], until: float) -> None:
    """Times every width again and again while there is time; the last row of the table is what it takes on average."""
    widest = max(len(one.widths) for one in subjects)
    samples = [[[taken] for taken in one.table[-1]] for one in subjects]
    turns = [(place, one, width) for width in range(widest) for place, one in enumerate(subjects)]
    for place, one, width in turns * ROUNDS:
        if one.clock() > until:
            break
        if width < len(one.widths):
            samples[place][width].append(one.timed(one.widths[width]))
    for one, taken in zip(subjects, samples, strict=True):
        one.table[-1] = [usual(times) for times in taken]


def usual(times: list[float]) -> float:
    """The mean, because steps will meet the same load; a pass that was held up for long counts as twice the median."""
    return float(np.minimum(times, 2 * np.median(times)).mean())


def widths_up_to(bound: int, offered: tuple[int, ...] = ()) -> Iterator[int]:
    """Those of an engine that pads, up to the first that holds so many nodes; else 1, 2, 4 and so on, and the bound."""
    if offered:
        yield from (width for width, before in zip(offered, (0, *offered), strict=False) if before < bound)
        return
    yield from (1 << power for power in range((bound - 1).bit_length()))
    yield bound


def text_length(subjects: list[Passes], window: int | None, bound: int, wanted: int) -> int:
    """As near to the wanted one as the models' windows and rotary embeddings allow."""
    branching = all(one.engine.branching for one in subjects)
    depth = bound.bit_length() if branching else bound
    if window is not None:
        wanted = min(wanted, window - depth)
    while wanted > 1:
        limits = [one.context.depth_limit(wanted) for one in subjects]
        if all(limit is None or limit >= depth for limit in limits):
            break
        wanted //= 2
    return max(wanted, 1)


def branches(tokens: Ints) -> TokenTree:
    """A tree in which every node has two children."""
    places = np.arange(len(tokens))
    return tree_of(tokens, (places - 1) // 2, np.array([(place + 1).bit_length() - 1 for place in places.tolist()]))


def chain(tokens: Ints) -> TokenTree:
    places = np.arange(len(tokens))
    return tree_of(tokens, places - 1, places)


def tree_of(tokens: Ints, parents: Ints, depths: Ints) -> TokenTree:
    return TokenTree(tokens, parents, depths, np.arange(len(tokens)), np.ones(len(tokens)), ["draft"] * len(tokens))


def level(nodes: int) -> tuple[Ints, Bools]:
    """Depths and what is seen: nodes side by side."""
    return np.zeros(nodes, dtype=np.int64), np.eye(nodes, dtype=bool)


def chained(nodes: int) -> tuple[Ints, Bools]:
    return np.arange(nodes), np.tri(nodes, dtype=bool)


def star(nodes: int, k: int) -> TokenGraph:
    """A graph with so many open nodes, all below the root."""
    graph = TokenGraph(0, GraphConfig(k=max(nodes, k)))
    graph.extend([ROOT], np.ones(1), np.arange(1, nodes + 1)[None], np.full((1, nodes), 1 / (nodes + 1)), "draft")
    return graph
