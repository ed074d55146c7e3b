"""Several sources propose children of the same node: one chance for each token, calibrated by what the target accepted.

What a draft and another source both name is likelier than either says; what a draft that was asked does not name is
less likely than the other source believes. A product of opinions says both (a logarithmic opinion pool; Genest and
Zidek, 1986). Its constants are from 1,800 positions of a 135M target and its 4-layer draft, greedy and at temperature
0.7: there the loss of its estimates was 13 and 10 per cent below that of the larger of the opinions.

The first k columns of a row are the draft's, then come those of what was copied, then those of what was recycled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from draftgraph.compiled import compiled
from draftgraph.graph import NO_TOKEN, Bools, Floats, Ints, Source, TokenGraph, TokenTree
from draftgraph.proposers.copying import CHOICES

WEIGHT = 0.45  # of what other sources say, that of a draft being 1
SILENCE = 0.01  # what a source says of a token that it does not name
UNNAMED = 0.01  # and a draft
REST = 0.01  # what at least is left for tokens that nobody names

ORDER: tuple[Source, ...] = ("draft", "copied", "recycled")  # whose token it is, where several propose one
Voice = Source | Literal["draft's best"]
BEST: Voice = "draft's best"  # child of a node: greedy targets ask for its rank more than for its probability
VOICES: tuple[Voice, ...] = (*ORDER, BEST)
DRAFTS_BEST = VOICES.index(BEST)

EDGES = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98])  # of bins
KNOTS = (np.array([0.0, *EDGES]) + np.array([*EDGES, 1.0])) / 2  # the middle of each bin
PLACES = np.array([0.0, *KNOTS, 1.0])  # where the curve through them is known
PRIOR = 5.0  # acceptances, as many as estimated, that a bin starts with
WINDOW = 500.0  # outcomes that a bin remembers
TRIED, EXPECTED, ACCEPTED = range(3)


@dataclass(frozen=True)
class Proposal:
    """Children that one source proposes at places of a frontier."""

    source: Source
    places: list[int]
    tokens: Ints  # [places, at most k of a draft, CHOICES of others], best first, padded with NO_TOKEN
    chances: Floats


class Calibration:
    """Acceptance estimates against outcomes, for each voice, in bins of the estimate.

    Without outcomes an estimate stays as it is. What a bin has seen moves the estimates in it towards the observed
    share; the curve through the bins never falls.
    """

    def __init__(self) -> None:
        self._tables: dict[Voice, Table] = {}
        self.curves = np.tile(PLACES, (len(VOICES), 1))  # through PLACES, by voice
        self.odds = 1.0, 1.0  # by which those of a draft's children, and of its best ones, are too small on the whole
        self._news: list[tuple[Voice, Floats, Bools]] = []

    def corrected(self, voice: Voice, estimates: Floats) -> Floats:
        """Chances of acceptance, of any shape."""
        return self._tables[voice].follow(estimates) if voice in self._tables else estimates

    def observe(self, voice: Voice, estimates: Floats, accepted: Bools) -> None:
        """What became of proposed tokens; estimates as they were before correction. Counts from `learn` on."""
        self._news.append((voice, estimates, accepted))

    def learn(self) -> None:
        """Takes in what was observed: to be called when there is time."""
        for voice, estimates, accepted in self._news:
            table = self._tables.setdefault(voice, Table())
            table.observe(estimates, accepted)
            self.curves[VOICES.index(voice)] = table.curve
        self._news.clear()
        self.odds = self._odds("draft"), self._odds(BEST)

    def _odds(self, voice: Voice) -> float:
        return self._tables[voice].odds if voice in self._tables else 1.0


class Table:
    """The outcomes of one voice."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, len(KNOTS)))  # tried, expected, accepted
        self.curve = PLACES.copy()
        self.odds = 1.0

    def follow(self, estimates: Floats) -> Floats:
        """The curve's height at estimates, straight between the bins."""
        heights: Floats = np.interp(estimates, PLACES, self.curve)
        return heights

    def observe(self, estimates: Floats, accepted: Bools) -> None:
        count(self._counts, EDGES, estimates, accepted, WINDOW)
        self.odds = float(odds_of(self._counts, PRIOR))
        fit(self._counts, KNOTS, PRIOR, self.odds, self.curve)


class Pool:
    """Weighs the proposals of a step against each other, and learns from what the target says to them."""

    def __init__(self, k: int, calibration: Calibration) -> None:
        self.k, self.calibration = k, calibration
        self._first_column = {"draft": 0, "copied": k, "recycled": k + CHOICES}
        self._row_of: dict[int, int] = {}  # by graph node
        self._rows = Rows.of(0, k)

    def begin(self) -> None:
        """A step starts with a graph of its own."""
        self._row_of, self._rows = {}, Rows.of(0, self.k)

    @property
    def weighed(self) -> Weighed:
        """What has been proposed since the step began."""
        return Weighed(self._row_of, self._rows, self.k)

    def weigh(self, graph: TokenGraph, frontier: list[int], proposals: list[Proposal]) -> list[Proposal]:
        """The proposals with every token named once, by the first to name it, and with the k best of a node alone."""
        nodes = [frontier[place] for place in sorted({place for one in proposals for place in one.places})]
        known = [node for node in nodes if node in self._row_of]
        self._rows = self._rows.with_room_for(len(nodes) - len(known))
        for node in nodes:
            self._row_of.setdefault(node, len(self._row_of))
        cells = []
        for one in proposals:
            rows = np.array([self._row_of[frontier[place]] for place in one.places])
            first = self._first_column[one.source]
            cells.append((rows[:, None], np.arange(first, first + one.tokens.shape[1])))
            self._rows.named[cells[-1]], self._rows.said[cells[-1]] = one.tokens, one.chances
        named, said, estimates, chances = self._rows
        for node in nodes:
            row = self._row_of[node]
            say_once(named[row], said[row], self.k)
            pool(named[row], said[row], self.k, estimates[row])
            calibrate(estimates[row], self.k, PLACES, self.calibration.curves, chances[row])
            if node in known:
                once = estimates[row] > 0  # where the draft names a token too, the column of the memory has none
                graph.revise(node, dict(zip(named[row, once].tolist(), chances[row, once].tolist(), strict=True)))
            keep_best(chances[row], self.k)
        kept = np.where(chances > 0, named, NO_TOKEN)
        return [
            Proposal(one.source, one.places, kept[cell], chances[cell])
            for one, cell in zip(proposals, cells, strict=True)
        ]


@dataclass(frozen=True)
class Rows:
    """What sources say of the children of nodes, a row for each node. # [rows, columns] each"""

    named: Ints
    said: Floats
    estimates: Floats  # of all sources together
    chances: Floats  # calibrated; 0 for all but the k best

    @classmethod
    def of(cls, rows: int, k: int) -> Rows:
        shape = rows, k + 2 * CHOICES
        return cls(np.full(shape, NO_TOKEN), *np.zeros((3, *shape)))

    def __iter__(self) -> Any:
        return iter((self.named, self.said, self.estimates, self.chances))

    def with_room_for(self, more: int) -> Rows:
        new = Rows.of(more, self.named.shape[1] - 2 * CHOICES)
        return Rows(*(np.concatenate(both) for both in zip(self, new, strict=True)))


@dataclass(frozen=True)
class Weighed:
    """What was proposed in one step, kept until the target has chosen."""

    row_of: dict[int, int]
    rows: Rows
    k: int

    def settle(self, calibration: Calibration, graph: TokenGraph, tree: TokenTree, visited: Any, chosen: Any) -> None:
        """The target chose these tokens at these tree nodes: all that was proposed there is right or wrong."""
        nodes = graph.canonical[tree.nodes[visited]].tolist()
        found = [(self.row_of[node], token) for node, token in zip(nodes, chosen, strict=True) if node in self.row_of]
        if found:
            observe_outcomes(calibration, self.rows.named, self.rows.estimates, found, self.k)


def observe_outcomes(
    calibration: Calibration, named: Ints, estimates: Floats, chosen: list[tuple[int, int]], k: int
) -> None:
    """What was named in these rows, beside the tokens that the target chose there."""
    rows, right = (np.array(column, dtype=np.int64) for column in zip(*chosen, strict=True))
    for voice in VOICES:
        is_best = voice == BEST
        first = 0 if is_best or voice == "draft" else k + CHOICES * (ORDER.index(voice) - 1)
        end = first + (k if first == 0 else CHOICES)
        said = outcomes(named, estimates, rows, right, first, end, k, is_best)
        if len(said[0]):
            calibration.observe(voice, *said)


@compiled
def say_once(named: Ints, said: Floats, k: int) -> None:
    """What several sources beside the draft name counts once, for the first, with the larger chance."""
    for column in range(k, len(named)):
        for other in range(column + 1, len(named)):
            if named[column] != NO_TOKEN and named[other] == named[column]:
                said[column] = max(said[column], said[other])
                named[other], said[other] = NO_TOKEN, 0.0


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
    calibrate(estimates, k, places, curves, chances)
    keep_best(chances, k)


@compiled
def calibrate(estimates: Floats, k: int, places: Floats, curves: Floats, chances: Floats) -> None:
    best = best_of(estimates, k)
    for column in range(len(estimates)):
        voice = 0 if column < k else 1 + (column - k) // CHOICES
        voice = DRAFTS_BEST if column == best else voice
        chances[column] = height(estimates[column], places, curves[voice])


@compiled
def keep_best(chances: Floats, k: int) -> None:
    """The k best alone; of equals the first."""
    for column in range(len(chances) - 1, -1, -1):
        if chances[column] <= 0.0:
            continue
        better = 0
        for other in range(len(chances)):
            better += chances[other] > chances[column] or (chances[other] == chances[column] and other < column)
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


@compiled
def outcomes(
    named: Ints, estimates: Floats, rows: Ints, right: Ints, first: int, end: int, k: int, best: bool
) -> tuple[Floats, Bools]:
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
    counts: Floats, edges: Floats, estimates: Floats, accepted: Bools, window: float
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
