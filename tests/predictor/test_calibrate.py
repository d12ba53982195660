"""Rates fitted to measured forwards, against forwards priced by known rates."""

from __future__ import annotations

import numpy as np
import pytest

from smpart.partition import Device, ModelShape, Shape
from smpart.predictor import Rates, RooflinePrior, calibrate

MODEL = ModelShape(30, 576, 9, 3, 64, 49152, 106_000_000, 28_000_000, 536_000_000, 4)
CPU = Device("cpu", "cpu", 2, (0, 1), 1 << 34)
TRUTH = Rates(40e9, 6e9, 1.0, 1e-3, 1e-4, 0.012, overlap=0.0)
LOOKED_AT = [
    (shape, units)
    for units in (2, 1)
    for shape in (Shape.prefill([(64, 0)]), Shape.decode(1, 64), Shape.decode(8, 512), Shape.prefill([(256, 0)]))
]


def measured(noise: float) -> list[tuple[Shape, int, float]]:
    rng, prior = np.random.default_rng(0), RooflinePrior(MODEL, CPU, TRUTH)
    return [(s, u, prior.seconds(s, u) * float(np.exp(noise * rng.standard_normal()))) for s, u in LOOKED_AT]


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.03), (0.1, 0.2)])
def test_sizes_never_measured_are_predicted(noise: float, error: float) -> None:
    rates = calibrate(MODEL, Rates.guess(CPU), measured(noise))
    truth, fitted = RooflinePrior(MODEL, CPU, TRUTH), RooflinePrior(MODEL, CPU, rates)
    for shape in (
        Shape.prefill([(1000, 0)]),
        Shape.prefill([(128, 500)]),
        Shape.decode(16, 4000),
        Shape.decode(5, 900).join(Shape.prefill([(64, 0)])),
    ):
        for units in (1, 2):
            assert fitted.seconds(shape, units) == pytest.approx(truth.seconds(shape, units), rel=error)


def test_too_few_or_senseless_measurements_change_nothing_they_say_nothing_of() -> None:
    guess = Rates.guess(CPU)
    assert calibrate(MODEL, guess, measured(0.0)[:3]) == guess
    only = [(Shape.prefill([(n, 0)]), 2, 0.01 * n) for n in (64, 128, 256, 512)]
    rates = calibrate(MODEL, guess, only)
    assert rates.row_seconds == 0.0
    assert rates.unit_flops > 0.0 and rates.bandwidth > 0.0
