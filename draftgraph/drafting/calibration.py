"""What estimates are worth: corrected by what the target accepted, while it decodes."""

from __future__ import annotations

from typing import Literal

import numpy as np

from draftgraph.compiled.calibrating import count, fit, odds_of
from draftgraph.graph import Bools, Floats, Source

EDGES = np.array([0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98])  # of bins
KNOTS = (np.array([0.0, *EDGES]) + np.array([*EDGES, 1.0])) / 2  # the middle of each bin
PLACES = np.array([0.0, *KNOTS, 1.0])  # where the curve through them is known
ORDER: tuple[Source, ...] = ("draft", "copied", "recycled")  # who has named a token that several name
Voice = Source | Literal["draft's best"]
BEST: Voice = "draft's best"  # child of a node: greedy targets ask for its rank more than for its probability
VOICES: tuple[Voice, ...] = (*ORDER, BEST)
PRIOR = 5.0  # acceptances, as many as estimated, that a bin starts with
WINDOW = 500.0  # outcomes that a bin remembers


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
