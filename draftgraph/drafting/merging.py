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
    inner = set(parents)
    grams = grams_of(parents, tokens, tau)
    first: dict[Gram, int] = {}
    for node, gram in enumerate(grams):
        if gram is not None and node in inner:
            first.setdefault(gram, node)
    found: dict[int, int] = {}
    for node, gram in enumerate(grams):
        twin = first.get(gram) if gram is not None and node not in inner else None
        if twin is not None and not reaches(parents, twin, node):
            found[node] = twin
    return found


def grams_of(parents: list[int], tokens: list[int], tau: int) -> list[Gram | None]:
    """The last tau tokens of every path; None where it is shorter."""
    paths: list[Gram] = []
    for parent, token in zip(parents, tokens, strict=True):
        paths.append((*paths[parent], token)[-tau:] if parent >= 0 else (token,))
    return [path if len(path) == tau else None for path in paths]


def reaches(parents: list[int], start: int, node: int) -> bool:
    while node > start:
        node = parents[node]
    return node == start
