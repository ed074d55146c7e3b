"""Merging in a tree that was chosen at once: a leaf that ends like another node borrows what follows that one."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from draftgraph.graph import Source, TokenTree

Gram = tuple[int, ...]


@dataclass
class Merged:
    """The unrolled tree, and the leaves that are aliases of an earlier node with their last tau tokens."""

    tree: TokenTree
    aliases: dict[int, int] = field(default_factory=dict)


def merged(tree: TokenTree, tau: int, max_depth: int, max_nodes: int) -> Merged:
    """Borrowed nodes repeat those of `tree` under another parent, best first among all; nothing closes a cycle."""
    parents, tokens, scores = tree.parents.tolist(), tree.tokens.tolist(), tree.scores.tolist()
    aliases = aliases_in(parents, tokens, tau)
    if not aliases:
        return Merged(tree)
    worst = scores[-1] if len(tree) >= max_nodes else 0.0
    borrowed = list(islice(borrowings(tree, scores, aliases, max_depth, worst), max_nodes))
    if not borrowed:
        return Merged(tree)
    above, nodes, depths, gained = (np.array(column) for column in zip(*borrowed, strict=True))
    whole = np.concatenate([np.arange(len(tree)), nodes])
    order = np.argsort(-np.concatenate([tree.scores, gained]), kind="stable")[:max_nodes]
    place = np.empty(len(whole), dtype=np.int64)
    place[order] = np.arange(len(order))
    new_parents = place[np.concatenate([tree.parents, above])[order]]
    new_parents[0] = -1
    names: list[Source] = [*tree.sources, *(tree.sources[node] for _, node, _, _ in borrowed)]
    view = TokenTree(
        tokens=tree.tokens[whole[order]],
        parents=new_parents,
        depths=np.concatenate([tree.depths, depths])[order],
        nodes=whole[order],
        scores=np.concatenate([tree.scores, gained])[order],
        sources=["merged" if node >= len(tree) and names[node] == "draft" else names[node] for node in order.tolist()],
    )
    return Merged(view, aliases)


def borrowings(
    tree: TokenTree, scores: list[float], aliases: dict[int, int], max_depth: int, worst: float
) -> Iterator[tuple[int, int, int, float]]:
    """What aliases borrow, best first, if it is better than the worst: its parent, the node that it repeats, its depth
    and its score. Borrowed nodes are counted on behind those of the tree."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents[1:].tolist(), start=1):
        children.setdefault(parent, []).append(node)
    heap: list[tuple[float, int, int, int]] = []  # -score, node, parent, depth

    def lend(node: int, parent: int, depth: int, score: float) -> None:
        if depth <= max_depth:
            for child in children.get(node, ()):
                gained = score * (scores[child] / scores[node])
                if gained > worst:
                    heapq.heappush(heap, (-gained, child, parent, depth))

    for leaf, node in aliases.items():
        lend(node, leaf, int(tree.depths[leaf]) + 1, scores[leaf])
    number = len(tree)
    while heap:
        negative, node, parent, depth = heapq.heappop(heap)
        yield parent, node, depth, -negative
        lend(aliases.get(node, node), number, depth + 1, -negative)
        number += 1


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
