"""The file a fitted profile lives in: whole or refused, for its own machine or refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from smpart.errors import SmpartError, UsageError
from smpart.partition import Device, ModelShape
from smpart.predictor.artefact import NAME, Artefact, find, installed
from smpart.profiler.fingerprint import Fingerprint

MODEL = ModelShape(30, 576, 9, 3, 64, 49152, 106_000_000, 28_000_000, 536_000_000, 4)
OURS = Fingerprint.of("cores", Device("cpu", "cpu", 2, (0, 1), 1 << 34), MODEL, "float32")
ARRAYS = {"knots": np.arange(12, dtype=np.float64).reshape(3, 4), "ids": np.array([1, 2], dtype=np.int32)}
REPORT = {"solo": {"median_ape": 0.031}, "measured": 1.75e9, "baselines": {}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def made() -> Artefact:
    return Artefact(OURS, ARRAYS, REPORT)


def test_what_is_saved_is_loaded(made: Artefact, tmp_path: Path) -> None:
    path = made.save(tmp_path / "new" / NAME)
    for where in (path, path.parent):
        loaded = Artefact.load(where)
        assert loaded.fingerprint == OURS and loaded.report == REPORT and loaded.source == path
        assert loaded.arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            np.testing.assert_array_equal(loaded.arrays[name], array, strict=True)
    assert [file.name for file in path.parent.iterdir()] == [NAME], "no half-written file stays"


def test_others_tools_can_read_it(made: Artefact, tmp_path: Path) -> None:
    with safe_open(made.save(tmp_path / NAME), framework="numpy") as opened:
        assert json.loads(opened.metadata()["fingerprint"])["model"]["layers"] == 30
        assert opened.get_tensor("ids").tolist() == [1, 2]


def test_every_damage_is_noticed(made: Artefact, tmp_path: Path) -> None:
    path = made.save(tmp_path / NAME)
    whole = path.read_bytes()
    harmless = {i for i, byte in enumerate(whole) if byte == ord(" ")}  # padding and spaces of the JSON header
    for place in range(0, len(whole), 7):
        if place not in harmless:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x15]) + whole[place + 1 :])
            with pytest.raises(UsageError, match=r"artefact\.safetensors"):
                Artefact.load(path)
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="damaged"):
            Artefact.load(path)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(UsageError, match="No such file"):
        Artefact.load(path)
    with pytest.raises(UsageError, match=r"holds no artefact.*smpart fit"):
        Artefact.load(tmp_path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(UsageError, match="damaged, or none"):
        Artefact.load(path)
    save_file(ARRAYS, path)
    with pytest.raises(UsageError, match="some other safetensors file"):
        Artefact.load(path)


@pytest.mark.parametrize(("schema", "message"), [("3", "newer smpart.*upgrade"), ("1", "older.*smpart fit")])
def test_other_versions_are_refused(made: Artefact, tmp_path: Path, schema: str, message: str) -> None:
    with safe_open(made.save(tmp_path / NAME), framework="numpy") as opened:
        metadata = opened.metadata()
    save_file(ARRAYS, tmp_path / NAME, metadata | {"schema": schema})
    with pytest.raises(UsageError, match=message):
        Artefact.load(tmp_path / NAME)


def test_a_wrong_one_names_what_differs_and_what_to_do(made: Artefact) -> None:
    made.require(OURS)
    other = Fingerprint.of("cores", Device("cpu", "cpu", 4, (0, 1, 2, 3), 1 << 34), MODEL, "bfloat16")
    with pytest.raises(UsageError, match=r"units 2, not 4.*smpart profile MODEL --backend cores") as refused:
        made.require(other)
    assert "dtype float32, not bfloat16" in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=r"and [0-9]+ more"):
        made.require(replace(other, backend="green", model=replace(MODEL, layers=1, hidden=1, heads=1)))


def test_an_installed_one_is_found_by_its_fingerprint_alone(made: Artefact, cache: Path) -> None:
    assert find(OURS) is None
    assert made.install() == cache / "profiles" / f"{OURS.digest}.safetensors"
    found = find(OURS)
    assert found is not None and found.report == REPORT
    assert find(replace(OURS, dtype="float64")) is None
    installed(OURS).rename(installed(replace(OURS, dtype="float64")))
    with pytest.raises(UsageError, match="dtype float32, not float64"):
        find(replace(OURS, dtype="float64"))


def test_without_a_home_folder_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("SMPART_CACHE")
    monkeypatch.setattr(Path, "home", homeless)
    assert find(OURS) is None


def test_what_cannot_be_written_says_so_and_spoils_nothing(made: Artefact, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SmpartError, match="cannot be written"):
        made.save(tmp_path / "file" / NAME)
    assert (tmp_path / "file").read_text() == "mine"
