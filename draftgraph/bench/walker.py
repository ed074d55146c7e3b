"""A structure on its way along an answer: its graph at every place where it stops, and how far that leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from draftgraph.bench.answers import Answer
from draftgraph.config import GraphConfig
from draftgraph.drafting.model import Ancestors, Perturb
from draftgraph.graph import ROOT, Bools, Floats, Ints, TokenGraph, TokenTree
from draftgraph.stats import Stats
from draftgraph.trace import Step


@dataclass(frozen=True, eq=False)
class Trunk:
    """An answer that the draft has read, and what it would have said at each of its places."""

    answer: Answer
    perturb: Perturb | None
    first_slot: int
    children: Ints  # [tokens of the answer, k], best first
    probs: Floats

    @cached_property
    def text(self) -> list[int]:
        return self.answer.prompt + self.answer.tokens

    def seen_at(self, place: int) -> Bools:
        """The slots that the token at this place of the text sees, its own last."""
        return np.arange(self.first_slot + place + 1) >= self.first_slot

    def agreed(self, among: int) -> int:
        """At how many places the target's token is among the draft's best."""
        return int((self.children[:, :among] == np.array(self.answer.tokens)[:, None]).any(axis=1).sum())


@dataclass
class Walker:
    """One structure on its way along one answer."""

    trunk: Trunk
    config: GraphConfig
    ends: frozenset[int]
    walked: int = 0
    stats: Stats = field(default_factory=Stats)

    @property
    def arrived(self) -> bool:
        return self.walked == len(self.trunk.answer.tokens)

    @property
    def root(self) -> int:
        return len(self.trunk.answer.prompt) - 1 + self.walked

    def begin(self, max_depth: int) -> None:
        """A graph behind the token where the walker stands; its first level is known from the trunk."""
        self.graph = TokenGraph(self.trunk.text[self.root], self.config, max_depth, self.ends)
        self.seen: Ancestors = {ROOT: self.trunk.seen_at(self.root)}
        self.levels = 0
        self._look()
        if self.frontier:
            here = slice(self.walked, self.walked + 1)
            self.extend(self.trunk.children[here], self.trunk.probs[here])

    def extend(self, tokens: Ints, probs: Floats) -> None:
        """A level of `drafting.grow`."""
        k = self.config.k
        self.graph.extend(self.frontier, self.scores, tokens[:, :k], probs[:, :k], "draft")
        self.graph.close(self.frontier)
        self.levels += 1
        self._look()

    def _look(self) -> None:
        self.tree: TokenTree = self.graph.unroll()
        self.frontier, self.scores = self.graph.frontier(self.tree)
        if self.levels == self.graph.max_depth:
            self.frontier = []

    def accept(self) -> None:
        """Goes on to behind the longest path that the answer takes, and its bonus token."""
        path: list[int] = []
        tokens: list[int] = []
        for token in self.trunk.answer.tokens[self.walked :]:
            tokens.append(token)
            child = self.tree.child(path[-1] if path else ROOT, token)
            if child is None:
                break
            path.append(child)
        root = self.root
        self.walked += len(tokens)
        self.stats.count(Step(root, self.graph, self.tree, path, tokens, "stop" if self.arrived else None))
        self.stats.draft_passes += self.levels
