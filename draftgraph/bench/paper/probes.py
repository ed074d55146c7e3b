"""What the draft says inside its own graphs: how far borrowed distributions are from those they stand in for, and what
hypotheses of one step have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from draftgraph.bench.runs import Record
from draftgraph.bench.structures import mode_named
from draftgraph.engine.borrowing import Loan
from draftgraph.graph import TokenGraph, TokenTree
from draftgraph.trace import Step

if TYPE_CHECKING:
    from draftgraph.pair import Pair

PAIRS = 6  # of hypotheses, of one step
UNRELATED = 2  # pairs with hypotheses of another prompt, for each step
SHORTEST = 2  # tokens of a hypothesis behind the place where it parts from another


@dataclass(frozen=True)
class Seen:
    """A step, and what the draft says at every node of its graph."""

    step: Step
    text: list[int]
    logprobs: Tensor  # [nodes, vocabulary of the draft]

    @property
    def entropy(self) -> float:
        """Of the draft at the root, in nats."""
        row = self.logprobs[0]
        return float(-(row.exp() * row.clamp_min(-1e4)).sum())


def steps_of(pair: Pair, prompt: str, mode: str, arguments: dict[str, Any]) -> tuple[list[int], list[Step]]:
    """The text of an answer, prompt included, and its steps."""
    steps: list[Step] = []
    decoder = pair.decoder
    before, decoder.observer = decoder.observer, steps.append
    try:
        decoding = pair.start(prompt, config=mode_named(mode), **arguments)
        for _ in decoding:
            pass
    finally:
        decoder.observer = before
    return decoding.text, steps


def seen(pair: Pair, text: list[int], steps: Sequence[Step]) -> Iterator[Seen]:
    """The draft reads the text once, and the graph of each step as a tree, merged nodes at their own places."""
    decoder = pair.decoder
    engine, vocabulary = decoder.draft_engine, decoder.draft_vocabulary
    assert engine is not None
    with Loan(*decoder.models):
        engine.begin(len(text), False)
        for step in steps:
            known = vocabulary.to_draft(np.array(text[len(engine.text) : step.position], dtype=np.int64)).tolist()
            engine.prefill(known)
            tree = own_tree(step.graph)
            logits = engine.forward(vocabulary.to_draft(tree.tokens), tree.depths, tree.mask)
            engine.forget(0)
            yield Seen(step, text, torch.log_softmax(logits.float(), dim=-1))


def own_tree(graph: TokenGraph) -> TokenTree:
    """Every node of a graph where it was proposed first: nothing is repeated, nothing left out."""
    tokens, parents, depths = (np.array(column) for column in (graph.tokens, graph.parents, graph.depths))
    return TokenTree(tokens, parents, depths, np.arange(len(graph)), np.ones(len(graph)), list(graph.sources))


def borrowing(one: Seen, random: Random) -> Iterator[Record]:
    """Of each merged node: KL divergence of what it borrows from what the draft would say there itself; and, for
    scale, that of another node's."""
    graph = one.step.graph
    for node, lender in enumerate(graph.canonical):
        if lender != node and graph.children[lender]:
            other = random.randrange(len(graph))
            divergence, unrelated = (kl(one.logprobs[node], one.logprobs[place]) for place in (lender, other))
            yield {"divergence": divergence, "unrelated": unrelated, "children": len(graph.children[lender])}


def kl(own: Tensor, borrowed: Tensor) -> float:
    return float((own.exp() * (own - borrowed)).nan_to_num(0.0, 0.0, 0.0).sum())


def overlap(one: Seen, others: Sequence[list[int]], kind_of: Callable[[int], str], random: Random) -> Iterator[Record]:
    """What pairs of hypotheses of a step share behind the place where they part, and what they share with hypotheses
    of other prompts."""
    paths = hypotheses(one.step.graph)
    parted = [rest for pair in combinations(paths, 2) if (rest := behind_parting(*pair)) is not None]
    about = {"entropy": one.entropy, "kind": kind_of(one.text[one.step.position])}
    for first, second in random.sample(parted, min(PAIRS, len(parted))):
        yield about | {"related": True} | compared(first, second)
    for _ in range(min(UNRELATED, len(others) and len(paths))):
        rest = behind_parting(random.choice(paths), random.choice(others))
        if rest is not None:
            yield about | {"related": False} | compared(*rest)


def hypotheses(graph: TokenGraph) -> list[list[int]]:
    """The paths from the root to the leaves, the root left out."""
    paths: list[list[int]] = []
    for node in range(1, len(graph)):
        if not graph.children[node]:
            path = []
            at = node
            while at > 0:
                path.append(graph.tokens[at])
                at = graph.parents[at]
            paths.append(path[::-1])
    return paths


def behind_parting(one: Sequence[int], other: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """What follows the first tokens that differ; None if that is too short to tell."""
    place = next((at for at, (left, right) in enumerate(zip(one, other, strict=False)) if left != right), None)
    if place is None:
        return None
    rests = list(one[place + 1 :]), list(other[place + 1 :])
    return rests if min(map(len, rests)) >= SHORTEST else None


def compared(one: Sequence[int], other: Sequence[int]) -> Record:
    """Shares of tokens and of pairs of tokens that both have (of those of the shorter), and edits per token."""
    found = {}
    for name, size in (("tokens", 1), ("bigrams", 2)):
        grams = [{tuple(text[at : at + size]) for at in range(len(text) - size + 1)} for text in (one, other)]
        found[name] = len(grams[0] & grams[1]) / min(map(len, grams))
    return found | {"edits": edits(one, other) / max(len(one), len(other))}


def edits(one: Sequence[int], other: Sequence[int]) -> int:
    """Levenshtein's distance.

    >>> edits([1, 2, 3], [1, 3, 4])
    2
    """
    row = list(range(len(other) + 1))
    for place, token in enumerate(one, start=1):
        before, row = row, [place]
        for at, known in enumerate(other, start=1):
            row.append(min(row[-1] + 1, before[at] + 1, before[at - 1] + (token != known)))
    return row[-1]


def kind_of_token(text: str) -> str:
    """
    >>> [kind_of_token(text) for text in (" the", "ing", "7", ".", "\\n")]
    ['start of a word', 'rest of a word', 'number', 'punctuation', 'space']
    """
    bare = text.strip()
    if not bare:
        return "space"
    if any(character.isdigit() for character in bare):
        return "number"
    if not any(character.isalpha() for character in bare):
        return "punctuation"
    return "start of a word" if text[0].isspace() else "rest of a word"
