"""Estimates against outcomes: counted in bins, and the curve through the bins."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled
from draftgraph.compiled.opinions import best_of

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
TRIED, EXPECTED, ACCEPTED = range(3)


@compiled
def outcomes(
    named: Ints, estimates: Floats, rows: Ints, right: Ints, first: int, end: int, k: int, best: bool
) -> tuple[Floats, NDArray[np.bool_]]:
    """What the columns from first to end named in these rows, and whether it was the right token of the row: the best
    child of the draft, whose columns are the first k, or all others."""
    found, accepted = np.empty(len(rows) * (end - first)), np.empty(len(rows) * (end - first), dtype=np.bool_)
    count = 0
    for place in range(len(rows)):
        top = best_of(estimates[rows[place]], k)
        for column in range(first, end):
            estimate = estimates[rows[place], column]
            if estimate > 0.0 and (column == top) == best:
                found[count], accepted[count] = estimate, named[rows[place], column] == right[place]
                count += 1
    return found[:count], accepted[:count]


@compiled
def count(
    counts: Floats, edges: Floats, estimates: Floats, accepted: NDArray[np.bool_], window: float
) -> None:  # counts: [3, bins]
    """A bin forgets what is more than its window."""
    for place in range(len(estimates)):
        where = 0
        while where < len(edges) and edges[where] <= estimates[place]:
            where += 1
        counts[TRIED, where] += 1.0
        counts[EXPECTED, where] += estimates[place]
        counts[ACCEPTED, where] += accepted[place]
    for where in range(counts.shape[1]):
        fading = min(1.0, window / max(counts[TRIED, where], 1.0))
        for row in range(3):
            counts[row, where] *= fading


@compiled
def odds_of(counts: Floats, prior: float) -> float:
    """How many times the odds of all estimates the odds of acceptance are: known long before any bin is."""
    tried, expected, accepted = counts[TRIED].sum(), counts[EXPECTED].sum(), counts[ACCEPTED].sum()
    happened = (accepted + prior) / (tried - accepted + prior)
    return happened * (tried - expected + prior) / (expected + prior)  # type: ignore[no-any-return]


@compiled
def shifted(chance: float, odds: float) -> float:
    return odds * chance / (1.0 - chance + odds * chance)


@compiled
def fit(counts: Floats, knots: Floats, prior: float, odds: float, curve: Floats) -> None:
    """The nearest curve through the bins without a fall: neighbours that break the order are pooled (Ayer et al.,
    1955). It begins at 0, and after the last bin goes on as it came. # [3, bins], [bins], [bins + 2]"""
    bins = len(knots)
    means, masses, sizes = np.empty(bins), np.empty(bins), np.empty(bins, dtype=np.int64)
    pools = 0
    for place in range(bins):
        tried = counts[TRIED, place]
        expected = tried * shifted(counts[EXPECTED, place] / tried, odds) if tried > 0.0 else 0.0
        ratio = (counts[ACCEPTED, place] + prior) / (expected + prior)
        mean, mass, size = min(ratio * shifted(knots[place], odds), 1.0), tried + prior, 1
        while pools and means[pools - 1] >= mean:
            pools -= 1
            total = masses[pools] + mass
            mean = (means[pools] * masses[pools] + mean * mass) / total
            mass, size = total, sizes[pools] + size
        means[pools], masses[pools], sizes[pools] = mean, mass, size
        pools += 1
    place = 1
    curve[0] = 0.0
    for pool in range(pools):
        for _ in range(sizes[pool]):
            curve[place] = means[pool]
            place += 1
    highest = means[pools - 1]
    curve[bins + 1] = max(highest, min(1.0, highest / knots[bins - 1]))
