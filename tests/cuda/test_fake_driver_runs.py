"""The tests of on_fake/, run in one process for each version of the driver that the fake plays.

With ``SMPART_COVERAGE`` set, each process is run by ``coverage run --parallel-mode``; its value is more options.
"""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DRIVERS = ("13.0", *(pytest.param(version, marks=pytest.mark.slow) for version in ("12.4", "12.8", "13.1")))
NEEDED = {"gcc": shutil.which("gcc"), "cuda-python": find_spec("cuda"), "nvidia-cuda-runtime": find_spec("nvidia")}


@pytest.mark.skipif(not all(NEEDED.values()), reason=f"needs {', '.join(name for name in NEEDED if not NEEDED[name])}")
@pytest.mark.parametrize("version", DRIVERS)
def test_on_the_fake_driver(version: str, pytestconfig: pytest.Config) -> None:
    options = os.environ.get("SMPART_COVERAGE")
    runner = [] if options is None else ["-m", "coverage", "run", "--parallel-mode", *options.split()]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--benchmark-disable", "tests/cuda/on_fake"]
    chosen = ["-m", pytestconfig.option.markexpr] if pytestconfig.option.markexpr else []
    command = [sys.executable, "-X", "faulthandler", *runner, *tests, "--fake-driver", version, *chosen]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if run.returncode:
        pytest.fail(f"{' '.join(command)}\n{run.stdout[-8000:]}\n{run.stderr[-2000:]}", pytrace=False)
