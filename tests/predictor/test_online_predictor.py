"""Learning what forwards take, against costs that the prior gets wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.partition import Device, ModelShape, Shape
from smpart.predictor import NOTHING, OnlinePredictor, Rates, RooflinePrior

MODEL = ModelShape(30, 576, 9, 3, 64, 49152, 106_000_000, 28_000_000, 536_000_000, 4)
CPU = Device("cpu", "cpu", 2, (0, 1), 1 << 34)
STEP, PROMPT = Shape.decode(8, 2000), Shape.prefill([(256, 0)])


def made() -> OnlinePredictor:
    return OnlinePredictor(RooflinePrior(MODEL, CPU))


def test_the_prior_grows_with_work_and_shrinks_with_units() -> None:
    prior = RooflinePrior(MODEL, Device("h100", "sim", 132, tuple(range(132)), 1 << 36))
    assert prior.seconds(PROMPT, 132) < prior.seconds(PROMPT, 40) < prior.seconds(PROMPT, 12)
    assert prior.seconds(STEP, 132) == prior.seconds(STEP, 100), "bandwidth saturates"
    assert prior.seconds(Shape.decode(8, 90_000), 132) > prior.seconds(STEP, 132)
    assert prior.predict(STEP, 66, PROMPT).mean >= prior.predict(STEP, 66).mean


def test_the_prior_is_the_roofline_written_out() -> None:
    model = ModelShape(2, 8, 2, 2, 4, 10, 1000, 80, 4320, 4)
    prior = RooflinePrior(model, CPU, Rates(1e3, 1e4, 2.0, 0.5, 0.25))
    # 10 tokens on one core: 2*1000*10 + 2*80 operations at 1e3/s; attention 4*2*2*4 * 55 pairs
    assert prior.seconds(Shape.prefill([(10, 0)]), 1) == pytest.approx(1.0 + 20.16 + 64 * 55 / 1e3)
    # one token: the weights at half the bandwidth, KV of 128 bytes a token
    assert prior.seconds(Shape.decode(1, 9), 1) == pytest.approx(1.0 + 2.16 + 1280 / 5e3)


@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_a_prior_wrong_by_ten_is_right_after_three_observations(wrong: float) -> None:
    predictor = made()
    truth = wrong * predictor.prior.seconds(STEP, 1)
    for _ in range(3):
        predictor.observe(STEP, 1, NOTHING, 1.0, truth)
    assert predictor.predict(STEP, 1).mean == pytest.approx(truth, rel=0.05)
    assert predictor.predict(Shape.decode(4, 900), 1).mean == pytest.approx(
        wrong * predictor.prior.seconds(Shape.decode(4, 900), 1), rel=0.05
    )


def test_how_decode_scales_over_units_is_learnt() -> None:
    predictor = made()
    for _ in range(4):
        for batch, one, two in ((1, 0.130, 0.122), (8, 0.233, 0.167)):
            predictor.observe(Shape.decode(batch, batch * 100), 1, NOTHING, 1.0, one)
            predictor.observe(Shape.decode(batch, batch * 100), 2, NOTHING, 1.0, two)
    assert predictor.predict(Shape.decode(1, 100), 1).mean == pytest.approx(0.130, rel=0.1)
    assert predictor.predict(Shape.decode(1, 100), 2).mean == pytest.approx(0.122, rel=0.1)
    assert predictor.predict(Shape.decode(8, 800), 1).mean == pytest.approx(0.233, rel=0.1)


def test_layer_groups_count_by_their_fraction() -> None:
    predictor = made()
    for _ in range(4):
        predictor.observe(PROMPT, 2, NOTHING, 0.25, 0.5)
    assert predictor.predict(PROMPT, 2).mean == pytest.approx(2.0, rel=0.05)


def test_contention_is_kept_apart_from_solo_speed() -> None:
    predictor = made()
    for _ in range(6):
        predictor.observe(STEP, 1, NOTHING, 1.0, 0.1)
        predictor.observe(STEP, 1, PROMPT, 1.0, 0.13)
    assert predictor.predict(STEP, 1).mean == pytest.approx(0.1, rel=0.02)
    assert predictor.predict(STEP, 1, PROMPT).mean == pytest.approx(0.13, rel=0.05)


def test_a_hybrid_step_never_seen_takes_after_its_parts() -> None:
    predictor = made()
    for _ in range(4):
        predictor.observe(STEP, 2, NOTHING, 1.0, 5 * predictor.prior.seconds(STEP, 2))
        predictor.observe(PROMPT, 2, NOTHING, 1.0, 5 * predictor.prior.seconds(PROMPT, 2))
    both = STEP.join(PROMPT)
    assert predictor.predict(both, 2).mean == pytest.approx(5 * predictor.prior.seconds(both, 2), rel=0.05)


def test_one_outlier_moves_little_and_a_real_change_is_followed() -> None:
    predictor = made()
    rng = np.random.default_rng(0)
    for _ in range(40):
        predictor.observe(STEP, 1, NOTHING, 1.0, 0.1 * math.exp(rng.normal(0, 0.02)))
    predictor.observe(STEP, 1, NOTHING, 1.0, 2.0)
    assert predictor.predict(STEP, 1).mean == pytest.approx(0.1, rel=0.03)
    for _ in range(60):
        predictor.observe(STEP, 1, NOTHING, 1.0, 0.2)
    assert predictor.predict(STEP, 1).mean == pytest.approx(0.2, rel=0.1)


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.3])
def test_the_bound_covers(sigma: float) -> None:
    predictor = made()
    rng = np.random.default_rng(1)
    covered = []
    for n in range(1500):
        seconds = 0.1 * math.exp(rng.normal(0, sigma))
        if n > 200:
            covered.append(seconds <= predictor.predict(STEP, 1).upper)
        predictor.observe(STEP, 1, NOTHING, 1.0, seconds)
    assert 0.975 <= np.mean(covered) <= 1.0
    assert predictor.predict(STEP, 1).upper <= 0.1 * math.exp(4 * sigma + 0.02)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([STEP, PROMPT, STEP.join(PROMPT), NOTHING]), st.integers(1, 2),
            st.sampled_from([NOTHING, PROMPT, STEP]), st.sampled_from([0.0, 1e-9, 0.3, 1.0]),
            st.sampled_from([0.0, 1e-6, 1.0, 1e4, math.inf, math.nan]),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_no_observation_breaks_it(seen) -> None:
    predictor = made()
    for observation in seen:
        predictor.observe(*observation)
    for shape in (STEP, PROMPT, STEP.join(PROMPT)):
        for beside in (NOTHING, PROMPT):
            estimate = predictor.predict(shape, 1, beside)
            assert 0 < estimate.mean <= estimate.upper < math.inf


@pytest.mark.parametrize(
    ("units", "fraction", "seconds"),
    [(2, math.inf, 1.0), (2, 1e300, 5e-324), (2, 1e-12, 1e300), (2, 5e-324, 1e308), (3, 1.0, 1.0), (0, 1.0, 1.0),
     (-1, 1.0, 1.0), (2, 0.0, 1.0), (2, 1.0, math.nan)],
)  # fmt: skip
def test_absurd_pieces_raise_nothing_and_are_outlived(units: int, fraction: float, seconds: float) -> None:
    predictor = made()
    predictor.observe(STEP, units, NOTHING, fraction, seconds)
    assert math.isfinite(predictor.predict(STEP, 2).upper) and math.isfinite(predictor.predict(STEP, 1).upper)
    for _ in range(60):
        predictor.observe(STEP, 2, NOTHING, 1.0, 1.0)
    assert predictor.predict(STEP, 2).mean == pytest.approx(1.0, rel=0.05)


def test_no_splits_have_no_sides() -> None:
    assert all(len(side) == 0 for side in made().predict_splits(STEP, PROMPT, ()))


def test_a_hybrid_step_never_seen_is_bounded_as_its_parts_are() -> None:
    """With the bound of a guess it would lose to every way that was tried, and never be tried itself."""
    predictor, rng = made(), np.random.default_rng(0)
    hybrid = STEP.join(PROMPT)
    guessed = predictor.predict(hybrid, 2)
    for _ in range(60):
        for part in (STEP, PROMPT):
            predictor.observe(part, 2, NOTHING, 1.0, predictor.prior.seconds(part, 2) * math.exp(rng.normal(0, 0.03)))
    told = predictor.predict(hybrid, 2)
    widths = [predictor.predict(part, 2).upper / predictor.predict(part, 2).mean for part in (STEP, PROMPT)]
    assert guessed.upper / guessed.mean > 1.4 and told.upper / told.mean <= 1.05 * max(widths)
