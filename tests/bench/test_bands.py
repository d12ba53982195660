"""Pictures of lanes on two devices, and of lanes that share units: nothing is drawn twice or outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.bench import plots
from smpart.bench.bands import Bands
from smpart.bench.bench import Bench, Options, Task, unwatched
from smpart.bench.run import Run
from smpart.bench.source import TraceOptions
from smpart.engine.deployment import Deployment
from smpart.engine.log import Span
from smpart.partition import Side, Split
from smpart.scheduler.slo import SLO

UNITS, SECONDS = 4, 12


def lane(side: Side) -> st.SearchStrategy[list[Span]]:
    """Spans of one side, one after the other, in whole seconds; splits may overlap."""
    shares = st.tuples(st.integers(1, UNITS), st.integers(1, UNITS))
    edges = st.lists(st.integers(0, SECONDS), unique=True, max_size=6).map(sorted)

    def spans(drawn: tuple[list[int], list[tuple[int, int]]]) -> list[Span]:
        times, splits = drawn
        pairs = zip(times[::2], times[1::2], splits, strict=False)
        return [Span(side, float(a), float(b), side.value, 1, 1, Split(*split)) for a, b, split in pairs]

    return st.tuples(edges, st.lists(shares, min_size=3, max_size=3)).map(spans)


@given(lane(Side.PREFILL), lane(Side.DECODE))
@settings(max_examples=150)
def test_shares_are_what_counting_each_unit_each_second_gives(prefill: list[Span], decode: list[Span]) -> None:
    bands, spans = Bands(UNITS), prefill + decode
    shares = bands.shares(spans, np.arange(SECONDS + 1.0))
    for second in range(SECONDS):
        at_work: dict[str, set[int]] = {"prefill": set(), "decode": set()}
        for span in spans:
            if span.started <= second < span.finished:
                first = 0 if span.side is Side.PREFILL else UNITS - span.split.decode
                at_work[span.kind] |= set(range(first, first + span.split.units(span.side)))
        both = at_work["prefill"] & at_work["decode"]
        wanted = {"prefill": at_work["prefill"] - both, "decode": at_work["decode"] - both, "both": both}
        for kind, units in wanted.items():
            assert shares[kind][second] == pytest.approx(len(units))
    assert sum(shares.values()).max(initial=0.0) <= UNITS + 1e-9  # type: ignore[union-attr]


def simulated(policy: str) -> Run:
    with Deployment.open("llama-3.1-8b", backend="sim:h100", dtype="bfloat16", profile="none") as made:
        options = Options((policy,), TraceOptions("synth:chat", limit=12), SLO(500, 50), (8.0,), jobs=1)
        return Bench(made, options, lambda line: None, unwatched).run(Task(policy, 8.0, 0))


@pytest.mark.parametrize(("policy", "devices"), [("disagg", 2), ("overlap", 1)])
def test_real_runs_stay_within_their_devices(
    policy: str, devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = simulated(policy)
    bands, units = Bands(132, devices), 132
    edges = run.replay.started + np.linspace(0.0, run.replay.seconds, 50)
    shares = bands.shares(run.replay.log.spans, edges)
    assert 0.0 < sum(shares.values()).max() <= bands.height + 1e-6  # type: ignore[union-attr]
    assert (shares["both"].max() > 0.0) == (policy == "overlap")
    drawn: list[Any] = []
    figure = plots.figure
    monkeypatch.setattr(plots, "figure", lambda *args, **more: drawn.append(figure(*args, **more)) or drawn[-1])
    plots.lanes([run], units, "SM", tmp_path / "lanes.png", "title")
    plots.shares([run], units, "SM", tmp_path / "shares.png", "title")
    (_, (lanes, _)), (_, (whole,)) = drawn
    assert whole.get_ylim() == (0, bands.height) and whole.dataLim.y1 <= bands.height + 1e-6
    tops = {side: [box.vertices[:, 1] for box in boxes(lanes, side)] for side in ("prefill", "decode")}
    assert max(t.max() for t in tops["prefill"]) == 132 and min(t.min() for t in tops["prefill"]) == 0
    assert max(t.max() for t in tops["decode"]) == bands.height
    assert min(t.min() for t in tops["decode"]) == (132 if devices == 2 else 0)
    label = whole.get_ylabel()
    assert ("2 devices" in label and "decode above" in label) == (devices == 2)


def boxes(axis: Any, kind: str) -> list[Any]:
    """Paths of a kind's bars: filled with its colour, or hatched in it."""
    from matplotlib.colors import to_rgba

    colour = to_rgba(plots.COLOURS[kind])
    mine = [c for c in axis.collections if any(tuple(x) == colour for x in (*c.get_facecolor(), *c.get_edgecolor()))]
    return [path for collection in mine for path in collection.get_paths()]


def test_goodput_is_a_gpus_share_where_runs_had_more_gpus_than_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(policy: str, gpus: int, rate: float) -> Any:
        record = {
            "rate": rate,
            "gpus": gpus,
            "goodput_rps": rate,
            "goodput_per_gpu_rps": rate / gpus,
            "slo_attainment": 1,
        }
        return Run(policy, 0, SLO(500, 50), record, None)  # type: ignore[arg-type]

    drawn: list[Any] = []
    figure = plots.figure
    monkeypatch.setattr(plots, "figure", lambda *args, **more: drawn.append(figure(*args, **more)) or drawn[-1])
    plots.goodput([run("disagg", 2, 6.0), run("smpart", 1, 6.0)], tmp_path / "bars.png", "title")
    plots.goodput([run("smpart", 1, 6.0)], tmp_path / "alone.png", "title")
    plots.goodput([run("disagg", 2, 6.0), run("disagg", 2, 8.0), run("smpart", 1, 6.0)], tmp_path / "lines.png", "t")
    (_, (bars,)), (_, (alone,)), (_, (lines, _)) = drawn
    assert [bar.get_height() for bar in bars.patches] == [3.0, 6.0] and "a GPU" in bars.get_ylabel()
    assert "GPU" not in alone.get_ylabel()
    disagg = next(line for line in lines.get_lines() if line.get_label() == "disagg")
    assert disagg.get_xydata().tolist() == [[3.0, 3.0], [4.0, 4.0]] and "a GPU" in lines.get_ylabel()
