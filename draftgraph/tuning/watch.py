"""Whether measured prices still hold: what steps should have taken, against what they took."""

from __future__ import annotations

import time
from collections.abc import Callable

from draftgraph.stats import Stats
from draftgraph.tuning.latency import MeasuredCost

STEPS = 50  # that are judged together
OFF = 0.25
PAUSE = 300.0  # seconds between two measurements, and before the first: a short session does not wait for one


class Watch:
    """Asks for another measurement when steps take longer, or less, than their prices say.

    Some of a step is not priced: processors, copies, what stands by. So if a new measurement leaves the ratio as it
    was, that ratio is the usual one from then on.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.usual = 1.0
        self.ratio = 1.0  # observed to predicted, in the last steps that were judged
        self._clock = clock
        self._off = False
        self._before: float | None = None  # the ratio that the last measurement was to mend
        self._measured_at = clock()
        self._stats: Stats | None = None
        self._seen: tuple[float, ...] = ()
        self._begin()

    @property
    def due(self) -> bool:
        return self._off and self._clock() - self._measured_at >= PAUSE

    def measured(self) -> None:
        self._before = self.ratio if self._off else None
        self._measured_at = self._clock()
        self._begin()

    def follow(self, stats: Stats, cost: MeasuredCost) -> None:
        """Called when a step begins: looks at those before it."""
        seconds = sum(stats.seconds.values()) - stats.seconds["prefill"]
        now = (stats.steps, stats.draft_passes, stats.draft_tokens, stats.verified_tokens, seconds)
        if stats is self._stats and stats.steps == self._seen[0] + 1:
            _, passes, fed, checked, taken = (after - before for after, before in zip(now, self._seen, strict=True))
            self.add(cost.of_step(int(passes), int(fed), int(checked)), taken)
        self._stats, self._seen = stats, now

    def add(self, predicted: float, observed: float) -> None:
        self._steps += 1
        self._predicted += predicted
        self._observed += observed
        if self._steps == STEPS:
            self._judge()

    def _judge(self) -> None:
        self.ratio = self._observed / self._predicted
        self._begin()
        self._off = not near(self.ratio, self.usual)
        if self._off and self._before is not None and near(self.ratio, self._before):
            self.usual, self._off = self.ratio, False

    def _begin(self) -> None:
        self._steps, self._predicted, self._observed, self._off = 0, 0.0, 0.0, False


def near(ratio: float, other: float) -> bool:
    return abs(ratio / other - 1.0) <= OFF
