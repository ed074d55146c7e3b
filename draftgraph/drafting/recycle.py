"""The target proposes: what it ranked best behind the same tokens, at any node that it has checked before.

Every pass of the target says at every node, accepted or not, what should come next; only the accepted path is text.
The rest is kept for the places where the same tokens stand again (Luo et al., 2024, "Token Recycling").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from draftgraph.compiled.rankings import LONGEST, Noise, Rankings, context_of, contexts_in, find, note, recall
from draftgraph.compiled.table import empty, take_over
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph, TokenTree
from draftgraph.ranking import Ranking

if TYPE_CHECKING:
    from draftgraph.choose import DraftNoise

ROWS = 8192  # nodes that are remembered
ALTERNATIVES = 4  # proposed behind a node
ENTRIES = 4096  # that a memory begins with


class RankingMemory:
    """What the target ranked best behind the last few tokens of a path. The newest wins, the oldest is forgotten."""

    def __init__(self, rows: int = ROWS) -> None:
        self.noted = 0  # rankings, ever
        self.known = Rankings(np.zeros((rows, 0), dtype=np.int64), np.zeros((rows, 0)), empty(ENTRIES))
        self._entries, self._room = 0, ENTRIES  # of the table

    def __len__(self) -> int:
        numbers = self.known.table["value"][self.known.table["key"] >= 0]
        return int((numbers >= self.noted - len(self.known.tokens)).sum())

    def keep(self, contexts: Ints, lengths: Ints, ranking: Ranking, order: Sequence[int]) -> None:
        """Notes rankings behind contexts, in this order: a later one over an earlier one."""
        rows, kept = len(self.known.tokens), ranking.tokens.shape[1]
        if not self.known.tokens.shape[1]:
            self.known = Rankings(np.zeros((rows, kept), dtype=np.int64), np.zeros((rows, kept)), self.known.table)
        first, self.noted = self.noted, self.noted + len(contexts)
        if self._entries + LONGEST * len(contexts) > self._room:
            self._make_room(LONGEST * len(contexts))
        found = ranking.tokens, ranking.logits
        self._entries += note(self.known, first, contexts, lengths, *found, np.array(order))

    def _make_room(self, entries: int) -> None:
        """A new table, without the contexts whose ranking is forgotten."""
        self._room = 2 * (len(self) + entries)
        table = empty(self._room)
        self._entries = take_over(table, self.known.table, self.noted - len(self.known.tokens))
        self.known = self.known._replace(table=table)

    def find(self, context: Sequence[int]) -> tuple[int, int] | None:
        """The row of the longest known suffix of a context, and its length."""
        tokens = np.array(context, dtype=np.int64)
        row, length = find(self.known, self.noted, context_of(tokens), len(tokens))
        return (row, length) if length else None


class RecycleProposer:
    """Proposes what the target said before."""

    source: Source = "recycled"
    free = True

    def __init__(self, k: int, noise: DraftNoise | None = None) -> None:
        self.k = min(k, ALTERNATIVES)
        key, temperature = (0, 0.0) if noise is None else (noise.noise.stream_key(noise.stream), noise.temperature)
        self.noise = Noise(np.array([key], dtype=np.uint64), float(temperature))
        self.memory = RankingMemory()
        self.position = 0  # of the root's next token
        self._contexts: dict[int, tuple[int, ...]] = {}  # graph node -> the tokens that end its path

    def begin(self, text: list[int]) -> None:
        self.position = len(text)
        self._contexts = {ROOT: tuple(text[-LONGEST:])}

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        tokens = np.full((len(frontier), self.k), NO_TOKEN)
        chances = np.zeros((len(frontier), self.k))
        for place, node in enumerate(frontier):
            match = self.memory.find(self._context(graph, node))
            if match is not None:
                position = self.position + graph.depths[node]
                recall(self.memory.known, *match, self.noise, position, tokens[place], chances[place])
        return tokens, chances

    def learn(self, text: list[int], root: int, tree: TokenTree, path: list[int], ranking: Ranking) -> None:
        """Keeps what the target says at every node of a tree, whose root is the token at this place of the text; nodes
        that were accepted are the newest, as it were."""
        before = np.array(text[max(0, root + 1 - LONGEST) : root + 1], dtype=np.int64)
        contexts, lengths = contexts_in(before, tree.parents, tree.tokens)
        self.memory.keep(contexts, lengths, ranking, [*range(len(tree) - 1, 0, -1), ROOT, *path])

    def _context(self, graph: TokenGraph, node: int) -> tuple[int, ...]:
        if node not in self._contexts:
            above = self._context(graph, graph.parents[node])
            self._contexts[node] = (*above, graph.tokens[node])[-LONGEST:]
        return self._contexts[node]
