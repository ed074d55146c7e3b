"""Answers that conform to a grammar, and drafts that do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from draftgraph.batching.grammar import check
from draftgraph.errors import UsageError
from draftgraph.graph import ROOT, TokenGraph, TokenTree

FORCED = 0.98  # chance that text which the grammar forces is written in the tokens that the tokenizer would use
LIKELY = 0.1  # behind nodes that are less likely nothing is forced


class GrammarMask(LogitsProcessor):
    """Makes tokens that the grammar does not allow impossible.

    Asked along the accepted walk alone, so its state is always that of the true text. An answer may end only where
    the grammar does: with one of `stops`, or, where nothing else is left, of `ends`.
    """

    def __init__(self, matcher: Any, special: list[int], start: int, stops: frozenset[int], ends: frozenset[int]):
        self.matcher, self.special, self.read = matcher, special, start
        self.stops, self.ends = sorted(stops), sorted(ends)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        new = input_ids[0, self.read :].tolist()
        self.read += len(new)
        self.matcher.consume_tokens(new)
        bits = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        check(self.matcher)
        known = np.unpackbits(bits, bitorder="little")[: scores.shape[1]]
        allowed = np.zeros(scores.shape[1], dtype=bool)
        allowed[: len(known)] = known
        allowed[self.special] = False
        if self.matcher.is_accepting():
            allowed[self.stops] = True
            allowed[self.ends] |= not allowed.any()
        if not allowed.any():
            raise UsageError("the answer is complete, and the model has no token to end it with: give stop_token_ids")
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)


class GrammarGuide:
    """Cuts drafts that the grammar does not allow, and adds those that it forces.

    With a matcher of its own: what drafts do to one, whose limits they use up, must not change the answer.
    """

    def __init__(self, matcher: Any, end: int, start: int, ends: frozenset[int]) -> None:
        self.matcher, self.end, self.read, self.ends = matcher, end, start, ends

    def shape(self, graph: TokenGraph, tree: TokenTree, text: list[int]) -> TokenTree:
        self.matcher.consume_tokens(text[self.read :])
        self.read = len(text)
        ends = self._reached(tree)
        if self.matcher.is_error():
            return tree
        likely = {path[-1] if path else ROOT: path for path in ends}
        forced = [self._force(graph, tree, path) for path in likely.values()]
        if any(forced):
            tree = graph.unroll()
            ends = self._reached(tree)
        allowed = np.zeros(len(tree), dtype=bool)
        allowed[ROOT] = True
        for path in ends:
            allowed[path] = True
        return tree if allowed.all() else tree.only(allowed)

    def _reached(self, tree: TokenTree) -> list[list[int]]:
        """Of the nodes on the way to every leaf, the root left out, those that the grammar allows."""
        return [path[: self.matcher.validate_tokens(self._tokens(tree, path))] for path in paths(tree)]

    def _tokens(self, tree: TokenTree, path: list[int]) -> list[int]:
        """Whatever ends an answer is the matcher's end."""
        return [self.end if token in self.ends else token for token in tree.tokens[path].tolist()]

    def _force(self, graph: TokenGraph, tree: TokenTree, path: list[int]) -> bool:
        """Adds what must follow a path; whether that is new."""
        node = path[-1] if path else ROOT
        room = graph.max_depth - len(path)
        if room <= 0 or tree.scores[node] < LIKELY or int(tree.tokens[node]) in self.ends:
            return False
        self.matcher.consume_tokens(self._tokens(tree, path))
        forced = self.matcher.compute_ff_tokens()[:room]
        self.matcher.rollback(len(path))
        return graph.force(int(tree.nodes[node]), forced, FORCED)


def paths(tree: TokenTree) -> Iterator[list[int]]:
    """The nodes from the root, left out, to every leaf."""
    parents = tree.parents.tolist()
    for leaf in sorted(set(range(len(tree))).difference(parents)):
        path = [leaf]
        while path[-1] > ROOT:
            path.append(parents[path[-1]])
        yield path[-2::-1]
