"""What a target ranked best behind the last few tokens of a path: kept, and found again."""

from __future__ import annotations

from math import exp, log
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.compiled.table import FREE, get, put

LONGEST = 3  # tokens of a context
TOKEN_BITS = 20  # in a key
# How much of the target's probability behind the same 1, 2 or 3 tokens holds at another place: counted at 1,000 places
# in a 135M model's answers, greedy and at temperature 0.7. Four tokens say no more than three.
TRUST = np.array([0.6, 0.87, 0.93])
HUGE = 1e30  # for logits that are no numbers
GOLDEN, FIRST, SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
SHIFTS = np.array([30, 27, 31, 12], dtype=np.uint64)


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
    noise: Noise,
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
        if noise.temperature > 0.0:
            scores[column] += noise.temperature * gumbel(noise.key[0], position, known.tokens[row, column])
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
def mixed(bits: np.uint64) -> np.uint64:
    """SplitMix64."""
    bits = (bits ^ (bits >> SHIFTS[0])) * FIRST
    bits = (bits ^ (bits >> SHIFTS[1])) * SECOND
    return bits ^ (bits >> SHIFTS[2])  # type: ignore[no-any-return]


@compiled
def gumbel(key: np.uint64, position: int, token: int) -> float:
    """`KeyedNoise.gumbel`, of one token."""
    row = mixed((key ^ np.uint64(position)) + GOLDEN)
    bits = mixed(np.uint64(token + 1) * GOLDEN + row)
    return -log(-log((np.float64(bits >> SHIFTS[3]) + 0.5) * 2.0**-52))


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
