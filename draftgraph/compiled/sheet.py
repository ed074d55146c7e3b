"""A row for each node that somebody proposed children for: made while a draft is at work, level by level."""

from __future__ import annotations

from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.compiled.automaton import Automaton, copies, follow
from draftgraph.compiled.heap import THING, pop, push
from draftgraph.compiled.opinions import CHOICES, NO_TOKEN, correct, find, pool
from draftgraph.compiled.rankings import LONGEST, Noise, Rankings, context_of, longer, recall
from draftgraph.compiled.rankings import find as find_ranking

MEMORY_ROWS = 16  # made while the draft is at work
LEAST = 0.02  # of nodes that are less likely no memory is asked
NO_ROW = -1
ROW = np.dtype(
    [
        ("parent", np.int64),
        ("token", np.int64),
        ("depth", np.int64),
        ("state", np.int64),  # where the path leads to in the text before
        ("matched", np.int64),
        ("newer_state", np.int64),  # and in the answers of the past
        ("newer_matched", np.int64),
        ("older_state", np.int64),
        ("older_matched", np.int64),
        ("context", np.int64),  # the last tokens of the path
        ("length", np.int64),
        ("drafted", np.int64),
        ("reach", np.float64),  # how likely it is, as whoever proposed it first said
    ]
)
DRAFTED = np.dtype([("token", np.int64), ("chance", np.float64)])
COUNTS = np.dtype([("rows", np.int64), ("expansions", np.int64)])

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Rows(NamedTuple):
    rows: NDArray[np.void]
    named: Ints  # [rows, columns]: see `opinions`
    said: Floats
    estimates: Floats  # what all together say
    chances: Floats  # what that is worth
    drafted: NDArray[np.void]  # nodes of the draft, by their numbers
    expansions: Ints  # their rows
    counts: NDArray[np.void]  # [1]


class Memories(NamedTuple):
    """What is known of the text, for one step."""

    automaton: Automaton
    rankings: Rankings
    noted: int  # rankings, ever
    noise: Noise
    position: int  # of the root's next token
    newer: Automaton  # answers of the past, in two halves
    older: Automaton
    roots: Ints  # [halves, 2]: the root's state and how many tokens match there; as many halves as there are


def rows_for(rows: int, k: int) -> Rows:
    """With room for so many rows, apart from those of the memories."""
    rows += 1 + MEMORY_ROWS
    shape = rows, k + 2 * CHOICES
    said, estimates, chances = np.zeros((3, *shape))
    return Rows(
        np.zeros(rows, dtype=ROW),
        np.zeros(shape, dtype=np.int64),
        said,
        estimates,
        chances,
        np.zeros(rows * k, dtype=DRAFTED),
        np.zeros(rows, dtype=np.int64),
        np.zeros(1, dtype=COUNTS),
    )


@compiled
def begin(
    sheet: Rows, memories: Memories, k: int, last_tokens: Ints, root: tuple[int, int], max_depth: int, ends: Ints
) -> None:
    """The root's row, and those that the text leads to."""
    sheet.counts["rows"][0] = sheet.counts["expansions"][0] = 0
    rows = sheet.rows
    rows["parent"][0], rows["token"][0], rows["depth"][0], rows["reach"][0] = NO_ROW, last_tokens[-1], 0, 1.0
    rows["state"][0], rows["matched"][0] = root
    if len(memories.roots) > 0:
        rows["newer_state"][0], rows["newer_matched"][0] = memories.roots[0, 0], memories.roots[0, 1]
    if len(memories.roots) > 1:
        rows["older_state"][0], rows["older_matched"][0] = memories.roots[1, 0], memories.roots[1, 1]
    rows["context"][0], rows["length"][0] = context_of(last_tokens), len(last_tokens)
    likely, size = np.empty((1 + MEMORY_ROWS) * CHOICES, dtype=THING), 0
    row = open_row(sheet, memories, k)
    while True:
        if rows["depth"][row] < max_depth:
            for place in range(k, k + CHOICES):
                hope = rows["reach"][row] * sheet.said[row, place]
                if hope > LEAST and find(ends, sheet.named[row, place]) == NO_TOKEN:
                    size = push(likely, size, hope, row * sheet.named.shape[1] + place)
        if not size or sheet.counts["rows"][0] > MEMORY_ROWS:
            return
        size = pop(likely, size)
        parent, place = divmod(likely["number"][size], sheet.named.shape[1])
        row = row_of(sheet, memories, k, parent, sheet.named[parent, place], sheet.said[parent, place])


@compiled
def row_of(sheet: Rows, memories: Memories, k: int, parent: int, token: int, chance: float) -> int:
    """The row of a child: a new one, if need be."""
    rows, row = sheet.rows, sheet.counts["rows"][0]
    for known in range(parent + 1, row):
        if rows["parent"][known] == parent and rows["token"][known] == token:
            return known
    rows["parent"][row], rows["token"][row] = parent, token
    rows["depth"][row], rows["reach"][row] = rows["depth"][parent] + 1, rows["reach"][parent] * chance
    match = follow(memories.automaton, rows["state"][parent], rows["matched"][parent], token)
    rows["state"][row], rows["matched"][row] = match
    if len(memories.roots) > 0:
        match = follow(memories.newer, rows["newer_state"][parent], rows["newer_matched"][parent], token)
        rows["newer_state"][row], rows["newer_matched"][row] = match
    if len(memories.roots) > 1:
        match = follow(memories.older, rows["older_state"][parent], rows["older_matched"][parent], token)
        rows["older_state"][row], rows["older_matched"][row] = match
    rows["context"][row] = longer(rows["context"][parent], token)
    rows["length"][row] = min(rows["length"][parent] + 1, LONGEST)
    return open_row(sheet, memories, k)


@compiled
def open_row(sheet: Rows, memories: Memories, k: int) -> int:
    """The next row: what the memories say there, if it is likely, every token once; the louder of both counts."""
    row = sheet.counts["rows"][0]
    sheet.counts["rows"][0] += 1
    one = sheet.rows[row]
    one["drafted"] = 0
    named, said = sheet.named[row], sheet.said[row]
    for place in range(len(named)):
        named[place], said[place] = NO_TOKEN, 0.0
    if not one["reach"] > LEAST:
        return row  # type: ignore[no-any-return]
    copied, recycled = named[k : k + CHOICES], named[k + CHOICES :]
    copy(memories, one, copied, said[k : k + CHOICES])
    found, matched = find_ranking(memories.rankings, memories.noted, one["context"], one["length"])
    if matched:
        position = memories.position + one["depth"]
        recall(memories.rankings, found, matched, memories.noise, position, recycled, said[k + CHOICES :])
        for place in range(k + CHOICES, len(named)):
            same = find(copied, named[place])
            if named[place] != NO_TOKEN and same != NO_TOKEN:
                said[k + same] = max(said[k + same], said[place])
                named[place], said[place] = NO_TOKEN, 0.0
    return row  # type: ignore[no-any-return]


@compiled
def copy(memories: Memories, one: Any, tokens: Ints, chances: Floats) -> None:
    """What followed in the text, or in answers of the past where they match longer."""
    newer = one["newer_matched"] if len(memories.roots) > 0 else 0
    older = one["older_matched"] if len(memories.roots) > 1 else 0
    if max(newer, older) <= one["matched"]:
        copies(memories.automaton, one["state"], one["matched"], tokens, chances)
    elif newer >= older:
        copies(memories.newer, one["newer_state"], newer, tokens, chances)
    else:
        copies(memories.older, one["older_state"], older, tokens, chances)


@compiled
def add(sheet: Rows, memories: Memories, k: int, report: Floats, places: Floats, curves: Floats) -> None:
    """Rows for the nodes that a draft has expanded, the root first, and what it says there: see `Growth.report`. A node
    is known by where it was proposed: its number is the draft's k times the expansion, plus its rank there."""
    width = report.shape[1] // 2
    for place in range(len(report)):
        one = report[place]
        expansion, node = sheet.counts["expansions"][0], int(one[2 * width])
        sheet.counts["expansions"][0] += 1
        row = 0 if expansion == 0 else NO_ROW
        if node >= 0 and sheet.expansions[node // width] != NO_ROW:
            above, drafted = sheet.expansions[node // width], sheet.drafted[node]
            row = row_of(sheet, memories, k, above, drafted["token"], drafted["chance"])
        sheet.expansions[expansion] = row
        for rank in range(width):
            drafted = sheet.drafted[expansion * width + rank]
            drafted["token"], drafted["chance"] = int(one[rank]), exp(one[width + rank])
            if row != NO_ROW:
                sheet.named[row, rank], sheet.said[row, rank] = drafted["token"], drafted["chance"]
        if row != NO_ROW:
            sheet.rows["drafted"][row] = 1
            weigh(sheet, k, row, places, curves)


@compiled
def weigh(sheet: Rows, k: int, row: int, places: Floats, curves: Floats) -> None:
    pool(sheet.named[row], sheet.said[row], k, sheet.estimates[row])
    correct(sheet.estimates[row], k, places, curves, sheet.chances[row])
