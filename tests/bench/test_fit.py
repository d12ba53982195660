from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gpu_samples
import numpy as np
import pytest
from gpu_samples import DEVICE, MODEL, UNITS

from smpart.bench.fit import Fitted, fit_folder, last_fit
from smpart.bench.fit_table import lines, table
from smpart.bench.heldout import Held, Measured, accuracy, bound_of, fit, held_out, trials
from smpart.bench.judgement import OURS, Judgement
from smpart.bench.noise import repeat_noise, tightest_bound
from smpart.errors import SmpartError, UsageError
from smpart.partition import Shape
from smpart.predictor.artefact import Artefact, find
from smpart.predictor.estimators.base import SHAPE, Floats, LatencyEstimator
from smpart.predictor.tables import Tables
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.sample import Point, Pressure, Sample
from smpart.profiler.store import Store

SOLO, CORUN = Shape.prefill([(100, 0)]), Shape.decode(4, 400)


class Memory(LatencyEstimator):
    """Knows the shapes it was fitted to by heart, whatever runs beside them, and guesses 1 s for all others."""

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        self.known_ = {tuple(row): seconds for row, seconds in zip(X[:, SHAPE].tolist(), y.tolist(), strict=True)}

    def _predict(self, X: Floats) -> Floats:  # noqa: N803
        return np.array([self.known_.get(tuple(row), 1.0) for row in X[:, SHAPE].tolist()])


class Bounded(Memory):
    """Its bound is twice what it expects; keeps how many rows it was fitted to."""

    def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
        super()._fit(X, y)
        self.rows_ = len(y)

    def predict_upper(self, X: Floats) -> Floats:  # noqa: N803
        return 2.0 * self.predict(X)


def sample(point: Point, *seconds: float, stage: str = "fill") -> Sample:
    return Sample(point, seconds, stage=stage)


def shapes(count: int) -> list[Shape]:
    return [Shape.decode(1 + n, 100 * (1 + n)) for n in range(count)]


def test_a_point_measured_several_times_counts_once() -> None:
    anchor, other = Point(SOLO, 4), Point(CORUN, 4)
    measured = Measured.of([sample(anchor, 1.0, 2.0), sample(other, 5.0), sample(anchor, 3.0, stage="anchor")])
    assert measured.points == [anchor, other] and measured.repeats == [(1.0, 2.0, 3.0), (5.0,)]
    assert measured.seconds.tolist() == [2.0, 5.0]
    assert measured.repeat_seconds.tolist() == [1.0, 2.0, 3.0, 5.0] and measured.repeat_rows.tolist() == [0, 0, 0, 1]


def test_solo_is_held_out_by_shape_whatever_units_and_neighbours() -> None:
    points = [Point(s, u) for s in shapes(7) for u in (1, 2)] + [Point(s, 1, SOLO, 3) for s in shapes(7)]
    measured = Measured.of([sample(p, 1.0) for p in points])
    predicted: list[int] = []
    for train, test in measured.folds("solo"):
        assert not {points[r].shape for r in train} & {points[r].shape for r in test}
        assert all(points[r].alone for r in test)
        held = {points[r].shape for r in test}
        assert {points[r].shape for r in train} == set(shapes(7)) - held
        predicted += test.tolist()
    assert sorted(predicted) == list(range(14))


def test_corun_is_held_out_by_the_pair_whichever_is_timed_and_fitted_with_all_else() -> None:
    rows, prompts = shapes(4), [Shape.prefill([(64 << n, 0)]) for n in range(3)]
    pairs = [(a, b) for a in rows for b in prompts]
    points = [Point(a, 1, b, 3) for a, b in pairs] + [Point(b, 2, a, 2) for a, b in pairs] + [Point(a, 1) for a in rows]
    contenders = [
        Point(a, 1, neighbour_units=3, contender=Pressure("copy", speed)) for a in rows for speed in (1e9, 2e9)
    ]
    measured = Measured.of([sample(p, 1.0) for p in [*points, *contenders]])

    def mix(row: int) -> frozenset[object]:
        point = measured.points[row]
        return frozenset((point.shape, point.contender.kind or point.neighbour))

    predicted: list[int] = []
    for train, test in measured.folds("corun"):
        left_out = {mix(r) for r in test}
        assert {r for r in range(len(measured.points)) if mix(r) not in left_out} == set(train.tolist())
        assert {r for r, p in enumerate(measured.points) if p.alone} <= set(train.tolist())
        predicted += test.tolist()
    assert sorted(predicted) == [r for r, p in enumerate(measured.points) if not p.alone]


def test_scaling_leaves_out_a_number_of_units() -> None:
    measured = Measured.of([sample(Point(s, u), 1.0) for s in shapes(3) for u in (1, 2, 4)])
    found = [{measured.points[r].units for r in test} for _, test in measured.folds("scaling")]
    assert sorted(found, key=min) == [{1}, {2}, {4}]


def test_what_cannot_be_tested_is_a_reason_in_words() -> None:
    measured = Measured.of([sample(Point(SOLO, u), 1.0) for u in (1, 2)])
    found = trials(Memory(MODEL, UNITS), measured)
    assert "1 of the 2 different shapes" in found["solo"]
    assert "beside a neighbour: 0 of the 2 different load mixes" in found["corun"]
    assert "2 of the 3 different numbers of units" in found["scaling"]


def test_an_estimator_that_cannot_be_fitted_is_a_reason_too() -> None:
    class Picky(Memory):
        def _fit(self, X: Floats, y: Floats) -> None:  # noqa: N803
            raise ValueError("not\nenough")

    measured = Measured.of([sample(Point(s, 1), 1.0) for s in shapes(3)])
    assert trials(Picky(MODEL, UNITS), measured, ["solo"])["solo"] == "not enough"


def test_figures_are_those_of_points_never_seen() -> None:
    """One who knows all by heart is right about everything but what was left out: there it guesses 1 s."""
    seconds = np.array([0.5, 2.0, 4.0, 1.25, 0.8])
    measured = Measured.of([sample(Point(s, 1), t) for s, t in zip(shapes(5), seconds.tolist(), strict=True)])
    held = held_out(Memory(MODEL, UNITS), measured, "solo")
    off = np.abs(1.0 / seconds - 1.0)
    found = accuracy(measured, held)
    assert (found.median_ape, found.max_ape, found.cases) == (np.median(off), off.max(), 5)
    assert found.p95_ape == pytest.approx(np.percentile(off, 95), abs=1e-6)
    assert bound_of(measured, [held]) is None


def test_bounds_are_judged_on_every_single_repeat() -> None:
    repeats = [(1.0, 1.9, 2.5), (0.5, 1.0, 4.0), (2.0, 1.0)]
    measured = Measured.of([sample(Point(s, 1), *r) for s, r in zip(shapes(3), repeats, strict=True)])
    found = bound_of(measured, [held_out(Bounded(MODEL, UNITS), measured, "solo")])
    assert found is not None and found.coverage == pytest.approx((2 / 3 + 2 / 3 + 1) / 3, abs=1e-6)
    assert found.mean_excess == pytest.approx(np.mean([np.mean(2.0 / np.array(r) - 1.0) for r in repeats]), abs=1e-6)


def test_only_those_with_bounds_are_fitted_to_single_repeats() -> None:
    measured = Measured.of([sample(Point(s, 1), 1.0, 2.0, 9.0) for s in shapes(2)])
    plain = fit(Memory(MODEL, UNITS), measured, np.array([1]))
    bounded = fit(Bounded(MODEL, UNITS), measured, np.array([1]))
    assert isinstance(plain, Memory) and list(plain.known_.values()) == [2.0]
    assert isinstance(bounded, Bounded) and bounded.rows_ == 3


def test_noise_of_repeats_and_of_anchors() -> None:
    alone, beside = Point(SOLO, 1), Point(SOLO, 1, CORUN, 3)
    found = repeat_noise([sample(alone, 0.9, 1.0, 1.3), sample(beside, 2.0, 2.2), sample(alone, 1.2)])
    assert found["solo"] == pytest.approx(0.1)  # deviations 0.1, 0, 0.3; the single one says nothing
    assert found["corun"] == pytest.approx(0.1 / 2.1, abs=1e-6)
    assert found["anchors"] == {"solo": pytest.approx(0.1 / 1.1, abs=1e-6), "corun": None}
    assert repeat_noise([sample(alone, 1.0)])["solo"] is None


def test_the_tightest_bound_is_the_machines_own() -> None:
    point = Point(SOLO, 1)
    steady, once = sample(Point(SOLO, 2), *[2.0] * 99, 3.0), sample(Point(CORUN, 1), 5.0)
    assert repeat_noise([once])["bound"] == {"solo": None, "corun": None}
    assert tightest_bound([steady]) == pytest.approx((2 / 3 - 1) / 100, abs=1e-6)
    assert tightest_bound([steady], 1.0) == pytest.approx((99 * 0.5 + 0.0) / 100, abs=1e-6)
    ratios = np.array([0.9, 1.0, 1.5])
    pooled = [sample(point, 0.9, 1.0), sample(point, 1.5), once]
    assert tightest_bound(pooled) == pytest.approx(np.mean(1.5 / ratios) - 1.0, abs=1e-6)


def test_a_judgement_reads_back_and_refuses_other_samples(tmp_path: Path) -> None:
    measured = Measured.of([sample(Point(s, 1), 1.0 + s.decode_batch) for s in shapes(4)])
    made = Judgement.of(measured, {OURS: Memory(MODEL, UNITS), "other": Bounded(MODEL, UNITS)})
    made.save(tmp_path)
    back = Judgement.load(tmp_path, measured)
    assert list(back.trials) == [OURS, "other"] and back.reasons(OURS) == made.reasons(OURS)
    for name in back.trials:
        mine, theirs = made.held(name, "solo"), back.held(name, "solo")
        assert isinstance(mine, Held) and isinstance(theirs, Held)
        for one, two in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(one, two)
    others = Measured.of([sample(Point(s, 1), 2.0 + s.decode_batch) for s in shapes(4)])
    with pytest.raises(UsageError, match="other samples"):
        Judgement.load(tmp_path, others)
    (tmp_path / "heldout.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match="run smpart fit"):
        Judgement.load(tmp_path, measured)


def test_the_report_has_the_keys_and_they_agree_with_the_predictions(fitted: tuple[Path, Fitted]) -> None:
    folder, made = fitted
    report = json.loads((folder / "fit.json").read_text())
    assert report == made.report
    assert {
        "schema",
        "command",
        "host",
        "solo",
        "corun",
        "bound",
        "repeat_noise",
        "samples",
        "minutes",
    } <= report.keys()
    assert (report["schema"], report["command"], report["minutes"]) == (1, "fit", 3.0)
    assert set(report["baselines"]) == {"muxwise", "bullet", "nexus", "semipd"}
    for figures in (report, *report["baselines"].values()):
        for test in ("solo", "corun"):
            assert {"median_ape", "p95_ape", "max_ape"} <= figures[test].keys()
    measured = made.judgement.measured
    for test in ("solo", "corun"):
        held = made.judgement.held(OURS, test)
        assert held is not None
        rows = [r for r, p in enumerate(measured.points) if p.alone == (test == "solo")]
        off = np.abs(held.predicted[rows] / measured.seconds[rows] - 1.0)
        assert report[test]["median_ape"] == pytest.approx(np.median(off), abs=1e-6)
        assert report[test]["cases"] == len(rows)
        single = np.array([s for r in rows for s in measured.repeats[r]])
        upper = np.array([held.upper[r] for r in rows for _ in measured.repeats[r]])
        shares = np.array([1.0 / len(measured.repeats[r]) for r in rows for _ in measured.repeats[r]])
        covered = np.average(single <= upper, weights=shares)
        assert report["bound"][test]["coverage"] == pytest.approx(covered, abs=1e-6)


def test_a_fit_for_a_study_is_installed_for_nobody(
    fitted: tuple[Path, Fitted], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "profile"
    shutil.copytree(fitted[0], folder)
    fit_folder(folder, published={}, install=False)
    assert find(Fingerprint.of("sim:h100", DEVICE, MODEL, "bfloat16")) is None
    fit_folder(folder, published={})
    assert find(Fingerprint.of("sim:h100", DEVICE, MODEL, "bfloat16")) is not None


def test_the_artefact_predicts_and_is_found_again(fitted: tuple[Path, Fitted], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, made = fitted
    monkeypatch.setenv("SMPART_CACHE", str(folder.parent / "cache"))
    loaded = Artefact.load(folder)
    assert made.report["artefact"] == str(folder / "artefact.safetensors")
    assert loaded.report["solo"] == made.report["solo"]
    installed = find(Fingerprint.of("sim:h100", DEVICE, MODEL, "bfloat16"))
    assert installed is not None and installed.arrays.keys() == loaded.arrays.keys()
    tables = Tables.from_arrays(loaded.arrays)
    measured = made.judgement.measured
    off = [
        tables.seconds(p.shape, p.units) / s - 1.0
        for p, s in zip(measured.points, measured.seconds.tolist(), strict=True)
        if p.alone
    ]
    assert np.median(np.abs(off)) < 0.05  # the noise of the samples is 1 %


def test_a_fit_of_fewer_samples_is_no_fit(fitted: tuple[Path, Fitted]) -> None:
    folder, made = fitted
    assert last_fit(folder, made.samples) == made.report
    assert last_fit(folder, [*made.samples, made.samples[0]]) is None
    assert last_fit(folder / "samples", made.samples) is None


def test_what_a_person_reads(fitted: tuple[Path, Fitted]) -> None:
    report = fitted[1].report
    assert table(report).row_count == 3 * 5 + 2
    assert any("artefact" in line for line in lines(report))
    poorer = {**report, "corun": None, "bound": None, "reasons": {"corun": "no neighbour"}}
    assert any("no figures (no neighbour)" in line for line in lines(poorer)) and table(poorer).row_count == 17


def test_without_co_runs_their_figures_are_null_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("smpart.bench.heldout.FOLDS", 2)
    folder = gpu_samples.write(tmp_path / "profile", gpu_samples.samples(5, beside=False))
    report: Any = fit_folder(folder, published={}).report
    assert report["corun"] is None and "load mixes" in report["reasons"]["corun"]
    assert report["solo"]["cases"] > 0 and report["bound"]["corun"] is None and report["baselines"] == {}


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_too_few_samples_or_one_phase_are_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    prefills = [s for s in gpu_samples.samples(6, beside=False) if s.point.shape.prefill_tokens][:kept]
    folder = gpu_samples.write(tmp_path / "profile", prefills)
    with pytest.raises(UsageError, match="too few to fit" if kept else "no samples yet"):
        fit_folder(folder)
    assert not (folder / "fit.json").exists()


def test_a_cache_that_cannot_be_written_costs_only_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("smpart.bench.heldout.FOLDS", 2)
    folder = gpu_samples.write(tmp_path / "profile", gpu_samples.samples(5, beside=False))
    assert fit_folder(folder, published={}).artefact.source == folder / "artefact.safetensors"
    assert "not installed" in caplog.text


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("smpart.bench.heldout.FOLDS", 2)
    folder = gpu_samples.write(tmp_path / "profile", gpu_samples.samples(5, beside=False))
    (folder / "heldout.parquet").mkdir()
    with pytest.raises(SmpartError, match="the fit cannot be written"):
        fit_folder(folder, published={})


def test_one_fit_or_profile_at_a_time(fitted: tuple[Path, Fitted]) -> None:
    folder, made = fitted
    before = (folder / "fit.json").read_bytes()
    with Store.create(folder, Store.open(folder).fingerprint), pytest.raises(UsageError, match="another process"):
        fit_folder(folder)
    with Store.open(folder).alone():
        for other in (lambda: fit_folder(folder), lambda: Store.create(folder, Store.open(folder).fingerprint)):
            with pytest.raises(UsageError, match=f"{folder}: another process is writing here"):
                other()
    assert (folder / "fit.json").read_bytes() == before and last_fit(folder, made.samples) is not None


def test_the_store_is_left_as_it_was(fitted: tuple[Path, Fitted]) -> None:
    assert Store.open(fitted[0]).samples() == list(fitted[1].samples)
