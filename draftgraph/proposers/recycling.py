"""The target proposes: what it ranked best behind the same tokens, at any node that it has checked before.

Every pass of the target says at every node, accepted or not, what should come next; only the accepted path is text.
The rest is kept for the places where the same tokens stand again (Luo et al., 2024, "Token Recycling").
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.choose import DraftNoise
from draftgraph.compiled import compiled
from draftgraph.engine.protocol import Ranking
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph, TokenTree
from draftgraph.kernels.noise import UNSIGNED_GOLDEN, mixed_compiled
from draftgraph.proposers.table import FREE, empty, get, put, take_over

LONGEST = 3  # tokens of a context
TOKEN_BITS = 20  # in a key
# How much of the target's probability behind the same 1, 2 or 3 tokens holds at another place: counted at 1,000 places
# in a 135M model's answers, greedy and at temperature 0.7. Four tokens say no more than three.
TRUST = np.array([0.6, 0.87, 0.93])
HUGE = 1e30  # for logits that are no numbers
UNUSED_BITS = np.uint64(12)


class Rankings(NamedTuple):
    """The last of them, each in the row that its number says."""

    tokens: NDArray[np.int64]  # [rows, kept]
    logits: NDArray[np.float64]
    table: NDArray[np.void]  # key of a context -> number of a ranking


class Noise(NamedTuple):
    """That of sampled text, by position: see `draftgraph.noise`."""

    key: NDArray[np.uint64]  # [1]
    temperature: float  # 0: none


@compiled
def longer(context: int, token: int) -> int:
    """A context, as a number, with one more token."""
    return (context << TOKEN_BITS | token) & ((1 << TOKEN_BITS * LONGEST) - 1)


@compiled
def key_of(context: int, length: int) -> int:
    """Of its last tokens."""
    return length << TOKEN_BITS * LONGEST | context & ((1 << TOKEN_BITS * length) - 1)


@compiled
def context_of(tokens: NDArray[np.int64]) -> int:
    context = 0
    for place in range(len(tokens)):
        context = longer(context, tokens[place])
    return context


@compiled
def note(
    known: Rankings,
    first: int,
    contexts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    tokens: NDArray[np.int64],
    logits: NDArray[np.float64],
    order: NDArray[np.int64],
) -> int:
    """Rankings behind contexts, numbered from the first on, in this order: a later one over an earlier one. How many
    entries that adds."""
    rows, added = len(known.tokens), 0
    for place in range(len(tokens)):
        row = (first + place) % rows
        for column in range(logits.shape[1]):
            known.tokens[row, column] = tokens[place, column]
            logit = logits[place, column]
            known.logits[row, column] = -HUGE if np.isnan(logit) else min(max(logit, -HUGE), HUGE)
    for place in order:
        for length in range(1, min(lengths[place], LONGEST) + 1):
            added += put(known.table, key_of(contexts[place], length), first + place)
    return added


@compiled
def find(known: Rankings, noted: int, context: int, length: int) -> tuple[int, int]:
    """The row of the longest known end of a context of so many tokens, and its length: none, and 0."""
    for shorter in range(min(length, LONGEST), 0, -1):
        number = get(known.table, key_of(context, shorter))
        if number != FREE and number >= noted - len(known.tokens):
            return number % len(known.tokens), shorter
    return FREE, 0


@compiled
def recall(
    known: Rankings,
    row: int,
    matched: int,
    perturb: Noise,
    position: int,
    tokens: NDArray[np.int64],
    chances: NDArray[np.float64],
) -> int:
    """The likeliest tokens of a row that was found, for this position, best first; as many as there are places. How
    many have a chance."""
    kept = known.logits.shape[1]
    scores = np.empty(kept)
    for column in range(kept):
        scores[column] = known.logits[row, column]
        if perturb.temperature > 0.0:
            scores[column] += perturb.temperature * gumbel(perturb.key[0], position, known.tokens[row, column])
    highest, total, count = scores[first_best(scores)], 0.0, 0
    for column in range(kept):
        total += exp(scores[column] - highest)
    while count < min(len(tokens), kept):
        best = first_best(scores)
        chance = TRUST[matched - 1] * exp(scores[best] - highest) / total
        if not chance > 0.0:
            break
        tokens[count], chances[count] = known.tokens[row, best], chance
        scores[best] = -np.inf
        count += 1
    return count


@compiled
def first_best(scores: NDArray[np.float64]) -> int:
    best = 0
    for place in range(1, len(scores)):
        if scores[place] > scores[best]:
            best = place
    return best


@compiled
def gumbel(key: np.uint64, position: int, token: int) -> float:
    """`KeyedNoise.gumbel`, of one token."""
    row = mixed_compiled((key ^ np.uint64(position)) + UNSIGNED_GOLDEN)
    bits = mixed_compiled(np.uint64(token + 1) * UNSIGNED_GOLDEN + row)
    return -log(-log((np.float64(bits >> UNUSED_BITS) + 0.5) * 2.0**-52))


@compiled
def contexts_in(
    before: NDArray[np.int64], parents: NDArray[np.int64], tokens: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The contexts that end with the nodes of a tree, and how many tokens they have; the root ends what is before."""
    contexts, lengths = np.empty(len(tokens), dtype=np.int64), np.empty(len(tokens), dtype=np.int64)
    contexts[0], lengths[0] = context_of(before), len(before)
    for node in range(1, len(tokens)):
        contexts[node] = longer(contexts[parents[node]], tokens[node])
        lengths[node] = lengths[parents[node]] + 1
    return contexts, lengths


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

    def __init__(self, k: int, perturb: DraftNoise | None = None) -> None:
        self.k = min(k, ALTERNATIVES)
        key = 0 if perturb is None else perturb.noise.stream_key(perturb.stream)
        temperature = 0.0 if perturb is None else float(perturb.temperature)
        self.noise = Noise(np.array([key], dtype=np.uint64), temperature)
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
