"""Our estimator and its tables, on a simulated GPU with noise and on published measurements: truths from outside."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import gpu_samples
import numpy as np
import pytest
from any_columns import AnyColumns
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import GroupKFold, cross_val_predict
from sklearn.utils.estimator_checks import parametrize_with_checks

from smpart.bench.truths import Truth, data_folder, rtx4090, sm_scaling
from smpart.errors import UsageError
from smpart.partition import Shape
from smpart.predictor.accuracy import bound, errors, groups
from smpart.predictor.compilation import compiled
from smpart.predictor.estimators import hybrid
from smpart.predictor.estimators.alone import Alone
from smpart.predictor.estimators.base import SHAPE, UNITS, LatencyEstimator
from smpart.predictor.estimators.contention import Contention
from smpart.predictor.estimators.doubt import Doubt
from smpart.predictor.estimators.published import PUBLISHED
from smpart.predictor.tables import Tables
from smpart.profiler.sample import Point, Pressure, Sample, matrix, targets
from smpart.sim import RooflineCost

COUNTS = (24, 48, 72, 96, 132)
COST = RooflineCost(gpu_samples.MODEL, "h100")
SAMPLES = gpu_samples.samples(40, counts=COUNTS, noise=0.01)
PREFILLS = st.builds(lambda new, old: Shape.prefill([(new, old)]), st.integers(16, 8192), st.integers(0, 8192))
STEPS = st.builds(lambda rows, each: Shape.decode(rows, rows * each), st.integers(1, 128), st.integers(16, 8192))


def rows(samples: list[Sample]) -> tuple[Any, Any]:
    """Every single repeat."""
    points = [sample.point for sample in samples for _ in sample.seconds]
    return matrix(points), np.array([s for sample in samples for s in sample.seconds])


def truth(points: list[Point]) -> Any:
    return np.array([COST(p.shape, p.units, p.neighbour, p.neighbour_units) for p in points])


def fresh(seed: int, count: int = 60) -> list[Point]:
    """Points that no sample has."""
    rng = np.random.default_rng(seed)
    points = []
    for _ in range(count):
        new, old, rows_, each = np.exp2(rng.uniform([6, 9, 0, 6], [13, 13, 7, 13])).astype(int).tolist()
        prefill, step = Shape.prefill([(new, old)]), Shape.decode(rows_, rows_ * each)
        units = int(rng.choice(COUNTS[:-1]))
        points += [Point(prefill, units), Point(step, units)]
        points += [Point(prefill, units, step, 132 - units), Point(step, units, prefill, 132 - units)]
    return points


@pytest.fixture(scope="module")
def made() -> Contention:
    estimator = Contention(gpu_samples.MODEL, gpu_samples.UNITS)
    estimator.fit(*rows(SAMPLES))
    return estimator


@pytest.fixture(scope="module")
def tables(made: Contention) -> Tables:
    return compiled(made)


def published(load: Any) -> list[Truth]:
    try:
        data_folder()
    except UsageError as error:
        pytest.skip(str(error))
    found: list[Truth] = load()
    return found


# ---- what it learns


def test_shapes_and_mixes_it_never_saw(made: Contention) -> None:
    points = fresh(1)
    found = errors(truth(points), made.predict(matrix(points)))
    assert found.median_ape < 0.03
    assert found.p95_ape < 0.15


def test_the_bound_covers_single_runs_that_it_never_saw(made: Contention) -> None:
    points = [point for point in fresh(2) if point.alone]
    noisy = truth(points) * np.exp(0.01 * np.random.default_rng(3).standard_normal(len(points)))
    found = bound(noisy, made.predict_upper(matrix(points)))
    assert found.coverage > 0.95
    assert found.mean_excess < 0.15


@pytest.mark.slow
def test_a_wider_coverage_never_lowers_the_bound() -> None:
    X, y = rows(SAMPLES[::4])  # noqa: N806
    points = matrix(fresh(4, 10))
    low, high = (Contention(gpu_samples.MODEL, 132, coverage=c).fit(X, y).predict_upper(points) for c in (0.6, 0.99))
    assert (low <= high * (1 + 1e-12)).all()


def test_its_three_terms_multiply(made: Contention) -> None:
    X = matrix(fresh(5, 10))  # noqa: N806
    whole = X.copy()
    whole[:, UNITS:] = 0.0
    whole[:, UNITS] = 132
    terms = made.predict(whole) * made.scaling(X) * made.slowdown(X)
    assert terms == pytest.approx(made.predict(X), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(shape=PREFILLS | STEPS, units=st.lists(st.integers(8, 132), min_size=2, max_size=4, unique=True))
def test_more_units_never_make_a_forward_slower(made: Contention, shape: Shape, units: list[int]) -> None:
    seconds = made.predict(matrix([Point(shape, count) for count in sorted(units)]))
    assert (np.diff(seconds) <= 1e-12).all()


@settings(max_examples=25, deadline=None)
@given(prefill=PREFILLS, step=STEPS, units=st.sampled_from(COUNTS[:-1]))
def test_a_neighbour_never_makes_a_forward_faster(made: Contention, prefill: Shape, step: Shape, units: int) -> None:
    beside = [Point(prefill, units, step, 132 - units), Point(step, units, prefill, 132 - units)]
    assert (made.slowdown(matrix(beside)) >= 1.0).all()


def test_equal_rows_are_repeats_and_an_outlier_among_them_moves_nothing() -> None:
    X, y = rows(SAMPLES)  # noqa: N806
    calm = Contention(gpu_samples.MODEL, 132).fit(X, y)
    order = np.sort(y.reshape(-1, 3), axis=1)
    order[:, 2] *= 3.0
    shaken = Contention(gpu_samples.MODEL, 132).fit(X, order.reshape(-1))
    # Not exactly: of the anchor, measured many times, a third was made larger, which moves its median a little.
    assert shaken.predict(X) == pytest.approx(calm.predict(X), rel=2e-3)


def test_a_contender_counts_by_what_it_asks_for() -> None:
    step = Shape.decode(32, 32 * 2048)
    asked = np.linspace(0.0, 2e12, 12)
    points = [Point(step, 48, neighbour_units=84, contender=Pressure("stream", bytes_s=b)) for b in asked]
    extra = [Sample(p, (0.02 * (1.0 + b / 4e12),)) for p, b in zip(points, asked, strict=True)]
    measured = [*SAMPLES, Sample(Point(step, 48), (0.02,)), *extra]
    made = Contention(gpu_samples.MODEL, 132).fit(matrix(s.point for s in measured), targets(measured))
    slower = made.slowdown(matrix([points[1], points[-2]]))
    assert slower[0] < slower[1]


def test_a_hybrid_step_is_both_parts_in_turn_until_one_was_measured(made: Contention) -> None:
    prefill, step = Shape.prefill([(512, 0)]), Shape.decode(16, 16 * 512)
    parts = made.predict(matrix([Point(prefill, 132), Point(step, 132)]))
    assert made.predict(matrix([Point(prefill.join(step), 132)])) == pytest.approx([parts.sum()])


@pytest.mark.parametrize(("wide", "count"), [(150, 16), (10, 40)])
def test_a_hybrid_step_of_many_sequences_is_not_shorter_than_its_parts_though_few_were_measured(
    wide: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "_WIDE", wide)
    rng = np.random.default_rng(0)
    measured = [sample for sample in SAMPLES if sample.point.alone]
    for new, few, each in np.exp2(rng.uniform([4, 0, 6], [9, 4, 13], (count, 3))).astype(int).tolist():
        seen = Point(Shape.prefill([(new, 0)]).join(Shape.decode(few, few * each)), 132)
        measured.append(Sample(seen, (float(truth([seen])[0]) * float(np.exp(rng.normal(0.0, 0.01))),)))
    made = Alone(gpu_samples.MODEL, 132).fit(matrix(s.point for s in measured), targets(measured))
    for new, many in itertools.product((16, 256, 2048), (64, 128)):
        prefill, step = Shape.prefill([(new, 0)]), Shape.decode(many, many * 1024)
        point = Point(prefill.join(step), 132)
        parts, _ = made.predict(matrix([Point(prefill, 132), Point(step, 132)]))
        (said,), _ = made.predict(matrix([point]))
        (tabulated,), _ = made.hybrid_.joined(parts[None], np.array([132.0]))
        assert min(said, tabulated) >= parts.max() - 1e-9
        assert said == pytest.approx(float(np.log(truth([point])[0])), abs=0.3)


def test_what_was_never_measured_is_refused_in_words() -> None:
    alone = [s for s in SAMPLES if s.point.alone and s.point.shape.prefill_tokens]
    made = Contention(gpu_samples.MODEL, 132).fit(*rows(alone))
    with pytest.raises(ValueError, match="no decode step was measured alone"):
        made.predict(matrix([Point(Shape.decode(4, 400), 48)]))
    with pytest.raises(ValueError, match="no forward was measured alone"):
        Contention(gpu_samples.MODEL, 132).fit(*rows([s for s in SAMPLES if not s.point.alone]))


def test_doubt_is_larger_where_nothing_was_measured() -> None:
    near = [s for s in SAMPLES if s.point.shape.decode_batch == 0 and s.point.shape.prefill_tokens < 1024]
    steps = [s for s in SAMPLES if s.point.shape.decode_batch and s.point.alone]
    far, known = Point(Shape.prefill([(8192, 8000)]), 48), near[0].point
    unsure = Doubt(gpu_samples.MODEL, 132)([*near, *steps], [replace(known, neighbour=Shape(), neighbour_units=0), far])
    assert unsure[0] < unsure[1]
    assert Doubt(gpu_samples.MODEL, 132)([], [known, far]).tolist() == [1.0, 1.0]


# ---- published measurements


def test_published_sm_scaling_with_sm_counts_and_shapes_held_out() -> None:
    ours, theirs = [], {name: [] for name in PUBLISHED}
    for one in published(sm_scaling):
        if one.name.split("/")[1] not in ("A100_8B", "H800"):
            continue
        counts, shapes = np.unique(one.X[:, UNITS]), groups(one.X, SHAPE)
        left = np.random.default_rng(0).permutation(shapes.max() + 1)[: (shapes.max() + 1) // 4]
        counted, shaped = np.isin(one.X[:, UNITS], counts[2:-1:3]), np.isin(shapes, left)
        train, test = ~counted & ~shaped, counted & shaped
        for off, estimator in [(ours, Contention), *((theirs[n], form) for n, form in PUBLISHED.items())]:
            fit = estimator(one.model, one.units).fit(one.X[train], one.y[train])
            off.append(np.abs(fit.predict(one.X[test]) / one.y[test] - 1.0))
    off = np.concatenate(ours)
    assert np.median(off) < 0.03
    for name in PUBLISHED:
        other = np.concatenate(theirs[name])
        assert np.median(off) < np.median(other), name
        assert np.percentile(off, 95) < np.percentile(other, 95), name


def test_published_mixed_batches_held_out_by_shape() -> None:
    one = next(t for t in published(rtx4090) if t.family == "rtx4090-forward")
    chosen = np.random.default_rng(0).permutation(len(one.y))[:200]
    X, y, kinds = one.X[chosen], one.y[chosen], groups(one.X[chosen], SHAPE)  # noqa: N806
    folds = {"groups": kinds, "cv": GroupKFold(5)}
    ours = errors(y, cross_val_predict(Contention(one.model, one.units), X, y, **folds))
    for name, form in PUBLISHED.items():
        other = errors(y, cross_val_predict(form(one.model, one.units), X, y, **folds))
        assert (ours.median_ape, ours.p95_ape) < (other.median_ape, other.p95_ape), name


# ---- compiled tables


def test_tables_say_what_the_estimator_says(made: Contention, tables: Tables) -> None:
    points = fresh(6)
    seconds = [
        tables.seconds(p.shape, p.units) * tables.contention(p.shape, p.units, p.neighbour, p.neighbour_units)
        for p in points
    ]
    found = errors(made.predict(matrix(points)), np.array(seconds))
    assert found.median_ape < 0.005
    assert found.max_ape < 0.04


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("chunk", [(2, 700), (40, 0), (300, 1000)])
def test_tables_tell_packed_prompts_from_one(
    made: Contention, tables: Tables, chunk: tuple[int, int], count: int
) -> None:
    packed = Shape.prefill([chunk] * count)
    assert tables.seconds(packed, 48) == pytest.approx(made.predict(matrix([Point(packed, 48)]))[0], rel=0.02)


def test_tables_keep_the_bound(made: Contention, tables: Tables) -> None:
    points = fresh(7)
    upper = np.array(
        [
            tables.seconds(p.shape, p.units)
            * tables.contention(p.shape, p.units, p.neighbour, p.neighbour_units)
            * np.exp(tables.margin(p.shape, beside=not p.alone))
            for p in points
        ]
    )
    found = bound(truth(points), upper)
    assert found.coverage > 0.95
    assert found.mean_excess < 0.25


@settings(max_examples=50, deadline=None)
@given(shape=PREFILLS | STEPS, units=st.lists(st.integers(1, 132), min_size=2, max_size=2, unique=True))
def test_tables_too_never_grow_with_units(tables: Tables, shape: Shape, units: list[int]) -> None:
    few, many = sorted(units)
    assert tables.seconds(shape, many) <= tables.seconds(shape, few) * (1 + 1e-6)


def test_tables_survive_being_plain_arrays(tables: Tables) -> None:
    again = Tables.from_arrays({name: values.copy() for name, values in tables.arrays().items()})
    step = Shape.decode(8, 8000)
    assert again.seconds(step, 48) == tables.seconds(step, 48)
    assert sum(values.nbytes for values in tables.arrays().values()) < 2_000_000


@pytest.mark.parametrize("name", ["units", "prefill", "hybrid_axes", "beside_margin", "decode_margin"])
def test_tables_with_a_part_missing_or_cut_are_refused(tables: Tables, name: str) -> None:
    arrays = tables.arrays()
    with pytest.raises(UsageError, match="run smpart fit again"):
        Tables.from_arrays({other: values for other, values in arrays.items() if other != name})
    if arrays[name].ndim > 1 and not name.endswith("axes"):
        with pytest.raises(UsageError, match="run smpart fit again"):
            Tables.from_arrays({**arrays, name: arrays[name][:, :-1]})


# ---- scikit-learn's own checks


class AnyContention(AnyColumns, Contention):
    pass


@parametrize_with_checks([AnyContention(gpu_samples.MODEL, 8)])
def test_scikit_learns_checks(estimator: LatencyEstimator, check: Any) -> None:
    check(estimator)


# ---- the machine's pace


@pytest.mark.slow
def test_a_known_pace_is_taken_out_of_expected_times_and_left_in_the_bound() -> None:
    rng = np.random.default_rng(8)
    X, y = rows(SAMPLES)  # noqa: N806
    slow = np.exp(0.2 * rng.standard_normal(len(y)))
    knowing = Contention(gpu_samples.MODEL, 132).fit(X, y * slow, pace=slow)
    calm = Contention(gpu_samples.MODEL, 132).fit(X, y)
    assert knowing.predict(X) == pytest.approx(calm.predict(X), rel=1e-6)
    assert bound(y * slow, knowing.predict_upper(X)).coverage > 0.97
    assert bound(y * slow, calm.predict_upper(X)).coverage < 0.9
