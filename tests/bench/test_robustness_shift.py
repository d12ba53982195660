"""The trace of `examples/robustness.py` whose traffic shifts."""

from __future__ import annotations

import runpy
from pathlib import Path

from smpart.bench.source import TraceOptions, open_load

SCRIPT = Path(__file__).parents[2] / "examples" / "robustness.py"


def test_every_window_shifts_once_and_no_two_are_the_same(data: Path, tmp_path: Path) -> None:
    trace = runpy.run_path(str(SCRIPT))["shift"](tmp_path, 21, 3)
    windows = [open_load(TraceOptions(str(trace), limit=21, seed=seed), 2**31, 21) for seed in range(3)]
    lengths = [tuple(a.prompt_tokens for a in window.arrivals) for window in windows]
    assert len(set(lengths)) == 3
    for name, part in (("conv", slice(0, 10)), ("code", slice(10, 21))):
        path = data / "traces" / f"AzureLLMInferenceTrace_{name}.csv"
        count = part.stop - part.start
        for seed, got in enumerate(lengths):
            wanted = open_load(TraceOptions(str(path), limit=count, seed=seed), 2**31, count)
            assert got[part] == tuple(a.prompt_tokens for a in wanted.arrivals)
