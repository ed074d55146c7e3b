"""A whole pass of a decoder on a CPU: one compiled function, which several threads run together.

Around its products a pass has a hundred small steps, each of which costs more to call than to compute. Here the threads
go through the layers side by side and meet where one needs what another has computed. Every step works on one row at a
time, in an order that depends on that row alone: what else is in the pass does not change a bit of it.

"""

from __future__ import annotations

from math import erf
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.kernels.attention import PAGE_SIZE
from draftgraph.kernels.cpu_attention import PATH_SEQUENCE, TOGETHER, attend_node, find_path
from draftgraph.kernels.products import (
    ADDRESS,
    BIAS,
    BIAS_KIND,
    INPUTS,
    KIND,
    OUTPUTS,
    product,
    read_row,
    round_row,
)
from draftgraph.kernels.vectors import (
    LANES,
    everywhere,
    exp,
    fma,
    load_first,
    load_number,
    load_short,
    load_whole,
    meet,
    store_first,
    store_number,
    total,
)

Ints: TypeAlias = NDArray[np.int64]
Counts: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]

# What compiled functions are told of a model: whole numbers,
HIDDEN, HEADS, GROUPS, SIZE, ROTARY, INNER, VOCABULARY, ACTIVATION, FINAL_NORM, EMBEDDING, OUTPUT, LAST_TAP = range(12)
# and others;
SCALE, SOFTCAP, EMBEDDING_FACTOR, RESIDUAL_FACTOR, LOGIT_FACTOR, LOGIT_SOFTCAP = range(6)
# of a layer: numbers of weights and norms (-1: none), its window (0: none), where its keys and values lie, the cosines
# and sines of positions, and where in a row of states that are kept those go that come into it (-1: nowhere);
QUERY, KEY, VALUE, ATTENDED, GATE, UP, DOWN = range(7)
BEFORE_ATTENTION, AFTER_ATTENTION, BEFORE_MLP, AFTER_MLP, QUERY_NORM, KEY_NORM = range(7, 13)
WINDOW, KEYS, VALUES, CAPACITY, COSINES, SINES, TAP = range(13, 20)
# of a weight, besides what products are told: the number of the first weight of its adapters (0: it has none), of which
# each has two, [rank, inputs] and [rank, outputs]; and which of several products with the same rows this is;
ADAPTED, PLACE = range(6, 8)
# of a norm: where its weights lie, and in how many bits; then its epsilon and what is added to the weights;
NORM_ADDRESS, NORM_KIND = range(2)
EPSILON, OFFSET = range(2)
# of a pass: rows and those of them that are scored; where results lie and what is computed on the way, with the numbers
# of bytes from row to row; where the numbers of the rows' adapters lie (0: none has any), and what their first weights
# make of the rows, with the bytes from row to row and from one product to the next; where states are kept.
ROWS, SCORED, LOGITS, LOGITS_ROW, STATES, NORMED, CODES, CODES_ROW, QUERIES, MIXED, INNERS, WIDE = range(12)
SCORES, SCORES_ROW, PATHS, PATHS_ROW, SUMS, ADAPTERS, LOWS, LOWS_ROW, LOWS_PLACE, TAPPED, TAPPED_ROW = range(12, 23)
PLACES = 3  # queries, keys and values are products with the same rows
SUMS_BYTES = 4 * LANES * TOGETHER * TOGETHER  # of one thread

SILU, GELU_TANH, GELU = range(3)
FEW_ROWS = 4  # that every thread prepares for itself: meeting would take longer


@compiled
def run_pass(
    thread: int,
    threads: int,
    shared: int,
    model: Ints,
    factors: Floats,
    layers: Ints,
    weights: Ints,
    norms: Ints,
    norm_factors: Floats,
    told: Ints,
    tokens: Ints,
    positions: Ints,
    slots: Ints,
    starts: Counts,
    lengths: Counts,
    pages: Counts,
    ancestors: Ints,
) -> None:
    """Logits of the first rows of a pass; keys and values of all rows go into the cache."""
    rows, hidden = told[ROWS], model[HIDDEN]
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        states = told[STATES] + row * hidden * 4
        read_row(weights[model[EMBEDDING]], tokens[row], states)
        if factors[EMBEDDING_FACTOR] != 1:
            scale_row(states, hidden, factors[EMBEDDING_FACTOR])
        find_path(told[PATHS] + row * told[PATHS_ROW], row, starts, lengths, ancestors[row])
    meet(shared, threads)
    for layer in layers:
        keep_states(thread, threads, told, layer[TAP], -1, norms, norm_factors, hidden)
        normed = norm_rows(
            thread, threads, shared, told, rows, layer[BEFORE_ATTENTION], norms, norm_factors, model, weights,
            layer[QUERY : VALUE + 1],
        )  # fmt: skip
        project_heads(thread, threads, model, layer, weights, norms, norm_factors, told, normed, positions, slots)
        meet(shared, threads)
        attend(thread, threads, model, factors, layer, told, positions, pages)
        meet(shared, threads)
        attended = round_rows(
            thread, threads, shared, told, rows, told[QUERIES], model[HEADS] * model[SIZE], weights,
            layer[ATTENDED : ATTENDED + 1],
        )  # fmt: skip
        add_product(
            thread, threads, shared, told, rows, weights, layer[ATTENDED], attended, layer[AFTER_ATTENTION], norms,
            norm_factors, model, factors,
        )  # fmt: skip
        normed = norm_rows(
            thread, threads, shared, told, rows, layer[BEFORE_MLP], norms, norm_factors, model, weights,
            layer[GATE : UP + 1],
        )  # fmt: skip
        gated_products(thread, threads, model, layer, weights, told, normed)
        meet(shared, threads)
        inner = round_rows(
            thread, threads, shared, told, rows, told[INNERS], model[INNER], weights, layer[DOWN : DOWN + 1]
        )
        add_product(
            thread, threads, shared, told, rows, weights, layer[DOWN], inner, layer[AFTER_MLP], norms, norm_factors,
            model, factors,
        )  # fmt: skip
    keep_states(thread, threads, told, model[LAST_TAP], model[FINAL_NORM], norms, norm_factors, hidden)
    scored = told[SCORED]
    if scored:
        normed = norm_rows(
            thread, threads, shared, told, scored, model[FINAL_NORM], norms, norm_factors, model, weights,
            model[OUTPUT : OUTPUT + 1],
        )  # fmt: skip
        score(thread, threads, model, factors, weights, told, normed)
    meet(shared, threads)


@compiled
def keep_states(
    thread: int, threads: int, told: Ints, place: int, norm: int, norms: Ints, norm_factors: Floats, hidden: int
) -> None:
    """The states of all rows, normed if there is a norm, go to their place among those that are kept, if any."""
    if told[TAPPED] == 0 or place < 0:
        return
    for row in range(told[ROWS] * thread // threads, told[ROWS] * (thread + 1) // threads):
        kept = told[TAPPED] + row * told[TAPPED_ROW] + place
        norm_row(told[STATES] + row * hidden * 4, kept, hidden, norm, norms, norm_factors)


@compiled
def share(count: int, thread: int, threads: int) -> tuple[int, int]:
    """A thread's part of so many outputs: whole tiles."""
    tiles = (count + LANES - 1) // LANES
    return tiles * thread // threads * LANES, min(count, tiles * (thread + 1) // threads * LANES)


@compiled
def norm_rows(
    thread: int, threads: int, shared: int, told: Ints, rows: int, norm: int, norms: Ints, norm_factors: Floats,
    model: Ints, weights: Ints, following: Ints,
) -> int:  # fmt: skip
    """The states of all rows, normed if there is a norm, as products take them: see `round_rows`."""
    hidden, own = model[HIDDEN], thread if rows <= FEW_ROWS else 0
    first, last = (0, rows) if rows <= FEW_ROWS else (rows * thread // threads, rows * (thread + 1) // threads)
    normed = told[NORMED] + own * FEW_ROWS * hidden * 4
    for row in range(first, last):
        out = normed + row * hidden * 4
        norm_row(told[STATES] + row * hidden * 4, out, hidden, norm, norms, norm_factors)
    return round_rows(thread, threads, shared, told, rows, normed, hidden, weights, following)


@compiled
def round_rows(
    thread: int, threads: int, shared: int, told: Ints, rows: int, given: int, size: int, weights: Ints, following: Ints
) -> int:
    """Rows in float32, of which each thread has computed its part, and the same in 8 bits if there are packed weights;
    and what adapters need of them for the `following` products. Few rows are rounded by every thread for itself, and
    read by no other. Returns where the rows lie."""
    own = thread if rows <= FEW_ROWS else 0
    first, last = (0, rows) if rows <= FEW_ROWS else (rows * thread // threads, rows * (thread + 1) // threads)
    if told[CODES]:
        codes = told[CODES] + own * FEW_ROWS * told[CODES_ROW]
        for row in range(first, last):
            round_row(given + row * size * 4, size, codes + row * told[CODES_ROW])
    if told[ADAPTERS]:
        for weight in following:
            if weights[weight, ADAPTED]:
                lower_rows(weights, weight, thread, told, rows, first, last, given, size)
    if rows > FEW_ROWS:
        meet(shared, threads)
    return given


@compiled
def low_place(weights: Ints, number: int, thread: int, told: Ints, rows: int) -> int:
    """Where `lower_rows` leaves the first of so many rows for this weight."""
    own = thread if rows <= FEW_ROWS else 0
    place: int = told[LOWS] + weights[number, PLACE] * told[LOWS_PLACE] + own * FEW_ROWS * told[LOWS_ROW]
    return place


@compiled
def lower_rows(
    weights: Ints, number: int, thread: int, told: Ints, rows: int, first: int, last: int, given: int, size: int
) -> None:
    """Products of some rows with the first weights of their adapters; neighbours with the same one go together."""
    lows, start = low_place(weights, number, thread, told, rows), first
    while start < last:
        adapter, end = load_whole(told[ADAPTERS] + 8 * start), start + 1
        while end < last and load_whole(told[ADAPTERS] + 8 * end) == adapter:
            end += 1
        if adapter:
            down = weights[weights[number, ADAPTED] + 2 * adapter - 2]
            x, low = given + start * size * 4, lows + start * told[LOWS_ROW]
            product(down, 0, down[OUTPUTS], x, size * 4, low, told[LOWS_ROW], end - start)
        start = end


@compiled
def add_adapters(
    weights: Ints, number: int, first: int, last: int, thread: int, told: Ints, rows: int, out: int, out_row: int
) -> None:
    """To some outputs of rows, what the second weights of their adapters make of the rows as `lower_rows` left them."""
    lows = low_place(weights, number, thread, told, rows)
    for row in range(rows):
        adapter = load_whole(told[ADAPTERS] + 8 * row)
        if not adapter:
            continue
        up, low = weights[weights[number, ADAPTED] + 2 * adapter - 1], lows + row * told[LOWS_ROW]
        for column in range(first, last, LANES):
            place, lanes = out + row * out_row + 4 * column, min(LANES, last - column)
            found = load_first(place, lanes)
            for rank in range(up[OUTPUTS]):
                factors = load_first(up[ADDRESS] + 4 * (rank * up[INPUTS] + column), lanes)
                found = fma(everywhere(load_number(low + 4 * rank)), factors, found)
            store_first(place, found, lanes)


@compiled
def multiply(
    weights: Ints, number: int, first: int, last: int, thread: int, told: Ints, rows: int, given: int, size: int,
    out: int, out_row: int,
) -> None:  # fmt: skip
    """Some outputs of all rows, bias and adapters included; the rows as `round_rows` left them."""
    weight = weights[number]
    if weight[KIND] <= 8:
        codes = told[CODES] + (thread if rows <= FEW_ROWS else 0) * FEW_ROWS * told[CODES_ROW]
        product(weight, first, last, codes, told[CODES_ROW], out, out_row, rows)
    else:
        product(weight, first, last, given, size * 4, out, out_row, rows)
    if weight[BIAS]:
        for row in range(rows):
            for column in range(first, last):
                place = out + row * out_row + 4 * column
                store_number(place, load_number(place) + read_number(weight[BIAS], weight[BIAS_KIND], column))
    if told[ADAPTERS] and weight[ADAPTED]:
        add_adapters(weights, number, first, last, thread, told, rows, out, out_row)


@compiled
def read_number(place: int, kind: int, number: int) -> Any:
    return load_number(place + 4 * number) if kind == 32 else load_short(place + 2 * number)


@compiled
def norm_row(given: int, out: int, size: int, norm: int, norms: Ints, norm_factors: Floats) -> None:
    """RMSNorm of a row; without a norm the row as it is."""
    if norm < 0:
        for start in range(0, size, LANES):
            store_first(out + 4 * start, load_first(given + 4 * start, size - start), size - start)
        return
    squares = everywhere(np.float32(0.0))
    for start in range(0, size, LANES):
        x = load_first(given + 4 * start, size - start)
        squares = fma(x, x, squares)
    mean = total(squares) / np.float32(size)
    factor = np.float32(1.0) / np.sqrt(mean + norm_factors[norm, EPSILON])
    place, kind = norms[norm, NORM_ADDRESS], norms[norm, NORM_KIND]
    for column in range(size):
        weight = read_number(place, kind, column) + norm_factors[norm, OFFSET]
        store_number(out + 4 * column, load_number(given + 4 * column) * factor * weight)


@compiled
def scale_row(place: int, size: int, factor: np.float32) -> None:
    for column in range(size):
        store_number(place + 4 * column, load_number(place + 4 * column) * factor)


@compiled
def project_heads(
    thread: int, threads: int, model: Ints, layer: Ints, weights: Ints, norms: Ints, norm_factors: Floats, told: Ints,
    normed: int, positions: Ints, slots: Ints,
) -> None:  # fmt: skip
    """Queries, keys and values, head by head: a thread has all of a head, so it can norm, turn and store it."""
    size, heads, groups, rows = model[SIZE], model[HEADS], model[GROUPS], told[ROWS]
    units = heads + 2 * groups
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        if unit < heads:
            weight, head, out, norm = layer[QUERY], unit, told[QUERIES], layer[QUERY_NORM]
            out_row = heads * size * 4
        elif unit < heads + groups:
            weight, head, out, norm = layer[KEY], unit - heads, told[MIXED], layer[KEY_NORM]
            out_row = 2 * groups * size * 4
        else:
            weight, head, out, norm = layer[VALUE], unit - heads - groups, told[MIXED] + groups * size * 4, -1
            out_row = 2 * groups * size * 4
        first = head * size
        multiply(weights, weight, first, first + size, thread, told, rows, normed, model[HIDDEN], out, out_row)
        for row in range(rows):
            place = out + row * out_row + first * 4
            if unit < heads + groups:
                if norm >= 0:
                    norm_row(place, place, size, norm, norms, norm_factors)
                turn(place, layer, positions[row], model[ROTARY])
            if unit >= heads + groups:
                store_value(place, layer, head, slots[row], size)
            elif unit >= heads:
                store_key(place, layer, head, slots[row], size)


@compiled
def turn(place: int, layer: Ints, position: int, rotary: int) -> None:
    """The rotary embedding of a head, or of its first numbers: halves against each other."""
    half, cos, sin = rotary // 2, layer[COSINES] + position * rotary * 4, layer[SINES] + position * rotary * 4
    for column in range(half):
        one, other = load_number(place + 4 * column), load_number(place + 4 * (column + half))
        along, across = one * load_number(cos + 4 * column), other * load_number(sin + 4 * column)
        back, forth = other * load_number(cos + 4 * (column + half)), one * load_number(sin + 4 * (column + half))
        store_number(place + 4 * column, along - across)
        store_number(place + 4 * (column + half), back + forth)


@compiled
def key_place(layer: Ints, head: int, slot: int, size: int) -> int:
    """Where number 0 of a key is; the next is LANES numbers further."""
    page: int = layer[KEYS] + (head * layer[CAPACITY] + slot // PAGE_SIZE * PAGE_SIZE) * size * 4
    return page + slot % PAGE_SIZE * 4


@compiled
def store_key(place: int, layer: Ints, head: int, slot: int, size: int) -> None:
    target = key_place(layer, head, slot, size)
    for column in range(size):
        store_number(target + 4 * PAGE_SIZE * column, load_number(place + 4 * column))


@compiled
def store_value(place: int, layer: Ints, head: int, slot: int, size: int) -> None:
    target = layer[VALUES] + (head * layer[CAPACITY] + slot) * size * 4
    for column in range(size):
        store_number(target + 4 * column, load_number(place + 4 * column))


@compiled
def move_slots(layers: Ints, groups: int, size: int, sources: Ints, targets: Ints, buffer: int) -> None:
    """Keys and values of slots to other slots; all are read before any is written. `buffer`: for all of one head."""
    for layer in layers:
        for head in range(groups):
            for number in range(len(sources)):
                key = key_place(layer, head, sources[number], size)
                value = layer[VALUES] + (head * layer[CAPACITY] + sources[number]) * size * 4
                for column in range(size):
                    store_number(buffer + 4 * (2 * number * size + column), load_number(key + 4 * PAGE_SIZE * column))
                    store_number(buffer + 4 * ((2 * number + 1) * size + column), load_number(value + 4 * column))
            for number in range(len(targets)):
                store_key(buffer + 8 * number * size, layer, head, targets[number], size)
                store_value(buffer + 8 * number * size + 4 * size, layer, head, targets[number], size)


@compiled
def attend(
    thread: int, threads: int, model: Ints, factors: Floats, layer: Ints, told: Ints, positions: Ints, pages: Counts
) -> None:
    """What every node takes from the values that it sees, up to four heads at a time; in place of its queries."""
    rows, size, heads, groups = told[ROWS], model[SIZE], model[HEADS], model[GROUPS]
    shared = heads // groups  # heads that share keys
    blocks = (shared + TOGETHER - 1) // TOGETHER
    scores, sums = told[SCORES] + thread * TOGETHER * told[SCORES_ROW], told[SUMS] + thread * SUMS_BYTES
    units = groups * blocks * rows
    for unit in range(units * thread // threads, units * (thread + 1) // threads):
        group, block, row = unit // rows // blocks, unit // rows % blocks, unit % rows
        first = shared * block // blocks
        count, head = shared * (block + 1) // blocks - first, group * shared + first
        path, start = told[PATHS] + row * told[PATHS_ROW], 0
        if layer[WINDOW]:
            start = max(0, positions[row] + 1 - layer[WINDOW])
        place = group * layer[CAPACITY] * size * 4
        attend_node(
            layer[KEYS] + place, layer[VALUES] + place, size, told[QUERIES] + (row * heads + head) * size * 4, count,
            start, pages[load_whole(path + PATH_SEQUENCE)], path, factors[SCALE], factors[SOFTCAP], scores,
            told[SCORES_ROW], sums,
        )  # fmt: skip


@compiled
def add_product(
    thread: int, threads: int, shared: int, told: Ints, rows: int, weights: Ints, number: int, given: int, norm: int,
    norms: Ints, norm_factors: Floats, model: Ints, factors: Floats,
) -> None:  # fmt: skip
    """A product is added to the states, normed before where the model has it so."""
    hidden, wide = model[HIDDEN], told[WIDE]
    first, last = share(hidden, thread, threads)
    size = weights[number, INPUTS]
    multiply(weights, number, first, last, thread, told, rows, given, size, wide, tiled_row(hidden))
    if norm >= 0:
        meet(shared, threads)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            place = wide + row * tiled_row(hidden)
            norm_row(place, place, hidden, norm, norms, norm_factors)
            add_row(told[STATES] + row * hidden * 4, place, 0, hidden, factors[RESIDUAL_FACTOR])
    else:
        for row in range(rows):
            add_row(
                told[STATES] + row * hidden * 4, wide + row * tiled_row(hidden), first, last, factors[RESIDUAL_FACTOR]
            )
    meet(shared, threads)


@compiled
def tiled_row(columns: int) -> int:
    """Bytes from row to row of what packed products write: whole tiles."""
    return (columns + LANES - 1) // LANES * LANES * 4


@compiled
def add_row(states: int, added: int, first: int, last: int, factor: np.float32) -> None:
    for column in range(first, last):
        place = states + 4 * column
        store_number(place, load_number(place) + load_number(added + 4 * column) * factor)


@compiled
def gated_products(thread: int, threads: int, model: Ints, layer: Ints, weights: Ints, told: Ints, normed: int) -> None:
    """A gated MLP up to its last product: gate and up of the same columns, then one times the other."""
    inner, rows, kind = model[INNER], told[ROWS], model[ACTIVATION]
    first, last = share(inner, thread, threads)
    out_row = tiled_row(inner)
    up = told[WIDE] + rows * out_row
    for start in range(first, last, LANES * 4):
        end = min(last, start + LANES * 4)
        for weight, out in ((layer[GATE], told[WIDE]), (layer[UP], up)):
            multiply(weights, weight, start, end, thread, told, rows, normed, model[HIDDEN], out, out_row)
        for row in range(rows):
            gate, beside, out = told[WIDE] + row * out_row, up + row * out_row, told[INNERS] + row * inner * 4
            for column in range(start, end, LANES):
                lanes = min(LANES, end - column)
                active = activated(load_first(gate + 4 * column, lanes), kind, gate + 4 * column, lanes)
                store_first(out + 4 * column, active * load_first(beside + 4 * column, lanes), lanes)


@compiled
def activated(x: Any, kind: int, place: int, lanes: int) -> Any:
    """An activation of 16 numbers, which also lie at `place`."""
    one = everywhere(np.float32(1.0))
    if kind == SILU:
        return x / (one + exp(everywhere(np.float32(0.0)) - x))
    if kind == GELU_TANH:
        cubed = fma(x * x * x, everywhere(np.float32(0.044715)), x)
        return x / (one + exp(everywhere(np.float32(-1.5957691216057308)) * cubed))
    for lane in range(lanes):
        number = load_number(place + 4 * lane)
        store_number(place + 4 * lane, number * np.float32(0.5 * (1.0 + erf(number * 0.7071067811865476))))
    return load_first(place, lanes)


@compiled
def score(thread: int, threads: int, model: Ints, factors: Floats, weights: Ints, told: Ints, normed: int) -> None:
    """Logits of the rows that are scored."""
    first, last = share(model[VOCABULARY], thread, threads)
    rows, out_row = told[SCORED], told[LOGITS_ROW]
    multiply(weights, model[OUTPUT], first, last, thread, told, rows, normed, model[HIDDEN], told[LOGITS], out_row)
    factor, softcap = factors[LOGIT_FACTOR], factors[LOGIT_SOFTCAP]
    if factor == 1 and softcap == 0:
        return
    for row in range(rows):
        for column in range(first, last):
            place = told[LOGITS] + row * out_row + 4 * column
            found = load_number(place) * factor
            store_number(place, np.float32(softcap * np.tanh(found / softcap)) if softcap > 0 else found)
