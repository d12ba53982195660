"""Breaks the code under the CUDA lanes in every small way, and counts the mistakes that its tests notice.

    make mutation                                    # the mistakes of mistakes.toml; the backends green and mps
    python tests/mutation/mutate.py cuda/streams     # another file of smpart/partition, or several

Each mutant (see `mutants`) is written into a copy of the tree and given to those tests that run the changed line, in a
process of its own, which begins with the libraries already loaded. Survivors are printed. Those that `equivalent.toml`
explains do no harm; fewer than `--least` percent of the others killed is a failure, and so is any of `mistakes.toml`
that no test notices.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import coverage
import pytest
from mutants import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "out" / "mutation.json"
MISTAKES = Path(__file__).with_name("mistakes.toml")
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
COPIED = ("smpart", "tests", "pyproject.toml")
PRELOADED = ("numpy", "hypothesis", "cuda.bindings.driver")
"""What every test process needs that neither loads a driver nor belongs to smpart."""

QUIET = ["-q", "-x", "-p", "no:cacheprovider", "--benchmark-disable", "--tb=line"]
QUIET += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of what was preloaded

ON_FAKE, MPS = "tests/cuda/on_fake", "tests/cuda/mps"
LANES = (f"{ON_FAKE}/test_green.py", f"{ON_FAKE}/test_stream_lanes.py")


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests that run in one process.

    Attributes:
        driver: the version that the fake driver plays; None: there is none.
    """

    tests: tuple[str, ...]
    driver: str | None = None

    @property
    def arguments(self) -> list[str]:
        return [] if self.driver is None else ["--fake-driver", self.driver]


def on_fake(*tests: str, drivers: tuple[str, ...] = ("13.0", "13.1", "12.4")) -> tuple[Suite, ...]:
    return tuple(Suite(tests, driver) for driver in drivers)


SUITES: dict[str, tuple[Suite, ...]] = {
    "green": on_fake(*LANES),
    "mps": (Suite((f"{MPS}/test_mps_backend.py",)), *on_fake(f"{ON_FAKE}/test_mps_on_fake.py")),
    "cuda/streams": on_fake(*LANES, f"{ON_FAKE}/test_switch_cost.py", drivers=("13.0",)),
    "cuda/events": on_fake(*LANES, drivers=("13.0",)),
    "cuda/timeline": (Suite(("tests/partition/test_timeline.py", "smpart/partition/cuda/timeline.py")),),
    "cuda/places": on_fake(*LANES, drivers=("13.0",)),
    "cuda/resources": on_fake(*LANES),
    "cuda/gpu": on_fake(*LANES, f"{ON_FAKE}/test_mps_on_fake.py"),
    "cuda/driver": (Suite(("tests/cuda/test_driver_calls.py",)), *on_fake(*LANES, f"{ON_FAKE}/test_mps_on_fake.py")),
    "cuda/sm_probe": on_fake(f"{ON_FAKE}/test_green.py", drivers=("13.0",)),
}
"""By file of smpart/partition: the tests that answer for it, the quickest to find a mistake first."""


class Reach:
    """A pytest plugin that notes for every line of one file the tests that run it."""

    def __init__(self, file: Path) -> None:
        self._file = str(file)
        self._coverage = coverage.Coverage(data_file=None, include=[self._file], config_file=False)
        self._coverage.start()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> object:
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def lines(self) -> dict[int, list[str]]:
        self._coverage.stop()
        return self._coverage.get_data().contexts_by_lineno(self._file)


class Copy:
    """A copy of the tree, in which one file is broken."""

    def __init__(self, root: Path, name: str) -> None:
        self.root = root
        for each in COPIED:
            copy = shutil.copytree if (ROOT / each).is_dir() else shutil.copyfile
            copy(ROOT / each, root / each)
        self.file = root / "smpart" / "partition" / f"{name}.py"
        self.source = self.file.read_text()

    def inside(self, what: Callable[[], int], limit_s: float) -> int:
        """Do something in a process that sees the copy alone; its status, or -SIGKILL when it takes too long."""
        child = os.fork()
        if not child:
            status = 70
            try:
                self._enter()
                status = what()
            except Exception:
                traceback.print_exc()
            finally:  # come what may, this process does not go on with its parent's work
                sys.stderr.flush()
                os._exit(status)
        until = time.monotonic() + limit_s
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
            time.sleep(0.01)
        with contextlib.suppress(ProcessLookupError):  # and whatever it has left behind
            os.killpg(child, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _enter(self) -> None:
        os.setpgid(0, 0)
        os.chdir(self.root)
        log = os.open(self.root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.path[0] = str(self.root)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "CI": "1"}

    def test(self, suite: Suite, tests: Iterable[str], *plugins: object) -> int:
        """Run tests in this process."""
        import smpart

        assert Path(smpart.__file__).is_relative_to(self.root), smpart.__file__
        return int(pytest.main([*QUIET, *suite.arguments, *tests], plugins=plugins))


def reach(copy: Copy, suite: Suite) -> tuple[dict[int, list[str]], float]:
    """Which tests run which line, and the seconds they all take. Raises `SystemExit`: some fail before any mistake."""
    found = copy.root / "reach"

    def run() -> int:
        plugin = Reach(copy.file)
        status = copy.test(suite, suite.tests, plugin)
        found.write_text(json.dumps(plugin.lines()))
        return status

    began = time.monotonic()
    if copy.inside(run, limit_s=600):
        raise SystemExit(f"{suite} fails without any mistake:\n{(copy.root / 'log').read_text()[-3000:]}")
    lines = {int(line): tests for line, tests in json.loads(found.read_text()).items()}
    return lines, time.monotonic() - began


def is_killed(copy: Copy, mutant: Mutant, suite: Suite, lines: dict[int, list[str]], seconds: float) -> bool:
    """Whether a test of the suite fails, or the process with it."""
    tests = {test for line in range(mutant.first, mutant.last + 1) for test in lines.get(line, ())} - {""}
    if mutant.everywhere:
        tests = set(suite.tests)
    if not tests:
        return False
    return copy.inside(partial(copy.test, suite, sorted(tests)), limit_s=10 + 2 * seconds) not in (0, 5)


def killer(copy: Copy) -> str:
    """The first test that failed in the copy's last run."""
    lines = (copy.root / "log").read_text().splitlines()
    failed = [line.split()[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[0] if failed else "the process ended"


def make_mistake(mistake: dict[str, str]) -> str | None:
    """Make one of `mistakes.toml`; what noticed it."""
    with tempfile.TemporaryDirectory(prefix="smpart-mutation-") as folder:
        copy = Copy(Path(folder), mistake["file"])
        old, new = mistake["old"].strip("\n"), mistake["new"].strip("\n")
        if copy.source.count(old) != 1:
            raise SystemExit(f"{mistake['name']}: its old text does not stand once in {mistake['file']}.py")
        copy.file.write_text(copy.source.replace(old, new))
        for suite in SUITES[mistake["file"]]:
            if copy.inside(partial(copy.test, suite, suite.tests), limit_s=600) not in (0, 5):
                return killer(copy) if suite.driver is None else f"{killer(copy)} (driver {suite.driver})"
    return None


def mutate(name: str, only: str) -> dict[str, Any]:
    """Break one file in every way; what came of it."""
    with tempfile.TemporaryDirectory(prefix="smpart-mutation-") as folder:
        copy = Copy(Path(folder), name)
        known = {(each["line"], each["change"]) for each in equivalents(name)}
        reached = [(suite, *reach(copy, suite)) for suite in SUITES[name]]
        killed, equivalent, survived = 0, 0, []
        for mutant in mutants(copy.source):
            if only not in mutant.line:
                continue
            if (mutant.line, mutant.change) in known:
                known.discard((mutant.line, mutant.change))
                equivalent += 1
                continue
            copy.file.write_text(mutant.write())
            if any(is_killed(copy, mutant, *each) for each in reached):
                killed += 1
            else:
                survived.append({"line": mutant.line, "change": mutant.change})
                print(f"{name}:{mutant.first}  {mutant.line}\n    {mutant.change}")
        for line, change in sorted(known) if not only else ():
            print(f"{name}: equivalent.toml names a mutant that there is not: {line}: {change}")
    return {"killed": killed, "equivalent": equivalent, "survived": survived}


def equivalents(name: str) -> list[dict[str, str]]:
    """Mutants of a file that no test can tell from it, each with the reason."""
    entries: list[dict[str, str]] = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return [each for each in entries if each["file"] == name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", default=["mistakes", "green", "mps"], help=", ".join(["mistakes", *SUITES]))
    parser.add_argument("--least", type=float, default=90.0, help="percent of mutants to kill (default 90)")
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants of lines that hold this text")
    chosen = parser.parse_args()
    for module in PRELOADED:
        __import__(module)
    sys.stdout.reconfigure(line_buffering=True)
    results: dict[str, Any] = {}
    good = True
    for mistake in tomllib.loads(MISTAKES.read_text())["mistake"] if "mistakes" in chosen.files else ():
        noticed = make_mistake(mistake)
        results.setdefault("mistakes", {})[mistake["name"]] = noticed
        good &= noticed is not None
        print(f"{mistake['name']}\n    {noticed or 'NOT NOTICED'}")
    for name in (name for name in chosen.files if name != "mistakes"):
        began = time.monotonic()
        results[name] = mutate(name, chosen.only)
        killed, survived, equivalent = (results[name][kind] for kind in ("killed", "survived", "equivalent"))
        made = killed + len(survived)
        percent = 100 * killed / made if made else 100.0
        good &= percent >= chosen.least
        print(
            f"{name}: {made} mutants, {killed} killed ({percent:.1f} %), {len(survived)} survived; "
            f"{equivalent} more are equivalent; {time.monotonic() - began:.0f} s"
        )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
