"""Drift: what lasts is noticed, what is noise is not."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.partition import Shape
from smpart.predictor import NOTHING, OnlinePredictor
from smpart.predictor.drift import PATIENCE, Drift

STEP, PROMPT = Shape.decode(8, 2000), Shape.prefill([(256, 0)])
BOUND = math.log(1.1)


class Measured:
    """A profile that says what everything takes, and that it is true to 10 %."""

    units = 4

    def seconds(self, shape: Shape, units: int) -> float:
        return 0.01 * shape.tokens / units

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return 1.0 + 0.05 * neighbour_units

    def margin(self, shape: Shape, beside: bool) -> float:
        return BOUND


def profiled() -> OnlinePredictor:
    return OnlinePredictor(Measured(), profiled=True)


def feed(predictor: OnlinePredictor, factors, shape: Shape = STEP, beside: Shape = NOTHING) -> None:
    truth = Measured().seconds(shape, 2) * (1.1 if beside is not NOTHING else 1.0)
    for factor in factors:
        predictor.observe(shape, 2, beside, 1.0, truth * float(factor))


def alarms(ratios) -> list[int]:
    drift, seen = Drift(), []
    for place, ratio in enumerate(ratios):
        if drift.learn(float(ratio), BOUND) and drift.side:
            seen.append(place)
    return seen


@given(st.integers(0, 2**32), st.floats(1.5, 30.0))
@settings(max_examples=30)
def test_heavy_tails_raise_no_alarm(seed: int, freedom: float) -> None:
    """Student's t, scaled so that a tenth on either side is beyond the bound: the most that is called noise."""
    noise = np.random.default_rng(seed).standard_t(freedom, 4000)
    assert alarms(BOUND * noise / np.quantile(np.abs(noise), 0.8)) == []


@given(st.integers(0, 2**32), st.integers(1, PATIENCE - 8))
@settings(max_examples=30)
def test_bursts_raise_no_alarm(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    ratios = rng.normal(0.0, BOUND / 3, 4000)
    for start in range(0, 4000 - length, 10 * length):
        ratios[start : start + length] = rng.choice([-1, 1]) * rng.uniform(0.5, 3.0)
    assert alarms(ratios) == []


@given(st.integers(0, 2**32), st.sampled_from([-1, 1]), st.floats(1.5, 20.0))
@settings(max_examples=40)
def test_a_shift_that_lasts_is_noticed_once(seed: int, sign: int, size: float) -> None:
    rng = np.random.default_rng(seed)
    ratios = rng.normal(0.0, BOUND / 3, 1000)
    ratios[500:] += sign * size * BOUND
    found = alarms(ratios)
    assert len(found) == 1 and 500 < found[0] < 500 + 3 * PATIENCE


def test_the_alarm_names_what_shifted_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rng, predictor = np.random.default_rng(0), profiled()
    feed(predictor, np.exp(rng.normal(0, 0.02, 100)), beside=PROMPT)
    assert predictor.drifted is None
    with caplog.at_level(logging.WARNING, "smpart"):
        feed(predictor, 1.34 * np.exp(rng.normal(0, 0.02, 300)), beside=PROMPT)
    assert predictor.drifted is not None and "decode beside prefill has taken 1.3" in predictor.drifted
    (record,) = caplog.records
    assert "run `smpart profile` again" in record.getMessage() and "beside prefill" in record.getMessage()


def test_it_ends_when_what_it_was_about_has_gone_away() -> None:
    predictor = profiled()
    feed(predictor, [0.5] * 60)
    assert predictor.drifted is not None and "0.50x" in predictor.drifted
    feed(predictor, [1.0] * 100)
    assert predictor.drifted is None


def test_each_phase_is_watched_by_itself() -> None:
    predictor = profiled()
    for _ in range(60):
        feed(predictor, [2.0], PROMPT)
        feed(predictor, [1.0], STEP)
    assert predictor.drifted is not None and "prefill alone" in predictor.drifted and "decode" not in predictor.drifted


def test_without_a_profile_there_is_nothing_to_drift_from() -> None:
    predictor = OnlinePredictor(Measured())
    feed(predictor, [3.0] * 200)
    assert predictor.drifted is None


def test_a_shift_is_followed_fast_and_the_bound_soon_covers_tightly() -> None:
    rng, predictor = np.random.default_rng(1), profiled()
    feed(predictor, np.exp(rng.normal(0, 0.02, 400)))
    feed(predictor, 1.5 * np.exp(rng.normal(0, 0.02, 16)))
    truth = 1.5 * Measured().seconds(STEP, 2)
    estimate = predictor.predict(STEP, 2)
    assert estimate.mean == pytest.approx(truth, rel=0.03)
    feed(predictor, 1.5 * np.exp(rng.normal(0, 0.02, 60)))
    estimate = predictor.predict(STEP, 2)
    assert truth * 1.01 < estimate.upper < 1.12 * truth


def test_a_copy_learns_by_itself() -> None:
    predictor = profiled()
    other = predictor.copy()
    feed(other, [2.0] * 50)
    assert other.prior is predictor.prior
    assert predictor.observations == 0 and predictor.drifted is None
    assert other.drifted is not None
    assert predictor.predict(STEP, 2).mean == Measured().seconds(STEP, 2)


def test_the_neighbour_has_the_rest_of_the_device() -> None:
    seen: list[tuple[int, int]] = []

    class Watching(Measured):
        def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
            seen.append((units, neighbour_units))
            return 1.0

    predictor = OnlinePredictor(Watching())
    predictor.predict(STEP, 1, PROMPT)
    predictor.observe(STEP, 3, PROMPT, 1.0, 0.1)
    predictor.predict(STEP, 4, PROMPT)
    assert seen == [(1, 3), (3, 1), (4, 1)]


def test_a_profile_is_trusted_more_than_a_few_loud_forwards() -> None:
    """One observation moves a profile whose bound is narrow less than a guess."""
    profile, guess = profiled(), OnlinePredictor(Measured())
    guess.prior.margin = lambda shape, beside: 1.0  # type: ignore[method-assign]
    for predictor in (profile, guess):
        feed(predictor, [1.5])
    said = Measured().seconds(STEP, 2)
    assert said < profile.predict(STEP, 2).mean < guess.predict(STEP, 2).mean
    assert guess.predict(STEP, 2).mean == pytest.approx(1.5 * said, rel=0.02)


def test_the_profiles_own_bound_holds_until_enough_was_seen() -> None:
    predictor = profiled()
    estimate = predictor.predict(STEP, 2, PROMPT)
    assert estimate.upper == pytest.approx(1.1 * estimate.mean)
    feed(predictor, [1.0, 1.3, 1.0], beside=PROMPT)
    estimate = predictor.predict(STEP, 2, PROMPT)
    assert estimate.upper > 1.15 * estimate.mean


def test_regions_get_bounds_of_their_own() -> None:
    """Short prefills are noisy, long ones are not: each bound fits its own once there is enough of it."""
    rng, predictor = np.random.default_rng(2), OnlinePredictor(Measured())
    long = Shape.prefill([(4096, 0)])
    for noise in np.exp(rng.normal(0, 1, 400)):
        feed(predictor, [noise**0.2], PROMPT)
        feed(predictor, [noise**0.01], long)
    short, steady = predictor.predict(PROMPT, 2), predictor.predict(long, 2)
    assert short.upper > 1.3 * short.mean
    assert steady.upper < 1.05 * steady.mean
