"""The Triton kernels, each way in a process of its own: interpreted or compiled is settled when Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent


def run(cases: str, *options: str, **variables: str) -> None:
    """Run a file of cases in a fresh process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "PYTEST_"))}
    environment = kept | {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"} | variables
    # Without the conftests, which import transformers: nothing in there is needed.
    command = [sys.executable, "-m", "pytest", "--noconftest", "-q", "-p", "no:cacheprovider", *options, HERE / cases]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="older interpreters do not run on NumPy 2.4"
)
def test_results_on_the_interpreter():
    run("kernel_cases.py", TRITON_INTERPRET="1")


@pytest.mark.gpu
def test_results_on_the_gpu():
    run("kernel_cases.py")


@pytest.mark.slow
def test_kernels_compile_for_every_type_and_gpu(tmp_path):
    run("compile_cases.py", TRITON_CACHE_DIR=str(tmp_path))
