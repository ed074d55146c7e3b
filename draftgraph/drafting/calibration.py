"""What estimates are worth: corrected by what the target accepted, while it decodes."""

from __future__ import annotations

import numpy as np

from draftgraph.graph import Bools, Floats, Source

EDGES = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98])  # of bins
KNOTS = (np.array([0.0, *EDGES]) + np.array([*EDGES, 1.0])) / 2  # the middle of each bin
PLACES = np.array([0.0, *KNOTS, 1.0])  # where the curve through them is known
ORDER: tuple[Source, ...] = ("draft", "copied", "recycled")  # who has named a token that several name
PRIOR = 5.0  # acceptances, as many as estimated, that a bin starts with
WINDOW = 500.0  # outcomes that a bin remembers


class Calibration:
    """Acceptance estimates against outcomes, for each source, in bins of the estimate.

    Without outcomes an estimate stays as it is. What a bin has seen moves the estimates in it towards the observed
    share; the curve through the bins never falls, so the best child of a source stays its best.
    """

    def __init__(self) -> None:
        self._tables: dict[Source, Table] = {}
        self.curves = np.tile(PLACES, (len(ORDER), 1))  # through PLACES, by source
        self._news: list[tuple[Source, Floats, Bools]] = []

    def corrected(self, source: Source, estimates: Floats) -> Floats:
        """Chances of acceptance, of any shape."""
        return self._tables[source].follow(estimates) if source in self._tables else estimates

    def observe(self, source: Source, estimates: Floats, accepted: Bools) -> None:
        """What became of proposed tokens; estimates as they were before correction. Counts from `learn` on."""
        self._news.append((source, estimates, accepted))

    def learn(self) -> None:
        """Takes in what was observed: to be called when there is time."""
        for source, estimates, accepted in self._news:
            table = self._tables.setdefault(source, Table())
            table.observe(estimates, accepted)
            self.curves[ORDER.index(source)] = table.curve
        self._news.clear()


class Table:
    """The outcomes of one source."""

    def __init__(self) -> None:
        self._tried, self._expected, self._accepted = np.zeros((3, len(KNOTS)))
        self.curve = PLACES.copy()

    def follow(self, estimates: Floats) -> Floats:
        """The curve's height at estimates, straight between the bins."""
        heights: Floats = np.interp(estimates, PLACES, self.curve)
        return heights

    def observe(self, estimates: Floats, accepted: Bools) -> None:
        bins = np.searchsorted(EDGES, estimates, side="right")
        self._tried += np.bincount(bins, minlength=len(KNOTS))
        self._expected += np.bincount(bins, estimates, len(KNOTS))
        self._accepted += np.bincount(bins, accepted, len(KNOTS))
        fading = np.minimum(1.0, WINDOW / np.maximum(self._tried, 1.0))
        for counts in (self._tried, self._expected, self._accepted):
            counts *= fading
        ratio = (self._accepted + PRIOR) / (self._expected + PRIOR)
        heights = never_falling(np.minimum(ratio * KNOTS, 1.0), self._tried + PRIOR)
        self.curve = np.array([0.0, *heights, max(heights[-1], min(1.0, heights[-1] / KNOTS[-1]))])


def never_falling(heights: Floats, weights: Floats) -> Floats:
    """The nearest curve without a fall: neighbours that break the order are pooled (Ayer et al., 1955)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, bins
    for height, weight in zip(heights.tolist(), weights.tolist(), strict=True):
        pool = (height, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, bins = pools.pop()
            total = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / total, total, bins + pool[2])
        pools.append(pool)
    return np.repeat([mean for mean, _, _ in pools], [bins for _, _, bins in pools])
