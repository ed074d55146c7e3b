"""The target proposes: what it ranked best behind the same tokens, at any node that it has checked before.

Every pass of the target says at every node, accepted or not, what should come next; only the accepted path is text.
The rest is kept for the places where the same tokens stand again (Luo et al., 2024, "Token Recycling").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph, TokenTree
from draftgraph.ranking import Ranking

ROWS = 8192  # nodes that are remembered
ALTERNATIVES = 4  # proposed behind a node
# How much of the target's probability behind the same 3, 2 or 1 tokens holds at another place: counted at 1,000 places
# in a 135M model's answers, greedy and at temperature 0.7. Four tokens say no more than three.
TRUST = {3: 0.93, 2: 0.87, 1: 0.6}
CONTEXTS = tuple(TRUST)  # the longest match first
Context = tuple[int, ...]


class NoiseOf(Protocol):
    """The noise of tokens [nodes, kept] at the positions of their nodes, scaled for logits."""

    def of(self, tokens: Ints, positions: Ints) -> Floats: ...


class RankingMemory:
    """What the target ranked best behind the last few tokens of a path. The newest wins, the oldest is forgotten."""

    def __init__(self, rows: int = ROWS) -> None:
        self.rows = rows
        self._tokens = np.zeros((rows, 0), dtype=np.int64)
        self._logits = np.zeros((rows, 0))
        self._shares = np.zeros((rows, 0))  # of the probability of what is kept
        self._noted = 0  # rankings, ever; the last of them lie in the rows, each where its number says
        self._number_of: dict[Context, int] = {}

    def __len__(self) -> int:
        return sum(map(self._is_kept, self._number_of.values()))

    def _is_kept(self, number: int) -> bool:
        return number >= self._noted - self.rows

    def keep(self, contexts: list[Context], ranking: Ranking, order: Sequence[int] | None = None) -> None:
        """Notes rankings behind contexts, in this order: a later one over an earlier one."""
        if not self._tokens.shape[1]:
            shape = (self.rows, ranking.tokens.shape[1])
            self._tokens, self._logits, self._shares = np.zeros(shape, dtype=np.int64), np.zeros(shape), np.zeros(shape)
        first, self._noted = self._noted, self._noted + len(contexts)
        rows, logits = np.arange(first, self._noted) % self.rows, ranking.usable
        self._tokens[rows], self._logits[rows], self._shares[rows] = ranking.tokens, logits, shares_of(logits)
        for place in range(len(contexts)) if order is None else order:
            context, number = contexts[place], first + place
            for length in CONTEXTS:
                self._number_of[context[-length:]] = number
        if len(self._number_of) > 2 * len(CONTEXTS) * self.rows:
            self._number_of = {context: one for context, one in self._number_of.items() if self._is_kept(one)}

    def find(self, context: Context) -> tuple[int, int] | None:
        """The row of the longest known suffix of a context, and its length."""
        for length in CONTEXTS:
            if length <= len(context):
                number = self._number_of.get(context[-length:])
                if number is not None and self._is_kept(number):
                    return number % self.rows, length
        return None

    def best(self, row: int, most: int) -> list[tuple[int, float]]:
        """The best tokens of a row and their shares, without noise."""
        tokens, shares = self._tokens[row, :most].tolist(), self._shares[row, :most].tolist()
        return [pair for pair in zip(tokens, shares, strict=True) if pair[1] > 0]

    def ranking(self, rows: list[int]) -> Ranking:
        return Ranking(self._tokens[rows], self._logits[rows])


class RecycleProposer:
    """Proposes what the target said before."""

    source: Source = "recycled"
    free = True

    def __init__(self, k: int, noise: NoiseOf | None = None) -> None:
        self.k = min(k, ALTERNATIVES)
        self.noise = noise
        self.memory = RankingMemory()
        self._position = 0  # of the root's next token
        self._contexts: dict[int, Context] = {}  # graph node -> the tokens that end its path

    def begin(self, text: list[int]) -> None:
        self._position = len(text)
        self._contexts = {ROOT: tuple(text[-max(CONTEXTS) :])}

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        tokens = np.full((len(frontier), self.k), NO_TOKEN)
        chances = np.zeros((len(frontier), self.k))
        matches = [self.memory.find(self._context(graph, node)) for node in frontier]
        places = [place for place, match in enumerate(matches) if match is not None]
        if places:
            depths = np.array([graph.depths[frontier[place]] for place in places])
            best = self.ranked([match for match in matches if match is not None], depths)
            tokens[places, : best[0].shape[1]], chances[places, : best[0].shape[1]] = best
        return tokens, chances

    def likeliest(self, contexts: list[Context], depths: list[int]) -> list[list[tuple[int, float]]]:
        """Tokens behind contexts and their chances, best first."""
        matches = [self.memory.find(context) for context in contexts]
        if self.noise is None:
            return [[] if match is None else self._remembered(*match) for match in matches]
        found: list[list[tuple[int, float]]] = [[] for _ in matches]
        known = [(place, match) for place, match in enumerate(matches) if match is not None]
        if known:
            deep = np.array([depths[place] for place, _ in known])
            tokens, chances = self.ranked([match for _, match in known], deep)
            for (place, _), row, said in zip(known, tokens.tolist(), chances.tolist(), strict=True):
                found[place] = [pair for pair in zip(row, said, strict=True) if pair[1] > 0]
        return found

    def _remembered(self, row: int, length: int) -> list[tuple[int, float]]:
        trust = TRUST[length]
        return [(token, trust * share) for token, share in self.memory.best(row, self.k)]

    def ranked(self, matches: list[tuple[int, int]], depths: Ints) -> tuple[Ints, Floats]:
        """The best of what was found in the memory, at nodes of these depths. # [nodes, k]"""
        known = self.memory.ranking([row for row, _ in matches])
        trust = np.array([TRUST[length] for _, length in matches])
        logits = known.logits
        if self.noise is not None:
            logits = logits + self.noise.of(known.tokens, self._position + depths)
        chances = np.exp(logits - logits.max(axis=1, keepdims=True))
        chances *= (trust / chances.sum(axis=1))[:, None]
        best = np.arange(len(matches))[:, None], np.argsort(-logits, axis=1, kind="stable")[:, : self.k]
        tokens, chances = known.tokens[best], chances[best]
        return np.where(chances > 0, tokens, NO_TOKEN), chances

    def learn(self, text: list[int], root: int, tree: TokenTree, path: list[int], ranking: Ranking) -> None:
        """Keeps what the target says at every node of a tree, whose root is the token at this place of the text; nodes
        that were accepted are the newest, as it were."""
        contexts: list[Context] = [tuple(text[max(0, root + 1 - max(CONTEXTS)) : root + 1])]
        for parent, token in zip(tree.parents[1:].tolist(), tree.tokens[1:].tolist(), strict=True):
            contexts.append((*contexts[parent], token)[-max(CONTEXTS) :])
        accepted = [ROOT, *path]
        self.memory.keep(contexts, ranking, [*range(len(tree) - 1, 0, -1), *accepted])

    def _context(self, graph: TokenGraph, node: int) -> Context:
        if node not in self._contexts:
            above = self._context(graph, graph.parents[node])
            self._contexts[node] = (*above, graph.tokens[node])[-max(CONTEXTS) :]
        return self._contexts[node]


def shares_of(logits: Floats) -> Floats:
    """What each token of a ranking has of the probability of all that it names."""
    shares: Floats = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
