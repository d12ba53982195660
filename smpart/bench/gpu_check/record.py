"""What a stage measures, written to a file as it goes: a stage that is ended keeps what it had."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic

Figures = dict[str, object]

CUDA = "smpart.runtime.device.cuda:open_parts"


@dataclass(frozen=True, slots=True)
class Setting:
    """How the stages are run.

    Attributes:
        parts: opens the device; see `DeviceArgs.parts`.
        tiny: models of a few thousand weights instead of billions, to try the stages themselves.
    """

    parts: str = CUDA
    tiny: bool = False
    seed: int = 0


class Record:
    """A stage's figures so far.

    Args:
        path: where they are written, in one step, at every change; None: nowhere.
        seconds: that the stage may take in all, from now on.
    """

    def __init__(self, path: Path | None, seconds: float, clock: Callable[[], float] = monotonic) -> None:
        self.figures: Figures = {}
        self.faults: list[str] = []
        self.finished = False
        self._path = path
        self._clock = clock
        self._end = clock() + seconds

    def put(self, **figures: object) -> None:
        """Add figures, or replace them."""
        self.figures |= figures
        self._save()

    def fault(self, reason: str) -> None:
        """Something is not as it must be. The stage goes on, and has failed."""
        self.faults.append(" ".join(reason.split())[:600])
        self._save()

    def require(self, holds: bool, reason: str) -> None:
        """Have a fault unless something holds."""
        if not holds:
            self.fault(reason)

    def finish(self) -> None:
        """All was measured."""
        self.finished = True
        self._save()

    def left(self) -> float:
        """Seconds before the stage is ended."""
        return self._end - self._clock()

    def _save(self) -> None:
        if self._path is not None:
            write_json(self._path, {"finished": self.finished, "faults": self.faults, "figures": self.figures})


def write_json(path: Path, value: object) -> None:
    """Write a file in one step: readers see all of it or what was there before."""
    building = path.with_name(f".{path.name}-{os.getpid()}")
    building.write_text(json.dumps(value, indent=1, default=str) + "\n")
    building.replace(path)


def spread(values: Sequence[float], digits: int = 4) -> Figures:
    """Median and range of a sample.

    >>> spread([1.0, 2.0, 9.0])
    {'median': 2.0, 'min': 1.0, 'max': 9.0, 'repeats': 3}
    """
    if not values:
        return {"median": None, "min": None, "max": None, "repeats": 0}
    low, middle, high = (float(f"{v:.{digits}g}") for v in (min(values), median(values), max(values)))
    return {"median": middle, "min": low, "max": high, "repeats": len(values)}
