"""Attention of the nodes of a pass on a CPU, over keys and values in pages.

Keys lie in their pages turned, 16 tokens beside each other, so that a node is compared with a page at once; values lie
as they are. A node sees the text, then its ancestors: key j is always that of its path's place j, in a tree as in plain
decoding, and all sums over keys go by j. So the bits of a node do not depend on what else is in the pass.

Heads that share keys are computed together: what is loaded of a key or value serves all of them.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.graph import WORD
from draftgraph.kernels.attention import PAGE_SIZE
from draftgraph.kernels.rows import scale_scores, softmax
from draftgraph.kernels.vectors import (
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    Code,
    address,
    everywhere,
    load_number,
    load_whole,
    operation,
    store,
    store_number,
    store_whole,
    whole,
)

Ints: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int32]

# Of the path of a node: its sequence; how many of its places are those of the text's pages, one after the other; how
# many there are behind them, and the end of the last one; then where these are.
PATH_SEQUENCE, PATH_LENGTH, PATH_BEHIND, PATH_END, PATH_PLACES = range(0, 40, 8)
TOGETHER = 4  # heads, pages or vectors of values


def compare_pages(pages: int) -> Any:
    """The keys of so many pages with the queries of up to four heads, as an operation of compiled functions. `keys`:
    where the addresses of the pages are; `scores`: where those of the first page and head go."""

    @operation(types.void, address, address, whole, address, whole, whole)
    def compare(code: Code, keys: Any, query: Any, size: Any, scores: Any, scores_row: Any, heads: Any) -> None:
        code.cases(
            heads, range(1, TOGETHER + 1), lambda count: write(code, keys, query, size, scores, scores_row, count)
        )

    def write(code: Code, keys: Any, query: Any, size: Any, scores: Any, scores_row: Any, heads: int) -> None:
        b = code.builder
        places = [code.load(code.plus(keys, 8 * page), LONG, 8) for page in range(pages)]
        queries = [b.add(query, b.mul(size, ir.Constant(LONG, 4 * head))) for head in range(heads)]
        sums = [[cgutils.alloca_once_value(b, code.all(0.0)) for _ in range(pages)] for _ in range(heads)]
        with cgutils.for_range(b, size) as loop:
            at, row = b.mul(loop.index, ir.Constant(LONG, 4)), b.mul(loop.index, ir.Constant(LONG, 4 * PAGE_SIZE))
            held = [code.load(b.add(place, row), FLOATS, 4) for place in places]
            for place, by_page in zip(queries, sums, strict=True):
                number = code.all(code.load(b.add(place, at), FLOAT, 4))
                for key, found in zip(held, by_page, strict=True):
                    b.store(code.fma(number, key, b.load(found)), found)
        for head, by_page in enumerate(sums):
            row = b.add(scores, b.mul(scores_row, ir.Constant(LONG, head)))
            for page, found in enumerate(by_page):
                code.store(code.plus(row, 4 * PAGE_SIZE * page), b.load(found), 4)

    return compare


def add_values(vectors: int) -> Any:
    """Adds the values of so many tokens in a row, weighed, to sums of so many vectors for each of up to four heads.
    `weights`: those of the first token and head; `sums`: where vectors are, head by head."""

    @operation(types.void, address, whole, whole, address, whole, address, whole)
    def add(
        code: Code, values: Any, size: Any, count: Any, weights: Any, weights_row: Any, sums: Any, heads: Any
    ) -> None:
        code.cases(
            heads,
            range(1, TOGETHER + 1),
            lambda number: write(code, values, size, count, weights, weights_row, sums, number),
        )

    def write(
        code: Code, values: Any, size: Any, count: Any, weights: Any, weights_row: Any, sums: Any, heads: int
    ) -> None:
        b = code.builder
        places = [b.add(weights, b.mul(weights_row, ir.Constant(LONG, head))) for head in range(heads)]
        kept = [
            [code.plus(sums, 4 * LANES * (head * vectors + number)) for number in range(vectors)]
            for head in range(heads)
        ]
        found = [[cgutils.alloca_once_value(b, code.load(place, FLOATS, 4)) for place in row] for row in kept]
        value_row = b.mul(size, ir.Constant(LONG, 4))
        with cgutils.for_range(b, count) as loop:
            value, at = b.add(values, b.mul(loop.index, value_row)), b.mul(loop.index, ir.Constant(LONG, 4))
            held = [code.load(code.plus(value, 4 * LANES * number), FLOATS, 4) for number in range(vectors)]
            for place, row in zip(places, found, strict=True):
                weight = code.all(code.load(b.add(place, at), FLOAT, 4))
                for one, part in zip(held, row, strict=True):
                    b.store(code.fma(weight, one, b.load(part)), part)
        for row, stored in zip(found, kept, strict=True):
            for part, place in zip(row, stored, strict=True):
                code.store(place, b.load(part), 4)

    return add


compare_one, compare_several = compare_pages(1), compare_pages(TOGETHER)
add_one, add_several = add_values(1), add_values(TOGETHER)


@compiled
def find_path(path: int, row: int, starts: Counts, lengths: Counts, ancestors: Ints) -> None:
    sequence = 0
    while starts[sequence + 1] <= row:
        sequence += 1
    length = np.int64(lengths[sequence])
    count, behind, end = length, 0, length
    for word in range(len(ancestors)):
        bits = ancestors[word]
        for bit in range(WORD):
            if bits >> bit & 1:
                end = length + word * WORD + bit + 1
                if end == count + 1 and behind == 0:
                    count = end
                else:
                    store_whole(path + PATH_PLACES + 8 * behind, end - 1)
                    behind += 1
    store_whole(path + PATH_SEQUENCE, sequence)
    store_whole(path + PATH_LENGTH, count)
    store_whole(path + PATH_BEHIND, behind)
    store_whole(path + PATH_END, end)


@compiled
def attend_node(
    keys: int, values: int, size: int, query: int, heads: int, first: int, pages: Counts, path: int, scale: np.float32,
    softcap: np.float32, scores: int, scores_row: int, sums: int,
) -> None:  # fmt: skip
    """Up to four heads of one node that share keys and values; what they take from the values goes where the queries
    were. `first`: the first place that the node sees. `scores`, `sums`: memory to compute in."""
    length, behind, end = load_whole(path + PATH_LENGTH), load_whole(path + PATH_BEHIND), load_whole(path + PATH_END)
    last = (end + PAGE_SIZE - 1) // PAGE_SIZE
    compare(keys, size, query, heads, first // PAGE_SIZE, last, pages, scores, scores_row, sums)
    for head in range(heads):
        row = scores + head * scores_row
        for number in range(behind):  # in the order of the path
            place = load_whole(path + PATH_PLACES + 8 * number)
            store_number(row + 4 * (length + number), load_number(row + 4 * place))
        scale_scores(row, first, length + behind, scale, softcap)
        softmax(row, first, length + behind)
    for column in range(0, size, LANES * TOGETHER):
        vectors = TOGETHER if size - column >= LANES * TOGETHER else 1
        for start in range(column, min(size, column + LANES * TOGETHER), LANES * vectors):
            mix(values + 4 * start, size, vectors, heads, first, length, behind, pages, path, scores, scores_row, sums)
            for head in range(heads):
                for lane in range(min(LANES * vectors, size - start)):
                    found = load_number(sums + 4 * (head * LANES * vectors + lane))
                    store_number(query + 4 * (head * size + start + lane), found)


@compiled
def compare(
    keys: int, size: int, query: int, heads: int, first: int, last: int, pages: Counts, scores: int, scores_row: int,
    places: int,
) -> None:  # fmt: skip
    """The scores of the pages from `first` to `last`, four at a time. `places`: memory for four addresses."""
    page = first
    while page < last:
        count = TOGETHER if last - page >= TOGETHER else 1
        for number in range(count):
            store_whole(places + 8 * number, keys + int(pages[page + number]) * PAGE_SIZE * size * 4)
        out = scores + page * PAGE_SIZE * 4
        if count == TOGETHER:
            compare_several(places, query, size, out, scores_row, heads)
        else:
            compare_one(places, query, size, out, scores_row, heads)
        page += count


@compiled
def mix(
    values: int, size: int, vectors: int, heads: int, first: int, length: int, behind: int, pages: Counts, path: int,
    scores: int, scores_row: int, sums: int,
) -> None:  # fmt: skip
    """Some numbers of the values of a path, weighed, place by place."""
    for number in range(heads * vectors):
        store(sums + 4 * LANES * number, everywhere(np.float32(0.0)))
    place = first
    while place < length:
        page = place // PAGE_SIZE
        last = page
        while (last + 1) * PAGE_SIZE < length and pages[last + 1] == pages[last] + 1:  # pages in a row are read as one
            last += 1
        count = min(length, (last + 1) * PAGE_SIZE) - place
        slot = int(pages[page]) * PAGE_SIZE + place % PAGE_SIZE
        add_run(values + slot * size * 4, size, vectors, heads, count, scores + 4 * place, scores_row, sums)
        place += count
    for number in range(max(0, first - length), behind):
        held = load_whole(path + PATH_PLACES + 8 * number)
        slot = int(pages[held // PAGE_SIZE]) * PAGE_SIZE + held % PAGE_SIZE
        add_run(values + slot * size * 4, size, vectors, heads, 1, scores + 4 * (length + number), scores_row, sums)


@compiled
def add_run(
    values: int, size: int, vectors: int, heads: int, count: int, weights: int, weights_row: int, sums: int
) -> None:
    if vectors == TOGETHER:
        add_several(values, size, count, weights, weights_row, sums, heads)
    else:
        add_one(values, size, count, weights, weights_row, sums, heads)
