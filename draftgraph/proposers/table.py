"""A table of numbers by number: open addressing, at most half full, nothing is ever taken out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled

ENTRY = np.dtype([("key", np.int64), ("value", np.int64)])
FREE = -1  # key, or value of a key that is not there; keys are not negative
SPREAD = 0x9E3779B97F4A7C1  # odd, so that neighbours lie far apart

Table = NDArray[np.void]


def empty(entries: int) -> Table:
    """With room for so many."""
    table = np.zeros(1 << max(4, (2 * entries - 1).bit_length()), dtype=ENTRY)
    table["key"] = FREE
    return table


@compiled
def place_of(table: Table, key: int) -> int:
    """Where a key is, or would be."""
    mask = len(table) - 1
    product = key * SPREAD
    place = (product ^ (product >> 29)) & mask
    while table["key"][place] != key and table["key"][place] != FREE:
        place = (place + 1) & mask
    return place


@compiled
def get(table: Table, key: int) -> int:
    place = place_of(table, key)
    return table["value"][place] if table["key"][place] == key else FREE


@compiled
def put(table: Table, key: int, value: int) -> int:
    """How many entries that adds."""
    place = place_of(table, key)
    new = table["key"][place] == FREE
    table["key"][place], table["value"][place] = key, value
    return 1 if new else 0


@compiled
def take_over(table: Table, older: Table, least: int) -> int:
    """The entries of another table whose values are not less; how many there are."""
    count = 0
    for place in range(len(older)):
        if older["key"][place] != FREE and older["value"][place] >= least:
            count += put(table, older["key"][place], older["value"][place])
    return count
