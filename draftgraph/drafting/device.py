"""A draft model grows a tree on its device, all levels back to back: the host starts it and reads the result once.

Best first under a width: every level expands the likeliest nodes that are still open, whatever their depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.drafting.model import DraftVocabulary
from draftgraph.engine.best import best_tokens
from draftgraph.engine.capture import Captured
from draftgraph.engine.graph_attention import WORD
from draftgraph.engine.growth import Growth, steps_on
from draftgraph.engine.runner import common_prefix
from draftgraph.engine.static import WIDTHS, PassData, StaticEngine
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph
from draftgraph.models.cache import notice
from draftgraph.noise import gumbel_rows, signed

WIDTH = 8  # nodes that a level expands
NEW_TOKENS = (16, *(width for width in WIDTHS if width > 16))  # of the text, read at the root's level


@dataclass(frozen=True)
class DraftedNodes:
    """What the draft proposed in one step: the children of every node that it expanded, the root first."""

    tokens: Ints  # [expansions, k]
    probs: Floats  # [expansions, k], behind their paths
    nodes: list[int]  # that were expanded, by row; a node's number is its place in `tokens`, root or none: -1

    @cached_property
    def expansion_of(self) -> dict[int, int]:
        """Drafted node -> its row."""
        return {-1: 0} | {node: row for row, node in enumerate(self.nodes) if node >= 0}

    def child(self, node: int, token: int) -> int | None:
        row = self.expansion_of.get(node)
        if row is None:
            return None
        found = np.flatnonzero(self.tokens[row] == token)
        return row * self.tokens.shape[1] + int(found[0]) if len(found) else None


class LevelProgram:
    """One recorded run of the draft: it reads the new text, then expands `levels - 1` times some open nodes."""

    def __init__(self, draft: DeviceDraft, new_tokens: int, levels: int, sampled: bool) -> None:
        self.draft, self.levels, self.sampled = draft, levels, sampled
        device = draft.engine.device
        self.text = PassData(new_tokens, max(1, new_tokens // WORD), device)
        self.growth = Growth.of(levels, draft.width, draft.k, device)
        self.steps = steps_on(device)
        self.causal = causal_words(new_tokens, self.text.words)
        self.key = torch.zeros(1, dtype=torch.long, device=device)  # of the noise
        self.temperature = torch.zeros(1, dtype=torch.float64, device=device)
        self._write_aside(draft.engine.capacity)
        self.run = Captured(self._compute, device)

    def _write_aside(self, capacity: int) -> None:
        """Recording must not write over the text."""
        self.text.slots.copy_(torch.arange(capacity - self.text.width, capacity))
        self.text.graph.lengths.fill_(capacity - 1 - len(self.growth.expanded))

    def tell(self, unread: list[int], length: int, capacity: int, noise: Any) -> None:
        """New tokens behind a text of this length, and the noise of sampled text."""
        count, width, host = len(unread), self.text.width, self.text.host
        host["tokens"][:count], host["tokens"][count:] = unread, 0
        host["positions"][:] = np.minimum(length + np.arange(width), length + count - 1)
        host["slots"][:count] = np.arange(length, length + count)
        host["slots"][count:] = np.arange(capacity - (width - count), capacity)
        host["length"][:] = length
        host["ancestors"][:] = self.causal
        host["scratch_positions"][:width] = length + np.arange(width)
        host["last"][:] = count - 1
        self.text.send()
        if noise is not None:
            self.key.fill_(signed(noise.noise.stream_key(noise.stream)))
            self.temperature.fill_(noise.temperature)

    def nodes(self, result: Tensor) -> DraftedNodes:
        """Waits for a run."""
        found, size = result.cpu().numpy(), len(self.growth.tokens)
        tokens, scores = found[: 2 * size].reshape(2, -1, self.growth.k)
        expanded = found[2 * size :].astype(np.int64)[: len(tokens) - 1]
        paths = np.concatenate([[0.0], scores.ravel()[expanded]])[:, None]  # of the expanded nodes themselves
        with np.errstate(invalid="ignore"):  # a node that is none has children that are none
            probs = np.nan_to_num(np.exp(scores - paths))
        return DraftedNodes(tokens.astype(np.int64), probs, [-1, *expanded.tolist()])

    def _compute(self) -> Tensor:
        text, growth, engine = self.text, self.growth, self.draft.engine
        growth.open.fill_(-torch.inf)
        growth.length.copy_(text.graph.lengths + text.last + 1)  # of the text with its new tokens
        logits = engine.graph_pass(text.tokens, text.positions, text.slots, text.graph)
        self._propose(0, logits.index_select(0, text.last), torch.zeros_like(growth.scores[:1]), growth.length)
        for level in range(self.levels - 1):
            self.steps.choose(growth, level, self.draft.readable)
            seen = growth.level(level)
            logits = engine.graph_pass(growth.next_tokens, growth.next_positions, growth.next_slots, seen)
            self._propose(1 + level * growth.width, logits, growth.next_scores, growth.next_positions[0] + 1)
        return torch.cat([part.double() for part in (growth.tokens, growth.scores, growth.expanded)])

    def _propose(self, first: int, logits: Tensor, scores: Tensor, positions: Tensor) -> None:
        """The children of the expansions from `first` on, whose next tokens have these positions."""
        tokens = self.draft.written
        if self.sampled:
            noise = gumbel_rows(self.key, positions, tokens)
            logits = (logits[:, : len(tokens)].double() + self.temperature * noise).float()
        best, chances = best_tokens(logits[:, : len(tokens)], self.growth.k)
        self.steps.note(self.growth, first, scores, tokens[best], chances, self.draft.is_end)


class DeviceDraft:
    """Proposes what a draft on a static engine has grown: `begin` starts it, the first `propose` waits for it."""

    source: Source = "draft"
    free = True  # to ask, once it has begun

    def __init__(self, engine: StaticEngine, vocabulary: DraftVocabulary, k: int, width: int = WIDTH) -> None:
        self.engine, self.width = engine, width
        self.levels = 8
        self.perturb: Any = None  # a `DraftNoise`, for sampled text
        self.passes = self.tokens_fed = 0
        self.readable = vocabulary.readable
        self._vocabulary = vocabulary
        device, size = engine.device, vocabulary.target_size
        written = vocabulary.written
        self.written = (torch.arange(size) if written is None else written).to(device)
        self.k = min(k, len(self.written))
        self.is_end = torch.zeros(max(size, int(self.written.max()) + 1), dtype=torch.bool, device=device)
        self._programs: dict[tuple[int, int, bool], LevelProgram] = {}
        self._started: tuple[LevelProgram, Tensor] | None = None
        self._slots = engine.slots
        self._gave_up = False  # memory was short
        self._nodes: DraftedNodes | None = None
        self._places: dict[int, int] = {}  # graph node -> drafted node

    def begin_text(self, ends: frozenset[int]) -> None:
        """For another text: counts from nothing, and drafts nothing behind these tokens."""
        self.passes = self.tokens_fed = 0
        self.is_end.fill_(False)
        self.is_end[[end for end in ends if end < len(self.is_end)]] = True

    def catch_up(self, text: list[int], chunk: int | None = None) -> None:
        """Reads the text but for its last token, keeping what was read before of the same text."""
        known = self._vocabulary.to_draft(np.array(text[:-1], dtype=np.int64)).tolist()
        self.engine.rewind(common_prefix(self.engine.text, known))
        self.engine.prefill(known[len(self.engine.text) :], chunk)

    def begin(self, text: list[int]) -> None:
        """Drafts behind this text, whose end the draft has not read yet."""
        self._started, self._nodes, self._places = None, None, {ROOT: -1}
        if not self.levels or self._gave_up:
            self.levels = 0
            return
        engine = self.engine
        unread = self._vocabulary.to_draft(np.array(text[len(engine.text) :])).tolist()
        if len(unread) > NEW_TOKENS[-1]:
            engine.prefill(unread[: -NEW_TOKENS[0]])
            unread = unread[-NEW_TOKENS[0] :]
        engine.reserve(len(text) + self.levels * self.width)
        width = next(width for width in NEW_TOKENS if len(unread) <= width)
        try:
            program = self._program(width, self.levels)
        except torch.OutOfMemoryError:
            return self._give_up()
        program.tell(unread, len(engine.text), engine.capacity, self.perturb)
        self._started = program, program.run()
        engine.text.extend(unread)
        self.passes += self.levels
        self.tokens_fed += len(unread) + (self.levels - 1) * self.width

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        tokens, probs = np.full((len(frontier), self.k), NO_TOKEN), np.zeros((len(frontier), self.k))
        drafted = self.drafted()
        if drafted is None:
            return tokens, probs
        places = [self._place(graph, node) for node in frontier]
        expansions = [-1 if place is None else drafted.expansion_of.get(place, -1) for place in places]
        known = [row for row, expansion in enumerate(expansions) if expansion >= 0]
        if known:
            here = np.array([expansions[row] for row in known])
            tokens[known], probs[known] = drafted.tokens[here], drafted.probs[here]
        return np.where(probs > 0, tokens, NO_TOKEN), probs

    def drafted(self) -> DraftedNodes | None:
        """Waits for what was begun."""
        if self._nodes is None and self._started is not None:
            self._nodes = self._started[0].nodes(self._started[1])
        return self._nodes

    def _place(self, graph: TokenGraph, node: int) -> int | None:
        """The drafted node that a graph node stands for."""
        if node not in self._places:
            above = self._place(graph, graph.parents[node])
            found = None
            if above is not None and self._nodes is not None:
                found = self._nodes.child(above, graph.tokens[node])
            if found is None:
                return None
            self._places[node] = found
        return self._places[node]

    def _give_up(self) -> None:
        """Text and memories still propose."""
        self._programs.clear()
        torch.cuda.empty_cache()
        self._gave_up, self.levels = True, 0
        notice("no GPU memory for drafting: going on without a draft model")

    def _program(self, width: int, levels: int) -> LevelProgram:
        if self._slots is not self.engine.slots:  # recorded programs write into the old ones
            self._programs.clear()
            self._slots = self.engine.slots
        key = (width, levels, self.perturb is not None)
        if key not in self._programs:
            self._programs[key] = LevelProgram(self, *key)
        return self._programs[key]


def causal_words(width: int, words: int) -> Ints:
    """Every token sees those before it and itself."""
    bits = np.zeros((width, words * WORD), dtype=bool)
    bits[:, :width] = np.tri(width, dtype=bool)
    return packed(bits).ravel()


def packed(bits: Any) -> Ints:
    return np.packbits(bits, axis=-1, bitorder="little").view("<i8")
