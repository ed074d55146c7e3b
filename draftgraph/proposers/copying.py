"""The text proposes itself: what followed the longest suffix of a path when it stood in the text, or in past answers.

All substrings of a growing text are kept in a suffix automaton, one more token in amortised constant time (Blumer et
al., 1985). A state stands for substrings that end at the same places; `link` leads to the longest shorter suffix. Edges
of a state are chained, the newest first. A text of n tokens has fewer than 2n states and 3n edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import announce, compiled
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph
from draftgraph.proposers.table import FREE, empty, get, put, take_over

CHOICES = 4  # continuations that are proposed behind a node
# Chance that a copied token is the target's, by length of the match (1, 2, 3, ... tokens): counted on 20,000 tokens of
# a 135M model's greedy answers to 240 training prompts (instructions, mathematics, translation, plain text).
TRUST = np.array([0.24, 0.54, 0.64, 0.68, 0.75, 0.79, 0.84, 0.84, 0.85, 0.90, 0.90, 0.96])
SECOND_CHOICE = 0.25  # how much less for every further continuation of a match
EMPTY = 0  # the state of no token
NONE = -1
LOOKED_AT = 16  # tokens that end a path: longer matches in past answers tell no more
TOKEN_BITS = 20  # in a key, beside a state
STATE = np.dtype([("link", np.int64), ("length", np.int64), ("newest", np.int64)])
EDGE = np.dtype([("token", np.int64), ("end", np.int64), ("older", np.int64), ("newer", np.int64)])
COUNTS = np.dtype([("states", np.int64), ("edges", np.int64), ("last", np.int64)])


class Automaton(NamedTuple):
    states: NDArray[np.void]
    edges: NDArray[np.void]
    table: NDArray[np.void]  # (state, token) -> edge
    counts: NDArray[np.void]  # [1]


def automaton_for(tokens: int, known: Automaton | None = None) -> Automaton:
    """With room for so many tokens, and all that is known."""
    edges = 3 * tokens + 3
    states, counts = np.zeros(2 * tokens + 2, dtype=STATE), np.zeros(1, dtype=COUNTS)
    found = Automaton(states, np.zeros(edges, dtype=EDGE), empty(edges), counts)
    if known is None:
        add_state(found, NONE, 0)
    else:
        found.states[: len(known.states)], found.edges[: len(known.edges)] = known.states, known.edges
        found.counts[:] = known.counts
        take_over(found.table, known.table, 0)
    return found


@compiled
def key_of(state: int, token: int) -> int:
    return state << TOKEN_BITS | token


@compiled
def add_state(known: Automaton, link: int, length: int) -> int:
    state = known.counts["states"][0]
    known.counts["states"][0] += 1
    known.states["link"][state], known.states["length"][state], known.states["newest"][state] = link, length, NONE
    return state  # type: ignore[no-any-return]


@compiled
def add_edge(known: Automaton, state: int, token: int, end: int) -> None:
    edge = known.counts["edges"][0]
    known.counts["edges"][0] += 1
    known.edges["token"][edge], known.edges["end"][edge] = token, end
    put(known.table, key_of(state, token), edge)
    make_newest(known, state, edge)


@compiled
def make_newest(known: Automaton, state: int, edge: int) -> None:
    """Of an edge that is in no chain."""
    before = known.states["newest"][state]
    known.edges["older"][edge], known.edges["newer"][edge] = before, NONE
    if before != NONE:
        known.edges["newer"][before] = edge
    known.states["newest"][state] = edge


@compiled
def take_out(known: Automaton, state: int, edge: int) -> None:
    older, newer = known.edges["older"][edge], known.edges["newer"][edge]
    if older != NONE:
        known.edges["newer"][older] = newer
    if newer != NONE:
        known.edges["older"][newer] = older
    else:
        known.states["newest"][state] = older


@compiled
def extend(known: Automaton, tokens: NDArray[np.int64]) -> None:
    """There is room for them."""
    states, edges, table, counts = known
    for token in tokens:
        state = counts["last"][0]
        new = add_state(known, EMPTY, states["length"][state] + 1)
        counts["last"][0] = new
        while state >= EMPTY and get(table, key_of(state, token)) == FREE:
            add_edge(known, state, token, new)
            state = states["link"][state]
        if state < EMPTY:
            continue
        edge = get(table, key_of(state, token))
        end = edges["end"][edge]
        if states["length"][end] != states["length"][state] + 1:
            end = split(known, state, token, end)
        states["link"][new] = end
        take_out(known, state, edge)
        make_newest(known, state, edge)


@compiled
def split(known: Automaton, state: int, token: int, end: int) -> int:
    """A state of its own for the shorter of the substrings at `end`."""
    states, edges, table, _ = known
    clone = add_state(known, states["link"][end], states["length"][state] + 1)
    edge = states["newest"][end]
    while edge != NONE and edges["older"][edge] != NONE:
        edge = edges["older"][edge]
    while edge != NONE:
        add_edge(known, clone, edges["token"][edge], edges["end"][edge])
        edge = edges["newer"][edge]
    states["link"][end] = clone
    while state >= EMPTY:
        edge = get(table, key_of(state, token))
        if edge == FREE or edges["end"][edge] != end:
            break
        edges["end"][edge] = clone
        state = states["link"][state]
    return clone


@compiled
def follow(known: Automaton, state: int, matched: int, token: int) -> tuple[int, int]:
    """The longest suffix of a path with one more token: its state and how many tokens match."""
    while True:
        edge = get(known.table, key_of(state, token))
        if edge != FREE:
            return known.edges["end"][edge], matched + 1
        if state == EMPTY:
            return EMPTY, 0
        state = known.states["link"][state]
        matched = known.states["length"][state]


@compiled
def end_of(known: Automaton, tokens: NDArray[np.int64]) -> tuple[int, int]:
    """Where a path of these tokens ends: see `follow`."""
    state, matched = EMPTY, 0
    for token in tokens:
        state, matched = follow(known, state, matched, token)
    return state, matched


@compiled
def continuations(
    known: Automaton, state: int, matched: int, tokens: NDArray[np.int64], lengths: NDArray[np.int64]
) -> int:
    """What followed, and how many tokens match there: the longest match first, and the newest among equals. As many
    as there are places; says how many."""
    count = 0
    while state != EMPTY and count < len(tokens):
        edge = known.states["newest"][state]
        while edge != NONE and count < len(tokens):
            token = known.edges["token"][edge]
            known_already = False
            for place in range(count):
                known_already |= tokens[place] == token
            if not known_already:
                tokens[count], lengths[count] = token, matched
                count += 1
            edge = known.edges["older"][edge]
        state = known.states["link"][state]
        matched = known.states["length"][state]
    return count


@compiled
def copies(known: Automaton, state: int, matched: int, tokens: NDArray[np.int64], chances: NDArray[np.float64]) -> int:
    """The same with the chances that they are right."""
    lengths = np.empty(len(tokens), dtype=np.int64)
    count = continuations(known, state, matched, tokens, lengths)
    for rank in range(count):
        chances[rank] = TRUST[min(lengths[rank], len(TRUST)) - 1] * SECOND_CHOICE**rank
    return count


Match = tuple[int, int]  # state of the automaton, how many tokens match
ROOM = 1024  # tokens, to begin with


class SuffixAutomaton:
    """All substrings of a growing text."""

    def __init__(self) -> None:
        announce()
        self.tokens, self._room = 0, ROOM
        self.known = automaton_for(ROOM)

    def extend(self, tokens: list[int]) -> None:
        self.tokens += len(tokens)
        if self.tokens > self._room:
            self._room = 2 * self.tokens
            self.known = automaton_for(self._room, self.known)
        extend(self.known, np.array(tokens, dtype=np.int64))

    @property
    def earlier(self) -> Match:
        """The longest suffix of the text that also ends before its end."""
        states, last = self.known.states, self.known.counts["last"][0]
        link = int(states["link"][last])
        return (link, int(states["length"][link])) if link >= EMPTY else (EMPTY, 0)

    def end_of(self, tokens: list[int]) -> Match:
        """The longest suffix of a path from its beginning."""
        return end_of(self.known, np.array(tokens, dtype=np.int64))

    def follow(self, match: Match, token: int) -> Match:
        """The longest suffix of a path with one more token."""
        return follow(self.known, *match, token)

    def copies(self, match: Match, tokens: Ints, chances: Floats) -> None:
        """What followed, longest match first and the newest first among equals, and how likely it is right; as many as
        there are places."""
        copies(self.known, *match, tokens, chances)


class SuffixProposer:
    """Copies from prompt and output, or from answers of the past where they match longer."""

    source: Source = "copied"
    free = True
    past: Past | None = None

    def __init__(self, k: int = CHOICES) -> None:
        self.k = min(k, CHOICES)
        self.automaton = SuffixAutomaton()
        self.roots: list[tuple[SuffixAutomaton, Match]] = []  # how the text's end stands in itself and in past answers
        self._matches: dict[int, list[Match]] = {}  # the same by graph node

    def begin(self, text: list[int]) -> None:
        self.automaton.extend(text[self.automaton.tokens :])
        self.roots = [(self.automaton, self.automaton.earlier), *(self.past.matches(text) if self.past else [])]
        self._matches = {ROOT: [match for _, match in self.roots]}

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        tokens = np.full((len(frontier), self.k), NO_TOKEN)
        probs = np.zeros((len(frontier), self.k))
        for row, node in enumerate(frontier):
            matches = self._at(graph, node)
            longest = max(range(len(matches)), key=lambda place: matches[place][1])  # of equals the text itself
            self.roots[longest][0].copies(matches[longest], tokens[row], probs[row])
        return tokens, probs

    def _at(self, graph: TokenGraph, node: int) -> list[Match]:
        if node not in self._matches:
            above, token = self._at(graph, int(graph.parents[node])), graph.tokens[node]
            followed = zip(self.roots, above, strict=True)
            self._matches[node] = [automaton.follow(match, token) for (automaton, _), match in followed]
        return self._matches[node]


class Past:
    """Two halves: when the newer one is full, the older one is forgotten."""

    def __init__(self, tokens: int) -> None:
        self.half = max(1, tokens // 2)
        self.halves = [SuffixAutomaton()]  # the newer one first

    @property
    def tokens(self) -> int:
        return sum(half.tokens for half in self.halves)

    def add(self, answer: Sequence[int]) -> None:
        for start in range(0, len(answer), self.half):
            piece = list(answer[start : start + self.half])
            if self.halves[0].tokens + len(piece) > self.half:
                self.halves = [SuffixAutomaton(), self.halves[0]]
            self.halves[0].extend(piece)

    def matches(self, text: Sequence[int]) -> list[tuple[SuffixAutomaton, Match]]:
        """How the end of a text stands in each half."""
        last = list(text[-LOOKED_AT:])
        return [(half, half.end_of(last)) for half in self.halves]
