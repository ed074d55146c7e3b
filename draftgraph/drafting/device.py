"""A draft model grows a tree on its device, all levels back to back: the host starts it and reads the result once.

Best first under a width: every level expands the likeliest nodes that are still open, whatever their depth. How likely
they are is what the draft says, with the odds that its best child and the others have had so far.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.compiled.passes import WORD
from draftgraph.drafting.model import DraftVocabulary
from draftgraph.engine.capture import Captured, graph_memory, host_memory
from draftgraph.engine.graph_attention import GraphPass
from draftgraph.engine.proposals import best_words
from draftgraph.engine.runner import common_prefix
from draftgraph.engine.sampler import SamplingData
from draftgraph.engine.static import WIDTHS, PassData, StaticEngine, fill
from draftgraph.graph import Floats, Ints
from draftgraph.kernels.growth import EVEN, Growth, choose, note
from draftgraph.models.cache import notice

WIDTH = 8  # nodes that a level expands
LEVELS = 16  # that a program is made for, at least
NEW_TOKENS = (16, *(width for width in WIDTHS if width > 16))  # of the text, read at the root's level


@dataclass(frozen=True)
class DraftedNodes:
    """What the draft proposed in one step: the children of every node that it expanded, the root first."""

    tokens: Ints  # [expansions, k]
    probs: Floats  # [expansions, k], behind their paths
    nodes: list[int]  # that were expanded, by row; a node's number is its place in `tokens`, root or none: -1

    @classmethod
    def of(cls, report: Floats) -> DraftedNodes:
        """See `Growth.report`."""
        k = report.shape[1] // 2
        tokens, nodes = report[:, :k].astype(np.int64), report[:, 2 * k].astype(np.int64)
        return cls(tokens, np.exp(report[:, k : 2 * k]), nodes.tolist())

    @cached_property
    def expansion_of(self) -> dict[int, int]:
        """Drafted node -> its row."""
        return {-1: 0} | {node: row for row, node in enumerate(self.nodes) if node >= 0}


class Program:
    """The recorded parts of a draft's run: it reads the new text, then expands some open nodes, level after level."""

    def __init__(self, draft: DeviceDraft, levels: int, sampled: bool) -> None:
        self.draft, self.sampled, self.device = draft, sampled, draft.engine.device
        self._most = levels
        self.growth = Growth.of(levels, draft.width, draft.k, self.device)
        self.noise = SamplingData(self.device)
        self._graphs = graph_memory(self.device)
        self._odds = host_memory(self.growth.odds.shape, self.growth.odds.dtype, self.device).fill_(1.0)
        self._report = host_memory(self.growth.report.shape, self.growth.report.dtype, self.device)
        self._told: Floats = self._report.numpy()
        self._readings: dict[int, tuple[PassData, Captured]] = {}  # by how many new tokens they can read
        self._levels: list[Captured] = []
        self._running: list[Captured] = []
        self._aside = draft.engine.capacity - 1 - len(self.growth.expanded)  # where recording writes: behind any text

    def start(self, unread: list[int], levels: int, odds: tuple[float, float], noise: Any) -> None:
        """New tokens behind the text, what children are corrected by, and the noise of sampled text."""
        self.wait()
        width = next(width for width in NEW_TOKENS if len(unread) <= width)
        text, read = self._readings.get(width) or self._reading(width)
        if not self._levels:  # all at once: an answer that needs more than the last should not stand still for it
            self._levels = [self._level(level) for level in range(self._most - 1)]
        tell(text, unread, len(self.draft.engine.text), self.draft.engine.capacity)
        self._odds.numpy()[:] = odds
        if noise is not None:
            self.noise.tell(noise.sampling)
        self._running = [read, *self._levels[: levels - 1]]
        for part in self._running:
            part()

    def wait(self) -> None:
        """The parts run one after the other."""
        if self._running:
            self._running[-1].wait()

    def arriving(self) -> Iterator[Floats]:
        """The rows of `Growth.report`, as soon as they are here: those of all levels but the last, then those."""
        early = len(self._running) - 1
        known = 0
        if early:
            self._running[early - 1].wait()
            known = 1 + (early - 1) * self.growth.width
            yield self._told[:known]
        self._running[early].wait()
        yield self._told[known : 1 + early * self.growth.width]

    def drafted(self) -> DraftedNodes:
        """All of it. Waits for the device."""
        self.wait()
        return DraftedNodes.of(self._told[: 1 + (len(self._running) - 1) * self.growth.width])

    def _reading(self, width: int) -> tuple[PassData, Captured]:
        text, growth, engine = PassData(width, max(1, width // WORD), self.device), self.growth, self.draft.engine
        text.host["slots"][:] = np.arange(engine.capacity - width, engine.capacity)  # recording must not touch the text
        text.host["length"][:] = self._aside

        def read() -> None:
            text.arrive()
            growth.odds.copy_(self._odds, non_blocking=True)
            if self.sampled:
                self.noise.arrive()
            growth.open.fill_(-torch.inf)
            growth.length.copy_(text.graph.lengths + text.last + 1)  # of the text with its new tokens
            logits = engine.graph_pass(text.tokens, text.positions, text.slots, text.graph)
            self._propose(0, logits.index_select(0, text.last), torch.zeros_like(growth.scores[:1]), growth.length)

        self._readings[width] = text, Captured(read, self.device, self._graphs)
        return self._readings[width]

    def _level(self, level: int) -> Captured:
        growth, engine = self.growth, self.draft.engine
        growth.length.fill_(self._aside)

        def expand() -> None:
            choose(growth, level, self.draft.readable)
            seen = GraphPass(*growth.level(level))
            logits = engine.graph_pass(growth.next_tokens, growth.next_positions, growth.next_slots, seen)
            self._propose(1 + level * growth.width, logits, growth.next_scores, growth.next_positions[0] + 1)

        return Captured(expand, self.device, self._graphs)

    def _propose(self, first: int, logits: Tensor, scores: Tensor, positions: Tensor) -> None:
        """The children of the expansions from `first` on, whose next tokens have these positions."""
        noise = (self.noise.key, self.noise.temperature) if self.sampled else None
        tokens, chances = best_words(logits, self.draft.written, self.growth.k, positions, noise)
        note(self.growth, first, scores, tokens, chances, self.draft.is_end)
        here = slice(first, first + len(logits))
        self._report[here].copy_(self.growth.report[here], non_blocking=True)


def tell(text: PassData, unread: list[int], length: int, capacity: int) -> None:
    """New tokens behind a text of this length."""
    seen = causal_words(text.width, text.words)[: len(unread)]
    fill(text, np.array(unread), np.arange(length, length + len(unread)), seen, length, 0, capacity)
    text.host["last"][0] = len(unread) - 1


class DeviceDraft:
    """What a draft on a static engine grows: `begin` starts it, `arriving` and `drafted` wait for it."""

    def __init__(self, engine: StaticEngine, vocabulary: DraftVocabulary, k: int, width: int = WIDTH) -> None:
        self.engine, self.width = engine, width
        self.levels = 8
        self.odds = EVEN
        self.perturb: Any = None  # a `DraftNoise`, for sampled text
        self.passes = self.tokens_fed = 0
        self.readable = vocabulary.readable
        self._vocabulary = vocabulary
        device, size = engine.device, vocabulary.target_size
        self.written = vocabulary.columns(device)
        self.k = min(k, len(self.written))
        self.is_end = torch.zeros(max(size, vocabulary.largest + 1), dtype=torch.bool, device=device)
        self._programs: dict[tuple[int, bool], Program] = {}
        self._started: Program | None = None
        self._slots = engine.slots
        self._gave_up = False  # memory was short

    def begin_text(self, ends: frozenset[int]) -> None:
        """For another text: counts from nothing, and drafts nothing behind these tokens."""
        self.passes = self.tokens_fed = 0
        self.odds = EVEN
        self.is_end.fill_(False)
        self.is_end[[end for end in ends if end < len(self.is_end)]] = True

    def catch_up(self, text: list[int], chunk: int | None = None) -> None:
        """Reads the text but for its last token, keeping what was read before of the same text."""
        known = self._vocabulary.to_draft(np.array(text[:-1], dtype=np.int64)).tolist()
        self.engine.rewind(common_prefix(self.engine.text, known))
        self.engine.prefill(known[len(self.engine.text) :], chunk)

    def begin(self, text: list[int]) -> None:
        """Drafts behind this text, whose end the draft has not read yet."""
        self._started = None
        if not self.levels or self._gave_up:
            self.levels = 0
            return
        engine = self.engine
        unread = self._vocabulary.to_draft(np.array(text[len(engine.text) :], dtype=np.int64)).tolist()
        if len(unread) > NEW_TOKENS[-1]:
            engine.prefill(unread[: -NEW_TOKENS[0]])
            unread = unread[-NEW_TOKENS[0] :]
        engine.reserve(len(text) + room_for(self.levels) * self.width)
        try:
            program = self._program(self.levels)
            program.start(unread, self.levels, self.odds, self.perturb)
        except torch.OutOfMemoryError:
            return self._give_up()
        self._started = program
        engine.text.extend(unread)
        self.passes += self.levels
        self.tokens_fed += len(unread) + (self.levels - 1) * self.width

    def arriving(self) -> Iterator[Floats]:
        """What was begun, level by level: see `Program.arriving`."""
        return iter(()) if self._started is None else self._started.arriving()

    def drafted(self) -> DraftedNodes | None:
        """Waits for what was begun."""
        return None if self._started is None else self._started.drafted()

    def _give_up(self) -> None:
        """Text and memories still propose."""
        self._programs.clear()
        torch.cuda.empty_cache()
        self._gave_up, self.levels = True, 0
        notice("no GPU memory for drafting: going on without a draft model")

    def _program(self, levels: int) -> Program:
        if self._slots is not self.engine.slots:  # recorded programs write into the old ones
            self._programs.clear()
            self._slots = self.engine.slots
        key = (room_for(levels), self.perturb is not None)
        if key not in self._programs:
            self._programs[key] = Program(self, *key)
        return self._programs[key]


def room_for(levels: int) -> int:
    """Levels that a program is made for: few sizes, so that few are recorded."""
    return max(LEVELS, 1 << (levels - 1).bit_length())


@cache
def causal_words(width: int, words: int) -> Ints:
    """Every token sees those before it and itself."""
    bits = np.zeros((width, words * WORD), dtype=bool)
    bits[:, :width] = np.tri(width, dtype=bool)
    return np.packbits(bits, axis=-1, bitorder="little").view("<i8")
