"""``--profile``: picked up by fingerprint, told in the JSON, refused in one line if it is not for this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from profiled import artefact, tables
from safetensors import safe_open
from safetensors.numpy import save_file
from typer.testing import CliRunner

from smpart import cli
from smpart.partition.registry import open_backend
from smpart.predictor.artefact import NAME, Artefact
from smpart.profiler.fingerprint import Fingerprint
from smpart.sim.models import MODELS

BENCH = ["bench", "--backend", "sim:h100", "--model", "llama-3.1-8b", "--limit", "12", "--policy", "smpart",
         "--jobs", "1", "--json"]  # fmt: skip
DEVICE, SHAPE = open_backend("sim:h100").device(), MODELS["llama-3.1-8b"]


def smpart(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, list(arguments))


def results(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made() -> Artefact:
    fingerprint = Fingerprint.of("sim:h100", DEVICE, SHAPE, "bfloat16")
    return artefact(fingerprint, tables(SHAPE, DEVICE, (32, 64, 132)))


def test_bench_tells_which_profile_it_used(made: Artefact, tmp_path: Path) -> None:
    path = made.save(tmp_path / "mine" / NAME)
    found = results(smpart(*BENCH, "--profile", str(path.parent)))
    assert found["profile"]["file"] == str(path) and found["profile"]["solo"] == {"median_ape": 0.021}
    assert found["profile"]["fingerprint"] == made.fingerprint.digest
    assert found["runs"][0]["drifted"] is None or "what it says" in found["runs"][0]["drifted"]
    assert found["runs"][0]["finished"] == 12


def test_bench_finds_the_installed_one_unless_told_not_to(made: Artefact) -> None:
    assert results(smpart(*BENCH))["profile"] is None
    path = made.install()
    assert results(smpart(*BENCH))["profile"]["file"] == str(path)
    assert results(smpart(*BENCH, "--profile", "none"))["profile"] is None
    assert results(smpart(*BENCH, "--dtype", "float32"))["profile"] is None


@pytest.mark.parametrize(
    "command", [BENCH, ["generate", "random:llama", "-p", "a"], ["demo", "--model", "random:llama"]]
)
def test_what_is_no_profile_is_refused_in_one_line(command: list[str], made: Artefact, tmp_path: Path) -> None:
    path = made.save(tmp_path / NAME)
    with safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata()
    save_file(dict(made.arrays), tmp_path / "newer.safetensors", metadata | {"schema": "99"})
    (tmp_path / "corrupt.safetensors").write_bytes(path.read_bytes()[:-9])
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("newer.safetensors", "newer smpart"), ("corrupt.safetensors", "damaged"), ("empty", "holds no artefact"),
        ("nowhere", "No such file"),
    ):  # fmt: skip
        more = ["--out", str(tmp_path / "out")] if command[0] == "demo" else []
        result = smpart(*command, *more, "--profile", str(tmp_path / name))
        assert result.exit_code == 2 and message in result.stderr.splitlines()[-1], result.output
        assert "Traceback" not in result.stderr


def test_that_of_another_model_is_refused_before_anything_is_served(made: Artefact, tmp_path: Path) -> None:
    made.save(tmp_path / NAME)
    result = smpart(*BENCH, "--dtype", "float32", "--profile", str(tmp_path))
    assert result.exit_code == 2 and result.stdout == ""
    assert "dtype bfloat16, not float32" in result.stderr and "smpart profile MODEL" in result.stderr
