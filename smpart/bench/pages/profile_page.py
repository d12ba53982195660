"""The page of a profile folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from smpart.bench.fit import fit_folder, last_fit
from smpart.bench.heldout import Measured
from smpart.bench.judgement import Judgement
from smpart.bench.pages.accuracy_parts import errors_by_phase, errors_by_shape, errors_by_split, parity, slowdowns
from smpart.bench.pages.bound_parts import bounds, published
from smpart.bench.pages.machine_parts import conditions, noise, provenance
from smpart.bench.pages.page import Page, percent
from smpart.profiler.store import Store


def profile_page(folder: Path, say: Callable[[str], None]) -> Page:
    """A profile's page, from its last fit; it is fitted first if there is none of all its samples.

    Raises:
        UsageError: the profile cannot be read, or has too little to fit; the message says what to do.
    """
    store = Store.open(folder)
    samples = store.samples()
    report = last_fit(folder, samples)
    if report is None:
        say(f"{folder} was not fitted since its last sample: fitting")
        fitted = fit_folder(folder, say=say)
        samples, report, judgement = list(fitted.samples), fitted.report, fitted.judgement
    else:
        judgement = Judgement.load(folder, Measured.of(samples))
    fingerprint = store.fingerprint
    device, model = fingerprint.device, fingerprint.model
    return Page(
        title=f"Profile of a model of {model.layers} layers x {model.hidden} on {device['name']}",
        subtitle=(
            f"backend {fingerprint.backend}, {device['units']} units, {fingerprint.dtype}; {report['samples']} samples "
            f"in {report['minutes']:.1f} minutes of measuring"
        ),
        tiles=_tiles(report),
        sections=[
            errors_by_phase(judgement),
            errors_by_shape(judgement),
            errors_by_split(judgement),
            parity(judgement),
            slowdowns(judgement),
            bounds(judgement, report["nominal_coverage"], report["repeat_noise"]["bound"]),
            published(judgement, report["repeat_noise"]),
            noise(samples, report["repeat_noise"]),
            conditions(samples),
            provenance(fingerprint, store.configuration, report),
        ],
    )


def _tiles(report: Any) -> list[tuple[str, str, str]]:
    solo, corun, bound, spread = report["solo"], report["corun"], report["bound"], report["repeat_noise"]
    tables = report["tables"]
    missing = {"median_ape": None, "p95_ape": None, "coverage": None, "mean_excess": None}
    solo, corun, bound = solo or missing, corun or missing, bound or missing
    return [
        ("error alone", percent(solo["median_ape"]), _beside(solo["p95_ape"], spread["solo"])),
        ("error beside a neighbour", percent(corun["median_ape"]), _beside(corun["p95_ape"], spread["corun"])),
        ("runs under their bound", percent(bound["coverage"]), f"mean excess {percent(bound['mean_excess'])}"),
        ("compiled tables off by", percent(tables["median_deviation"]), f"at most {percent(tables['max_deviation'])}"),
    ]


def _beside(p95: float | None, noise: float | None) -> str:
    return f"median, held out; 95th percentile {percent(p95)}; repeats differ by {percent(noise)}"
