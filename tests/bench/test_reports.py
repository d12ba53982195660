from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from smpart.bench import plots, report
from smpart.bench.demo import verdict
from smpart.bench.host import host
from smpart.bench.metrics import summarise
from smpart.bench.output import contrast
from smpart.bench.replay import Job, replay
from smpart.bench.run import Run
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.slo import SLO

OBJECTIVES = SLO(ttft_ms=3000, tpot_ms=600)


@pytest.fixture
def runs(fake_core: Any) -> list[Run]:
    """Two policies on the same load, two seeds each; `smpart` is the faster one."""
    made = []
    for seed in (0, 1):
        for policy, first, gap in (("chunked:64", 1.0, 0.5), ("smpart", 0.5, 0.25)):
            jobs = [Job(2.0 * i, range(5 + i), SamplingParams(max_tokens=3), ()) for i in range(6)]
            result = replay(fake_core(first, gap), jobs, OBJECTIVES)
            record = {
                "policy": policy,
                "rate": 0.5,
                "seed": seed,
                "capacity_rps": None,
                **summarise(result, OBJECTIVES),
            }
            made.append(Run(policy, seed, OBJECTIVES, record, result))
    return made


def shown(records: list[Any]) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(report.table(records, "title"))
    file: Any = console.file
    return str(file.getvalue())


def test_table_fits_a_terminal_and_shows_medians_with_their_spread(runs: list[Run]) -> None:
    text = shown([run.record for run in runs])
    assert "chunked:64" in text and "smpart" in text and "…" not in text and " to " in text
    assert "capacity" not in text
    assert "capacity" in shown([{**run.record, "capacity_rps": 1.5} for run in runs])
    assert " to " not in shown([run.record for run in runs[:2]])


def test_figures_per_gpu_show_where_there_were_several(runs: list[Run]) -> None:
    pair = {"gpus": 2, "goodput_per_gpu_rps": 0.25, "capacity_per_gpu_rps": None}
    assert "per GPU" not in shown([run.record for run in runs])
    text = shown([{**runs[0].record, **pair}, {**runs[1].record, "capacity_per_gpu_rps": None}])
    assert "goodput per GPU" in text and "0.25" in text and "capacity per GPU" not in text


def test_files_hold_every_request(runs: list[Run], tmp_path: Path) -> None:
    import pandas

    results = report.document("bench", host(), [run.record for run in runs])
    report.write(tmp_path / "new" / "folder", results, runs, {"model": "x"})
    folder = tmp_path / "new" / "folder"
    assert json.loads((folder / "config.json").read_text()) == {"model": "x"}
    back = json.loads((folder / "results.json").read_text())
    assert back["schema"] == 1 and back["command"] == "bench" and len(back["runs"]) == 4
    frame = pandas.read_parquet(folder / "requests.parquet")
    assert len(frame) == 24 and set(frame["policy"]) == {"chunked:64", "smpart"}
    slowest = frame[frame["policy"] == "chunked:64"]["itl_max_ms"].max()
    assert slowest == pytest.approx(500)
    assert frame[frame["policy"] == "smpart"]["met_slo"].all()


def test_host_says_where_a_number_comes_from() -> None:
    facts = host()
    assert {"cpu", "cores", "memory_gib", "python", "torch", "transformers", "smpart", "command", "revision"} <= set(
        facts
    )
    json.dumps(facts)


def test_pictures_are_drawn(runs: list[Run], tmp_path: Path) -> None:
    plots.lanes(contrast(runs), 2, "core", tmp_path / "lanes.png", "title")
    plots.goodput(runs, tmp_path / "goodput.png", "title")
    plots.latencies(runs, tmp_path / "latencies.png", "title")
    plots.shares(contrast(runs), 2, "core", tmp_path / "shares.png", "title")
    for path in tmp_path.iterdir():
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000


def test_the_picture_contrasts_chunked_and_smpart(runs: list[Run]) -> None:
    assert [run.policy for run in contrast(runs)] == ["chunked:64", "smpart"]
    assert [run.policy for run in contrast(runs[:1])] == ["chunked:64"]


def test_the_verdict_is_for_or_against_as_the_numbers_are(runs: list[Run]) -> None:
    assert "more than" in verdict(runs[:2])
    swapped = [Run(p, r.seed, r.slo, r.record, r.replay) for p, r in zip(("smpart", "chunked"), runs[:2], strict=True)]
    assert "less than" in verdict(swapped)
