"""A heap of numbered things: the highest score first, of equals the lowest number."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled

THING = np.dtype([("score", np.float64), ("number", np.int64)])

Heap = NDArray[np.void]


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
