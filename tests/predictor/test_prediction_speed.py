"""What asking, learning and loading cost with a profile of an H100; nothing is asserted on time."""

from __future__ import annotations

from pathlib import Path

import pytest
from profiled import artefact, tables
from pytest_benchmark.fixture import BenchmarkFixture

from smpart.partition import Shape
from smpart.partition.registry import open_backend
from smpart.predictor import NOTHING, OnlinePredictor
from smpart.predictor.artefact import Artefact
from smpart.predictor.tables import Tables
from smpart.profiler.fingerprint import Fingerprint
from smpart.sim.models import MODELS

BACKEND, MODEL = open_backend("sim:h100"), MODELS["llama-3.1-8b"]
SPLITS = tuple(split for split in BACKEND.splits() if not split.exclusive)
STEP, HEAD = Shape.decode(64, 64 * 900), Shape.prefill([(1500, 0)])


@pytest.fixture(scope="module")
def made() -> Tables:
    return tables(MODEL, BACKEND.device(), sorted({u for s in BACKEND.splits() for u in (s.prefill, s.decode)} - {0}))


@pytest.fixture
def predictor(made: Tables) -> OnlinePredictor:
    learnt = OnlinePredictor(made, profiled=True)
    for split in SPLITS:
        for _ in range(40):
            learnt.observe(STEP, split.decode, HEAD, 1.0, 1.02 * learnt.predict(STEP, split.decode, HEAD).mean)
            learnt.observe(HEAD, split.prefill, STEP, 1.0, 1.02 * learnt.predict(HEAD, split.prefill, STEP).mean)
            learnt.observe(STEP, split.decode, NOTHING, 1.0, 0.98 * learnt.predict(STEP, split.decode).mean)
            learnt.observe(HEAD, split.prefill, NOTHING, 1.0, 0.98 * learnt.predict(HEAD, split.prefill).mean)
    return learnt


def test_a_step_alone(benchmark: BenchmarkFixture, predictor: OnlinePredictor) -> None:
    assert benchmark(predictor.predict, STEP, 64).mean > 0


def test_a_prefill_alone(benchmark: BenchmarkFixture, predictor: OnlinePredictor) -> None:
    assert benchmark(predictor.predict, HEAD, 64).mean > 0


def test_a_step_beside_a_prefill(benchmark: BenchmarkFixture, predictor: OnlinePredictor) -> None:
    assert benchmark(predictor.predict, STEP, 64, HEAD).mean > 0


def test_a_hybrid_step(benchmark: BenchmarkFixture, predictor: OnlinePredictor) -> None:
    assert benchmark(predictor.predict, STEP.join(HEAD), 132).mean > 0


def test_all_splits_for_one_decision(benchmark: BenchmarkFixture, predictor: OnlinePredictor) -> None:
    sides = benchmark(predictor.predict_splits, STEP, HEAD, SPLITS)
    assert len(sides.step) == len(SPLITS)


@pytest.mark.parametrize("neighbour", [NOTHING, HEAD], ids=["alone", "beside"])
def test_learning_from_a_step(benchmark: BenchmarkFixture, predictor: OnlinePredictor, neighbour: Shape) -> None:
    seconds = predictor.predict(STEP, 64, neighbour).mean
    benchmark(predictor.observe, STEP, 64, neighbour, 1.0, seconds)
    assert predictor.observations


def test_loading_an_artefact(benchmark: BenchmarkFixture, made: Tables, tmp_path: Path) -> None:
    fingerprint = Fingerprint.of(BACKEND.name, BACKEND.device(), MODEL, "bfloat16")
    path = artefact(fingerprint, made).save(tmp_path / "a.safetensors")
    benchmark.extra_info["bytes"] = path.stat().st_size
    loaded = benchmark(lambda: Tables.from_arrays(Artefact.load(path).arrays))
    assert loaded.seconds(STEP, 64) == made.seconds(STEP, 64)
