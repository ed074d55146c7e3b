"""What is said of the children of one node: pooled to one chance for each token. See `drafting.pool`.

The first k columns of a row are the draft's, then come those of what was copied, then those of what was recycled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftgraph.compiled import compiled

WEIGHT = 0.45  # of what other sources say, that of a draft being 1
SILENCE = 0.01  # what a source says of a token that it does not name
UNNAMED = 0.01  # and a draft
REST = 0.01  # what at least is left for tokens that nobody names
CHOICES = 4  # of each memory at a node
DRAFTS_BEST = 3  # the curve of a draft's best child: see `drafting.calibration`
NO_TOKEN = -1

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@compiled
def pool(named: Ints, said: Floats, k: int, estimates: Floats) -> None:
    """Of one row, every token once: what the draft names too is 0 among the others. # [columns] each"""
    certain = loud = 0.0  # certain: 0 where no draft was asked
    for column in range(len(named)):
        estimates[column] = said[column] if column < k else 0.0
        certain += estimates[column]
    for column in range(k, len(named)):
        if named[column] == NO_TOKEN:
            continue
        support = (max(said[column], SILENCE) / SILENCE) ** WEIGHT
        same = find(named, named[column])
        if same >= k:
            estimates[column] = UNNAMED * support
            loud += said[column]
        else:
            estimates[same] = max(estimates[same], said[same] * support)
    total = max(1.0 - certain, REST)
    for column in range(len(named)):
        total += estimates[column]
    for column in range(len(named)):
        if certain > 0.0:
            estimates[column] /= total
        elif estimates[column] > 0.0:
            estimates[column] = said[column] / max(loud, 1.0)


@compiled
def find(tokens: Ints, token: int) -> int:
    for place in range(len(tokens)):
        if tokens[place] == token:
            return place
    return NO_TOKEN


@compiled
def correct(estimates: Floats, k: int, places: Floats, curves: Floats, chances: Floats) -> None:
    """What estimates are worth, by the curve of each voice through these places; k children at most."""
    best = best_of(estimates, k)
    for column in range(len(estimates)):
        voice = 0 if column < k else 1 + (column - k) // CHOICES
        voice = DRAFTS_BEST if column == best else voice
        chances[column] = height(estimates[column], places, curves[voice])
    for column in range(len(estimates) - 1, -1, -1):
        if chances[column] <= 0.0:
            continue
        better = 0
        for other in range(len(estimates)):
            better += chances[other] > chances[column]
        if better >= k:
            chances[column] = 0.0


@compiled
def best_of(estimates: Floats, k: int) -> int:
    """The column of a draft's best child."""
    best = 0
    for column in range(1, k):
        if estimates[column] > estimates[best]:
            best = column
    return best


@compiled
def height(estimate: float, places: Floats, curve: Floats) -> float:
    """Of a curve, straight between its places."""
    if estimate <= 0.0:
        return 0.0
    right = 1
    while right < len(places) - 1 and places[right] < estimate:
        right += 1
    share = (estimate - places[right - 1]) / (places[right] - places[right - 1])
    return curve[right - 1] + min(share, 1.0) * (curve[right] - curve[right - 1])  # type: ignore[no-any-return]
