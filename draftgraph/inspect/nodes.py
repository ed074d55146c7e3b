"""A step's graph, or its unrolled tree, as a picture of nodes and edges."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from draftgraph.inspect.layout import GUTTER, HEIGHT, Box, layered
from draftgraph.inspect.markup import Picture, element, text
from draftgraph.inspect.record import NodeRecord, StepRecord, TreeRecord
from draftgraph.inspect.text import cells, label, probability, visible

CELL = 8.0  # width of one character of a token
SMALL_CELL = 6.5  # and of small print
PADDING = 10.0
ROUND = HEIGHT / 2
CORNERS = {"copied": 3.0}  # other sources are round


@dataclass(frozen=True)
class Item:
    """What is drawn for a node, be it of the graph or of the tree."""

    parent: int | None
    source: str  # colours the node
    edge: str  # colours the edge that leads to it
    status: str
    token: str
    details: str  # in small print
    tip: str
    attributes: dict[str, object]

    @property
    def width(self) -> float:
        gap = 7.0 if self.details else 0.0
        return 2 * PADDING + CELL * cells(self.token) + gap + SMALL_CELL * cells(self.details)


def graph_picture(step: StepRecord, outcome: bool = True, focus: int | None = None) -> Picture:
    """The graph: a merged node stands where it was found, with a curve to the node whose children it shares.

    Nodes that were drafted but not checked are left out, and with `outcome=False` what the target said;
    `focus` lights up the path of a node of the unrolled tree.
    """
    shown = step.shown
    place = {node.id: number for number, node in enumerate(shown)}
    shared = {node.alias_of for node in shown}
    items = [_graph_item(node, place, node.id in shared, outcome) for node in shown]
    boxes = _place(items, step, place[step.last_accepted.node], outcome)
    walked = {edge.parent for edge in step.edges if edge.kind == "merged" and edge.accepted}
    curves = []
    for node in shown:
        if node.alias_of in place:
            status = _status(node.id in walked, node.verified, outcome)
            curves += _merge_curve(boxes[place[node.id]], boxes[place[node.alias_of]], status)
    return _picture(items, boxes, curves, {place[node.node] for node in step.path_to(focus)})


def tree_picture(step: StepRecord, outcome: bool = True, focus: int | None = None) -> Picture:
    """The unrolled tree: what is merged in the graph stands here once for every path."""
    items = [_tree_item(node, outcome) for node in step.tree]
    boxes = _place(items, step, step.last_accepted.index, outcome)
    return _picture(items, boxes, [], {node.index for node in step.path_to(focus)})


def _status(accepted: bool, verified: bool, outcome: bool) -> str:
    if not outcome:
        return ""
    if accepted:
        return "accepted"
    return "rejected" if verified else "unverified"


def _graph_item(node: NodeRecord, place: dict[int, int], shared: bool, outcome: bool) -> Item:
    merged = node.alias_of is not None
    details = [] if node.parent is None else [probability(node.prob)]
    if merged:
        details.append(f"↪#{node.alias_of}")
    elif shared:
        details.append(f"#{node.id}")
    source = "merged" if merged else node.source
    status = _status(node.accepted, node.verified, outcome)
    facts = [f"#{node.id} {visible(node.text)}", f"token {node.token}", node.source, f"probability {node.prob:.3f}"]
    return Item(
        parent=None if node.parent is None else place[node.parent],
        source=source,
        edge=node.source,
        status=status,
        token=label(node.text, node.token),
        details=" ".join(details),
        tip=", ".join([*facts, *[f"continues as #{node.alias_of}"] * merged, *[status] * outcome]),
        attributes={**_data(node.id, node, source), "data_alias_of": node.alias_of},
    )


def _tree_item(node: TreeRecord, outcome: bool) -> Item:
    status = _status(node.accepted, True, outcome)
    facts = [f"{node.index} {visible(node.text)}", f"token {node.token}", node.source, f"score {node.score:.3f}"]
    return Item(
        parent=node.parent,
        source=node.source,
        edge=node.source,
        status=status,
        token=label(node.text, node.token),
        details=str(node.index),
        tip=", ".join([*facts, *[status] * outcome]),
        attributes={**_data(node.index, node, node.source), "data_node": node.node},
    )


def _data(number: int, node: NodeRecord | TreeRecord, source: str) -> dict[str, object]:
    accepted = node.accepted
    return {"data_id": number, "data_token": visible(node.text), "data_source": source, "data_accepted": accepted}


def _place(items: list[Item], step: StepRecord, last: int, outcome: bool) -> list[Box]:
    """Boxes for the items, to which the bonus token is added if there is one to show."""
    if outcome and step.bonus is not None:
        name, token = visible(step.bonus.text), step.bonus.token
        tip = f"{name}, token {token}, bonus: the target's own choice"
        data: dict[str, object] = {"data_token": name, "data_source": "bonus"}
        items.append(Item(last, "bonus", "bonus", "accepted", f"★ {label(step.bonus.text, token)}", "", tip, data))
    return layered([item.parent for item in items], [item.width for item in items])


def _picture(items: list[Item], boxes: list[Box], curves: list[str], lit: set[int]) -> Picture:
    drawn = sorted(zip(items, boxes, strict=True), key=lambda pair: pair[0].status == "accepted")
    edges = [_edge(boxes[item.parent], box, item) for item, box in drawn if item.parent is not None]
    shapes = [_shape(item, box, number in lit) for number, (item, box) in enumerate(zip(items, boxes, strict=True))]
    width = max(box.right for box in boxes) + (GUTTER * 0.7 if curves else 0)
    height = max(box.middle for box in boxes) + HEIGHT / 2
    return Picture(width, height, "".join([*edges, *curves, *shapes]))


def _shape(item: Item, box: Box, lit: bool) -> str:
    corner = CORNERS.get(item.source, ROUND)
    outline = element(
        "rect",
        class_="pill",
        x=box.left,
        y=box.middle - HEIGHT / 2,
        width=box.width,
        height=HEIGHT,
        rx=corner,
    )
    parts = [element("title", escape(item.tip)), outline, text(box.left + PADDING, box.middle, item.token, "token")]
    if item.details:
        start = box.right - PADDING - SMALL_CELL * cells(item.details)
        parts.append(text(start, box.middle, item.details, "small"))
    kinds = ["node"] * (item.source != "bonus") + [item.source, item.status] + ["lit"] * lit
    return element("g", *parts, class_=" ".join(filter(None, kinds)), **item.attributes)


def _edge(start: Box, end: Box, item: Item) -> str:
    bend = GUTTER / 2
    turn = f"C{start.column_right + bend:g} {start.middle:g} {end.left - bend:g} {end.middle:g}"
    line = f"M{start.right:g} {start.middle:g}H{start.column_right:g}{turn} {end.left:g} {end.middle:g}"
    return element("path", d=line, class_=f"edge {item.edge} {item.status}".strip())


def _merge_curve(alias: Box, first: Box, status: str) -> list[str]:
    """From a merged node to the place where the edges to the shared children begin."""
    if alias.left > first.left:
        side = 1 if alias.middle < first.middle else -1  # towards the other
        halfway = (alias.middle + first.middle) / 2
        start = f"M{alias.center:g} {alias.middle + side * HEIGHT / 2:g}"
        bend = f"C{alias.center:g} {halfway:g} {first.column_right + GUTTER:g} {first.middle:g}"
    else:
        reach = first.column_right + GUTTER * 0.8
        start = f"M{alias.right:g} {alias.middle:g}H{alias.column_right:g}"
        bend = f"C{reach:g} {alias.middle:g} {reach:g} {first.middle:g}"
    tip = first.right + 2
    line = f"{start}{bend} {max(first.column_right, tip + 6):g} {first.middle:g}H{tip + 6:g}"
    arrow = f"M{tip:g} {first.middle:g}l8 -4.5v9z"
    kinds = f"merged {status}".strip()
    return [element("path", d=line, class_=f"edge {kinds}"), element("path", d=arrow, class_=f"arrow {kinds}")]
