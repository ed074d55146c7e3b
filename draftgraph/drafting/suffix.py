"""The text proposes itself: what followed the longest suffix of a path when it stood in the text before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from draftgraph.compiled import announce
from draftgraph.compiled.automaton import EMPTY, automaton_for, copies, end_of, extend, follow
from draftgraph.graph import NO_TOKEN, ROOT, Floats, Ints, Source, TokenGraph

if TYPE_CHECKING:
    from draftgraph.drafting.past import Past, PastMatch

Match = tuple[int, int]  # state of the automaton, how many tokens match
ROOM = 1024  # tokens, to begin with


class SuffixAutomaton:
    """All substrings of a growing text: see `compiled.automaton`."""

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

    def __init__(self, k: int) -> None:
        self.k = k
        self._past: dict[int, list[PastMatch]] = {}  # by graph node
        self.automaton = SuffixAutomaton()
        self.root: Match = (EMPTY, 0)
        self._matches: dict[int, Match] = {}  # by graph node

    def begin(self, text: list[int]) -> None:
        self.automaton.extend(text[self.automaton.tokens :])
        self.root = self.automaton.earlier
        self._matches = {ROOT: self.root}
        self._past = {ROOT: self.past.matches(text) if self.past else []}

    @property
    def past_roots(self) -> list[PastMatch]:
        """How the end of the text stands in the answers of the past: not at all, or in one or two parts of them."""
        return self._past.get(ROOT, [])

    def propose(self, graph: TokenGraph, frontier: list[int]) -> tuple[Ints, Floats]:
        tokens = np.full((len(frontier), self.k), NO_TOKEN)
        probs = np.zeros((len(frontier), self.k))
        for row, node in enumerate(frontier):
            match, earlier = self._match(graph, node), self._past_matches(graph, node)
            best = max(earlier, key=lambda one: one.length, default=None)
            if best is not None and best.length > match[1]:
                best.copies(tokens[row], probs[row])
            else:
                self.automaton.copies(match, tokens[row], probs[row])
        return tokens, probs

    def _past_matches(self, graph: TokenGraph, node: int) -> list[PastMatch]:
        if node not in self._past:
            above, token = self._past_matches(graph, graph.parents[node]), graph.tokens[node]
            self._past[node] = [match.follow(token) for match in above]
        return self._past[node]

    def _match(self, graph: TokenGraph, node: int) -> Match:
        if node not in self._matches:
            self._matches[node] = self.automaton.follow(self._match(graph, graph.parents[node]), graph.tokens[node])
        return self._matches[node]
