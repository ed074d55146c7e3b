"""The likeliest nodes of a sheet, best first; and the leaves among them that borrow what follows another node."""

from __future__ import annotations

import numpy as np

from draftgraph.compiled import compiled
from draftgraph.compiled.heap import THING, pop, push
from draftgraph.compiled.opinions import CHOICES, find
from draftgraph.compiled.sheet import NO_ROW, Floats, Ints, Rows, weigh

TOKEN, PARENT, DEPTH, NODE, SOURCE = range(5)  # of a tree's nodes: NODE is the row, or the node that is repeated
ROOT_SOURCE, DRAFT, MERGED = 0, 1, 4  # 2 and 3 are those of the memories


@compiled
def select(
    sheet: Rows, k: int, places: Floats, curves: Floats, floor: float, max_depth: int, max_nodes: int
) -> tuple[Ints, Floats]:
    """The root, and the nodes with the best products of chances on their paths, over a floor. # [5, nodes], [nodes]"""
    rows, count, columns = sheet.rows, sheet.counts["rows"][0], sheet.named.shape[1]
    child = np.empty((count, columns), dtype=np.int64)
    for row in range(count):
        for column in range(columns):
            child[row, column] = NO_ROW
        if not rows["drafted"][row]:
            weigh(sheet, k, row, places, curves)
    for row in range(1, count):
        column = find(sheet.named[rows["parent"][row]], rows["token"][row])
        if column >= 0:
            child[rows["parent"][row], column] = row
    nodes, scores = np.empty((5, max_nodes), dtype=np.int64), np.empty(max_nodes)
    nodes[TOKEN, 0], nodes[PARENT, 0], nodes[DEPTH, 0], nodes[NODE, 0] = rows["token"][0], -1, 0, 0
    nodes[SOURCE, 0], scores[0] = ROOT_SOURCE, 1.0
    node_of = np.zeros(count, dtype=np.int64)
    best, size, chosen, row, path = np.empty(count * columns, dtype=THING), 0, 1, 0, 1.0
    while True:
        if row != NO_ROW and rows["depth"][row] < max_depth:
            for column in range(columns):
                score = path * sheet.chances[row, column]
                if score > floor:
                    size = push(best, size, score, row * columns + column)
        if not size or chosen >= max_nodes:
            break
        size = pop(best, size)
        path = best["score"][size]
        above, column = divmod(best["number"][size], columns)
        row = child[above, column]
        if row != NO_ROW:
            node_of[row] = chosen
        nodes[TOKEN, chosen], nodes[PARENT, chosen] = sheet.named[above, column], node_of[above]
        nodes[DEPTH, chosen], nodes[NODE, chosen] = rows["depth"][above] + 1, row
        nodes[SOURCE, chosen] = DRAFT if column < k else 2 + (column - k) // CHOICES
        scores[chosen] = path
        chosen += 1
    return nodes[:, :chosen].copy(), scores[:chosen].copy()


@compiled
def aliases_in(parents: Ints, tokens: Ints, tau: int) -> Ints:
    """Leaf -> the first node with the same last tau tokens that something follows and that is none of its ancestors;
    any other node -> itself."""
    count = len(tokens)
    aliases, inner = np.arange(count), np.zeros(count, dtype=np.bool_)
    for node in range(1, count):
        inner[parents[node]] = True
    for leaf in range(count):
        if inner[leaf]:
            continue
        for twin in range(count):
            if inner[twin] and tokens[twin] == tokens[leaf] and alike(parents, tokens, twin, leaf, tau):
                if not reaches(parents, twin, leaf):
                    aliases[leaf] = twin
                break
    return aliases


@compiled
def alike(parents: Ints, tokens: Ints, one: int, other: int, tau: int) -> bool:
    """Whether two paths end with the same tokens, so many."""
    for _ in range(tau):
        if one < 0 or other < 0 or tokens[one] != tokens[other]:
            return False
        one, other = parents[one], parents[other]
    return True


@compiled
def reaches(parents: Ints, start: int, node: int) -> bool:
    while node > start:
        node = parents[node]
    return node == start


@compiled
def merge(nodes: Ints, scores: Floats, aliases: Ints, max_depth: int, max_nodes: int) -> tuple[Ints, Floats]:
    """The tree with what aliases borrow, best first among all: borrowed nodes repeat those of the tree under another
    parent. Nodes must be given best first."""
    parents, count = nodes[PARENT], nodes.shape[1]
    first_child, sibling = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    children, most = np.zeros(count, dtype=np.int64), 0
    for node in range(count):
        first_child[node] = sibling[node] = -1
    for node in range(count - 1, 0, -1):
        above = parents[node]
        sibling[node], first_child[above] = first_child[above], node
        children[above] += 1
        most = max(most, children[above])
    lent = np.empty((max_nodes * most, 3), dtype=np.int64)  # parent in the new tree, node that is repeated, depth
    waiting, size, number = np.empty(len(lent), dtype=THING), 0, 0
    place_of = np.empty(count, dtype=np.int64)
    whole, gained, chosen, own = np.empty((5, max_nodes), dtype=np.int64), np.empty(max_nodes), 0, 0
    while chosen < max_nodes and (own < count or size):
        if own < count and (not size or scores[own] >= waiting["score"][0]):
            node, parent, depth, score = own, parents[own], nodes[DEPTH, own], scores[own]
            whole[SOURCE, chosen] = nodes[SOURCE, own]
            parent = place_of[parent] if parent >= 0 else -1
            place_of[own] = chosen
            lender = aliases[own] if aliases[own] != own else -1
            own += 1
        else:
            size = pop(waiting, size)
            score = waiting["score"][size]
            parent, node, depth = lent[waiting["number"][size]]
            whole[SOURCE, chosen] = MERGED if nodes[SOURCE, node] == DRAFT else nodes[SOURCE, node]
            lender = aliases[node]
        whole[TOKEN, chosen], whole[PARENT, chosen] = nodes[TOKEN, node], parent
        whole[DEPTH, chosen], whole[NODE, chosen], gained[chosen] = depth, node, score
        if lender >= 0 and depth < max_depth:
            child = first_child[lender]
            while child >= 0:
                lent[number, 0], lent[number, 1], lent[number, 2] = chosen, child, depth + 1
                size = push(waiting, size, score * (scores[child] / scores[lender]), number)
                number += 1
                child = sibling[child]
        chosen += 1
    return whole[:, :chosen].copy(), gained[:chosen].copy()
