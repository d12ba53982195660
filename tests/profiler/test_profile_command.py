"""`smpart profile`: from the command line to a folder, in virtual time and on this machine's cores."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from smpart import cli
from smpart.bench import fit, fit_table, profile
from smpart.profiler.store import Store
from smpart.sim import RooflineCost, built_in

RUNNER = CliRunner()
MODEL = "llama-3.1-8b"
SIM = (MODEL, "--backend", "sim:h100-roofline", "--dtype", "bfloat16")
SMALL = ("--max-prompt", "64", "--max-context", "64", "--max-batch", "4")


@pytest.fixture(autouse=True)
def unfitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Fitting is slow and tested on its own; these are the folders that would have been fitted."""
    folders: list[Path] = []

    def fitted(folder: Path, **options: Any) -> SimpleNamespace:
        folders.append(folder)
        return SimpleNamespace(report={"solo": {"median_ape": 0.01}})

    monkeypatch.setattr(fit, "fit_folder", fitted)
    monkeypatch.setattr(fit_table, "show", lambda report, console, say: None)
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))
    return folders


def smpart(*arguments: str) -> Result:
    return RUNNER.invoke(cli.app, ["profile", *arguments])


def last_json(result: Result) -> Mapping[str, Any]:
    assert result.exit_code == 0, result.stderr
    value: Mapping[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return value


def test_a_simulated_gpu_is_profiled_and_its_samples_are_what_it_costs(tmp_path: Path, unfitted: list[Path]) -> None:
    folder = tmp_path / "p"
    said = last_json(smpart(*SIM, "--minutes", "0.5", "--out", str(folder), "--seed", "3", "--json"))
    assert (said["schema"], said["command"], said["folder"]) == (1, "profile", str(folder))
    assert unfitted == [folder] and said["fit"]["solo"] == {"median_ape": 0.01}
    assert 0.5 <= said["minutes"] < 1.0 and said["seed"] == 3 and said["disturbed"] == 0
    store = Store.open(folder)
    samples = store.samples()
    assert said["samples"] == len(samples) > 40 and said["fingerprint"] == store.fingerprint.digest
    cost = RooflineCost(built_in(MODEL), "h100")
    for sample in samples:
        p = sample.point
        truth = cost(p.shape, p.units, p.neighbour, p.neighbour_units)
        assert sample.seconds == pytest.approx([truth] * len(sample.seconds), rel=5e-3)
    assert any(not sample.point.alone for sample in samples)


def test_a_second_run_goes_on_with_the_first(tmp_path: Path) -> None:
    run = (*SIM, "--out", str(tmp_path / "p"), "--json")
    first = last_json(smpart(*run, "--minutes", "0.3", "--max-batch", "32", "--seed", "5"))
    second = last_json(smpart(*run, "--minutes", "0.6"))
    assert second["samples"] > first["samples"] and second["minutes_before"] == first["minutes"]
    assert second["limits"] == first["limits"] and second["limits"]["max_batch"] == 32
    assert second["seed"] == first["seed"] == 5
    third = last_json(smpart(*run, "--minutes", "0.6"))
    assert third["samples"] == second["samples"] and third["round_noise"] is None


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--minutes", "0"), "--minutes 0.0: must be a positive number"),
        (("--minutes", "-1"), "--minutes -1.0: must be a positive number"),
        (("--minutes", "nan"), "--minutes nan: must be a positive number"),
        (("--max-batch", "0"), "--max-batch 0: must be at least 1"),
        (("--backend", "nonsense"), "nonsense"),
    ],
)
def test_bad_options_are_one_line(tmp_path: Path, arguments: tuple[str, ...], why: str) -> None:
    result = smpart(*SIM, "--out", str(tmp_path / "p"), *arguments)
    assert result.exit_code == 2 and why in result.stderr and len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (("qwen3-32b", "--backend", "sim:h100", "--dtype", "bfloat16"), "holds another profile"),
        ((MODEL, "--backend", "sim:a100", "--dtype", "bfloat16"), "holds another profile"),
        ((*SIM, "--seed", "9"), "seed 0, not 9"),
        ((*SIM, "--max-prompt", "100"), "max_prompt"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, other: tuple[str, ...], why: str) -> None:
    folder = str(tmp_path / "p")
    last_json(smpart(*SIM, "--minutes", "0.1", "--out", folder, "--json"))
    before = Store.open(tmp_path / "p").samples()
    result = smpart(*other, "--minutes", "1", "--out", folder)
    assert result.exit_code == 2 and why in result.stderr
    assert Store.open(tmp_path / "p").samples() == before


def test_an_interrupt_is_one_line_and_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unfitted: list[Path]
) -> None:
    whole = profile.Sweep.run

    def interrupted(self: profile.Sweep) -> Any:
        for count, progress in enumerate(whole(self)):
            if count == 3:
                raise KeyboardInterrupt
            yield progress

    monkeypatch.setattr(profile.Sweep, "run", interrupted)
    result = smpart(*SIM, "--minutes", "5", "--out", str(tmp_path / "p"))
    assert result.exit_code == 130 and not unfitted
    line = " ".join(result.stderr.split())
    assert "interrupted after" in line and "run it again with" in line
    assert len(Store.open(tmp_path / "p").samples()) > 10


@pytest.mark.slow
def test_on_the_cores_of_this_machine_killed_and_resumed(tmp_path: Path) -> None:
    """A kill at any moment loses the batch in progress and nothing else; a second run takes no longer than is left."""
    folder = tmp_path / "p"
    run = ["profile", "random:llama", "--backend", "cores", *SMALL, "--minutes", "0.5", "--out", str(folder), "--json"]
    process = subprocess.Popen([sys.executable, "-m", "smpart", *run], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 240
    while not list(folder.glob("samples/*.parquet")):
        assert process.poll() is None and time.monotonic() < deadline
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    before = Store.open(folder).samples()
    assert before and all(sample.median > 0 for sample in before)
    said = last_json(smpart(*run[1:]))
    samples = Store.open(folder).samples()
    assert samples[: len(before)] == before and said["samples"] == len(samples) > len(before)
    assert 0.5 <= said["minutes"] < 1.0
    measured = [sample.point for sample in samples if sample.stage == "fill"]
    assert len(measured) == len(set(measured))
    assert {point.units for point in measured} >= {1} and any(sample.point.alone for sample in samples)
