"""The published forms against worked examples of their papers and code, and data made by their own formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from any_columns import AnyColumns
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.estimator_checks import parametrize_with_checks

from smpart.partition import ModelShape, Shape
from smpart.predictor.accuracy import errors
from smpart.predictor.estimators.base import LatencyEstimator
from smpart.predictor.estimators.bullet import Bullet, roofline
from smpart.predictor.estimators.forms import relative_nnls
from smpart.predictor.estimators.muxwise import MuxWise
from smpart.predictor.estimators.nexus import Nexus, effective_share
from smpart.predictor.estimators.published import PUBLISHED
from smpart.predictor.estimators.semipd import SemiPD
from smpart.profiler.sample import Point, Pressure, matrix

K = 1024
MODEL = ModelShape(32, 4096, 32, 8, 128, 128256, 6_979_321_856, 525_336_576, 15_009_316_864, 2)
"""Llama-3.1-8B."""

A100 = {"whole": 108, "peak_flops": 312e12, "bandwidth": 2e12, "knee": 30}


def prefill(new: int, context: int = 0, prompts: int = 1) -> Shape:
    return Shape.prefill([(new, context)] * prompts)


def fitted(estimator: LatencyEstimator, measured: dict[Point, float]) -> LatencyEstimator:
    return estimator.fit(matrix(measured), np.array(list(measured.values())))


def predicted(estimator: LatencyEstimator, *points: Point) -> list[float]:
    return estimator.predict(matrix(points)).tolist()


# ---- MuxWise: coefficients of the authors' code (A100_8B, lengths in units of 1,024 tokens, milliseconds)


def muxwise_prefill(new: int, context: int) -> float:
    n, r = new / K, context / K
    return (0.1074 * n * n + 0.5844 * n * r + 16.9732 * n + 12.3569) / 1e3


def muxwise_decode(batch: int, context: int) -> float:
    return (0.04039 * context / K + 0.02668 * batch + 7.4748) / 1e3


PREFILLS = {
    Point(prefill(new, context), 80): muxwise_prefill(new, context)
    for new in (512, 1024, 2048, 6144, 8192, 16384, 32768)
    for context in (0, 2048, 8192)
}
DECODES = {
    Point(Shape.decode(batch, batch * each), 24): muxwise_decode(batch, batch * each)
    for batch in (1, 4, 8, 16, 64)
    for each in (512, 1024, 4096, 16384)
}


def test_muxwise_recovers_the_authors_prefill_coefficients() -> None:
    model = fitted(MuxWise(MODEL, 108), PREFILLS)
    assert predicted(model, Point(prefill(4 * K), 80)) == [pytest.approx(81.97e-3, abs=5e-6)]


def test_muxwise_takes_the_next_lower_sm_count_and_the_worst_slowdown_seen() -> None:
    beside = Point(Shape.decode(16, 16 * 4096), 24, prefill(2 * K), 84)
    model = fitted(MuxWise(MODEL, 108), {**DECODES, beside: 1.2 * muxwise_decode(16, 16 * 4096)})
    step = Shape.decode(32, 32 * 2048)
    alone, guarded = predicted(model, Point(step, 28), Point(step, 28, prefill(4 * K), 80))
    assert alone == pytest.approx(13.10e-3 / 1.2, abs=5e-6)
    assert guarded == pytest.approx(13.10e-3, abs=5e-6)


def test_muxwise_guards_a_cell_by_what_was_seen_in_it_and_prefill_by_nothing() -> None:
    step, small, large = Shape.decode(16, 16 * 4096), prefill(1 * K), prefill(30 * K)
    solo, chunk = muxwise_decode(16, 16 * 4096), prefill(2 * K)
    seen = {
        Point(step, 24, small, 84): 1.1 * solo,
        Point(step, 24, large, 84): 1.3 * solo,
        Point(chunk, 80, step, 28): 1.5 * muxwise_prefill(2 * K, 0),
    }
    model = fitted(MuxWise(MODEL, 108), {**PREFILLS, **DECODES, **seen})
    other = Point(step, 24, prefill(6 * K), 84)
    found = predicted(model, *list(seen)[:2], other, list(seen)[2])
    assert found == pytest.approx([1.1 * solo, 1.3 * solo, 1.3 * solo, muxwise_prefill(2 * K, 0)], rel=1e-6)
    assert model.predict_upper(matrix(seen)).tolist() == predicted(model, *seen)  # type: ignore[attr-defined]


def test_muxwise_takes_a_hybrid_as_the_sum_of_both_phases() -> None:
    both = {Point(p.shape, 24): s for p, s in PREFILLS.items()} | DECODES
    model = fitted(MuxWise(MODEL, 108), both)
    hybrid = prefill(4 * K, 1024).join(Shape.decode(8, 8 * 1024))
    expected = muxwise_prefill(4 * K, 1024) + muxwise_decode(8, 8 * 1024)
    assert predicted(model, Point(hybrid, 24)) == [pytest.approx(expected, rel=1e-6)]


def test_muxwise_has_coefficients_for_each_length_bucket() -> None:
    made = {
        Point(prefill(new, context), 80): muxwise_prefill(new, context) * (1 if new <= 2048 else 2)
        for new in (512, 1024, 1536, 2048, 4096, 8192, 12288, 16384, 32768)
        for context in (0, 2048, 8192)
    }
    model = fitted(MuxWise(MODEL, 108), made)
    found = predicted(model, Point(prefill(768), 80), Point(prefill(6144), 80))
    assert found == pytest.approx([muxwise_prefill(768, 0), 2 * muxwise_prefill(6144, 0)], rel=1e-6)


# ---- Bullet: 312 TFLOP/s, 2 TB/s, 108 SMs, bandwidth saturated at 30


@pytest.mark.parametrize(
    ("flops", "moved", "units", "milliseconds"),
    [(2e12, 1e9, 54, 12.82), (1.6e10, 1.6e10, 54, 8.0), (1.6e10, 1.6e10, 20, 12.0), (1.6e10, 1.6e10, 16, 15.0)],
)
def test_bullets_roofline_as_worked_out(flops: float, moved: float, units: int, milliseconds: float) -> None:
    assert float(roofline(flops, moved, units, **A100)) * 1e3 == pytest.approx(milliseconds, abs=5e-3)


def bullet_seconds(shape: Shape, units: int, left: float = 1.0) -> float:
    """Linear layers and attention of one phase, by hand."""
    device = {**A100, "bandwidth": A100["bandwidth"] * left}
    sampled = shape.prefill_chunks + shape.decode_batch
    linear = 2.0 * (MODEL.linear_params * shape.tokens + MODEL.head_params * sampled)
    attention = 4.0 * 32 * 32 * 128 * (shape.prefill_pairs + shape.decode_context)
    kv = 131_072.0 * (shape.prefill_context + shape.decode_context + shape.tokens)
    parts = roofline(linear, MODEL.weight_bytes, units, **device) + roofline(attention, kv, units, **device)
    return 1.61 * float(parts)


BULLET = {
    Point(shape, units): bullet_seconds(shape, units)
    for shape in (
        *(prefill(new, context) for new in (512, 2048, 8192) for context in (0, 4096)),
        *(Shape.decode(batch, batch * each) for batch in (4, 32) for each in (512, 4096)),
    )
    for units in (16, 24, 36, 54, 80, 108)
}


def test_bullet_recovers_data_of_its_own_form_and_interpolates() -> None:
    model = fitted(Bullet(MODEL, 108), BULLET)
    between = [Point(prefill(4096, 1024), 64), Point(Shape.decode(16, 16 * 2048), 48)]
    assert predicted(model, *between) == pytest.approx([bullet_seconds(p.shape, p.units) for p in between], rel=0.05)


def test_bullet_uses_the_bandwidth_measured_beside_a_prefill_of_that_length() -> None:
    step = Shape.decode(32, 32 * 4096)
    beside = {
        Point(step, 54, prefill(length), 54): bullet_seconds(step, 54, left)
        for length, left in ((1024, 0.8), (8192, 0.5))
    }
    model = fitted(Bullet(MODEL, 108), {**BULLET, **beside})
    assert predicted(model, *beside) == pytest.approx(list(beside.values()), rel=0.03)
    (middle,) = predicted(model, Point(step, 54, prefill(2896), 54))
    assert middle == pytest.approx(bullet_seconds(step, 54, 0.65), rel=0.05)


# ---- Nexus


def test_nexus_arithmetic_grows_in_proportion_until_it_saturates() -> None:
    shares = np.array([0.2, 0.4, 0.8, 0.9, 1.0])
    assert 100 * np.maximum(1, 0.8 / shares) == pytest.approx(80 / effective_share(shares, 0.8, 1e9))
    grown = effective_share(np.linspace(0.01, 1.0, 100), 0.5, 3.0)
    assert (np.diff(grown) > 0).all()
    assert (np.diff(grown, 2) < 1e-12).all(), "no unit yields more than the one before"


def test_nexus_recovers_data_of_its_own_form() -> None:
    made = {
        Point(prefill(new), share): 1e-3 + 2.0 * MODEL.linear_params * new / (2e14 * min(share, 80) / 100)
        for new in (512, 1024, 4096, 8192)
        for share in (20, 40, 60, 70, 80, 90, 100)
    }
    weightless = ModelShape(32, 4096, 0, 0, 0, 0, MODEL.linear_params, 0, 0, 2)
    model = fitted(Nexus(weightless, 100), made)
    found = predicted(model, Point(prefill(2048), 50), Point(prefill(2048), 95))
    linear = 2.0 * MODEL.linear_params * 2048 / 2e14
    assert found == pytest.approx([1e-3 + linear / 0.5, 1e-3 + linear / 0.8], rel=0.03)


def test_nexus_shares_bandwidth_in_proportion_to_bytes_of_attention() -> None:
    """Of attention alone: as many bytes again beside it, all the neighbour's time in attention, take twice as long."""
    attention = ModelShape(1, 4096, 32, 8, 128, 0, 0, 0, 0, 2)
    steps = [Shape.decode(batch, batch * each) for batch in (1, 8, 64) for each in (1024, 8192)]
    solo = {Point(step, 54): 4096.0 * (step.decode_context + step.decode_batch) / 1e12 for step in steps}
    beside = {Point(p.shape, 54, p.shape, 54): 2 * seconds for p, seconds in solo.items()}
    model = fitted(Nexus(attention, 108), {**solo, **beside})
    assert predicted(model, *beside) == pytest.approx(list(beside.values()), rel=0.05)


# ---- semi-PD: curves of the authors' code, q = 100 / cap


def test_semipd_recovers_the_authors_curve() -> None:
    """A P90 of 98 ms at a cap of 80 is predicted to be 96.45 ms at 82."""
    step = Shape.decode(16, 16 * 1024)
    full = 98e-3 / (0.6099 * 100 / 80 + 0.4153)
    caps = {Point(step, cap): full * (0.6099 * 100 / cap + 0.4153) for cap in (40, 60, 80, 100)}
    model = fitted(SemiPD(MODEL, 100), caps)
    assert predicted(model, Point(step, 80), Point(step, 82)) == pytest.approx([98e-3, 96.45e-3], abs=5e-6)


def test_semipd_refits_its_law_to_what_runs_beside_a_neighbour() -> None:
    step, other = Shape.decode(16, 16 * 1024), prefill(2048)
    alone = {Point(step, cap): 1e-3 * (100 / cap) for cap in (20, 50, 100)}
    beside = {Point(step, cap, other, 100 - cap): 1.4e-3 * (100 / cap) for cap in (20, 50, 80)}
    model = fitted(SemiPD(MODEL, 100), {**alone, **beside})
    assert predicted(model, Point(step, 40), Point(step, 40, other, 60)) == pytest.approx([2.5e-3, 3.5e-3])


# ---- all of them


def test_relative_least_squares_against_a_closed_form() -> None:
    """One term of 1 through times 1 and 3: sum (c/y - 1)^2 is least at sum(1/y) / sum(1/y^2)."""
    seconds = np.array([1.0, 3.0])
    assert relative_nnls(np.ones((2, 1)), seconds)[0] == pytest.approx((1 + 1 / 3) / (1 + 1 / 9))


shapes = st.one_of(
    st.builds(prefill, st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 3)),
    st.builds(lambda batch, each: Shape.decode(batch, batch * each), st.integers(1, 64), st.integers(1, 9000)),
    st.builds(
        lambda new, batch: prefill(new).join(Shape.decode(batch, 500 * batch)), st.integers(1, 64), st.integers(1, 8)
    ),
)
lone = st.builds(Point, shapes, st.integers(1, 8))
pairs = st.builds(Point, shapes, st.integers(1, 8), shapes, st.integers(1, 8))
contended = st.builds(
    lambda shape, units: Point(shape, units, neighbour_units=8 - units, contender=Pressure("stream", 1e9, 0.0)),
    shapes,
    st.integers(1, 7),
)
points = st.one_of(lone, pairs, contended)


@pytest.mark.parametrize("form", PUBLISHED)
@settings(max_examples=8, deadline=None)
@given(measured=st.lists(points, min_size=1, max_size=12), asked=st.lists(points, min_size=1, max_size=12))
def test_any_profile_can_be_fitted_and_any_point_asked(form: str, measured: list[Point], asked: list[Point]) -> None:
    """Few rows, only co-run ones, or a phase that was never measured: still a finite time above 0."""
    seconds = {p: 1e-3 * p.shape.tokens / p.units + 1e-4 for p in measured}
    times = fitted(PUBLISHED[form](MODEL, 8), seconds).predict(matrix(asked))
    assert np.isfinite(times).all()
    assert (times > 0).all()


@pytest.mark.parametrize("form", PUBLISHED)
def test_what_was_measured_without_noise_is_predicted_back(form: str) -> None:
    """Times linear in the work and inverse in the units, which every form can say."""
    made = {
        Point(prefill(new), units): 2.0 * MODEL.linear_params * new / (1e12 * units)
        for new in (1024, 2048, 4096, 8192)
        for units in (1, 2, 4, 8)
    }
    linear = ModelShape(32, 4096, 0, 0, 0, 0, MODEL.linear_params, 0, 0, 2)
    model = fitted(PUBLISHED[form](linear, 8), made)
    assert errors(np.array(list(made.values())), model.predict(matrix(made))).max_ape < 0.02


# ---- scikit-learn's own checks

CHECKS_WITH_OTHER_COLUMNS = "brings columns of its own; a profile's matrix has a fixed set, refused in words"
OTHER_COLUMNS = dict.fromkeys(
    (
        "check_dict_unchanged",
        "check_dont_overwrite_parameters",
        "check_dtype_object",
        "check_estimators_dtypes",
        "check_estimators_fit_returns_self",
        "check_estimators_nan_inf",
        "check_estimators_overwrite_params",
        "check_estimators_pickle",
        "check_f_contiguous_array_estimator",
        "check_fit2d_1feature",
        "check_fit2d_1sample",
        "check_fit2d_predict1d",
        "check_fit_check_is_fitted",
        "check_fit_idempotent",
        "check_fit_score_takes_y",
        "check_methods_sample_order_invariance",
        "check_methods_subset_invariance",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_pipeline_consistency",
        "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_regressors_no_decision_function",
        "check_regressors_train",
        "check_supervised_y_2d",
    ),
    CHECKS_WITH_OTHER_COLUMNS,
)


class AnyMuxWise(AnyColumns, MuxWise):
    pass


class AnyBullet(AnyColumns, Bullet):
    pass


class AnyNexus(AnyColumns, Nexus):
    pass


class AnySemiPD(AnyColumns, SemiPD):
    pass


@parametrize_with_checks([SemiPD(MODEL, 8)], expected_failed_checks=lambda _: OTHER_COLUMNS)
def test_scikit_learns_checks_as_far_as_fixed_columns_let_them(estimator: LatencyEstimator, check: Any) -> None:
    check(estimator)


@parametrize_with_checks([form(MODEL, 8) for form in (AnyMuxWise, AnyBullet, AnyNexus, AnySemiPD)])
def test_scikit_learns_checks_on_columns_that_fit(
    estimator: LatencyEstimator, check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smpart.predictor.estimators.forms._EVALUATIONS", 5)  # it is the contract that is checked
    check(estimator)
