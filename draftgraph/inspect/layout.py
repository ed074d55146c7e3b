"""Where things go in a picture of a graph: one column per depth, the best continuation on its parent's own line.

So the best path reads as a line of text, with the alternatives under the place where they part.
"""

from __future__ import annotations

from dataclasses import dataclass

ROW = 36.0  # from one line to the next
GUTTER = 40.0  # between columns, where edges curve
HEIGHT = 26.0


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
    """Boxes for nodes of these widths; parents come before their children, the best child first.

    >>> [(box.left, box.middle) for box in layered([None, 0, 0], [50, 50, 50])]
    [(0.0, 13.0), (90.0, 13.0), (90.0, 49.0)]
    """
    depths = _depths(parents)
    rows = _rows(parents, depths)
    columns = [0.0] * (max(depths) + 1)
    for depth, width in zip(depths, widths, strict=True):
        columns[depth] = max(columns[depth], width)
    lefts = [sum(columns[:depth]) + GUTTER * depth for depth in range(len(columns))]
    return [
        Box(lefts[depth], width, row * ROW + HEIGHT / 2, lefts[depth] + columns[depth])
        for depth, width, row in zip(depths, widths, rows, strict=True)
    ]


def _depths(parents: list[int | None]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent is None else depths[parent] + 1)
    return depths


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
