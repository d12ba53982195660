"""The kernels of csrc under compute-sanitizer: no access out of bounds, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile

from smpart.bench.gpu_check.record import Figures, Record, Setting

TOOLS = ("memcheck", "racecheck")
TARGET = "smpart.bench.gpu_check.every_kernel"
_FOUND = 66
"""Exit status that the tool is told to give when it found something."""
_QUIET = ("--report-api-errors", "no")
"""Bindings ask an older driver for functions that it lacks: that is no error."""
_WHERE = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
"""Where it lies if PATH does not lead there."""


def measure(setting: Setting, record: Record) -> None:
    """Each tool over a process that launches every kernel once."""
    program = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *_WHERE]))
    if program is None:
        record.put(refused_here="compute-sanitizer is not installed here")
        return
    for number, tool in enumerate(TOOLS):
        seconds = (record.left() - 3.0) / (len(TOOLS) - number)
        found = check(program, tool, seconds)
        record.put(**{tool: found})
        record.require(found["clean"] is not False, f"{tool} found: {found.get('said')}")


def check(program: str, tool: str, seconds: float) -> Figures:
    """Run one tool. ``clean`` is None where it could not be used here."""
    command = [program, "--tool", tool, "--error-exitcode", str(_FOUND), *_QUIET, sys.executable, "-m", TARGET]
    with tempfile.TemporaryFile("w+") as said:
        try:
            done = subprocess.run(
                command, stdout=said, stderr=subprocess.STDOUT, timeout=max(1.0, seconds), check=False
            )
            status: int | str = done.returncode
        except subprocess.TimeoutExpired:
            status = f"not done after {seconds:.0f} s"
        said.seek(0)
        lines = [line.strip()[:200] for line in said.read().splitlines() if line.strip()]
    launched = next((line for line in lines if line.startswith("launched ")), None)
    summary = [line for line in lines if "SUMMARY" in line or "Error" in line or "error" in line][:6]
    verdict = {0: True, _FOUND: False}.get(status) if isinstance(status, int) and launched else None
    return {"clean": verdict, "status": status, "launched": launched, "said": summary or lines[-4:]}
