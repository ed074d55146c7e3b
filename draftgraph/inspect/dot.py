"""A step's graph in the DOT language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator

from draftgraph.inspect.record import NodeRecord, StepRecord
from draftgraph.inspect.text import label, probability
from draftgraph.inspect.theme import LIGHT

STYLES = {"draft": "solid", "copied": "dotted", "merged": "dashed", "recycled": "dashed"}
HEAD = """digraph draftgraph {
  rankdir=LR;
  node [fontname="monospace", fontsize=11, shape=box, style=rounded];
  edge [arrowsize=0.6];"""


def dot_document(steps: dict[int, StepRecord]) -> str:
    """One digraph with a cluster for each step; nodes that were drafted but not checked are left out."""
    clusters = [line for number, step in steps.items() for line in _cluster(number, step)]
    return "\n".join([HEAD, *clusters, "}"]) + "\n"


def _cluster(number: int, step: StepRecord) -> Iterator[str]:
    yield f"  subgraph cluster_{number} {{"
    yield f"    label={quoted(f'step {number + 1}')};"
    shown = {node.id: node for node in step.shown}
    for node in shown.values():
        yield f"    {_name(number, node.id)} [{_node_attributes(node)}];"
        if node.parent is not None:
            look = f"style={STYLES[node.source]}, {_color(node.source, node.accepted)}"
            yield f"    {_name(number, node.parent)} -> {_name(number, node.id)} [{look}];"
    walked = {edge.parent for edge in step.edges if edge.kind == "merged" and edge.accepted}
    for node in shown.values():
        if node.alias_of in shown:
            style = f'style=dashed, constraint=false, label="same", {_color("merged", node.id in walked)}'
            yield f"    {_name(number, node.id)} -> {_name(number, node.alias_of)} [{style}];"
    if step.bonus is not None:
        bonus = f"s{number}bonus"
        text = quoted(f"★ {label(step.bonus.text, step.bonus.token)}")
        yield f'    {bonus} [label={text}, style="rounded,filled", {_color("bonus", True)}, fontcolor=white];'
        yield f"    {_name(number, step.last_accepted.node)} -> {bonus} [{_color('bonus', True)}];"
    yield "  }"


def _node_attributes(node: NodeRecord) -> str:
    same = "" if node.alias_of is None else f" ↪#{node.alias_of}"
    text = quoted(f"#{node.id} {label(node.text, node.token)} {probability(node.prob)}{same}")
    source = "merged" if node.alias_of is not None else node.source
    corners = "solid" if source == "copied" else "rounded"
    dash = ",dashed" if source == "merged" else ""
    return f'label={text}, style="{corners}{dash}", {_color(source, node.accepted)}'


def _color(source: str, accepted: bool) -> str:
    if accepted:
        return f'color="{LIGHT.accepted}", penwidth=2.5'
    return f'color="{getattr(LIGHT, source, LIGHT.ink)}"'


def _name(number: int, node: int) -> str:
    return f"s{number}n{node}"


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
