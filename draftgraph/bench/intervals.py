"""How many times as fast, and how sure that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

RESAMPLES = 10_000
FEWER_RESAMPLES = 1_000  # where every prompt of every cell has its own
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


def noise_of(repeats: Sequence[Sequence[float]]) -> float | None:
    """How far the mean over prompts of their repeats' medians may be off, by the repeats alone: half of the 95%
    interval of a bootstrap over them, as a share of the mean. None: nothing was repeated.

    >>> noise_of([[2.0, 2.0, 2.0], [8.0, 8.0]]), noise_of([[2.0], [8.0]])
    (0.0, None)
    """
    if max(map(len, repeats), default=0) < 2:
        return None
    draw, known = np.random.default_rng(0), [np.asarray(one, dtype=float) for one in repeats]
    medians = [np.median(one[draw.integers(0, len(one), (FEWER_RESAMPLES, len(one)))], axis=1) for one in known]
    low, high = np.percentile(np.mean(medians, axis=0), PERCENTILES)
    return float(high - low) / 2 / float(np.mean([np.median(one) for one in known]))
