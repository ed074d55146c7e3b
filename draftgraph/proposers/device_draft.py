"""A draft grows the trees of many sequences at once on its device, all levels back to back.

The host starts a run and reads the result as it arrives. Best first under a width: every level expands the likeliest
nodes that are still open, whatever their depth. How likely they are is what the draft says, corrected by the odds that
its best children and the others have had so far. Each sequence has a draft of its own, which only notes that it is to
go on; then one call starts all of them together. What trained heads are fed, and where their children come from, stands
in `device_heads`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftgraph.compiled import compiled
from draftgraph.config import GraphConfig
from draftgraph.cost.reading import ALL, share
from draftgraph.engine.capture import Buffer, Captured, Parts, graph_memory, host_memory
from draftgraph.engine.paged import SEQUENCES, at_least, up_to
from draftgraph.engine.pages import PAGE, OutOfPages, pages_for
from draftgraph.engine.protocol import Segment, proposals
from draftgraph.graph import WORD, Floats, Ints
from draftgraph.kernels import growth
from draftgraph.kernels.attention import PagedPass
from draftgraph.kernels.growth import ENDS, EVEN, Growth
from draftgraph.noise import signed
from draftgraph.notices import notice
from draftgraph.proposers.draft_model import DraftReader, DraftVocabulary

WIDTH = 8  # nodes that a level expands
NARROW = 4  # the same on a CPU, where every node has its price
NEW_TOKENS = 32  # of one sequence, read at the root's level; more are read before
USUAL = 4  # new tokens of a sequence, on average
NARROWEST = 16  # nodes of a reading pass
PAGES = 512  # of a sequence, to begin with
SPARE = 64  # tokens
NODE_PARTS = ("tokens", "positions", "slots", "ancestors")


@dataclass(frozen=True)
class Row:
    """One sequence in a run: what the draft has not read yet goes behind the rest of it."""

    read: int  # tokens that have been read
    new: list[int]
    text: int  # of the new ones, that are text; the others are read for the run alone
    pages: list[int]
    levels: int
    deepest: int  # see `Growth`
    ends: Ints  # [ENDS]
    key: int = 0  # of its noise, signed: see `KeyedNoise.stream_key`
    temperature: float = 0.0  # 0: greedy
    odds: tuple[float, float] = EVEN  # see `Growth`
    waiting: Tensor | None = None  # a head's: states of the first new tokens
    left: Sequence[int] = ()  # and where the target has left those of the next; what comes behind them has none


class RunData:
    """What a run is told, in one buffer that is filled by one copy. What is about nodes comes last: a pass of fewer
    copies less."""

    def __init__(self, draft: DeviceDrafts, sequences: int) -> None:
        device, idle, most_pages = draft.engine.device, draft.engine.slots, draft.pages
        self._most_new, self._together = NEW_TOKENS + draft.masks, draft.together
        widest = sequences * self._most_new
        self.sequences, self.idle, self._widest = sequences, idle, widest
        parts: Parts = {name: ((sequences,), torch.int64) for name in ("levels", "deepest", "keys", "last")}
        parts |= {"temperatures": ((sequences,), torch.float64), "odds": ((sequences, 2), torch.float64)}
        parts |= {"ends": ((sequences, ENDS), torch.int64), "lengths": ((sequences,), torch.int32)}
        parts |= {"starts": ((sequences + 1,), torch.int32), "pages": ((sequences, most_pages), torch.int32)}
        parts |= {"states": ((widest,), torch.int64)} if draft.reads_states else {}
        self._buffer = Buffer(parts | {"nodes": ((len(NODE_PARTS) * widest,), torch.int64)}, device)
        self.host, self.device = self._buffer.host, self._buffer.device
        self._known: list[list[int]] = [[] for _ in range(sequences)]  # pages, by row
        self.host["ends"][:], self.host["odds"][:] = -1, 1.0
        self._numbered = torch.arange(WORD, device=device)

    def fill(self, rows: Sequence[Row], width: int) -> None:
        """For a reading pass of this width."""
        host = self.host
        for row, one in enumerate(rows):
            if self._known[row] != one.pages:
                host["pages"][row, : len(one.pages)] = one.pages
                self._known[row] = one.pages.copy()
        for absent in range(len(rows), self.sequences):
            self._known[absent] = []
        count = len(rows)
        host["levels"][:count], host["levels"][count:] = [row.levels for row in rows], 0
        host["deepest"][:count] = [row.deepest for row in rows]
        host["keys"][:count] = [row.key for row in rows]
        host["temperatures"][:count] = [row.temperature for row in rows]
        for row, one in enumerate(rows):
            host["ends"][row], host["odds"][row] = one.ends, one.odds
        new = np.array([token for row in rows for token in row.new], dtype=np.int64)
        counts, before = np.array([(len(row.new), row.read) for row in rows], dtype=np.int64).reshape(-1, 2).T.copy()
        told = host["last"], host["starts"], host["lengths"], host["pages"]
        tokens, positions, slots, ancestors = nodes_of(host["nodes"], width)
        fill_new_tokens(
            tokens, positions, slots, ancestors, *told, new, counts, before, self._together, self.idle, PAGE
        )

    def arrive(self, width: int) -> None:
        """The device takes over what the host has written; the host may write again when the pass is done."""
        self._buffer.arrive(len(NODE_PARTS) * (self._widest - width))

    def nodes(self, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """On the device: see NODE_PARTS. # [width] each"""
        tokens, positions, slots, ancestors = nodes_of(self.device["nodes"], width)
        return tokens, positions, slots, ancestors

    def reading(self, width: int) -> PagedPass:
        """What new tokens see; part of the pass."""
        _, positions, _, ancestors = self.nodes(width)
        lengths, starts, pages = (self.device[name] for name in ("lengths", "starts", "pages"))
        scratch = lengths[:, None] + self._numbered
        return PagedPass(starts, lengths, pages, ancestors[:, None], positions[None], scratch, self._most_new)


def nodes_of(numbers: Any, width: int) -> tuple[Any, ...]:
    """The parts of a pass of this width. # [width] each"""
    return tuple(numbers[part * width : (part + 1) * width] for part in range(len(NODE_PARTS)))


class Program:
    """The recorded parts of a run for so many sequences: it reads what is new in all of them, then expands some open
    nodes of each, level after level."""

    def __init__(self, draft: DeviceDrafts, sequences: int, sampled: bool) -> None:
        self.draft, self.sequences, self.sampled, self.device = draft, sequences, sampled, draft.engine.device
        idle = draft.engine.slots
        self.data = RunData(draft, sequences)
        pages, levels, ends, odds = (self.data.device[name] for name in ("pages", "levels", "ends", "odds"))
        shape = idle, draft.most, draft.width, draft.k
        self.growth = Growth.of(pages, levels, ends, odds, *shape, self.data.device["deepest"])
        self.seconds = 0.0  # that the host gave to the last run, waiting for it included
        self._report = host_memory(self.growth.report.shape, self.growth.report.dtype, self.device)
        self._told: Floats = self._report.numpy()
        self._readings: dict[int, Captured] = {}  # by how many new tokens they can read
        self._levels: list[Captured] = []
        self._running: list[Captured] = []

    @property
    def usual(self) -> tuple[int, int]:
        """New tokens that runs have, mostly and sometimes."""
        mostly = max(NARROWEST, whole_power((USUAL + self.draft.masks) * self.sequences))
        return mostly, 2 * mostly

    def prepare(self, new: int) -> Captured:
        """Records what is missing for so many new tokens."""
        self.wait()
        width = new if self.draft.exact else max(self.usual[0], whole_power(new))
        if width not in self._readings:
            self._fill([], width)  # recording must not touch a text
            self._readings[width] = self._reading(width)
        if not self._levels:  # all at once: an answer that needs more than the last should not stand still for it
            self._levels = [self._level(level) for level in range(self.draft.passes - 1)]
        self._width = width
        return self._readings[width]

    def launch(self, rows: Sequence[Row]) -> None:
        read = self.prepare(sum(len(row.new) for row in rows))
        start = time.perf_counter()
        self._fill(rows, self._width)
        self._running = [read, *self._levels[: max(row.levels for row in rows) - 1]]
        for part in self._running:
            part()
        self.seconds = time.perf_counter() - start

    def _fill(self, rows: Sequence[Row], width: int) -> None:
        self.data.fill(rows, width)

    def wait(self) -> None:
        """The parts run one after the other."""
        if self._running:
            self._running[-1].wait()

    def arriving(self, row: int, levels: int) -> Iterator[Floats]:
        """What there is for one sequence, as soon as it is here: all levels of the run but the last, then that."""
        early = len(self._running) - 1
        known, end = 0, 1 + (levels - 1) * self.growth.width
        for place in (early - 1, early):
            upto = min(self._known_after(place), end)
            if place >= 0 and upto > known:
                start = time.perf_counter()
                self._running[place].wait()
                self.seconds += time.perf_counter() - start
                yield np.ascontiguousarray(self._told[known:upto, row])
                known = upto

    def _known_after(self, part: int) -> int:
        """Rows of the report that are there after a part of a run."""
        return 1 + part * self.growth.width

    def _reading(self, width: int) -> Captured:
        grown, engine, data = self.growth, self.draft.engine, self.data
        tokens, positions, slots, _ = data.nodes(width)

        def read() -> None:
            data.arrive(width)
            grown.begin(self._lengths())
            given = self._states_of_text(width)
            logits, states = engine.forward(tokens[None], positions[None], slots, data.reading(width), given)
            self._begin(logits, states)

        return Captured(read, self.device, self.draft.graphs)

    def _lengths(self) -> Tensor:
        """Of the texts with their new tokens."""
        starts, lengths = (self.data.device[name] for name in ("starts", "lengths"))
        return lengths + starts[1:] - starts[:-1]

    def _begin(self, logits: Tensor, states: Tensor | None) -> None:
        """The children of the roots."""
        last, scores = self.data.device["last"], self.growth.next_scores.new_zeros(self.sequences)
        self._keep(0, None if states is None else states.index_select(0, last))
        self._propose(0, logits.index_select(0, last), scores, self.growth.length)

    def _level(self, level: int) -> Captured:
        grown, engine = self.growth, self.draft.engine

        def expand() -> None:
            growth.choose(grown, level, self.draft.vocabulary.readable)
            told = grown.next_tokens, grown.next_positions, grown.next_slots, grown.level()
            logits, states = engine.forward(*told, self._states_above(level))
            first = 1 + level * grown.width
            self._keep(first, states)
            self._propose(first, logits, grown.next_scores, grown.next_positions[0] + 1)

        return Captured(expand, self.device, self.draft.graphs)

    def _states_of_text(self, width: int) -> Tensor | None:
        """What a head reads beside new tokens. # [width, width of a row]"""
        return None

    def _states_above(self, level: int) -> Tensor | None:
        """What a head reads beside the nodes of a level: what it left at their parents."""
        return None

    def _keep(self, first: int, states: Tensor | None) -> None:
        """What a head leaves at the expansions from `first` on."""

    def _propose(self, first: int, logits: Tensor, scores: Tensor, positions: Tensor) -> None:
        """The children of every sequence's expansions from `first` on, whose next tokens have these positions."""
        tokens, chances = self._proposals(logits, positions)
        growth.note(self.growth, first, scores, tokens, chances)
        here = slice(first, first + len(logits) // self.sequences)
        self._report[here].copy_(self.growth.report[here], non_blocking=True)

    def _proposals(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of rows whose next tokens have these positions, as many of each sequence."""
        noise = (self.data.device["keys"], self.data.device["temperatures"]) if self.sampled else None
        return proposals(logits, self.draft.columns, self.growth.k, positions, noise)


class DeviceDrafts:
    """A draft for the sequences of an engine: `open` one for each, let them `begin`, then `launch` them all."""

    shift = 0  # tokens of the text that come before those that it reads
    block = 0  # nodes of a pass that drafts all levels; 0: each level has a pass of its own
    together = 0  # of them see each other, those before them and those behind
    reads_states = False

    def __init__(self, engine: Any, vocabulary: DraftVocabulary, k: int, levels: int, width: int = WIDTH) -> None:
        self.engine, self.vocabulary, self.width = engine, vocabulary, width
        self.most = self.passes = self.deepest = max(1, levels)
        self.columns = vocabulary.columns(engine.device)
        self.k = min(k, len(self.columns))
        self.pages = PAGES
        self.exact = not engine.captured  # runs are as wide as they need to be, else of a few widths
        self.graphs = graph_memory(engine.device)
        self.fed: list[int] = []  # nodes, level by level of the last run
        self._programs: dict[tuple[int, bool], Program] = {}
        self._running: Program | None = None
        self._recorded_with = engine.pool_moves, engine.weights
        self.gave_up = False  # memory was short

    @staticmethod
    def shape_for(config: GraphConfig, captured: bool) -> tuple[int, int, int]:
        """What sequences of this configuration ask for: k, levels and width."""
        return config.k, config.levels, 1 if config.mode == "chain" else WIDTH if captured else NARROW

    @property
    def masks(self) -> int:
        """Nodes behind the last token of a text in the pass that reads it."""
        return max(0, self.block - 1)

    def open(self, context: Any, ends: frozenset[int]) -> DeviceDraft:
        return DeviceDraft(self, context, ends)

    def program(self, sequences: int, sampled: bool) -> Program:
        return Program(self, sequences, sampled)

    def nodes_behind(self, levels: int) -> int:
        """Of so many levels, that need room behind a text."""
        return (levels - 1) * self.width

    @property
    def seconds(self) -> float:
        """That the last run took of the host's time."""
        return self._running.seconds if self._running else 0.0

    def prepare(self, sequences: int) -> None:
        """Records what so many sequences need, or fewer: else the first of them wait for it."""
        if self.exact:
            return
        for most, sampled in product(up_to(SEQUENCES, sequences), (False, True)):
            program = self._program(most, sampled)
            for new in program.usual:
                program.prepare(new)

    def launch(self, drafts: Sequence[DeviceDraft], room: int = ALL) -> None:
        """All of these go on behind their texts; those that want no levels, or for whom there is no memory, do not. At
        most `room` tokens are read of texts that have not been drafted on for a while."""
        self._running, self.fed = None, []
        try:
            self._launch(drafts, room)
        finally:
            for draft in drafts:
                draft.settle()

    def _launch(self, drafts: Sequence[DeviceDraft], room: int) -> None:
        self._rest([draft for draft in drafts if draft.levels and not draft.is_ready()])
        going = [draft for draft in drafts if draft.levels and draft.makes_room()]
        for draft in going[SEQUENCES[-1] :]:
            draft.levels = 0
        going = going[: SEQUENCES[-1]]
        if not going or self.gave_up:
            return self._rest(going)
        try:
            self._read_long(going, room)
            going = [draft for draft in going if draft.levels]
            if not going:
                return
            rows = [draft.row() for draft in going]
            program = self._program(len(rows), any(row.temperature for row in rows))
            program.launch(rows)
        except torch.OutOfMemoryError:
            self._programs.clear()
            torch.cuda.empty_cache()
            self.gave_up = True
            notice("no GPU memory for drafting: going on without a draft model")
            return self._rest(going)
        self._running = program
        for number, (draft, row) in enumerate(zip(going, rows, strict=True)):
            draft.launched(program, number, row)
        passes = [self.passes_of(row) for row in rows]
        self.fed = [sum(len(row.new) for row in rows)]
        self.fed += [self.width * sum(own > level for own in passes) for level in range(1, max(passes))]

    def passes_of(self, row: Row) -> int:
        return min(row.levels, self.passes)

    def _rest(self, drafts: Sequence[DeviceDraft]) -> None:
        for draft in drafts:
            draft.levels = 0

    def _read_long(self, drafts: list[DeviceDraft], room: int) -> None:
        """Of texts that have not been drafted on for a while, all but their ends, in one pass. Those that are not read
        to their ends rest."""
        late = [(draft, unread - 1) for draft in drafts if (unread := len(draft.missing())) > NEW_TOKENS]
        segments = []
        for (draft, unread), count in zip(late, share([unread for _, unread in late], room), strict=True):
            if count:
                segments.append(draft.next_piece(count))
            if count < unread:
                draft.levels = 0
        if segments:
            self.engine.run(segments)
            for segment in segments:
                segment.commit()

    def _program(self, sequences: int, sampled: bool) -> Program:
        state = self.engine.pool_moves, self.engine.weights
        if self._recorded_with != state:  # recorded programs write into a pool that is gone, or read other weights
            self._forget()
            self._recorded_with = state
        key = sequences if self.exact else at_least(SEQUENCES, sequences), sampled
        if key not in self._programs:
            self._programs[key] = self.program(*key)
        return self._programs[key]

    def widen(self, pages: int) -> None:
        """Texts have become longer than the tables: recorded programs read the old ones."""
        if pages > self.pages:
            self._forget()
            self.pages = whole_power(pages)

    def _forget(self) -> None:
        for program in self._programs.values():
            program.wait()
        self._programs.clear()
        self.graphs = graph_memory(self.engine.device)


class DeviceDraft(DraftReader):
    """One sequence's draft."""

    on_device = True

    def __init__(self, drafts: DeviceDrafts, context: Any, ends: frozenset[int]) -> None:
        self.group, self.context, self.width, self.k = drafts, context, drafts.width, drafts.k
        self.shift, self.block, self.deepest = drafts.shift, drafts.block, drafts.deepest
        self.expansions = drafts.width * drafts.most
        self.levels = 0
        self.odds = EVEN
        self.perturb: Any = None  # a `DraftNoise`, for sampled text
        self.passes = self.tokens_fed = 0
        self._ends = first_ends(ends)
        self._text: list[int] = []
        self._run: tuple[Program, int, int] | None = None  # its row there, and how many levels count
        self._noise: tuple[int, float] | None = None

    def as_read(self, text: list[int]) -> list[int]:
        return self.group.vocabulary.as_read(text)

    def begin(self, text: list[int]) -> None:
        """It is to draft behind this text, as many levels as `levels` says when all are launched."""
        self._text, self._run = text, None
        self.levels = min(self.levels, self.deepest)

    def rehearse(self, root: int) -> None:
        """The same behind whatever it has read and this token, as deep as it may: to be timed."""
        self.levels = self.deepest
        self.begin([*[root] * self.shift, *self.context.text, root])

    def arriving(self) -> Iterator[Floats]:
        """What was launched, level by level: see `Program.arriving`."""
        if self._run is None:
            return iter(())
        program, row, levels = self._run
        return program.arriving(row, levels)

    def missing(self) -> list[int]:
        """What it has not read, the root included."""
        if len(self.context.text) >= len(self._text):  # begun again: the root has to be read once more
            self.context.rewind(len(self._text) - 1)
        return self.as_read(self._text[len(self.context.text) :])

    def next_piece(self, count: int) -> Segment:
        """The first of that."""
        return self.piece(self._text, count)

    def is_ready(self) -> bool:
        """Whether it has all that it reads; if not, it rests."""
        return True

    def settle(self) -> None:
        """Takes in what the target's next pass would write over."""

    def makes_room(self) -> bool:
        """For the nodes that are expanded, and for some more tokens: looking for pages takes its time."""
        needed, pages = len(self._text) + self.group.nodes_behind(self.levels), self.context.pages
        if pages_for(needed) > len(pages):
            for spare in (SPARE, 0):
                try:
                    self.context.reserve(needed + spare)
                    break
                except OutOfPages:
                    continue
            else:
                self.levels = 0
        self.group.widen(len(self.context.pages) + pages_for(self.group.nodes_behind(self.group.most + 1)) + 4)
        return self.levels > 0

    def row(self) -> Row:
        context, unread = self.context, self.missing()
        if self._noise is None:
            noise = self.perturb
            self._noise = (0, 0.0) if noise is None else (noise.noise.stream_key(noise.stream), noise.temperature)
        key, temperature = self._noise
        shape = context.pages, self.levels, self.levels
        return Row(len(context.text), unread, len(unread), *shape, self._ends, signed(key), temperature, self.odds)

    def launched(self, program: Program, number: int, row: Row) -> None:
        self._run = program, number, row.levels
        self.context.text.extend(row.new[: row.text])
        passes = self.group.passes_of(row)
        self.passes += passes
        self.tokens_fed += len(row.new) + (passes - 1) * self.width


def whole_power(count: int) -> int:
    """The power of two that is at least this."""
    return 1 << (count - 1).bit_length()


def first_ends(tokens: frozenset[int]) -> NDArray[np.int64]:
    """The first of them. # [ENDS]"""
    found = np.full(ENDS, -1, dtype=np.int64)
    known = sorted(tokens)[:ENDS]
    found[: len(known)] = known
    return found


@compiled
def fill_new_tokens(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    last: Ints,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    pages: NDArray[np.int32],
    new: Ints,
    counts: Ints,
    before: Ints,
    together: int,
    idle: int,
    page: int,
) -> None:
    """The new tokens of sequences, one sequence after the other, so many of each behind so many: each sees those before
    it, and the last `together` of a sequence all of its. Absent sequences have none; nodes that only fill the pass up
    write where nothing is kept."""
    node = 0
    for text in range(len(last)):
        starts[text], lengths[text] = node, 0
        if text >= len(counts):
            pages[text, 0] = idle // page
        else:
            lengths[text] = before[text]
            for place in range(counts[text]):
                at = before[text] + place
                tokens[node], positions[node] = new[node], at
                slots[node] = pages[text, at // page] * page + at % page
                latest = place if place < counts[text] - together else counts[text] - 1
                ancestors[node] = (np.int64(2) << np.int64(latest)) - 1
                node += 1
        last[text] = max(node - 1, 0)
    starts[len(last)] = node
    for rest in range(node, len(tokens)):
        tokens[rest], positions[rest], slots[rest], ancestors[rest] = 0, 0, idle, 1
