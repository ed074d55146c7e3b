"""What a report holds: plain data, one dataclass for each kind of object in the JSON document.

Field names are the JSON keys. A change of their meaning, or a field taken away, raises `VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Literal

from draftgraph.config import GraphConfig
from draftgraph.graph import ROOT, Source, TokenGraph
from draftgraph.inspect.text import Decode, piece
from draftgraph.stats import Reason, Step

SCHEMA = "draftgraph.inspect"
VERSION = 1
DIGITS = 6

Setting = str | int | float | bool


@dataclass(frozen=True)
class NodeRecord:
    """A node of the graph. Ids count from 0, the root; a parent's id is below its children's."""

    id: int
    token: int
    text: str
    prob: float  # the estimate of the source that proposed it
    depth: int
    source: Source  # who proposed it: root, draft, copied or recycled
    state: str  # open: may still be expanded; expanded: was; leaf: pruned by theta_prob
    parent: int | None  # None for the root
    alias_of: int | None  # the node whose children it shares, if it was merged
    verified: bool  # the target has checked it, on at least one path
    accepted: bool  # it is on the accepted path


@dataclass(frozen=True)
class EdgeRecord:
    """A continuation. Kind "merged": from an alias to a child of the node that it is an alias of."""

    parent: int
    child: int
    kind: Source
    accepted: bool


@dataclass(frozen=True)
class TreeRecord:
    """A node of the unrolled tree, in the order in which the target checks them."""

    index: int
    parent: int | None
    depth: int
    node: int  # the graph node that it repeats
    token: int
    text: str
    score: float  # product of the estimates along the path
    source: Source  # "merged": drafted for another path and reached through an alias
    accepted: bool


@dataclass(frozen=True)
class TokenRecord:
    """A token of the output. Source "bonus": the target's own, after the accepted path."""

    token: int
    text: str  # "" where the next token completes the character
    source: Source | Literal["bonus"]


@dataclass(frozen=True)
class StepRecord:
    """One step: what was drafted, checked and accepted."""

    position: int  # of the root, in the text
    nodes: list[NodeRecord]
    edges: list[EdgeRecord]
    tree: list[TreeRecord]
    mask: list[str]  # row i has a 1 for tree node i and each of its ancestors, else 0
    path: list[int]  # accepted tree nodes, the root left out
    tokens: list[TokenRecord]  # the output of this step
    rejection: Reason | None  # why the bonus token was not in the tree
    stopped: bool  # a stop condition ended the text inside this step

    @property
    def bonus(self) -> TokenRecord | None:
        return next((token for token in self.tokens if token.source == "bonus"), None)

    @property
    def last_accepted(self) -> TreeRecord:
        return self.tree[self.path[-1] if self.path else ROOT]

    def path_to(self, index: int | None) -> list[TreeRecord]:
        """A tree node and those above it, from the root; nothing for None."""
        path = []
        while index is not None:
            path.append(self.tree[index])
            index = self.tree[index].parent
        return path[::-1]

    @property
    def shown(self) -> list[NodeRecord]:
        """The nodes that a picture needs: those that were checked, on any path, and those above them."""
        wanted: set[int] = set()
        for node in reversed(self.nodes):
            if node.verified or node.id in wanted:
                wanted |= {node.id} if node.parent is None else {node.id, node.parent}
        return [node for node in self.nodes if node.id in wanted]

    @classmethod
    def of(cls, step: Step, decode: Decode, texts: list[str]) -> StepRecord:
        """Records a step whose output tokens have these texts."""
        path = [ROOT, *(int(step.tree.nodes[index]) for index in step.path)]
        names = [_node_text(step.graph, node, decode) for node in range(len(step.graph))]
        sources: list[Source | Literal["bonus"]] = [*(step.tree.sources[index] for index in step.path), "bonus"]
        output = zip(step.tokens, texts, sources, strict=False)  # a stop may leave no bonus token
        return cls(
            position=step.position,
            nodes=_nodes(step, names, set(path)),
            edges=_edges(step.graph, set(pairwise(path))),
            tree=_tree(step, names),
            mask=["".join("01"[bit] for bit in row) for row in step.tree.mask.astype(int).tolist()],
            path=[int(index) for index in step.path],
            tokens=[TokenRecord(int(token), text, source) for token, text, source in output],
            rejection=step.rejection,
            stopped=step.stopped,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepRecord:
        lists = {"nodes": NodeRecord, "edges": EdgeRecord, "tree": TreeRecord, "tokens": TokenRecord}
        records = {name: [kind(**entry) for entry in data[name]] for name, kind in lists.items()}
        return cls(**(data | records))


def _node_text(graph: TokenGraph, node: int, decode: Decode) -> str:
    token, parent = int(graph.tokens[node]), graph.parents[node]
    return decode([token]) if node == ROOT else piece(decode, int(graph.tokens[parent]), token)


def _nodes(step: Step, names: list[str], accepted: set[int]) -> list[NodeRecord]:
    graph, verified = step.graph, set(step.tree.nodes.tolist())
    numbers = (graph.tokens, graph.probs, graph.depths, graph.parents, graph.canonical)
    rows = zip(graph.sources, graph.states, *(column.tolist() for column in numbers), strict=True)
    return [
        NodeRecord(
            id=node,
            token=token,
            text=names[node],
            prob=round(prob, DIGITS),
            depth=depth,
            source=source,
            state=state.name.lower(),
            parent=None if node == ROOT else parent,
            alias_of=canonical if canonical != node else None,
            verified=node in verified,
            accepted=node in accepted,
        )
        for node, (source, state, token, prob, depth, parent, canonical) in enumerate(rows)
    ]


def _tree(step: Step, names: list[str]) -> list[TreeRecord]:
    tree, accepted = step.tree, {ROOT, *step.path}
    numbers = (tree.parents, tree.depths, tree.nodes, tree.tokens, tree.scores)
    rows = zip(tree.sources, *(column.tolist() for column in numbers), strict=True)
    return [
        TreeRecord(
            index=index,
            parent=None if index == ROOT else parent,
            depth=depth,
            node=node,
            token=token,
            text=names[node],
            score=round(score, DIGITS),
            source=source,
            accepted=index in accepted,
        )
        for index, (source, parent, depth, node, token, score) in enumerate(rows)
    ]


def _edges(graph: TokenGraph, walked: set[tuple[int, int]]) -> list[EdgeRecord]:
    sources = graph.sources
    return [
        EdgeRecord(node, child, "merged" if graph.is_alias(node) else sources[child], (node, child) in walked)
        for node in range(len(graph))
        for child in graph.children_of(node).values()
    ]


def settings(config: GraphConfig) -> dict[str, Setting]:
    """The configuration's fields as JSON values; a cost model of one's own by its class name."""
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value if isinstance(value, Setting) else type(value).__name__ for name, value in values.items()}
