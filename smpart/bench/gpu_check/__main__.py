"""`python -m smpart.bench.gpu_check`: run the stages, then print the table. Exit 0: all well, 1: not, 2: no GPU."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import monotonic

from smpart.bench.gpu_check.plan import DEVICE, STAGES, TOTAL_S
from smpart.bench.gpu_check.record import CUDA, Figures, Setting
from smpart.bench.gpu_check.report import lines
from smpart.bench.gpu_check.runner import Limits, Runner, Stage, run_stage
from smpart.bench.host import revision


def main(arguments: Sequence[str]) -> int:
    """Check this machine's GPU; the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    unknown = _unknown(given.only)
    if unknown:  # before anything is written: an earlier report may be there
        parser.error(f"--only: there is no stage {', '.join(unknown)}")
    began = monotonic()
    setting = Setting(given.parts, given.tiny, given.seed)
    limits = Limits(given.seconds, memory_bytes=int(given.memory_gib * 2**30))
    device = run_stage(DEVICE.name, setting, min(DEVICE.limit_s, given.seconds), limits.memory_bytes)
    missing = device.get("missing") or device["error"]
    if missing:
        print(f"gpu-check: no GPU can be used here: {missing}", file=sys.stderr)
        return 2
    head: Figures = {
        "schema": 1,
        "command": shlex.join([Path(sys.executable).name, "-m", "smpart.bench.gpu_check", *arguments]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seed": given.seed,
        "revision": revision(),
        **{name: value for name, value in device.items() if name not in ("ok", "error", "seconds", "missing")},
    }
    report = Runner(given.out, head, setting, limits, print, began).run(_chosen(given.only))
    print("\n".join(lines(report)))
    stages = report["stages"]
    assert isinstance(stages, dict)
    return 0 if all(stage["ok"] for stage in stages.values()) else 1


def _chosen(only: str | None) -> Sequence[Stage]:
    if only is None:
        return STAGES
    return [stage for stage in STAGES if stage.name in only.split(",")]


def _unknown(only: str | None) -> list[str]:
    return sorted({*(only.split(",") if only is not None else ())} - {stage.name for stage in STAGES})


def _positive(text: str) -> float:
    number = float(text)
    if not 0.0 < number < inf:
        raise ValueError(text)
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smpart.bench.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_check.json"), help="the report's file")
    parser.add_argument("--only", metavar="STAGE,...", help=f"of {', '.join(stage.name for stage in STAGES)}")
    parser.add_argument("--seconds", type=_positive, default=TOTAL_S, help="for all stages together")
    parser.add_argument("--memory-gib", type=_positive, default=64.0, help="host memory that a stage may take")
    parser.add_argument("--tiny", action="store_true", help="tiny models: tries the stages, measures nothing of worth")
    parser.add_argument("--parts", default=CUDA, help="module:function that opens the device")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
