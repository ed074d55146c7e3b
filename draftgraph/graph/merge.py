"""Merge: a node that completes an n-gram of tau tokens which stands in the graph already is an alias of the first one.

An alias shares the children of the node it stands for, now and later. A merge that would close a cycle is not made.
"""

from __future__ import annotations

import numpy as np

from draftgraph.compiled import compiled
from draftgraph.graph.nodes import BUCKETS, NONE, Nodes


@compiled
def merge(graph: Nodes, node: int, tau: int) -> None:
    """Makes the node an alias of the first node with its last tau tokens, unless that would close a cycle."""
    if graph.node["depth"][node] + 1 < tau:
        return
    first = first_occurrence(graph, node, tau)
    if first != node and not reaches(graph, first, node):
        graph.node["canonical"][node] = first
        graph.node["next_alias"][node] = graph.node["first_alias"][first]
        graph.node["first_alias"][first] = node


@compiled
def merge_leaves(graph: Nodes, tau: int) -> None:
    """Merges the leaves of a tree once all of it is there: with nodes that have children, else with an equal leaf."""
    for node in range(graph.size[0]):
        if graph.node["first_child"][node] != NONE and graph.node["depth"][node] + 1 >= tau:
            first_occurrence(graph, node, tau)
    for node in range(graph.size[0]):
        if graph.node["first_child"][node] == NONE:
            merge(graph, node, tau)


@compiled
def first_occurrence(graph: Nodes, node: int, tau: int) -> int:
    """The first node that was noted with the same last tau tokens: this one, if there is no other."""
    bucket, at = np.int64(0), node
    for _ in range(tau):
        bucket = (bucket * 31 + graph.node["token"][at]) % BUCKETS
        at = graph.node["parent"][at]
    known = graph.buckets[bucket]
    while known != NONE:
        if same_ngram(graph, known, node, tau):
            return known  # type: ignore[no-any-return]
        known = graph.node["next_in_bucket"][known]
    graph.node["next_in_bucket"][node] = graph.buckets[bucket]
    graph.buckets[bucket] = node
    return node


@compiled
def same_ngram(graph: Nodes, one: int, other: int, tau: int) -> bool:
    for _ in range(tau):
        if one == NONE or other == NONE or graph.node["token"][one] != graph.node["token"][other]:
            return False
        one, other = graph.node["parent"][one], graph.node["parent"][other]
    return True


@compiled
def reaches(graph: Nodes, start: int, goal: int) -> bool:
    """Whether a path leads from start to goal: walks back from goal, through every alias of its ancestors."""
    count = graph.size[0]
    seen, stack = np.zeros(count, dtype=np.bool_), np.empty(count, dtype=np.int64)
    stack[0], waiting, seen[goal] = goal, 1, True
    while waiting:
        waiting -= 1
        above = graph.node["parent"][stack[waiting]]
        alias = NONE if above == NONE else graph.node["first_alias"][above]
        while above != NONE:
            if not seen[above]:
                seen[above] = True
                stack[waiting] = above
                waiting += 1
            above = alias
            alias = NONE if alias == NONE else graph.node["next_alias"][alias]
    return seen[start]  # type: ignore[no-any-return]
