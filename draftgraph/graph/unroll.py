"""Flatten: a graph is unrolled into a token tree, because a token's keys and values depend on its path.

A merged continuation is repeated under every parent. The likeliest paths come first. The target checks the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.graph.nodes import DRAFT, MERGED, NONE, OPEN, ROOT, Bools, Floats, Ints, Nodes, Source

WORD = 64  # bits of a number
FIRST, CERTAIN, ITSELF = np.zeros(1, dtype=np.int64), np.ones(1), np.ones((1, 1), dtype=bool)  # of a root alone
ABOVE = np.full(1, NONE)


@dataclass(frozen=True)
class TokenTree:
    """An unrolled graph: what the target checks in one pass. Node 0 is the root, parents come before children."""

    tokens: Ints
    parents: Ints  # -1 for the root
    depths: Ints
    nodes: Ints  # the graph node that each tree node repeats
    scores: Floats  # product of the estimates along the path
    sources: list[Source]

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def mask(self) -> Bools:
        """[nodes, nodes]: row i marks node i and its ancestors."""
        if len(self) == 1:
            return ITSELF
        bits = np.unpackbits(self.ancestors(-(-len(self) // WORD)).view(np.uint8), axis=1, bitorder="little")
        return bits[:, : len(self)].astype(bool)

    def ancestors(self, words: int) -> Ints:
        """The same as bits, WORD of them in a number. # [nodes, words]"""
        return ancestor_bits(self.parents, words)

    @cached_property
    def _children(self) -> dict[tuple[int, int], int]:
        keys = zip(self.parents.tolist(), self.tokens.tolist(), strict=True)
        return {key: node for node, key in enumerate(keys)}

    def index(self) -> None:
        """Makes `child` quick; else its first call does."""
        _ = self._children

    def child(self, node: int, token: int) -> int | None:
        return self._children.get((node, token))

    def first(self, nodes: int) -> TokenTree:
        """The tree of the best nodes alone."""
        arrays = (self.tokens, self.parents, self.depths, self.nodes)
        tokens, parents, depths, kept = (array[:nodes] for array in arrays)
        return TokenTree(tokens, parents, depths, kept, self.scores[:nodes], self.sources[:nodes])

    def only(self, kept: Bools) -> TokenTree:
        """The tree of these nodes alone, the root among them, and the parents of all."""
        places = np.append(kept.cumsum() - 1, NONE)  # the root's parent is the last
        arrays = (self.tokens, places[self.parents], self.depths, self.nodes)
        tokens, parents, depths, nodes = (array[kept] for array in arrays)
        sources = list(compress(self.sources, kept))
        return TokenTree(tokens, parents, depths, nodes, self.scores[kept], sources)


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


THING = np.dtype([("score", np.float64), ("number", np.int64)])
Heap = NDArray[np.void]  # of numbered things: the highest score first, of equals the lowest number


@compiled
def before(heap: Heap, one: int, other: int) -> bool:
    if heap["score"][one] != heap["score"][other]:
        return heap["score"][one] > heap["score"][other]  # type: ignore[no-any-return]
    return heap["number"][one] < heap["number"][other]  # type: ignore[no-any-return]


@compiled
def swap(heap: Heap, one: int, other: int) -> None:
    score, number = heap["score"][one], heap["number"][one]
    heap["score"][one], heap["number"][one] = heap["score"][other], heap["number"][other]
    heap["score"][other], heap["number"][other] = score, number


@compiled
def push(heap: Heap, size: int, score: float, number: int) -> int:
    """The new size."""
    heap["score"][size], heap["number"][size] = score, number
    place = size
    while place > 0 and before(heap, place, (place - 1) // 2):
        swap(heap, place, (place - 1) // 2)
        place = (place - 1) // 2
    return size + 1


@compiled
def pop(heap: Heap, size: int) -> int:
    """Takes the first thing out: it then lies behind all others. The new size."""
    size -= 1
    swap(heap, 0, size)
    place = 0
    while True:
        best = place
        for below in (2 * place + 1, 2 * place + 2):
            if below < size and before(heap, below, best):
                best = below
        if best == place:
            return size
        swap(heap, place, best)
        place = best


NODE, PARENT, DEPTH, SOURCE = range(4)  # rows of what `unroll` finds
BORROWED = SOURCE  # of what waits, in place of the source: whether an alias was passed


@compiled
def unroll(graph: Nodes, max_nodes: int, max_depth: int, floor: float) -> tuple[Ints, Floats]:
    """The best nodes by the products of the estimates on their paths, not under a floor. # [4, nodes], [nodes]"""
    node, most = graph.node, 1
    for place in range(graph.size[0]):
        most = max(most, node["children"][place])
    waiting, heap = np.empty((4, 1 + max_nodes * most), dtype=np.int64), np.empty(1 + max_nodes * most, dtype=THING)
    waiting[NODE, 0], waiting[PARENT, 0], waiting[DEPTH, 0], waiting[BORROWED, 0] = ROOT, NONE, 0, 0
    size, arrivals, chosen = push(heap, 0, 1.0, 0), 1, 0
    tree, scores = np.empty((4, max_nodes), dtype=np.int64), np.empty(max_nodes)
    while size and chosen < max_nodes:
        size = pop(heap, size)
        score, arrival = heap["score"][size], heap["number"][size]
        if score < floor:
            break
        here, depth, borrowed = waiting[NODE, arrival], waiting[DEPTH, arrival], waiting[BORROWED, arrival]
        tree[NODE, chosen], tree[PARENT, chosen], tree[DEPTH, chosen] = here, waiting[PARENT, arrival], depth
        source = node["source"][here]
        tree[SOURCE, chosen] = MERGED if borrowed and source == DRAFT else source
        scores[chosen] = score
        if depth < max_depth:
            shared = node["canonical"][here]
            child = node["first_child"][shared]
            while child != NONE:
                waiting[NODE, arrivals], waiting[PARENT, arrivals] = child, chosen
                waiting[DEPTH, arrivals], waiting[BORROWED, arrivals] = depth + 1, borrowed or shared != here
                size = push(heap, size, score * node["prob"][child], arrivals)
                arrivals += 1
                child = node["next_sibling"][child]
        chosen += 1
    return tree[:, :chosen].copy(), scores[:chosen].copy()


@compiled
def frontier(graph: Nodes, nodes: Ints, depths: Ints, scores: Floats, max_depth: int) -> tuple[Ints, Floats]:
    """The open nodes of an unrolled view, best first, and the score of the best path to each."""
    found, reached, count = np.empty(len(nodes), dtype=np.int64), np.empty(len(nodes)), 0
    seen = np.zeros(graph.size[0], dtype=np.bool_)
    for place in range(len(nodes)):
        node = graph.node["canonical"][nodes[place]]
        if depths[place] < max_depth and graph.node["state"][node] == OPEN and not seen[node]:
            found[count], reached[count], seen[node] = node, scores[place], True
            count += 1
    return found[:count].copy(), reached[:count].copy()
