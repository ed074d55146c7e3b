"""A step in the terminal: the graph as an indented tree, the flattened tree with its mask beside or under it."""

from __future__ import annotations

from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from draftgraph.inspect.record import NodeRecord, StepRecord, TreeRecord
from draftgraph.inspect.text import label, probability
from draftgraph.inspect.theme import LETTERS

COLORS = {
    "root": "bold",
    "draft": "blue",
    "merged": "magenta",
    "copied": "yellow",
    "recycled": "cyan",
    "bonus": "bold green",
}
LEGEND = {
    "D": ("drafted", "draft"),
    "M": ("merged", "merged"),
    "C": ("copied from the text", "copied"),
    "R": ("recycled", "recycled"),
    "★": ("the target's own token", "bonus"),
    "✓": ("accepted", "bonus"),
}
LARGEST_MASK = 64


def print_step(console: Console, step: StepRecord, heading: str, explanation: str) -> None:
    console.rule(Text(heading, style="bold"), align="left")
    graph = graph_tree(step)
    if 1 < len(step.tree) <= LARGEST_MASK:
        mask = mask_table(step)
        needed = sum(Measurement.get(console, console.options, part).maximum for part in (graph, mask)) + 4
        console.print(_beside(graph, mask) if needed <= console.width else graph)
        if needed > console.width:
            console.print(mask)
    else:
        console.print(graph)
    console.print(Text(explanation, style="dim"))
    console.print()


def print_legend(console: Console) -> None:
    parts = [Text(f"{sign} {name}", style=COLORS[source]) for sign, (name, source) in LEGEND.items()]
    console.print(Text("   ").join(parts))


def graph_tree(step: StepRecord) -> Tree:
    """The graph: an alias ends with the node that it is the same as."""
    branches: dict[int, Tree] = {}
    for node in step.shown:
        line = _node_line(node)
        branches[node.id] = Tree(line) if node.parent is None else branches[node.parent].add(line)
    if step.bonus is not None:
        name = label(step.bonus.text, step.bonus.token)
        branches[step.last_accepted.node].add(Text(f"{LETTERS['bonus']} {name}", style=COLORS["bonus"]))
    return branches[0]


def _node_line(node: NodeRecord) -> Text:
    color = COLORS[node.source] if node.verified else "dim"
    name = Text.assemble(
        (f"{LETTERS[node.source]} ", color),
        (label(node.text, node.token), f"bold {color}" if node.accepted else color),
    )
    if node.parent is not None:
        name.append(f" {probability(node.prob)}", style="dim")
    name.append(f" #{node.id}", style="dim")
    if node.alias_of is not None:
        name.append(f" ↪ same as #{node.alias_of}", style=COLORS["merged"])
    if node.accepted and node.parent is not None:
        name.append(" ✓", style=COLORS["bonus"])
    elif not node.verified:
        name.append(" not checked", style="dim")
    return name


def mask_table(step: StepRecord) -> Table:
    """Each tree node, in the order in which the target checks them, with the row of its mask."""
    table = Table.grid(padding=(0, 1))
    for justify in ("right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    table.add_column(no_wrap=True)
    for node, row in zip(step.tree, step.mask, strict=True):
        table.add_row(Text(str(node.index), style="dim"), _tree_line(node), _mask_row(row, node.accepted))
    return table


def _tree_line(node: TreeRecord) -> Text:
    color = COLORS[node.source]
    mark = ("✓" if node.accepted and node.parent is not None else " ", COLORS["bonus"])
    name = (label(node.text, node.token), f"bold {color}" if node.accepted else color)
    return Text.assemble((f"{LETTERS[node.source]} ", color), mark, " ", name)


def _mask_row(row: str, accepted: bool) -> Text:
    wide = 2 if len(row) <= 24 else 1
    line = Text()
    for bit in row:
        line.append(("█" if bit == "1" else "·") * wide, style=("green" if accepted else "") if bit == "1" else "dim")
    return line


def _beside(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid
