"""Fits a prior's rates to a few measured forwards, so that it is right about sizes that were not measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from smpart.partition import ModelShape, Shape
from smpart.predictor.prior import Rates

_FEWEST = 4
"""Measured forwards that a fit needs at least."""


def calibrate(model: ModelShape, rates: Rates, measured: Iterable[tuple[Shape, int, float]]) -> Rates:
    """Rates of the additive prior (no overlap) that fit best, by non-negative least squares of relative errors.

    Fitted are what a unit computes, what the memory delivers and what a decoding sequence costs; the rest, and what
    the measurements say nothing of, stays as it is in `rates`.

    Args:
        measured: shape, units and seconds of forwards that ran alone.
    """
    rows = []
    for shape, units, seconds in measured:
        fixed = rates.forward_seconds + model.layers * rates.layer_seconds
        reach = min(1.0, units / rates.knee)
        features = model.flops(shape) / units, model.bytes(shape) / reach, float(shape.decode_batch)
        rows.append([feature / seconds for feature in features] + [max(0.0, 1.0 - fixed / seconds)])
    if len(rows) < _FEWEST:
        return rates
    table = np.array(rows)
    scale = table[:, :3].max(axis=0)
    scale[scale == 0.0] = 1.0
    flops, bandwidth, row = (nnls(table[:, :3] / scale, table[:, 3])[0] / scale).tolist()
    return replace(
        rates,
        unit_flops=1.0 / flops if flops > 0.0 else rates.unit_flops,
        bandwidth=1.0 / bandwidth if bandwidth > 0.0 else rates.bandwidth,
        row_seconds=row,
        overlap=0.0,
    )
