"""Answers of the past propose: what followed the same tokens in one of them. Bounded, and never wrong, only useless:
whatever is proposed is checked."""

from __future__ import annotations

from collections.abc import Sequence

from draftgraph.drafting.suffix import Match, SuffixAutomaton
from draftgraph.graph import Floats, Ints

LOOKED_AT = 16  # tokens that end a path: longer matches tell no more


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

    def matches(self, text: Sequence[int]) -> list[PastMatch]:
        """How the end of a text stands in each half."""
        last = list(text[-LOOKED_AT:])
        return [PastMatch(half, half.end_of(last)) for half in self.halves]


class PastMatch:
    """A path's end in one half."""

    def __init__(self, half: SuffixAutomaton, match: Match) -> None:
        self.half, self.match = half, match

    @property
    def length(self) -> int:
        return self.match[1]

    def follow(self, token: int) -> PastMatch:
        return PastMatch(self.half, self.half.follow(self.match, token))

    def copies(self, tokens: Ints, chances: Floats) -> None:
        self.half.copies(self.match, tokens, chances)
