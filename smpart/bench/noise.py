"""The machine's own noise: how far repeats of one and the same thing lie apart, which no prediction can beat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from smpart.predictor.accuracy import bound, quantile
from smpart.profiler.sample import Point, Sample


def repeat_noise(samples: Sequence[Sample]) -> dict[str, object]:
    """Median absolute percentage deviations, ready for JSON.

    ``solo`` and ``corun``: of the repeats of a sample from their median, over samples alone and with a neighbour.
    ``anchors``: likewise, of the medians of a point that was measured again and again from their common median:
    what the machine drifts over the minutes comes on top of what two repeats differ by. ``bound``: see
    `tightest_bound`. None where no sample has two repeats, or no point two samples.
    """
    alone = [s for s in samples if s.point.alone]
    beside = [s for s in samples if not s.point.alone]
    return {
        "solo": deviation(s.seconds for s in alone),
        "corun": deviation(s.seconds for s in beside),
        "anchors": {"solo": deviation(anchors(alone).values()), "corun": deviation(anchors(beside).values())},
        "bound": {"solo": tightest_bound(alone), "corun": tightest_bound(beside)},
    }


def anchors(samples: Iterable[Sample]) -> dict[Point, list[float]]:
    """Median seconds of each sample of the points that were measured more than once, in the order they ran."""
    medians: dict[Point, list[float]] = {}
    for sample in samples:
        medians.setdefault(sample.point, []).append(sample.median)
    return {point: values for point, values in medians.items() if len(values) > 1}


def deviation(sets: Iterable[Sequence[float]]) -> float | None:
    """Median of abs(value / median of its set - 1) over all sets of at least two values; None without one.

    >>> deviation([[1.0, 1.0, 1.3], [2.0, 2.2]])    # deviations 0, 0, 0.3 and twice 0.1 / 2.1
    0.047619
    """
    off = [np.abs(np.array(values) / np.median(values) - 1.0) for values in sets if len(values) > 1]
    return round(float(np.median(np.concatenate(off))), 6) if off else None


def tightest_bound(samples: Iterable[Sample], coverage: float = 0.99) -> float | None:
    """By how much the narrowest bound exceeds single runs on average, if it knew the median of every point.

    One factor over the medians, the least that covers so many of the repeats; all points count alike. None where no
    point was repeated.
    """
    pooled: dict[Point, list[float]] = {}
    for sample in samples:
        pooled.setdefault(sample.point, []).extend(sample.seconds)
    repeated = [np.array(seconds) / np.median(seconds) for seconds in pooled.values() if len(seconds) > 1]
    if not repeated:
        return None
    ratios, weights = np.concatenate(repeated), np.repeat([1.0 / len(r) for r in repeated], [len(r) for r in repeated])
    upper = np.full(len(ratios), quantile(ratios, weights, coverage))
    return bound(ratios, upper, weights).mean_excess
