"""A draft with another tokenizer proposes through text.

It reads the text in its own tokens and drafts a tree of them. The paths of that tree are decoded and, behind the end of
the text, encoded with the target's tokenizer. A token of the target is as likely as the draft's paths up to the nodes
that complete it. What changes the tokens of the text before it is not proposed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from math import ceil
from typing import Any

import numpy as np
from torch import Tensor

from draftgraph.config import CostModel, GraphConfig
from draftgraph.cost.budget import PlannedBudget, levels_ahead, price_of_level
from draftgraph.cost.sharing import STALL, in_seconds, mean, rounded
from draftgraph.engine.pages import OutOfPages
from draftgraph.engine.protocol import Segment, common_prefix
from draftgraph.generation import context_window
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph, TokenTree
from draftgraph.proposers.device_draft import NARROW, WIDTH
from draftgraph.proposers.draft_model import DraftReader, DraftVocabulary, ModelProposer, Perturb
from draftgraph.proposers.growth import Growing, growing
from draftgraph.proposers.translation import Reading, Translation

TAIL = 8  # tokens of the draft before a continuation, which are decoded with it
SECONDS = 0.001  # of the host's time in a step, before it is known
KEPT = 0.98  # of what is known with every step without a draft, so that it is tried again some day

Path = tuple[int, ...]
Children = dict[Path, dict[int, float]]  # tokens of the target that may follow a path, and how likely each is


class TextProposer(DraftReader):
    """Drafts all levels when it is first asked in a step; what they say in the target's tokens costs nothing more."""

    source: Source = "draft"
    on_device = keep_logits = False
    group = None
    perturb: Perturb | None = None  # is not looked at: the noise of a place belongs to tokens of the target
    seconds = SECONDS

    def __init__(
        self,
        context: Any,
        vocabulary: DraftVocabulary,
        config: GraphConfig,
        translation: Translation,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.context, self.k = context, config.k
        self.logits: dict[int, Tensor] = {}  # none: a drafted token could be no other
        self._config = config if config.mode == "chain" else replace(config, mode="tree")
        self._model, self._vocabulary = ModelProposer(context, vocabulary, config.k), vocabulary
        self._translation, self._reading = translation, Reading(translation)
        self._end_text = translation.end_text if translation.end in ends else ""
        self._window = context_window(context.engine.model)
        self._ids: list[int] = []  # the text in the draft's tokens
        self._read = 0  # tokens of the target that these stand for
        self._drafted: tuple[TokenGraph, TokenTree] | None = None  # behind them, and not committed yet
        self.begin([])

    @property
    def passes(self) -> int:
        return self._model.passes

    @property
    def tokens_fed(self) -> int:
        return self._model.tokens_fed

    @property
    def free(self) -> bool:
        """Once it has drafted, or is not to."""
        return self._children is not None

    # The text

    def tokens_of(self, text: list[int]) -> list[int]:
        """The text in the draft's tokens. What came true of the last draft is kept in the context, the rest is not."""
        if len(text) != self._read:
            before, self._ids = len(self._ids), self._vocabulary.as_read(self._reading.of(text))
            if self._drafted is not None and self.context.scratch:
                graph, tree = self._drafted
                self._model.commit(tree, path_of(tree, self._ids[before:]), graph)
            self._read, self._drafted = len(text), None
        if self.context.text != self._ids[:-1][: len(self.context.text)]:
            self.context.rewind(common_prefix(self.context.text, self._ids[:-1]))
        return self._ids

    def text_read(self, text: list[int]) -> list[int]:
        tokens = self.tokens_of(text)
        return tokens if self._fits(tokens) else tokens[-1:]

    def depth_limit(self, text: list[int]) -> int | None:
        """None: its depth is not that of the target's tokens."""
        return None

    def unread(self, text: list[int]) -> int:
        return super().unread(self.tokens_of(text)) if self._has_room(text) else 0

    def piece(self, text: list[int], count: int) -> Segment:
        return super().piece(self.tokens_of(text), count)

    def prefill(self, text: list[int], chunk: int | None) -> None:
        if self.unread(text):
            super().prefill(self.tokens_of(text), chunk)

    def as_read(self, text: list[int]) -> list[int]:
        """Its own tokens need no mapping."""
        return text

    def _fits(self, tokens: list[int]) -> bool:
        """In its window; and there is something to begin behind, as the text may say nothing in its tokens."""
        return bool(tokens) and (self._window is None or len(tokens) + self._config.levels <= self._window)

    def _has_room(self, text: list[int]) -> bool:
        """In its window, and for keys and values: it may need more tokens than the target."""
        tokens = self.tokens_of(text)
        try:
            self.context.reserve(len(tokens) + self._config.nodes if self._fits(tokens) else 0)
        except OutOfPages:
            return False
        return self._fits(tokens)

    # A step

    def begin(self, text: list[int]) -> None:
        self._text = text
        self._planned: PlannedBudget | None = None
        self._children: Children | None = None
        self._paths: dict[int, Path] = {ROOT: ()}  # by node of the graph

    def budget(self, graph: TokenGraph, cost: CostModel, hit: float) -> PlannedBudget:
        pace = max(0.1, round(len(self._ids) / max(1, self._read), 1))  # its tokens for one of the target
        host = rounded(self.seconds) if in_seconds(cost) else 0.0
        width = WIDTH if self.context.engine.captured else NARROW
        most = min(graph.max_depth, ceil(self._config.levels / pace))
        levels = levels_ahead(cost, most, width, hit, graph.max_nodes, pace=pace, host=host)
        spent = levels * pace * price_of_level(cost, width) + (host if levels else 0.0)
        self._planned = PlannedBudget(ceil(levels * pace), width, cost.floor(), spent)
        if not levels:
            self._children, self.seconds = {}, KEPT * self.seconds
        return self._planned

    def propose(self, graph: TokenGraph, frontier: list[int]) -> Any:
        return self._draft(graph, frontier) if self._children is None else self._at(graph, frontier)

    def commit(self, tree: TokenTree, path: list[int], graph: TokenGraph) -> None:
        """Waits for the next token, which may change the draft's last ones: see `tokens_of`."""

    def _draft(self, graph: TokenGraph, frontier: list[int]) -> Growing[tuple[Ints, Floats]]:
        start, self._children = time.perf_counter(), {}
        if not self._has_room(self._text):
            return self._at(graph, frontier)
        ids, plan = self._ids, self._planned
        levels, limit = self._config.levels if plan is None else plan.levels, self.context.depth_limit(len(ids) - 1)
        levels = levels if limit is None else min(levels, limit)
        drafted = TokenGraph(ids[-1], self._config, levels, self._translation.draft_ends)
        self._model.begin(ids)
        took = time.perf_counter() - start
        tree = yield from growing(drafted, [self._model], 0.0 if plan is None else plan.floor, plan)
        start, self._drafted = time.perf_counter(), (drafted, tree)
        self._children = self._translated(tree)
        took += time.perf_counter() - start
        self.seconds = mean(self.seconds, min(took, STALL * self.seconds))
        return self._at(graph, frontier)

    def _translated(self, tree: TokenTree) -> Children:
        """What a tree of the draft says in the target's tokens."""
        stem, known = self._translation.stem(self._text)
        said = self._said(tree)
        completed: dict[Path, set[int]] = defaultdict(set)  # nodes of the draft that complete the last token of a path
        for leaf in sorted({*range(1, len(tree))} - {*tree.parents.tolist()}):
            tokens, ends = self._translation.written(stem + said[leaf])
            if tokens[: len(known)] != known:
                continue
            line = [node for node in range(1, leaf + 1) if tree.mask[leaf, node]]
            for place in range(len(known), len(tokens)):
                if tokens[place] >= self._translation.size:
                    break
                node = next((one for one in line if len(stem) + len(said[one]) >= ends[place]), leaf)
                completed[tuple(tokens[len(known) : place + 1])].add(node)
        chances = {path: float(tree.scores[list(nodes)].sum()) for path, nodes in completed.items()} | {(): 1.0}
        children: Children = defaultdict(dict)
        for path in completed:
            children[path[:-1]][path[-1]] = min(1.0, chances[path] / chances[path[:-1]])
        return children

    def _said(self, tree: TokenTree) -> list[str]:
        """How the text goes on, up to each node."""
        tail = self._ids[-TAIL:]
        before = self._translation.text_of(tail)
        tokens, said = [tail], [""]
        for token, above in zip(tree.tokens[1:].tolist(), tree.parents[1:].tolist(), strict=True):
            tokens.append([*tokens[above], token])
            if token in self._translation.draft_ends:
                said.append(said[above] + self._end_text)
                continue
            text = self._translation.text_of(tokens[-1])
            said.append(text[len(before) :] if text.startswith(before) else said[above])
        return said

    def _at(self, graph: TokenGraph, nodes: list[int]) -> tuple[Ints, Floats]:
        tokens, chances = np.full((len(nodes), self.k), NO_TOKEN), np.zeros((len(nodes), self.k))
        for row, node in enumerate(nodes):
            following = (self._children or {}).get(self._path(graph, node), {})
            for place, token in enumerate(sorted(following, key=lambda one: -following[one])[: self.k]):
                tokens[row, place], chances[row, place] = token, following[token]
        return tokens, chances

    def _path(self, graph: TokenGraph, node: int) -> Path:
        if node not in self._paths:
            self._paths[node] = (*self._path(graph, int(graph.parents[node])), int(graph.tokens[node]))
        return self._paths[node]


def path_of(tree: TokenTree, tokens: list[int]) -> list[int]:
    """The nodes of a tree that these tokens lead through."""
    path: list[int] = []
    for token in tokens:
        node = tree.child(path[-1] if path else ROOT, token)
        if node is None:
            break
        path.append(node)
    return path
