"""The machine's pace, told from its anchors: what they share and hold for a while, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from smpart.partition import Shape
from smpart.profiler.pace import paces
from smpart.profiler.sample import Point, Sample

ANCHORS = (Point(Shape.prefill([(16, 0)]), 2), Point(Shape.decode(1, 64), 2))
OTHER = Point(Shape.decode(8, 800), 1)


def sweep(slow: np.ndarray, noise: float, seed: int = 0) -> list[Sample]:
    """A batch every 10 s: both anchors, and one other point."""
    rng = np.random.default_rng(seed)
    found = []
    for number, pace in enumerate(slow.tolist()):
        for point, seconds, stage in (*((a, 0.1, "anchor") for a in ANCHORS), (OTHER, 0.3, "fill")):
            taken = seconds * pace * float(np.exp(noise * rng.standard_normal()))
            found.append(Sample(point, (taken,), stage=stage, moment=1.7e9 + 10.0 * number))
    return found


def test_a_drift_that_all_share_is_told() -> None:
    slow = np.exp(0.2 * np.sin(np.arange(60) / 6.0))
    samples = sweep(slow, noise=0.03)
    found = paces(samples)
    assert len(found) == len(samples)
    off = found.reshape(-1, 3)[:, 2] / slow
    assert np.std(np.log(off)) < 0.04  # 0.14 without knowing of any drift


def test_a_step_for_good_is_told_too() -> None:
    slow = np.where(np.arange(60) < 30, 1.0, 1.5)
    found = paces(sweep(slow, noise=0.02)).reshape(-1, 3)[:, 2]
    assert np.median(found[35:]) / np.median(found[:25]) == pytest.approx(1.5, rel=0.05)


def test_noise_of_each_by_itself_is_no_drift() -> None:
    found = paces(sweep(np.ones(60), noise=0.1))
    assert np.std(np.log(found)) < 0.05


def test_a_machine_that_keeps_its_pace_or_tells_too_little_has_the_usual_one() -> None:
    assert paces(sweep(np.ones(20), noise=0.0)).tolist() == [1.0] * 60
    assert paces(sweep(np.exp(np.arange(3.0)), noise=0.0)).tolist() == [1.0] * 9
    assert paces([Sample(OTHER, (1.0,))]).tolist() == [1.0]
    assert paces([]).tolist() == []


def test_samples_of_another_day_keep_their_pace_to_themselves() -> None:
    """A second run, a day later, on a machine that is twice as slow then."""
    first, second = sweep(np.ones(30), 0.02), sweep(np.full(30, 2.0), 0.02, seed=1)
    later = [Sample(s.point, s.seconds, stage=s.stage, moment=s.moment + 86400.0) for s in second]
    found = paces([*first, *later])
    assert np.median(found[90:]) / np.median(found[:90]) == pytest.approx(2.0, rel=0.1)
