"""A sweep on lanes of every kind: measures the truth, within its time, and loses nothing that was whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from toy_sweep import SPLITS, Troubled, cost, experiments, run, sim_lanes, store, sweep, thread_lanes, truth

from smpart.errors import SmpartError
from smpart.profiler.rounds import ROUNDS
from smpart.profiler.sample import Point, Sample
from smpart.profiler.store import Store
from smpart.profiler.sweep import BATCH_S


def test_in_virtual_time_every_sample_is_the_truth(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        run(sweep(sim_lanes(), kept, 60.0))
        samples = kept.samples()
        assert 60.0 <= 60 * kept.minutes < 60.0 + BATCH_S
    for sample in samples:
        assert sample.seconds == pytest.approx([truth(sample.point)] * len(sample.seconds), rel=1e-9)
        assert len(sample.seconds) >= 2 and sample.disturbed == 0
    measured = experiments(samples)
    assert len(measured) > 60 and len(set(measured)) == len(measured)
    assert {point.units for point in measured} == {1, 2, 3, 4}
    assert {point.shape.hybrid for point in measured} == {True, False}
    beside = [point for point in measured if not point.alone]
    assert {point.neighbour_units for point in beside} == {1, 2, 3}
    anchors = [sample for sample in samples if sample.stage == "anchor"]
    assert len({sample.point for sample in anchors}) == 2 and len(anchors) >= 10


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        run(sweep(sim_lanes(), kept, 20.0))
        before, minutes = kept.samples(), kept.minutes
    with store(tmp_path) as kept:
        assert run(sweep(sim_lanes(), kept, 20.0)) == []
        run(sweep(sim_lanes(), kept, 45.0))
        after = kept.samples()
        assert kept.minutes > minutes
    assert after[: len(before)] == before and len(after) > len(before)
    measured = experiments(after)
    assert len(set(measured)) == len(measured)


def test_progress_tells_the_time_left_and_the_noise(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        progress = list(sweep(sim_lanes(), kept, 30.0).run())
        assert progress[-1].points == len(kept.samples())
    left = [each.left_s for each in progress]
    assert left == sorted(left, reverse=True) and left[-1] == 0.0
    assert all(each.spent_s + each.left_s == pytest.approx(30.0) for each in progress[:-1])
    assert max(each.noise for each in progress) < 1e-9 and {each.suspect for each in progress} == {0.0}


def test_an_interrupt_keeps_what_is_whole(tmp_path: Path) -> None:
    lanes = Troubled(sim_lanes())
    lanes.interrupt = 2000
    with store(tmp_path) as kept:
        made = sweep(lanes, kept, 1e4)  # type: ignore[arg-type]
        with pytest.raises(KeyboardInterrupt):
            run(made)
        spent = 60 * kept.minutes
    reopened = Store.open(tmp_path)
    samples = reopened.samples()
    assert samples and spent == pytest.approx(lanes.now(), rel=0.05)  # type: ignore[operator]
    for sample in samples:
        assert sample.seconds == pytest.approx([truth(sample.point)] * len(sample.seconds), rel=1e-9)


def test_a_worker_that_dies_costs_time_only(tmp_path: Path) -> None:
    lanes = Troubled(sim_lanes())
    lanes.lose = {50, 700, 1400}
    with store(tmp_path) as kept:
        run(sweep(lanes, kept, 40.0))  # type: ignore[arg-type]
        assert not lanes.lose and len(kept.samples()) > 30
        for sample in kept.samples():
            assert sample.seconds == pytest.approx([truth(sample.point)] * len(sample.seconds), rel=1e-9)


def test_workers_that_keep_dying_end_it_in_one_line(tmp_path: Path) -> None:
    lanes = Troubled(sim_lanes())
    lanes.lose = set(range(300, 330))
    with store(tmp_path) as kept, pytest.raises(SmpartError, match=r"^workers keep dying .*the worker ended"):
        run(sweep(lanes, kept, 60.0))  # type: ignore[arg-type]


def test_half_way_the_model_is_asked(tmp_path: Path) -> None:
    asked: list[tuple[int, int]] = []

    def doubt(samples: Sequence[Sample], points: Sequence[Point]) -> np.ndarray:
        asked.append((len(samples), len(points)))
        return np.array([1.0 + point.shape.decode_batch for point in points])

    with store(tmp_path) as kept:
        stages = run(sweep(sim_lanes(), kept, 30.0, doubt=doubt))
        samples = kept.samples()
    assert stages == sorted(stages, key=["fill", "active"].index) and {"fill", "active"} == set(stages)
    assert asked and all(samples and points > 20 for samples, points in asked)
    assert len(asked) <= 10
    active = [sample.point for sample in samples if sample.stage == "active"]
    filled = [sample.point for sample in samples if sample.stage == "fill"]
    assert len(set(active) & set(filled)) <= 2  # of a pair one side may be new and the other not

    def rows(points: Sequence[Point]) -> float:
        return float(np.mean([point.shape.decode_batch for point in points if point.shape.decode_batch]))

    assert rows(active) > rows(filled)


class Loud:
    """A witness that objects to some of what it is asked about."""

    def __init__(self, every: int) -> None:
        self.every, self.asked = every, 0

    def mark(self) -> None:
        pass

    def objection(self, since: None) -> str | None:
        self.asked += 1
        return "a neighbour" if self.asked % self.every == 0 else None


def test_disturbed_repeats_are_thrown_away_and_made_again(tmp_path: Path) -> None:
    with store(tmp_path / "quiet") as quiet, store(tmp_path / "loud") as loud:
        run(sweep(sim_lanes(), quiet, 30.0))
        run(sweep(sim_lanes(), loud, 30.0, witness=Loud(9)))
        samples = loud.samples()
        assert sum(sample.disturbed for sample in samples) > 0
        repeats = {sample.point: len(sample.seconds) for sample in quiet.samples()}
        for sample in samples[:20]:
            if sample.stage != "anchor" and sample.disturbed:
                assert len(sample.seconds) >= repeats[sample.point] / ROUNDS
        assert len(samples) < len(quiet.samples())


def test_where_it_is_never_quiet_it_goes_on_all_the_same(tmp_path: Path) -> None:
    with store(tmp_path / "quiet") as quiet, store(tmp_path / "loud") as loud:
        run(sweep(sim_lanes(), quiet, 30.0))
        progress = list(sweep(sim_lanes(), loud, 30.0, witness=Loud(1)).run())
        assert progress[-1].suspect == 1.0
        assert len(loud.samples()) > 0.6 * len(quiet.samples())


def test_a_guess_that_is_far_off_does_no_harm(tmp_path: Path) -> None:
    for name, factor in (("fast", 0.05), ("slow", 20.0)):
        with store(tmp_path / name) as kept:
            expected = lambda shape, units, beside, by=factor: by * cost(shape, units, beside, 0)  # noqa: E731
            run(sweep(sim_lanes(), kept, 40.0, expected=expected))
            assert 40.0 <= 60 * kept.minutes < 40.0 + 3 * BATCH_S
            assert len(experiments(kept.samples())) > 30


def test_one_unit_is_measured_alone(tmp_path: Path) -> None:
    with store(tmp_path) as kept:
        run(sweep(sim_lanes((SPLITS[0], SPLITS[-1])), kept, 10.0))
        assert all(sample.point.alone for sample in kept.samples())


def test_on_threads_in_real_time(tmp_path: Path) -> None:
    lanes = thread_lanes()
    try:
        with store(tmp_path) as kept:
            run(sweep(lanes, kept, 3.0))
            samples = kept.samples()
    finally:
        lanes.close()
    assert any(not sample.point.alone for sample in samples) and any(sample.point.alone for sample in samples)
    for sample in samples:
        assert sample.median >= 1e-3 + 1e-5 * sample.point.shape.tokens
