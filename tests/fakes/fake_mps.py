"""The fake MPS control program, scripted for a test, and what it must not leave behind."""

import ast
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("mps") / "nvidia-cuda-mps-control"


class FakeMps:
    """See the program for the keys of its script.

    Attributes:
        base: an empty directory with a short path, for daemons' directories.
    """

    def __init__(self, root: Path) -> None:
        self.base = root / "b"
        self.base.mkdir()
        # Run by this very interpreter: one that is found on PATH may be a slow wrapper.
        program = root / PROGRAM.name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{PROGRAM}" "$@"\n')
        program.chmod(0o700)
        self.program = str(program)
        self.variable = str(root / "script")
        self._keys: dict[str, Any] = {}

    def script(self, **keys: Any) -> None:
        self._keys |= keys
        Path(self.variable).write_text(repr(self._keys))

    def fault(self, command: str, **what: Any) -> None:
        self.script(faults={**self._keys.get("faults", {}), command: what})

    def mend(self) -> None:
        self.script(faults={}, stubborn=[], clients=[])

    def log(self, key: str) -> list[Any]:
        """What was recorded under a key: ``launch``, ``command``, ``daemon`` or ``environment``."""
        log = Path(f"{self.variable}.log")
        entries = [ast.literal_eval(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [entry[key] for entry in entries if key in entry]

    def homes(self) -> list[Path]:
        return sorted(self.base.glob("smpart-mps-*"))

    def processes(self) -> list[int]:
        """Everything that was started with this script and still runs."""
        mark = os.fsencode(f"FAKE_MPS={self.variable}")
        found = []
        for directory in Path("/proc").iterdir():
            if directory.name.isdecimal() and int(directory.name) != os.getpid():
                try:
                    if mark in (directory / "environ").read_bytes().split(b"\0"):
                        found.append(int(directory.name))
                except OSError:
                    continue
        return found


@contextmanager
def playing() -> Iterator[FakeMps]:
    """The program with a script of its own. Afterwards nothing that it started may run, and no directory be left."""
    root = Path(tempfile.mkdtemp(prefix="fm-", dir="/tmp"))
    fake = FakeMps(root)
    os.environ["FAKE_MPS"] = fake.variable
    try:
        yield fake
    finally:
        del os.environ["FAKE_MPS"]
        left, homes = fake.processes(), fake.homes()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(root)
    assert not left, "MPS processes were left running"
    assert not homes, "directories were left behind"
