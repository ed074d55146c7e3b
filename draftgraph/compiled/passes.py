"""What a pass is told about its nodes, written where the device reads it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled

Ints = NDArray[np.int64]
WORD = 64  # bits of a number


@compiled
def ancestor_bits(parents: Ints, words: int) -> Ints:
    """A bit for each node's ancestors and itself, WORD of them in a number; parents come first. # [nodes, words]"""
    bits = np.zeros((len(parents), words), dtype=np.int64)
    for node in range(len(parents)):
        if parents[node] >= 0:
            for word in range(words):
                bits[node, word] = bits[parents[node], word]
        bits[node, node // WORD] |= np.int64(1) << np.int64(node % WORD)
    return bits


@compiled
def fill(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    scratch_positions: Ints,
    nodes: Ints,
    places: Ints,
    seen: Ints,
    length: int,
    before: int,
    capacity: int,
) -> None:
    """The tokens of nodes, their positions behind those of the nodes before, and what they see. Nodes that only fill
    the pass up repeat the first one, and write where nothing is kept."""
    count, width, words = len(nodes), len(tokens), seen.shape[1]
    for node in range(width):
        same = node if node < count else 0
        tokens[node], positions[node] = nodes[same], places[before + same]
        slots[node] = length + before + node if node < count else capacity - width + node
        for word in range(words):
            ancestors[node * words + word] = seen[same, word]
    for place in range(len(places)):
        scratch_positions[place] = places[place]


@compiled
def fill_text(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    scratch_positions: NDArray[np.int32],
    nodes: Ints,
    depths: Ints,
    visible: NDArray[np.bool_],
    places: Ints,
    length: int,
    pages: NDArray[np.int32],
    page: int,
) -> None:
    """One text's nodes of a pass over many: those before them in the scratch, whose positions `places` begins with,
    may be seen too. # [nodes] three times, [nodes, words], [words * WORD]"""
    count, before = len(nodes), len(places) - len(nodes)
    for node in range(count):
        place = length + before + node
        tokens[node], positions[node] = nodes[node], length + depths[node]
        slots[node] = np.int64(pages[place // page]) * page + place % page
        for word in range(ancestors.shape[1]):
            ancestors[node, word] = 0
        for slot in range(before + count):
            if visible[node, slot]:
                ancestors[node, slot // WORD] |= np.int64(1) << np.int64(slot % WORD)
    for place in range(len(places)):
        scratch_positions[place] = places[place]
