"""Runs of a bench: the same whoever makes them; rates swept; capacities searched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import pytest

from smpart.bench.bench import Bench, Options, Task, Watch
from smpart.bench.capacity import at_capacity
from smpart.bench.crew import Alone, Processes, crew
from smpart.bench.report import by_rate, rows
from smpart.bench.run import Run
from smpart.bench.source import TraceOptions
from smpart.engine.deployment import Deployment
from smpart.errors import SmpartError, UsageError
from smpart.scheduler.slo import SLO

SOURCE = TraceOptions("synth:chat", limit=10)
OBJECTIVES = SLO(ttft_ms=500, tpot_ms=50)


@contextmanager
def unwatched(title: str) -> Iterator[Watch]:
    yield lambda status: None


@contextmanager
def opened(**options: object) -> Iterator[tuple[Bench, list[str]]]:
    said: list[str] = []
    asked = {"policies": ("chunked:256", "static:96/36"), "source": SOURCE, "slo": OBJECTIVES, "rates": (4.0,)}
    with Deployment.open("llama-3.1-8b", backend="sim:h100", dtype="bfloat16", profile="none") as deployment:
        made = Bench(deployment, Options(**{**asked, **options}), said.append, unwatched)  # type: ignore[arg-type]
        yield made, said


def times(run: Run) -> list[float]:
    """When every token came. Virtual clocks that began at other moments differ in the last digits."""
    return [moment for served in run.replay.served for moment in served.times_s]


def test_processes_make_the_runs_that_one_process_makes() -> None:
    with opened(rates=(4.0, 8.0), repeat=2, jobs=2) as (bench, said):
        tasks = list(bench.tasks())
        assert tasks[:3] == [Task("chunked:256", 4.0, 0), Task("static:96/36", 4.0, 0), Task("chunked:256", 4.0, 1)]
        assert len(tasks) == 8
        alone = list(Alone(bench, said.append).runs(tasks))
        here = said.copy()
        said.clear()
        with crew(bench, said.append) as workers:
            assert isinstance(workers, Processes) and workers.parallel == 2
            apart = list(workers.runs(tasks))
    for mine, theirs in zip(apart, alone, strict=True):
        assert (mine.policy, mine.seed, mine.record["rate"]) == (theirs.policy, theirs.seed, theirs.record["rate"])
        assert times(mine) == pytest.approx(times(theirs), rel=1e-6)
    assert said == here[-8:] and "chunked:256 at 4 req/s, seed 0: 10 requests" in said[0]


def test_repeats_that_repeat_the_same_requests_are_told(tmp_path: Path) -> None:
    """Seeds are windows of a recorded trace: beyond its end they are no draws of anything."""
    rows = "".join(f"{k},{10 + k},4\n" for k in range(30))
    trace = tmp_path / "t.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    for limit, repeat, told in ((10, 3, ""), (10, 4, "seed 3 replays window 0 again"), (None, 2, "with --limit N")):
        with opened(source=TraceOptions(str(trace), limit), repeat=repeat, jobs=1) as (_, said):
            assert any(told in line for line in said)
            assert bool(told) == any("again" in line or "every repeat" in line for line in said)


def test_rates_are_told_apart() -> None:
    with opened(rates=(4.0, 8.0), jobs=1) as (bench, said), crew(bench, said.append) as workers:
        runs = list(workers.runs(bench.tasks()))
    records = [run.record for run in runs]
    assert [(rate, len(part)) for rate, part in by_rate(records)] == [(4.0, 2), (8.0, 2)]
    assert by_rate(records[:3]) == [(None, records[:3])]


def test_best_effort_is_shown_where_any_run_had_some() -> None:
    with opened(jobs=1) as (bench, said), crew(bench, said.append) as workers:
        record = next(iter(workers.runs(bench.tasks()))).record
    some = {**record, "best_effort": {"requests": 3, "finished": 3, "throughput_tok_s": 7.0, "prompt_tok_s": 9.0}}
    for records, shown in (([record, some], True), ([record, record], False)):
        assert ("best-effort requests" in [name for name, _, _ in rows(records)[1]]) == shown


def test_capacities_of_several_targets_share_their_trials() -> None:
    asked = opened(capacity=True, attainment=(0.9, 0.99), repeat=2, jobs=1)
    with asked as (bench, said), crew(bench, said.append) as workers:
        for run in at_capacity(bench, workers, said.append):
            held = run.record["capacities"]
            assert set(held) == {"0.9", "0.99"} and held["0.99"] <= held["0.9"] == run.record["capacity_rps"]
            tried = [trial["rate"] for trial in run.record["trials"]]
            assert len(set(tried)) == len(tried) and held["0.9"] in tried
            assert run.record["rate"] == pytest.approx(held["0.9"], rel=1e-5)


class Patient(Alone):
    """Makes every run to its end."""

    def runs(self, tasks: Iterable[Task]) -> Iterator[Run]:
        return super().runs(task._replace(least=0.0) for task in tasks)


@pytest.mark.parametrize("repeat", [1, 2])
def test_no_capacity_changes(repeat: int) -> None:
    asked = {"capacity": True, "attainment": (0.9, 0.75), "repeat": repeat, "jobs": 1}
    with opened(**asked, policies=("mixed",), slo=SLO(ttft_ms=100, tpot_ms=12)) as (bench, said):
        cut = list(at_capacity(bench, Alone(bench, said.append), said.append))
        whole = list(at_capacity(bench, Patient(bench, said.append), said.append))
    for quick, slow in zip(cut, whole, strict=True):
        assert quick.record["capacities"] == slow.record["capacities"]
        assert quick.replay.reachable is None
        tried, known = quick.record["trials"], slow.record["trials"]
        assert [t["rate"] for t in tried] == [t["rate"] for t in known]
        assert any(t["cut"] for t in tried) and not any(t["cut"] for t in known)
        for mine, theirs in zip(tried, known, strict=True):
            exact = mine["queue_grows"] is None or mine == theirs
            assert exact and mine["slo_attainment"] >= theirs["slo_attainment"]


@pytest.mark.slow
def test_a_process_that_dies_ends_it_in_one_line() -> None:
    with opened(jobs=2) as (bench, said), crew(bench, said.append) as workers:
        assert isinstance(workers, Processes)
        assert isinstance(workers._pool.submit(_die).exception(), BrokenProcessPool)
        with pytest.raises(SmpartError, match="a process of the bench died"):
            list(workers.runs(bench.tasks()))


def _die() -> None:
    import os

    os._exit(1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rates": (4.0, 4.0)}, "named twice"),
        ({"rates": (4.0, 8.0), "capacity": True}, "--capacity chooses the rates"),
        ({"attainment": (0.9, 1.5), "capacity": True}, "--attainment 0.9,1.5"),
        ({"attainment": (0.9,)}, "give that, too"),
        ({"jobs": -1}, "--jobs -1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Options(("chunked",), SOURCE, **options)  # type: ignore[arg-type]
