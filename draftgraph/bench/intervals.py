"""How many times as fast, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True)
class Speed:
    """A ratio against plain decoding; the 95% interval is None where a task has a single prompt."""

    ratio: float
    low: float | None = None
    high: float | None = None


def geometric_mean(ratios: Mapping[str, Sequence[float]], centre: Callable[..., Any] = np.mean) -> Speed:
    """Of the ratios of tasks' prompts, every task counting the same; the interval by a bootstrap over the prompts.
    The `centre` of a task may also be `np.median`: then a machine that stalls once does not spoil it.

    >>> geometric_mean({"one": [2.0], "other": [8.0]})
    Speed(ratio=4.0, low=None, high=None)
    """
    logs = [np.log(np.asarray(of_task, dtype=float)) for of_task in ratios.values()]
    mean = float(np.mean([centre(of_task) for of_task in logs]))
    if min(map(len, logs)) < 2:
        return Speed(float(np.exp(mean)))
    draw = np.random.default_rng(0)
    resampled = [centre(one[draw.integers(0, len(one), (RESAMPLES, len(one)))], axis=1) for one in logs]
    low, high = np.exp(np.percentile(np.mean(resampled, axis=0), PERCENTILES))
    return Speed(float(np.exp(mean)), float(low), float(high))
