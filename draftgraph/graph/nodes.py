"""The nodes of a token graph as arrays, and the additions that compiled code makes to them."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled

Source = Literal["root", "draft", "copied", "recycled", "merged", "forced"]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

ROOT = 0
NONE = -1  # no node
NO_TOKEN = -1  # fills proposals that have fewer than k children
SOURCES: tuple[Source, ...] = ("root", "draft", "copied", "recycled", "merged", "forced")  # by number
DRAFT, MERGED = 1, 4


class State(IntEnum):
    OPEN = 0  # may be expanded
    EXPANDED = 1  # its children have been proposed
    LEAF = 2  # improbable, a weak sibling, or the end of a text: kept, never expanded


OPEN, EXPANDED, LEAF = (int(state) for state in State)  # compiled code takes plain numbers
NODE = np.dtype(
    [
        ("token", np.int64),
        ("parent", np.int64),
        ("depth", np.int64),
        ("prob", np.float64),
        ("source", np.int64),
        ("state", np.int64),
        ("canonical", np.int64),  # itself, or the node that it is an alias of
        ("children", np.int64),  # how many
        ("first_child", np.int64),
        ("last_child", np.int64),
        ("next_sibling", np.int64),
        ("first_alias", np.int64),  # of the nodes that are aliases of this one
        ("next_alias", np.int64),  # of the node that this one is an alias of
        ("next_in_bucket", np.int64),  # of first occurrences of n-grams with the same hash
        ("drafted", np.int64),  # a draft model, which ranks every token, proposed its children
        ("weak", np.int64),  # a leaf by sibling pruning
    ]
)
BUCKETS = 256  # of the index of n-grams


class Nodes(NamedTuple):
    """Storage of a graph."""

    node: NDArray[np.void]  # [capacity]
    size: Ints  # [1]
    buckets: Ints  # [BUCKETS]: first occurrences of n-grams, by hash


def nodes_for(capacity: int) -> Nodes:
    return Nodes(np.zeros(capacity, dtype=NODE), np.zeros(1, dtype=np.int64), np.full(BUCKETS, NONE))


@compiled
def append(graph: Nodes, parent: int, token: int, prob: float, source: int, state: int) -> int:
    """A new node under a parent, NONE for the root; there is room for it."""
    place, node = graph.size[0], graph.node
    graph.size[0] += 1
    node["token"][place], node["parent"][place] = token, parent
    node["prob"][place], node["source"][place], node["state"][place] = prob, source, state
    node["depth"][place] = 0 if parent == NONE else node["depth"][parent] + 1
    node["canonical"][place] = place
    node["children"][place] = node["drafted"][place] = node["weak"][place] = 0
    node["first_child"][place] = node["last_child"][place] = node["next_sibling"][place] = NONE
    node["first_alias"][place] = node["next_alias"][place] = node["next_in_bucket"][place] = NONE
    if parent != NONE:
        before = node["last_child"][parent]
        if before == NONE:
            node["first_child"][parent] = place
        else:
            node["next_sibling"][before] = place
        node["last_child"][parent] = place
        node["children"][parent] += 1
    return place  # type: ignore[no-any-return]


LONE = nodes_for(1)
append(LONE, NONE, 0, 1.0, 0, OPEN)


def lone_root(token: int) -> Nodes:
    """A graph that nothing will be added to."""
    node = LONE.node.copy()
    node["token"][0] = token
    return Nodes(node, LONE.size, LONE.buckets)


@compiled
def child_of(graph: Nodes, parent: int, token: int) -> int:
    """The child with this token, NONE if there is none."""
    child = graph.node["first_child"][graph.node["canonical"][parent]]
    while child != NONE and graph.node["token"][child] != token:
        child = graph.node["next_sibling"][child]
    return child  # type: ignore[no-any-return]
