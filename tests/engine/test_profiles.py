"""Which profile an engine predicts from: found by fingerprint, refused if wrong, checked against the machine."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from profiled import artefact, tables

import smpart
from smpart.engine.deployment import Deployment
from smpart.engine.profiles import Wanted, contradiction
from smpart.errors import UsageError
from smpart.kvcache import KVConfig
from smpart.partition import Shape
from smpart.partition.registry import open_backend
from smpart.predictor import RooflinePrior
from smpart.predictor.artefact import NAME, Artefact, installed
from smpart.predictor.tables import Tables
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.probe import Probe
from smpart.runtime.models import load_model
from smpart.sim.models import MODELS

SIM, SHAPE = open_backend("sim:h100"), MODELS["llama-3.1-8b"]
OURS = Fingerprint.of("sim:h100", SIM.device(), SHAPE, "bfloat16")
TABLES = tables(SHAPE, SIM.device(), (32, 64, 132))
SMALL = KVConfig(blocks=32, max_len=128, max_requests=4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made() -> Artefact:
    return artefact(OURS, TABLES)


def opened(profile: object = "auto", dtype: str = "bfloat16") -> Deployment:
    return Deployment.open("llama-3.1-8b", backend="sim:h100", dtype=dtype, profile=profile)


def test_auto_takes_the_installed_one_and_says_so(made: Artefact, caplog: pytest.LogCaptureFixture) -> None:
    path = made.install()
    with caplog.at_level(logging.INFO, "smpart"), opened() as deployment:
        assert deployment.profile is not None and deployment.profile.source == path
        assert isinstance(deployment.predictor.prior, Tables) and deployment.predictor.profiled
        assert deployment.fingerprint == OURS
        assert deployment.profile_facts is not None and deployment.profile_facts["file"] == str(path)
    assert f"profile auto: {path}, measured 2025" in caplog.text and "median error alone 2.1%" in caplog.text


def test_auto_without_one_says_what_makes_one(made: Artefact, caplog: pytest.LogCaptureFixture) -> None:
    made.install()
    with caplog.at_level(logging.INFO, "smpart"), opened(dtype="float16") as deployment:
        assert deployment.profile is None and deployment.profile_facts is None
        assert isinstance(deployment.predictor.prior, RooflinePrior)
    assert "smpart profile MODEL --backend sim:h100" in caplog.text


def test_auto_goes_on_without_a_damaged_one_and_warns(made: Artefact, caplog: pytest.LogCaptureFixture) -> None:
    path = made.install()
    path.write_bytes(path.read_bytes()[:-1])
    with opened() as deployment:
        assert deployment.profile is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "damaged" in caplog.text


@pytest.mark.parametrize("nothing", ["none", None])
def test_none_looks_for_none(made: Artefact, nothing: str | None) -> None:
    made.install()
    with opened(nothing) as deployment:
        assert deployment.profile is None


def test_a_folder_a_file_or_an_artefact(made: Artefact, tmp_path: Path) -> None:
    path = made.save(tmp_path / "mine" / NAME)
    for profile in (path.parent, str(path.parent), path, made):
        with opened(profile) as deployment:
            assert isinstance(deployment.predictor.prior, Tables)
            assert deployment.predictor.predict(Shape.decode(4, 400), 64).mean == TABLES.seconds(
                Shape.decode(4, 400), 64
            )


def test_a_wrong_one_is_refused(made: Artefact, tmp_path: Path) -> None:
    made.save(tmp_path / NAME)
    with pytest.raises(UsageError, match=r"dtype bfloat16, not float16.*smpart profile"):
        opened(tmp_path, dtype="float16")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="holds no artefact"):
        opened(tmp_path / "empty")
    with pytest.raises(UsageError, match="must be auto, none"):
        opened(3)
    with pytest.raises(UsageError, match="must be auto, none"):
        opened("")


def test_a_core_learns_for_itself(made: Artefact) -> None:
    with opened(made) as deployment:
        first, second = deployment.core("smpart", smpart.SLO()), deployment.core("smpart", smpart.SLO())
        step = Shape.decode(4, 400)
        for _ in range(60):
            first.state.predictor.observe(step, 64, Shape(), 1.0, 5 * TABLES.seconds(step, 64))
        assert first.drifted is not None and "decode alone" in first.drifted
        assert second.drifted is None and deployment.predictor.observations == 0


class Said:
    """A profile that says 10 ms for everything."""

    units = 2

    def __init__(self, margin: float) -> None:
        self.stated = margin

    def seconds(self, shape: Shape, units: int) -> float:
        return 0.01

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        return 1.0

    def margin(self, shape: Shape, beside: bool) -> float:
        return self.stated


@pytest.mark.parametrize(
    ("margin", "took_ms", "stands"),
    [(0.02, (11.0,), True), (0.02, (8.0,), False), (0.02, (13.0,), False), (0.5, (13.0,), True),
     (0.02, (30.0, 10.5, 9.8), True), (0.02, (30.0, 30.0, 10.0), False), (9.0, (29.0,), True), (9.0, (31.0,), False)],
)  # fmt: skip
def test_what_contradicts_a_profile(margin: float, took_ms: tuple[float, ...], stands: bool) -> None:
    probes = [Probe(Shape.decode(3, 30), 2, Shape(), ms / 1e3) for ms in took_ms]
    said = contradiction(Said(margin), probes)
    assert (said is None) == stands
    assert stands or "a decode step of 3 on 2 units takes" in said.words


def test_the_gravest_contradiction_is_told() -> None:
    probes = [Probe(Shape.decode(rows, 30), 2, Shape(), ms / 1e3) for rows, ms in ((1, 14.0), (2, 2.0), (3, 30.0))]
    found = contradiction(Said(0.02), probes)
    assert found.factor == pytest.approx(5.0) and found.grave and "a decode step of 2 on 2 units" in found.words
    assert not contradiction(Said(0.02), probes[:1]).grave


# ---- on the machine itself


@pytest.fixture(scope="module")
def model():
    return load_model("random:llama")[0]


@pytest.fixture(scope="module")
def true(model) -> Iterator[Artefact]:
    """What a first look of this machine finds, as a profile."""
    with Deployment.serve(model, backend="cores", kv=SMALL, profile="none") as deployment:
        device = deployment.device
        rates = deployment.predictor.prior.rates
        yield artefact(
            deployment.fingerprint, tables(deployment.model_shape, device, range(1, device.units + 1), rates=rates)
        )


def test_wrap_finds_it_and_serves(model, true: Artefact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smpart.engine.profiles._GRAVE", 1e9)  # however busy the machine has become meanwhile
    true.install()
    with smpart.wrap(model, kv=SMALL, backend="cores") as engine:
        assert engine.deployment.profile is not None
        assert engine.deployment.profile.source == installed(true.fingerprint)
        assert 1 <= len(engine.deployment.probes) <= 9, "no first look"
        assert engine.generate([[5, 9, 11]], smpart.SamplingParams(max_tokens=4, ignore_eos=True))
        assert engine.core.state.predictor.observations > 0


def test_wrap_warns_of_one_that_is_no_longer_true(model, true: Artefact, caplog: pytest.LogCaptureFixture) -> None:
    slow = {
        name: array - math.log(1000.0) if name in ("prefill", "decode") else array
        for name, array in true.arrays.items()
    }
    with smpart.wrap(model, kv=SMALL, backend="cores", profile=Artefact(true.fingerprint, slow)) as engine:
        assert engine.drifted is not None and "x what the profile says" in engine.drifted
        assert len(engine.deployment.probes) == 9, "asked again before it was said"
    assert "run `smpart profile` again" in caplog.text


def test_an_installed_one_that_is_of_no_use_is_not_used(
    model, true: Artefact, caplog: pytest.LogCaptureFixture
) -> None:
    wild = {name: array + math.log(1000.0) if name == "prefill" else array for name, array in true.arrays.items()}
    Artefact(true.fingerprint, wild, true.report).install()
    with smpart.wrap(model, kv=SMALL, backend="cores") as engine:
        assert engine.deployment.profile is None and engine.drifted is None
        assert isinstance(engine.core.state.predictor.prior, RooflinePrior)
    assert "profile auto: going on without" in caplog.text


def test_wrap_refuses_that_of_another_machine(model, made: Artefact) -> None:
    with pytest.raises(UsageError, match="another machine or model"):
        smpart.wrap(model, kv=SMALL, backend="cores", profile=made)


def test_nothing_is_read_before_it_is_asked_for() -> None:
    assert Wanted.read("auto") == Wanted(None, auto=True)
