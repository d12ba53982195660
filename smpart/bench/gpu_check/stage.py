"""One stage in a process of its own: ``python -m smpart.bench.gpu_check.stage NAME --out part.json``."""

from __future__ import annotations

import argparse
import faulthandler
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from smpart.bench.gpu_check.record import CUDA, Record, Setting

Measure = Callable[[Setting, Record], None]


def find(name: str) -> Measure:
    """A stage by its name, or as ``module:function``. Raises what importing it raises."""
    found: Measure = pkgutil.resolve_name(name if ":" in name else f"smpart.bench.gpu_check.stages.{name}:measure")
    return found


def run(name: str, setting: Setting, record: Record) -> None:
    """Run a stage to its end. Whatever it raises becomes one fault, and a traceback on stderr."""
    try:
        find(name)(setting, record)
    except ModuleNotFoundError as error:
        traceback.print_exc()
        record.fault(f"it needs {error.name}, which is not installed here: pip install {error.name}")
    except Exception as error:
        traceback.print_exc()
        record.fault(f"{type(error).__name__}: {error}")
    record.finish()


def main(arguments: list[str]) -> None:
    """Run one stage. Does not return: what is left in this process (a lost device, say) must hold up nobody."""
    parser = argparse.ArgumentParser(prog="python -m smpart.bench.gpu_check.stage", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--parts", default=CUDA)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.5, given.seconds - 2.0))  # a stage that hangs shows where
    signal.signal(signal.SIGTERM, _leave)
    record = Record(given.out, given.seconds)
    run(given.name, Setting(given.parts, given.tiny, given.seed), record)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if record.faults else 0)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    main(sys.argv[1:])
