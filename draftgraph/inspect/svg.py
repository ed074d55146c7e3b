"""Pictures of a step as SVG: its graph, the tree that it unrolls into, the ancestor mask, with a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Literal

from rich.cells import cell_len

from draftgraph.errors import UsageError
from draftgraph.inspect.record import NodeRecord, StepRecord, TreeRecord
from draftgraph.inspect.text import label, probability, visible
from draftgraph.inspect.theme import LETTERS, THEMES

View = Literal["graph", "tree", "mask"]
KEYS = {
    "root": "end of the text",
    "draft": "drafted",
    "merged": "merged",
    "copied": "copied from the text",
    "recycled": "recycled",
    "accepted": "accepted",
    "rejected": "rejected",
    "unverified": "not checked",
    "bonus": "the target's own token",
}
BASELINE = "0.34em"  # puts the middle of a text on its y

# the graph and the tree
ROW = 36.0  # from one line to the next
GUTTER = 40.0  # between columns, where edges curve
HEIGHT = 26.0
CELL = 8.0  # width of one character of a token
SMALL_CELL = 6.5  # and of small print
PADDING = 10.0
CORNERS = {"copied": 3.0}  # other sources are round

# the mask
MASK_ROW = 19.0
TEXT_CELLS = 24  # for the text of a path
INDEX_AT, BADGE_AT, TEXT_AT = 20.0, 34.0, 46.0
SCORE_AT = TEXT_AT + 8.0 * TEXT_CELLS + 34.0
GRID_AT = SCORE_AT + 12.0
NO_BREAK_SPACE = "\u00a0"

# documents
MARGIN = 22.0
BETWEEN = 44.0  # panels
TITLE, CAPTION = 32.0, 22.0  # heights
SAMPLE_WIDTH, SAMPLE_HEIGHT = 32.0, 18.0  # of the legend
KEY_LINE = 28.0
SHRINK = 0.75


@dataclass(frozen=True)
class Picture:
    width: float
    height: float
    body: str


def element(name: str, *children: str, **attributes: object) -> str:
    """One element; `class_` and `data_id` become class and data-id, None leaves an attribute out."""
    listed = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_attribute(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return f"<{name}{listed}>{''.join(children)}</{name}>" if children else f"<{name}{listed}/>"


def _attribute(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)


def text(x: float, y: float, content: str, kind: str) -> str:
    return element("text", escape(content), x=x, y=y, dy=BASELINE, class_=kind)


def pill(source: str, x: float, middle: float, width: float, height: float) -> str:
    corner = CORNERS.get(source, height / 2)
    return element("rect", class_="pill", x=x, y=middle - height / 2, width=width, height=height, rx=corner)


def move(picture: Picture, x: float, y: float) -> str:
    return element("g", picture.body, transform=f"translate({x:g} {y:g})")


@dataclass(frozen=True)
class Box:
    left: float
    width: float
    middle: float  # y
    column_right: float  # where the gutter begins

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def center(self) -> float:
        return self.left + self.width / 2


def layered(parents: list[int | None], widths: list[float]) -> list[Box]:
    """Boxes for nodes of these widths, one column per depth; parents come before their children, the best child first.

    The best child stands on its parent's own line: the best path reads as a line of text, with the alternatives under
    the place where they part.

    >>> [(box.left, box.middle) for box in layered([None, 0, 0], [50, 50, 50])]
    [(0.0, 13.0), (90.0, 13.0), (90.0, 49.0)]
    """
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    rows = _rows(parents, depths)
    columns = [0.0] * (max(depths) + 1)
    for depth, width in zip(depths, widths, strict=True):
        columns[depth] = max(columns[depth], width)
    lefts = [sum(columns[:depth]) + GUTTER * depth for depth in range(len(columns))]
    return [
        Box(lefts[depth], width, row * ROW + HEIGHT / 2, lefts[depth] + columns[depth])
        for depth, width, row in zip(depths, widths, rows, strict=True)
    ]


def _rows(parents: list[int | None], depths: list[int]) -> list[int]:
    """A row for each node: its parent's for a first child, else the first that is free down its own line."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent is not None:
            children[parent].append(node)
    rows = [0] * len(parents)
    free = [0] * (max(depths) + 1)  # the first free row of each column
    pending = [node for node, parent in enumerate(parents) if parent is None]
    while pending:
        start = pending.pop()
        line = [start]
        while children[line[-1]]:
            line.append(children[line[-1]][0])
        row = max(free[depths[node]] for node in line)
        for node in line:
            rows[node] = row
            free[depths[node]] = row + 1
        # Deepest branches are placed first, so that no edge crosses another.
        pending += [child for node in line for child in reversed(children[node][1:])]
    return rows


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
        return 2 * PADDING + CELL * cell_len(self.token) + gap + SMALL_CELL * cell_len(self.details)


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
    parent, details = (None, "") if node.parent is None else (place[node.parent], probability(node.prob))
    if merged or shared:
        details = f"{details} {f'↪#{node.alias_of}' if merged else f'#{node.id}'}".strip()
    status = _status(node.accepted, node.verified, outcome)
    facts = [f"probability {node.prob:.3f}", *[f"continues as #{node.alias_of}"] * merged, *[status] * outcome]
    source = "merged" if merged else node.source
    return _item(node, f"#{node.id}", parent, source, status, details, facts, data_alias_of=node.alias_of)


def _tree_item(node: TreeRecord, outcome: bool) -> Item:
    status = _status(node.accepted, True, outcome)
    facts, name = [f"score {node.score:.3f}", *[status] * outcome], str(node.index)
    return _item(node, name, node.parent, node.source, status, name, facts, data_node=node.node)


def _item(
    node: NodeRecord | TreeRecord,
    name: str,
    parent: int | None,
    source: str,
    status: str,
    details: str,
    facts: list[str],
    **more: object,
) -> Item:
    seen = visible(node.text)
    tip = ", ".join([f"{name} {seen}", f"token {node.token}", node.source, *facts])
    data = {
        "data_id": name.removeprefix("#"),
        "data_token": seen,
        "data_source": source,
        "data_accepted": node.accepted,
    }
    return Item(parent, source, node.source, status, label(node.text, node.token), details, tip, data | more)


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
    outline = pill(item.source, box.left, box.middle, box.width, HEIGHT)
    parts = [element("title", escape(item.tip)), outline, text(box.left + PADDING, box.middle, item.token, "token")]
    if item.details:
        start = box.right - PADDING - SMALL_CELL * cell_len(item.details)
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


def mask_picture(step: StepRecord, outcome: bool = True, focus: int | None = None) -> Picture:
    """Row i of the mask beside tree node i; `focus` lights up one row and those of its ancestors."""
    size = len(step.tree)
    cell = max(6.0, min(MASK_ROW - 3, 340.0 / size))
    top = MASK_ROW
    lit = {node.index for node in step.path_to(focus)}
    rows = [_row(step, node, top, cell, outcome, node.index in lit) for node in step.tree]
    right, bottom = GRID_AT + cell * size, top + MASK_ROW * size
    lines = "".join(f"M{GRID_AT + cell * place:g} {top:g}V{bottom:g}" for place in range(size + 1))
    lines += "".join(f"M{GRID_AT:g} {top + MASK_ROW * place:g}H{right:g}" for place in range(size + 1))
    every = 1 if cell >= 15 else 5
    heads = [
        element("text", str(place), x=GRID_AT + cell * (place + 0.5), y=top / 2, dy=BASELINE, class_="small mid")
        for place in range(0, size, every)
    ]
    return Picture(right + 1, bottom + 1, "".join([*heads, *rows, element("path", d=lines, class_="grid")]))


def _row(step: StepRecord, node: TreeRecord, top: float, cell: float, outcome: bool, lit: bool) -> str:
    y = top + MASK_ROW * node.index
    middle = y + MASK_ROW / 2
    seen = [place for place, bit in enumerate(step.mask[node.index]) if bit == "1"]
    accepted = outcome and node.accepted
    path = "".join(visible(above.text, keep=" ") for above in step.path_to(node.index)[1:])
    name = f"{node.index}: {path or visible(node.text)}, {node.source}{', accepted' * accepted}"
    width = GRID_AT + cell * len(step.tree)
    parts = [
        element("rect", class_="stripe", x=0.0, y=y, width=width, height=MASK_ROW),
        text(INDEX_AT, middle, str(node.index), "small index"),
        text(BADGE_AT, middle, LETTERS[node.source], "badge"),
        _path_label(step, node, middle),
        text(SCORE_AT, middle, probability(node.score), "small score"),
        element("path", class_="cells", d=_cells(seen[:-1], y, cell)),
        element("path", class_="self", d=_cells(seen[-1:], y, cell)),
    ]
    return element(
        "g",
        *parts,
        class_=" ".join(["row", "node", node.source, *["accepted"] * accepted, *["lit"] * lit]),
        tabindex=-1 if node.index else 0,
        role="listitem",
        aria_label=f"{name}; sees {', '.join(map(str, seen))}",
        data_id=node.index,
        data_node=node.node,
        data_parent=node.parent,
        data_token=visible(node.text),
        data_source=node.source,
        data_accepted=node.accepted,
    )


def _cells(places: list[int], y: float, cell: float) -> str:
    """Neighbouring cells drawn as one bar."""
    bars = []
    for _, run in groupby(enumerate(places), key=lambda pair: pair[1] - pair[0]):
        columns = [place for _, place in run]
        bars.append(
            f"M{GRID_AT + cell * columns[0]:g} {y:g}h{cell * len(columns):g}v{MASK_ROW:g}h{-cell * len(columns):g}z"
        )
    return "".join(bars) or "M0 0"


def _path_label(step: StepRecord, node: TreeRecord, middle: float) -> str:
    """The text of the path, its own token last and strong; what does not fit is cut off at the start."""
    own = label(node.text, node.token)
    past = "".join(visible(above.text, keep=" ") for above in step.path_to(node.parent)[1:])
    if cell_len(past) + cell_len(own) > TEXT_CELLS:
        while past and cell_len(past) + cell_len(own) >= TEXT_CELLS:
            past = past[1:]
        past = "…" + past
    before = element("tspan", escape(past.replace(" ", NO_BREAK_SPACE)), class_="past")
    return element("text", before, element("tspan", escape(own), class_="own"), x=TEXT_AT, y=middle, dy=BASELINE)


VIEWS = {"graph": graph_picture, "tree": tree_picture, "mask": mask_picture}


@dataclass(frozen=True)
class Panel:
    """One picture of several.

    `outcome=False` shows the step before the target's check; `focus` lights up the path to a tree node.
    """

    step: StepRecord
    view: View = "graph"
    title: str = ""
    caption: str = ""
    outcome: bool = True
    focus: int | None = None


def draw(panel: Panel) -> Picture:
    if panel.view not in VIEWS:
        raise UsageError(f"view must be one of {', '.join(VIEWS)}, not {panel.view!r}")
    if panel.focus is not None and not 0 <= panel.focus < len(panel.step.tree):
        raise UsageError(f"focus must be between 0 and {len(panel.step.tree) - 1}, not {panel.focus}")
    return VIEWS[panel.view](panel.step, panel.outcome, panel.focus)


def side_by_side_svg(panels: Sequence[Panel], theme: str = "light", stacked: bool = False) -> str:
    """One picture of several panels with a common legend, for documents; `stacked` puts one under the other.

    >>> svg = side_by_side_svg([Panel(tree_step, title="A tree"), Panel(graph_step, title="A graph")])  # doctest: +SKIP
    """
    x = y = MARGIN
    width = height = 0.0
    parts = []
    for panel in panels:
        picture = draw(panel)
        body = y
        if panel.title:
            parts.append(text(x, y + 8, panel.title, "title"))
            body += TITLE
        if panel.caption:
            parts.append(text(x, body, panel.caption, "caption"))
            body += CAPTION
        parts.append(move(picture, x, body))
        across = max(picture.width, 8.4 * len(panel.title), 6.2 * len(panel.caption))
        width, height = max(width, x + across), max(height, body + picture.height)
        x, y = (x, height + BETWEEN) if stacked else (x + across + BETWEEN, y)
    key = legend(keys(panels), width - MARGIN)
    parts.append(move(key, MARGIN, height + MARGIN))
    whole = Picture(width + MARGIN, height + MARGIN + key.height + MARGIN / 2, "".join(parts))
    return document(whole, theme, "; ".join(panel.title or panel.view for panel in panels))


def document(picture: Picture, theme: str, title: str) -> str:
    """A picture as an SVG file of its own, on the theme's background."""
    if theme not in THEMES:
        raise UsageError(f"theme must be one of {', '.join(THEMES)}, not {theme!r}")
    colors = THEMES[theme]
    ground = element("rect", width="100%", height="100%", rx=10.0, fill=colors.background)
    return element(
        "svg",
        element("title", escape(title)),
        element("style", colors.style_sheet()),
        ground,
        picture.body,
        xmlns="http://www.w3.org/2000/svg",
        class_="dg",
        role="img",
        **_size(picture),
    )


def inline(picture: Picture, kind: str, title: str, role: str = "group") -> str:
    """A picture for a page that brings the style sheet and lets it shrink, as far as it can still be read."""
    narrowest = f"min-width:{round(SHRINK * picture.width)}px"
    attributes = {"class_": f"dg {kind}", "role": role, "aria_label": title, "style": narrowest}
    return element("svg", picture.body, **attributes, **_size(picture))


def _size(picture: Picture) -> dict[str, object]:
    width, height = round(picture.width + 2), round(picture.height + 2)
    return {"width": width, "height": height, "viewBox": f"-1 -1 {width} {height}"}


def keys(panels: Sequence[Panel]) -> list[str]:
    """What a legend must explain: all that stands in the panels."""
    found: set[str] = set()
    for panel in panels:
        step = panel.step
        shown = step.shown if panel.view == "graph" else step.tree
        found |= {node.source for node in shown}
        if panel.view == "graph" and any(node.alias_of is not None for node in step.shown):
            found.add("merged")
        if panel.outcome:
            found |= {"accepted" if node.accepted else "rejected" for node in shown if node.parent is not None}
            found |= {"unverified" for node in step.shown if panel.view == "graph" and not node.verified}
            found |= {"bonus"} if panel.view != "mask" and step.bonus is not None else set()
    return [key for key in KEYS if key in found]


def legend(found: list[str], width: float) -> Picture:
    """Samples with their names, in as many lines as the width asks for."""
    parts = []
    x, y, right = 0.0, SAMPLE_HEIGHT / 2, 0.0
    for key in found:
        across = SAMPLE_WIDTH + 8 + 7.2 * len(KEYS[key]) + 20
        if x and x + across > width:
            x, y = 0.0, y + KEY_LINE
        outline = pill(key, x, y, SAMPLE_WIDTH, SAMPLE_HEIGHT)
        letter = text(x + SAMPLE_WIDTH / 2, y, LETTERS.get(key, ""), "badge token")
        parts.append(element("g", outline, letter, class_=f"draft {key}" if key == "rejected" else key))
        parts.append(text(x + SAMPLE_WIDTH + 8, y, KEYS[key], "key"))
        x += across
        right = max(right, x)
    return Picture(right, y + SAMPLE_HEIGHT / 2, "".join(parts))
