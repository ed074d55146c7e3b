"""Merging in a tree that was chosen at once: a leaf that ends like another node borrows what follows that one."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from draftgraph.graph import ROOT, Source, TokenTree

Gram = tuple[int, ...]


@dataclass
class Merged:
    """The unrolled tree, and the leaves that are aliases of an earlier node with their last tau tokens."""

    tree: TokenTree
    aliases: dict[int, int] = field(default_factory=dict)


def merged(tree: TokenTree, tau: int, max_depth: int, max_nodes: int) -> Merged:
    """Borrowed nodes repeat those of `tree` under another parent, best first among all; nothing closes a cycle."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    aliases = aliases_in(parents, tokens, tau)
    if not aliases:
        return Merged(tree)
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents[1:], start=1):
        children[parent].append(node)
    scores = tree.scores.tolist()
    nodes: list[int] = []
    places: list[tuple[int, int, float]] = []  # parent in the new tree, depth, score
    sources: list[Source] = []
    heap = [(-1.0, ROOT, -1, 0, False)]  # -score, node, parent in the new tree, depth, whether it is borrowed
    while heap and len(nodes) < max_nodes:
        negative, node, parent, depth, borrowed = heapq.heappop(heap)
        here = len(nodes)
        nodes.append(node)
        places.append((parent, depth, -negative))
        sources.append("merged" if borrowed and tree.sources[node] == "draft" else tree.sources[node])
        if depth < max_depth:
            first = aliases.get(node, node)
            for child in children[first]:
                score = negative * (scores[child] / scores[first])
                heapq.heappush(heap, (score, child, here, depth + 1, borrowed or first != node))
    above, depths, kept = zip(*places, strict=True)
    whole = np.array(nodes)
    view = TokenTree(tree.tokens[whole], np.array(above), np.array(depths), whole, np.array(kept), sources)
    return Merged(view, aliases)


def aliases_in(parents: list[int], tokens: list[int], tau: int) -> dict[int, int]:
    """Leaf -> the first node with the same last tau tokens that something follows and that is none of its ancestors."""
    inner, grams = set(parents), grams_of(parents, tokens, tau)
    first: dict[Gram, int] = {}
    for node in sorted(inner, reverse=True):
        if node >= 0:
            first[grams[node]] = node
    twins = ((node, first[gram]) for node, gram in enumerate(grams) if gram in first and node not in inner)
    return {node: twin for node, twin in twins if len(grams[node]) == tau and not reaches(parents, twin, node)}


def grams_of(parents: list[int], tokens: list[int], tau: int) -> list[Gram]:
    """The last tau tokens of every path, as one tuple; fewer where it is shorter."""
    if tau == 2:  # as in the paper, and quicker
        return [(tokens[0],), *((tokens[parent], token) for parent, token in zip(parents[1:], tokens[1:], strict=True))]
    grams: list[Gram] = []
    for parent, token in zip(parents, tokens, strict=True):
        grams.append((*grams[parent], token)[-tau:] if parent >= 0 else (token,))
    return grams


def reaches(parents: list[int], start: int, node: int) -> bool:
    while node > start:
        node = parents[node]
    return node == start
