"""What stages need of the repository beyond the package: its tests."""

from __future__ import annotations

import sys
from pathlib import Path

from smpart.bench.gpu_check.runner import ROOT
from smpart.errors import BackendUnavailable


def tests(*rooms: str) -> Path:
    """The folder of tests; modules of `rooms` in it can be imported from now on.

    Raises:
        BackendUnavailable: this is no checkout.
    """
    folder = ROOT / "tests"
    if not folder.is_dir():
        raise BackendUnavailable(f"this stage needs the repository's tests, and there is no {folder}: run a checkout")
    for room in rooms:
        if str(folder / room) not in sys.path:
            sys.path.insert(0, str(folder / room))
    return folder
