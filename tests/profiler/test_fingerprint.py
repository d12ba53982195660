"""What a fingerprint holds: all that changes times, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys

from smpart.partition import Device, ModelShape
from smpart.profiler.fingerprint import Fingerprint

MODEL = ModelShape(30, 576, 9, 3, 64, 49152, 106_000_000, 28_000_000, 536_000_000, 4)


def test_a_machine_has_the_same_fingerprint_in_every_process() -> None:
    code = (
        "from smpart.partition.registry import open_backend\n"
        "from smpart.profiler.fingerprint import Fingerprint\n"
        "from smpart.sim.models import MODELS\n"
        "for name in ('cores', 'sim:h100'):\n"
        "    print(Fingerprint.of(name, open_backend(name).device(), MODELS['llama-3.1-8b'], 'bfloat16').digest)\n"
    )
    seen = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        seen.add(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env=environment).stdout)
    assert len(seen) == 1


def cores(allowed: list[int], quota: float | None, units: int = 2, memory: int = 1 << 34) -> str:
    facts = {"allowed_cpus": allowed, "quota_cpus": quota, "threads_per_core": 1}
    return Fingerprint.of(
        "cores", Device("cpu", "cpu", units, tuple(allowed[:units]), memory, facts), MODEL, "f32"
    ).digest


def test_what_changes_no_time_changes_no_fingerprint() -> None:
    plain = cores([0, 1], None)
    assert plain == cores([2, 3], None) == cores([0, 1], 2.0) == cores([0, 1], 8.0) == cores([0, 1], None, memory=1)
    assert len({plain, cores([0, 1], 1.5), cores([0, 1, 2], 2.0), cores([0, 1, 2], None, units=3)}) == 4

    def gpu(**facts: object) -> str:
        return Fingerprint.of("green", Device("H100", "cuda", 132, (), 1, facts), MODEL, "f32").digest

    assert gpu(uuid="GPU-1", driver_cuda="13.0", daemon="x") == gpu(uuid="GPU-2", driver_cuda="13.0", daemon="y")
    assert gpu(driver_cuda="13.0") != gpu(driver_cuda="13.1")
