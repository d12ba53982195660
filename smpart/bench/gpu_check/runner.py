"""Runs the stages one after the other within a budget, and keeps the report on disk true after each."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from smpart.bench.gpu_check.processes import watch
from smpart.bench.gpu_check.record import Figures, Setting, write_json

ROOT = Path(__file__).resolve().parents[3]
"""Where ``smpart`` is imported from: the repository, if it is run from one."""

_TAIL = 30
"""Lines of what a failed stage printed that the report keeps."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
        name: its file in ``stages``, or ``module:function``.
        limit_s: seconds it may take.
        title: for people.
    """

    name: str
    limit_s: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of a whole run.

    Attributes:
        total_s: seconds for all stages together: later ones get what earlier ones have left.
        least_s: a stage with less than this is left out.
        memory_bytes: host memory that one stage may take.
    """

    total_s: float
    least_s: float = 5.0
    memory_bytes: int = 64 << 30


class Runner:
    """Runs stages.

    Args:
        out: the report's file.
        head: what the report says beside the stages.
        say: told one line about each stage.
    """

    def __init__(
        self, out: Path, head: Figures, setting: Setting, limits: Limits, say: Callable[[str], None], began: float
    ) -> None:
        self.report: Figures = {**head, "seconds": 0.0, "stages": {}}
        self._stages: dict[str, Figures] = {}
        self._out, self._setting, self._limits, self._say = out, setting, limits, say
        self._began = began
        out.parent.mkdir(parents=True, exist_ok=True)
        self._save()

    def run(self, stages: Sequence[Stage]) -> Figures:
        """Run them in order; the report."""
        for stage in stages:
            seconds = min(stage.limit_s, self._limits.total_s - (monotonic() - self._began))
            if seconds < self._limits.least_s:
                result: Figures = {"ok": False, "seconds": 0.0, "error": "left out: no time was left"}
            else:
                result = run_stage(stage.name, self._setting, seconds, self._limits.memory_bytes)
            self._stages[stage.name] = result
            self._save()
            self._say(f"{stage.name}: {result['error'] or 'ok'} ({result['seconds']} s)")
        return self.report

    def _save(self) -> None:
        self.report |= {"seconds": round(monotonic() - self._began, 1), "stages": self._stages}
        write_json(self._out, self.report)


def run_stage(name: str, setting: Setting, seconds: float, memory_bytes: int) -> Figures:
    """Run one stage in a process of its own; its figures, with ``ok``, ``seconds`` and ``error``."""
    began = monotonic()
    folder = Path(tempfile.mkdtemp(prefix="smpart-gpu-check-"))
    try:
        part, log = folder / "part.json", folder / "log"
        why = watch(_command(name, part, setting, seconds), log, _environment(), seconds, memory_bytes)
        figures, faults, finished = _read(part)
        took = round(monotonic() - began, 1)
        if not finished:
            faults = [*faults, why or "it ended before it was done"]
        result: Figures = {"ok": not faults, "seconds": took, "error": "; ".join(faults) or None, **figures}
        return result | ({"printed": _tail(log)} if faults else {})
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(name: str, part: Path, setting: Setting, seconds: float) -> list[str]:
    options = ["--seconds", f"{seconds:.1f}", "--parts", setting.parts, "--seed", str(setting.seed)]
    tiny = ["--tiny"] if setting.tiny else []
    return [sys.executable, "-m", "smpart.bench.gpu_check.stage", name, "--out", str(part), *options, *tiny]


def _environment() -> Mapping[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}


def _read(part: Path) -> tuple[Figures, list[str], bool]:
    """Figures and faults that a stage wrote, and whether it came to its end."""
    try:
        written = json.loads(part.read_text())
        return dict(written["figures"]), [str(fault) for fault in written["faults"]], bool(written["finished"])
    except FileNotFoundError:
        return {}, [], False
    except (OSError, ValueError, TypeError, KeyError):
        return {}, ["what it wrote cannot be read"], False


def _tail(log: Path) -> list[str]:
    lines = log.read_text(errors="replace").splitlines()
    return [line[:300] for line in lines[-_TAIL:]]
