"""The ancestor mask as a picture: one row for each tree node, with the text of its path beside what it may see."""

from __future__ import annotations

from html import escape
from itertools import groupby

from draftgraph.inspect.markup import BASELINE, Picture, element, text
from draftgraph.inspect.record import StepRecord, TreeRecord
from draftgraph.inspect.text import cells, label, probability, visible
from draftgraph.inspect.theme import LETTERS

ROW = 19.0
TEXT_CELLS = 24  # for the text of a path
INDEX_AT, BADGE_AT, TEXT_AT = 20.0, 34.0, 46.0
SCORE_AT = TEXT_AT + 8.0 * TEXT_CELLS + 34.0
GRID_AT = SCORE_AT + 12.0
NO_BREAK_SPACE = "\u00a0"


def mask_picture(step: StepRecord, outcome: bool = True, focus: int | None = None) -> Picture:
    """Row i of the mask beside tree node i; `focus` lights up one row and those of its ancestors."""
    size = len(step.tree)
    cell = max(6.0, min(ROW - 3, 340.0 / size))
    top = ROW
    lit = {node.index for node in step.path_to(focus)}
    rows = [_row(step, node, top, cell, outcome, node.index in lit) for node in step.tree]
    right, bottom = GRID_AT + cell * size, top + ROW * size
    lines = "".join(f"M{GRID_AT + cell * place:g} {top:g}V{bottom:g}" for place in range(size + 1))
    lines += "".join(f"M{GRID_AT:g} {top + ROW * place:g}H{right:g}" for place in range(size + 1))
    every = 1 if cell >= 15 else 5
    heads = [
        element("text", str(place), x=GRID_AT + cell * (place + 0.5), y=top / 2, dy=BASELINE, class_="small mid")
        for place in range(0, size, every)
    ]
    return Picture(right + 1, bottom + 1, "".join([*heads, *rows, element("path", d=lines, class_="grid")]))


def _row(step: StepRecord, node: TreeRecord, top: float, cell: float, outcome: bool, lit: bool) -> str:
    y = top + ROW * node.index
    middle = y + ROW / 2
    seen = [place for place, bit in enumerate(step.mask[node.index]) if bit == "1"]
    accepted = outcome and node.accepted
    path = "".join(visible(above.text, keep=" ") for above in step.path_to(node.index)[1:])
    name = f"{node.index}: {path or visible(node.text)}, {node.source}{', accepted' * accepted}"
    width = GRID_AT + cell * len(step.tree)
    parts = [
        element("rect", class_="stripe", x=0.0, y=y, width=width, height=ROW),
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
        bars.append(f"M{GRID_AT + cell * columns[0]:g} {y:g}h{cell * len(columns):g}v{ROW:g}h{-cell * len(columns):g}z")
    return "".join(bars) or "M0 0"


def _path_label(step: StepRecord, node: TreeRecord, middle: float) -> str:
    """The text of the path, its own token last and strong; what does not fit is cut off at the start."""
    own = label(node.text, node.token)
    past = "".join(visible(above.text, keep=" ") for above in step.path_to(node.parent)[1:])
    if cells(past) + cells(own) > TEXT_CELLS:
        while past and cells(past) + cells(own) >= TEXT_CELLS:
            past = past[1:]
        past = "…" + past
    before = element("tspan", escape(past.replace(" ", NO_BREAK_SPACE)), class_="past")
    return element("text", before, element("tspan", escape(own), class_="own"), x=TEXT_AT, y=middle, dy=BASELINE)
