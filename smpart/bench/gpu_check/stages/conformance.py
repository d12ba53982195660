"""The conformance suite of lanes on green contexts, by pytest."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

from smpart.bench.gpu_check.record import Figures, Record, Setting
from smpart.bench.gpu_check.repository import tests

SUITE = ("cuda", "on_gpu", "test_green_conformance.py")
_OPTIONS = ("-q", "-p", "no:cacheprovider", "-o", "addopts=--import-mode=importlib", "-W", "default")


def measure(setting: Setting, record: Record) -> None:
    """Every check of the suite: passed, failed, and why."""
    if find_spec("pytest") is None:
        record.fault("it needs pytest, which is not installed here: pip install pytest")
        return
    suite = tests().joinpath(*SUITE)
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", *_OPTIONS, f"--junitxml={results}", str(suite)]
        try:
            subprocess.run(command, cwd=suite.parents[3], timeout=max(1.0, record.left() - 3.0), check=False)
        except subprocess.TimeoutExpired:
            record.fault("the suite was not done in time: see what it printed")
            return
        if not results.is_file():
            record.fault("pytest wrote no results: see what it printed")
            return
        record.put(**read(results))
    failed = record.figures["failed"]
    assert isinstance(failed, dict)
    record.require(not failed, f"{len(failed)} checks failed: {', '.join(failed)}")
    record.require(bool(record.figures["passed"]), "no check was run")


def read(results: Path) -> Figures:
    """What a JUnit file says: how many passed and were skipped, and the first line of each failure, by test."""
    failed: dict[str, str] = {}
    passed = skipped = 0
    for case in ElementTree.parse(results).iter("testcase"):
        name = case.get("name", "?").removeprefix("test_conformance[check_").removesuffix("]")
        wrong = next((found for tag in ("failure", "error") if (found := case.find(tag)) is not None), None)
        if wrong is not None:
            failed[name] = " ".join((wrong.get("message") or wrong.text or "?").split())[:300]
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "skipped": skipped, "failed": failed}
