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
def fill_texts(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    pages: NDArray[np.int32],
    scratch_positions: NDArray[np.int32],
    told: Ints,
    nodes: Ints,
    depths: Ints,
    visible: NDArray[np.bool_],
    earlier: Ints,
    tables: NDArray[np.int32],
    page: int,
    idle: int,
) -> None:
    """The nodes of many texts, one after the other. Of each text `told` has the numbers of nodes, of scratch nodes
    before them, of tokens and of pages; the rest has what those are, all texts' in a row. Nodes that only fill the pass
    up write into a page where nobody reads. # [nodes] three times, [nodes, words], by texts: `PackedData`"""
    words, node, seen, before, entry = ancestors.shape[1], 0, 0, 0, 0
    for text in range(len(starts) - 1):
        starts[text], lengths[text] = node, 0
        if text >= len(told):
            continue
        count, drafted, length, held = told[text]
        lengths[text] = length
        for place in range(held):
            pages[text, place] = tables[entry + place]
        for place in range(drafted):
            scratch_positions[text, place] = length + earlier[before + place]
        for own in range(count):
            place = length + drafted + own
            tokens[node], positions[node] = nodes[node], length + depths[node]
            scratch_positions[text, drafted + own] = positions[node]
            slots[node] = np.int64(pages[text, place // page]) * page + place % page
            for word in range(words):
                ancestors[node, word] = 0
            for slot in range(drafted + count):
                if visible[seen + slot]:
                    ancestors[node, slot // WORD] |= np.int64(1) << np.int64(slot % WORD)
            seen += drafted + count
            node += 1
        before += drafted
        entry += held
    starts[-1] = node
    for left in range(node, len(tokens)):
        tokens[left], positions[left], slots[left] = 0, 0, idle + (left - node) % page
        for word in range(words):
            ancestors[left, word] = 0


@compiled
def pack(
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    ancestors: Ints,
    last: Ints,
    starts: NDArray[np.int32],
    lengths: NDArray[np.int32],
    pages: NDArray[np.int32],
    new: Ints,
    counts: Ints,
    before: Ints,
    trash: int,
    page: int,
) -> None:
    """The new tokens of texts, one text after the other, so many of each behind so many: each sees those before it.
    Texts that are not there have none; nodes that only fill the pass up write where nothing is kept."""
    node = 0
    for text in range(len(last)):
        starts[text], lengths[text] = node, 0
        if text >= len(counts):
            pages[text, 0] = trash // page
        else:
            lengths[text] = before[text]
            for place in range(counts[text]):
                at = before[text] + place
                tokens[node], positions[node] = new[node], at
                slots[node] = pages[text, at // page] * page + at % page
                ancestors[node] = (np.int64(2) << np.int64(place)) - 1
                node += 1
        last[text] = max(node - 1, 0)
    starts[len(last)] = node
    for rest in range(node, len(tokens)):
        tokens[rest], positions[rest], slots[rest], ancestors[rest] = 0, 0, trash, 1
