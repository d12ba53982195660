"""Pictures of runs. `lanes` is the one that explains the project: what each unit did over time, and what readers felt.

Colours are Okabe and Ito's, told apart also by the colour-blind; hybrid steps are hatched as well, and so is decode
where it runs on units that prefill has too. Two devices stand one above the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from smpart.bench.bands import Bands
from smpart.bench.metrics import itl_ms, judged, ttft_ms
from smpart.bench.run import Run
from smpart.engine.log import Span
from smpart.errors import BackendUnavailable
from smpart.partition import Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"prefill": "#E69F00", "decode": "#0072B2", "hybrid": "#009E73"}
_POLICY_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_INK, _LATE = "#222222", "#D55E00"
_SHARED = "\\\\\\\\"
"""Hatch of decode where prefill has the units too."""
_BINS = 200
"""Moments of a whole run that its picture tells apart."""
_WINDOW_SPANS = 260
"""Spans that one picture can show apart; of a longer run the window around the worst stutter is shown."""


def figure(
    rows: int, heights: Sequence[float], size: tuple[float, float], share: bool = True
) -> tuple[Figure, list[Axes]]:
    """A figure without a display. Raises `BackendUnavailable` if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise BackendUnavailable("matplotlib is missing: pip install 'smpart[bench]'") from None
    canvas = Figure(figsize=size, dpi=150, layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.subplots(rows, 1, sharex=share, gridspec_kw={"height_ratios": list(heights)}, squeeze=False)
    flat: list[Axes] = list(axes[:, 0])
    for axis in flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
    return canvas, flat


def save(canvas: Any, path: Path) -> None:
    """Write a figure as PNG. Raises `OSError`, which names the file, if it cannot be written."""
    try:
        canvas.savefig(path)
    except OSError as error:
        error.filename = str(path)
        raise


def lanes(runs: Sequence[Run], units: int, unit_name: str, path: Path, title: str, gpus: int = 1) -> None:
    """Each run's lanes over time, the line between them, and beneath every gap between two tokens.

    Args:
        runs: of one load, so that the same requests arrive at the same moments.
        units: units of the whole device, the height of a lane panel.
        unit_name: what a unit is called: core, SM.
        path: PNG to write.
        title: what was run where, one line.
        gpus: that make a device: those of a run over these are the devices it had.
    """
    canvas, axes = figure(2 * len(runs), [2.1, 1.5] * len(runs), (12, 1.2 + 3.5 * len(runs)))
    window = _window(runs)
    for axis, run in zip(axes[::2], runs, strict=True):
        _lane_panel(axis, run, _bands(run, units, gpus), unit_name, window)
    worst = max((g for run in runs for s in judged(run.replay) for g in itl_ms(s)), default=1.0)
    for axis, run in zip(axes[1::2], runs, strict=True):
        _gap_panel(axis, run, worst)
    axes[0].set_xlim(*window)
    axes[-1].set_xlabel("seconds since the first arrival")
    canvas.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    canvas.legend(handles=_legend(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(canvas, path)


def _window(runs: Sequence[Run]) -> tuple[float, float]:
    seconds = max(run.replay.seconds for run in runs)
    crowd = max(len(run.replay.log.spans) for run in runs)
    if crowd <= _WINDOW_SPANS:
        return 0.0, seconds
    width = seconds * _WINDOW_SPANS / crowd
    gaps = [(g, t) for r in runs for s in judged(r.replay) for g, t in zip(itl_ms(s), s.times_s[1:], strict=True)]
    centre = max(gaps, default=(0.0, 0.0))[1]
    start = min(max(0.0, centre - 0.5 * width), seconds - width)
    return start, start + width


def _bands(run: Run, units: int, gpus: int) -> Bands:
    return Bands(units, cast(int, run.record["gpus"]) // gpus)


def _lane_panel(axis: Axes, run: Run, bands: Bands, unit_name: str, window: tuple[float, float]) -> None:
    started, height = run.replay.started, bands.height
    shown = [s for s in run.replay.log.spans if s.finished - started >= window[0] and s.started - started <= window[1]]
    for kind, colour in COLOURS.items():
        _bars(axis, [s for s in shown if s.kind == kind], bands, started, colour, "////" if kind == "hybrid" else "")
    line = _line(shown, started)
    axis.step([t for t, _ in line], [h for _, h in line], where="post", color=_INK, linewidth=1.6)
    longest = max(s.prompt_tokens for s in run.replay.served)
    arrivals = [s for s in run.replay.served if window[0] <= s.due_s <= window[1]]
    sizes = [14 + 120 * s.prompt_tokens / longest for s in arrivals]
    heights = [1.06 * height] * len(arrivals)
    axis.scatter([s.due_s for s in arrivals], heights, s=sizes, marker="v", color=_INK, clip_on=False)
    axis.set_ylim(0, 1.16 * height)
    axis.set_yticks(range(height + 1) if height <= 8 else np.linspace(0, height, 5).round().tolist())
    axis.set_ylabel(_units_label(bands, f"{unit_name}s"))
    record: Any = run.record
    axis.set_title(
        f"{run.policy}: {record['slo_attainment']:.0%} of requests met every objective, "
        f"longest stutter {record['itl_ms']['max'] or 0:,.0f} ms, TTFT p95 {record['ttft_ms']['p95'] or 0:,.0f} ms",
        loc="left", fontsize=10,
    )  # fmt: skip


def _units_label(bands: Bands, name: str) -> str:
    return name if bands.devices == 1 else f"{name} of {bands.devices} devices:\nprefill below, decode above"


def _bars(axis: Axes, spans: list[Span], bands: Bands, started: float, colour: str, hatch: str) -> None:
    from matplotlib.collections import PolyCollection

    boxes, shared = [], []
    for span in spans:
        owned, other = bands.owned(span), bands.shared(span)
        boxes.append(_box(span, owned, started))
        if span.side is Side.DECODE and other:  # prefill's bar may lie there as well, and above
            shared.append(_box(span, other, started))
    order = 0.9 if colour == COLOURS["decode"] else 1.0
    bars = PolyCollection(boxes, facecolor=colour, edgecolor="white", linewidth=0.4, hatch=hatch, zorder=order)
    stripes = PolyCollection(shared, facecolor="none", edgecolor=colour, linewidth=0.4, hatch=_SHARED, zorder=1.1)
    axis.add_collection(bars)
    axis.add_collection(stripes)


def _box(span: Span, heights: range, started: float) -> list[tuple[float, float]]:
    left, right = span.started - started, span.finished - started
    return [(left, heights.start), (right, heights.start), (right, heights.stop), (left, heights.stop)]


def _line(spans: list[Span], started: float) -> list[tuple[float, int]]:
    """Where the line between the lanes was, at each change: the prefill units of the split that work ran under."""
    line: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda s: s.started):
        height = span.split.prefill
        if not line or line[-1][1] != height:
            line.append((span.started - started, height))
    if line:
        line.append((max(s.finished for s in spans) - started, line[-1][1]))
    return line


def _gap_panel(axis: Axes, run: Run, worst: float) -> None:
    points = [p for s in judged(run.replay) for p in zip(s.times_s[1:], itl_ms(s), strict=True)]
    if points:
        times, gaps = np.array(points).T
        late = gaps > run.slo.itl_ms
        axis.vlines(times[late], 0, gaps[late], color=_LATE, linewidth=0.8, alpha=0.5)
        axis.scatter(times[~late], gaps[~late], s=7, color=COLOURS["decode"], linewidths=0)
        axis.scatter(times[late], gaps[late], s=16, color=_LATE, marker="X", linewidths=0)
    axis.axhline(run.slo.itl_ms, color=_INK, linestyle="--", linewidth=1)
    axis.set_ylim(0, 1.08 * max(worst, run.slo.itl_ms))
    axis.set_ylabel("gap between\ntokens (ms)")


def _legend() -> list[Any]:
    from matplotlib.lines import Line2D

    return [
        *_kinds(),
        Line2D([], [], color=_INK, linewidth=1.6, label="the line between the lanes"),
        Line2D([], [], color=_INK, marker="v", linestyle="", label="arrival (size: prompt)"),
        Line2D([], [], color=_LATE, marker="X", linestyle="", label="gap over the ITL objective (dashed)"),
    ]


def _kinds() -> list[Any]:
    from matplotlib.patches import Patch

    prefill, decode = COLOURS["prefill"], COLOURS["decode"]
    return [
        Patch(color=prefill, label="prefill"),
        Patch(color=decode, label="decode"),
        Patch(facecolor=COLOURS["hybrid"], edgecolor="white", hatch="////", label="hybrid step (both in one)"),
        Patch(facecolor=prefill, edgecolor=decode, hatch=_SHARED, label="both lanes on the same units"),
    ]


def goodput(runs: Sequence[Run], path: Path, title: str) -> None:
    """Goodput and attainment of each policy against the rate: the median of its runs, each run as a dot.

    Where all were run at one rate, as bars. A GPU's share of each, where some runs had more GPUs than others.
    """
    per_gpu = len({run.record["gpus"] for run in runs}) > 1
    if len({run.record["rate"] for run in runs}) > 1:
        _goodput_by_rate(runs, path, title, per_gpu)
        return
    canvas, (axis,) = figure(1, [1], (7, 4))
    by_policy: dict[str, list[float]] = {}
    for run in runs:
        by_policy.setdefault(run.policy, []).append(_goodput(run, per_gpu))
    for x, (values, colour) in enumerate(zip(by_policy.values(), _POLICY_COLOURS * len(by_policy), strict=False)):
        axis.bar(x, float(np.median(values)), width=0.6, color=colour)
        axis.scatter([x] * len(values), values, color=_INK, s=14, zorder=3)
        axis.annotate(
            f"{np.median(values):.3g}", (x, float(np.median(values))), (0, 6), textcoords="offset points", ha="center"
        )
    axis.set_xticks(range(len(by_policy)), list(by_policy))
    axis.set_ylabel(f"requests/s{' a GPU' if per_gpu else ''} that met every objective")
    axis.margins(y=0.15)
    axis.set_title(title, loc="left", fontsize=10)
    save(canvas, path)


def _goodput(run: Run, per_gpu: bool) -> float:
    return float(cast(float, run.record["goodput_per_gpu_rps" if per_gpu else "goodput_rps"]))


def _goodput_by_rate(runs: Sequence[Run], path: Path, title: str, per_gpu: bool) -> None:
    canvas, axes = figure(2, [1, 1], (7, 7))
    each = " a GPU" if per_gpu else ""
    for policy, colour in zip(dict.fromkeys(r.policy for r in runs), _POLICY_COLOURS * len(runs), strict=False):
        mine = [run for run in runs if run.policy == policy]
        gpus = [cast(int, run.record["gpus"]) if per_gpu else 1 for run in mine]
        arriving = np.array([run.record["rate"] for run in mine], dtype=np.float64) / gpus
        goodputs = [_goodput(run, per_gpu) for run in mine]
        met = [100.0 * cast(float, run.record["slo_attainment"]) for run in mine]
        for axis, values in zip(axes, (np.array(goodputs), np.array(met)), strict=True):
            rates = np.unique(arriving)
            middle = [float(np.median(values[arriving == rate])) for rate in rates]
            axis.plot(rates, middle, color=colour, label=policy)
            axis.scatter(arriving, values, color=colour, s=14, zorder=3)
            axis.grid(alpha=0.25)
    axes[0].set_ylabel(f"requests/s{each} that met every objective")
    axes[1].set_ylabel("met all (%)")
    axes[0].axline((0.0, 0.0), slope=1.0, color=_INK, linewidth=0.8, linestyle="--")
    axes[0].set_xlim(0.0, None)
    axes[0].set_ylim(0.0, None)
    axes[0].legend(frameon=False, fontsize=9)
    axes[0].set_title(title, loc="left", fontsize=10)
    axes[-1].set_xlabel(f"requests/s{each} that arrive")
    save(canvas, path)


def shares(runs: Sequence[Run], units: int, unit_name: str, path: Path, title: str, gpus: int = 1) -> None:
    """How each run shared the device out over its whole length: unit-seconds of each kind of work, stacked.

    Args:
        units: units of the whole device.
        unit_name: what a unit is called: core, SM.
        gpus: that make a device: those of a run over these are the devices it had.
    """
    canvas, axes = figure(len(runs), [1] * len(runs), (10, 1.0 + 2.2 * len(runs)))
    for axis, run in zip(axes, runs, strict=True):
        bands = _bands(run, units, gpus)
        edges = run.replay.started + np.linspace(0.0, max(run.replay.seconds, 1e-9), _BINS + 1)
        times, parts = edges[:-1] - run.replay.started, bands.shares(run.replay.log.spans, edges)
        if bands.devices > 1:
            floor = np.full_like(times, bands.units)
            axis.fill_between(times, parts["prefill"], step="post", color=COLOURS["prefill"])
            axis.fill_between(times, floor, floor + parts["decode"], step="post", color=COLOURS["decode"])
            axis.axhline(bands.units, color=_INK, linewidth=0.8)
        else:
            drawn = axis.stackplot(times, *parts.values(), step="post", colors=[*COLOURS.values(), COLOURS["prefill"]])
            drawn[2].set(hatch="////", edgecolor="white", linewidth=0.0)
            drawn[-1].set(hatch=_SHARED, edgecolor=COLOURS["decode"], linewidth=0.0)
        axis.set(ylim=(0, bands.height), ylabel=_units_label(bands, f"{unit_name}s at work"), title=run.policy)
    axes[-1].set_xlabel("seconds since the first arrival")
    canvas.suptitle(title, fontsize=12, x=0.01, ha="left", weight="bold")
    canvas.legend(handles=_kinds(), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    save(canvas, path)


def latencies(runs: Sequence[Run], path: Path, title: str) -> None:
    """Share of requests (TTFT) and of gaps (ITL) up to each latency, by policy; objectives dashed."""
    canvas, axes = figure(2, [1, 1], (8, 7), share=False)
    colours = dict(zip(dict.fromkeys(r.policy for r in runs), _POLICY_COLOURS * len(runs), strict=False))
    for policy, colour in colours.items():
        served = [s for r in runs if r.policy == policy for s in judged(r.replay)]
        for axis, values in zip(
            axes,
            ([v for s in served if (v := ttft_ms(s)) is not None], [g for s in served for g in itl_ms(s)]),
            strict=True,
        ):
            ordered = np.sort(values)
            axis.step(
                ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), where="post", color=colour, label=policy
            )
    for axis, name, limit in zip(axes, ("TTFT", "ITL"), (runs[0].slo.ttft_ms, runs[0].slo.itl_ms), strict=True):
        axis.axvline(limit, color=_INK, linestyle="--", linewidth=1)
        axis.set(xscale="log", xlabel=f"{name} (ms)", ylabel="share")
        axis.grid(alpha=0.25)
    axes[0].legend(frameon=False, fontsize=9)
    axes[0].set_title(title, loc="left", fontsize=10)
    save(canvas, path)
