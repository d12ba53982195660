"""Sections of a profile's page on the machine: its noise over time, its conditions, and whose profile it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from smpart.bench.noise import anchors
from smpart.bench.pages.ink import INK, draw
from smpart.bench.pages.page import Block, Drawing, Section, Table, Text, percent
from smpart.bench.pages.regions import load
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.sample import Conditions, Point, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_UNITS = {
    "sm_mhz": "SM clock (MHz)",
    "memory_mhz": "memory clock (MHz)",
    "celsius": "temperature (°C)",
    "watts": "power (W)",
}
_ANCHORS = 4
"""Points that the picture of anchors shows: those measured most often."""
_OUTSIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 8}
"""Where a legend hides nothing."""
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def noise(samples: Sequence[Sample], figures: Mapping[str, Any]) -> Section:
    """How far repeats lie apart, how anchors drift, and which repeats were thrown away, over time."""
    disturbed, kept = sum(s.disturbed for s in samples), sum(len(s.seconds) for s in samples)
    rows = [
        ["repeats of a sample, alone", percent(figures["solo"])],
        ["repeats of a sample, beside a neighbour", percent(figures["corun"])],
        ["anchors over time, alone", percent(figures["anchors"]["solo"])],
        ["anchors over time, beside a neighbour", percent(figures["anchors"]["corun"])],
        ["repeats thrown away as disturbed", f"{disturbed} of {disturbed + kept}"],
    ]
    blocks: list[Block] = [Table(["median deviation from the median", ""], rows)]
    minutes = _minutes(samples)
    points = anchors(samples)

    def paint(axes: list[Axes]) -> None:
        _spread_panel(axes[0], samples, minutes)
        _anchor_panel(axes[1], samples, minutes, points)
        axes[2].bar(minutes, [s.disturbed for s in samples], width=_bar_width(minutes), color=_COLOURS[1])
        axes[2].set(ylabel="repeats\nthrown away", xlabel="minutes since the first sample")

    caption = (
        "Above: each repeat's deviation from the median of its sample. Middle: points that were measured again and "
        "again, against their own median: a slope is drift of the machine. Below: repeats thrown away as disturbed."
    )
    svg = draw("The machine's noise over time", paint, size=(9.6, 6.0), rows=3, share_x=True)
    return Section("Noise of the machine", [*blocks, Drawing(svg, caption)])


def _minutes(samples: Sequence[Sample]) -> list[float]:
    first = min(s.moment for s in samples)
    return [(s.moment - first) / 60.0 for s in samples]


def _bar_width(minutes: Sequence[float]) -> float:
    return max(1e-3, max(minutes) / 150.0)


def _spread_panel(axis: Axes, samples: Sequence[Sample], minutes: Sequence[float]) -> None:
    for alone, colour, label in ((True, _COLOURS[0], "alone"), (False, _COLOURS[1], "beside a neighbour")):
        dots = [
            (minute, 100.0 * (seconds / sample.median - 1.0))
            for sample, minute in zip(samples, minutes, strict=True)
            if sample.point.alone == alone
            for seconds in sample.seconds
        ]
        if dots:
            x, y = np.array(dots).T
            axis.scatter(x, y, s=5, color=colour, linewidths=0, alpha=0.6, label=label)
    axis.set_ylabel("repeat off its\nmedian (%)")
    axis.grid()
    axis.legend(**_OUTSIDE)


def _anchor_panel(
    axis: Axes, samples: Sequence[Sample], minutes: Sequence[float], points: Mapping[Point, Sequence[float]]
) -> None:
    oftenest = sorted(points.items(), key=lambda item: -len(item[1]))[:_ANCHORS]
    for (point, values), colour in zip(oftenest, _COLOURS, strict=False):
        times = [minute for sample, minute in zip(samples, minutes, strict=True) if sample.point == point]
        off = 100.0 * (np.array(values) / np.median(values) - 1.0)
        label = f"{load(point.shape).label} tokens on {point.units}{'' if point.alone else ', beside a neighbour'}"
        axis.plot(times, off, marker="o", markersize=3, linewidth=1, color=colour, label=label)
    axis.axhline(0.0, color=INK, linewidth=0.6)
    axis.set_ylabel("anchor off its\nmedian (%)")
    axis.grid()
    if points:
        axis.legend(**_OUTSIDE)
    else:
        axis.text(0.5, 0.5, "no point was measured twice", transform=axis.transAxes, ha="center", va="center")


def conditions(samples: Sequence[Sample]) -> Section:
    """Clocks, temperature and power while it was measured, where the driver tells."""
    minutes = _minutes(samples)
    known = {}
    for name in (f.name for f in fields(Conditions)):
        values = [
            (m, v) for s, m in zip(samples, minutes, strict=True) if (v := getattr(s.conditions, name)) is not None
        ]
        if values:
            known[name] = np.array(values)
    if not known:
        text = "No clocks, temperature or power were recorded: NVML tells them of NVIDIA GPUs only."
        return Section("Conditions", [Text(text)])
    rows = [
        [_UNITS[name], *(f"{x:,.1f}" for x in (v[:, 1].min(), np.median(v[:, 1]), v[:, 1].max()))]
        for name, v in known.items()
    ]

    def paint(axes: list[Axes]) -> None:
        for axis, (name, values), colour in zip(axes, known.items(), _COLOURS, strict=False):
            axis.plot(values[:, 0], values[:, 1], color=colour, linewidth=1)
            axis.set_ylabel(_UNITS[name].replace(" (", "\n("))
            axis.grid()
        axes[-1].set_xlabel("minutes since the first sample")

    svg = draw("Conditions over time", paint, size=(9.6, 0.6 + 1.4 * len(known)), rows=len(known), share_x=True)
    table = Table(["", "lowest", "median", "highest"], rows)
    return Section("Conditions", [table, Drawing(svg, "What the driver told of the GPU at each sample.")])


def provenance(fingerprint: Fingerprint, configuration: Mapping[str, Any], report: Mapping[str, Any]) -> Section:
    """Whose profile it is, what was asked to be measured, and where it was fitted."""
    return Section(
        "Whose profile this is",
        [
            Text(
                "A profile is good for exactly this device, model, element type and engine; for others it is refused."
            ),
            facts({**fingerprint.to_json(), "digest": fingerprint.digest}, "Fingerprint"),
            *([facts(configuration, "What was to be measured")] if configuration else []),
            facts(report["host"], "Where it was fitted"),
        ],
    )


def facts(value: Mapping[str, Any], caption: str) -> Table:
    """A nested mapping as a table of two columns."""
    return Table([], [[name, _plain(item)] for name, item in _flat(value)], caption)


def _flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, item in value.items():
        found += _flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else [(f"{prefix}{name}", item)]
    return found


def _plain(value: object) -> str:
    return value if isinstance(value, str) else "–" if value is None else json.dumps(value)  # noqa: RUF001 (a dash)
