"""`smpart fit`: the samples of a profile -> an artefact that the engine predicts from, and how good it is."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from smpart.bench.heldout import TESTS, Measured, fit
from smpart.bench.host import host
from smpart.bench.judgement import OURS, Judgement
from smpart.bench.noise import repeat_noise
from smpart.durable import write_whole
from smpart.errors import SmpartError, UsageError
from smpart.partition.cpu import Cpus
from smpart.predictor.artefact import NAME, Artefact
from smpart.predictor.compilation import compiled
from smpart.predictor.estimators.base import LatencyEstimator
from smpart.predictor.estimators.contention import Contention
from smpart.predictor.estimators.published import PUBLISHED
from smpart.predictor.tables import Tables
from smpart.profiler.sample import Sample
from smpart.profiler.store import Store

_log = logging.getLogger(__name__)

FILE = "fit.json"
_KEYS = {"schema", "solo", "corun", "bound", "baselines", "nominal_coverage", "repeat_noise", "samples", "points",
         "minutes", "measured", "tables", "host", "reasons"}  # fmt: skip
"""What a report is read for."""
_USABLE = 0.5
"""Median held-out error of forwards alone up to which a profile is installed for later runs."""
Estimators = Mapping[str, type[LatencyEstimator]]


@dataclass(frozen=True)
class Fitted:
    """What `fit_folder` made.

    Attributes:
        samples: those it was made of.
        report: what ``smpart fit --json`` prints and ``fit.json`` holds.
        judgement: the held-out predictions behind it.
        artefact: as it was saved.
    """

    samples: Sequence[Sample]
    report: Mapping[str, Any]
    judgement: Judgement
    artefact: Artefact


def fit_folder(
    folder: Path,
    published: Estimators = PUBLISHED,
    say: Callable[[str], None] = lambda line: None,
    install: bool = True,
) -> Fitted:
    """Fit a profile folder: judge our estimator and the published forms held out, then fit ours to everything.

    Writes ``artefact.safetensors``, ``fit.json`` and ``heldout.parquet``.

    Args:
        folder: of a profile, finished or not.
        published: estimators to put beside ours, by name.
        say: is told what is going on, line by line.
        install: a copy of the artefact in the user's cache, for later runs, unless what it says of forwards that were
            held out is off by half.

    Raises:
        UsageError: no profile there, or too little in it to fit anything; the message says what is missing. Or another
            process measures or fits there.
        SmpartError: the results cannot be written.
        BackendUnavailable: pyarrow is missing.
    """
    store = Store.open(folder)
    with store.alone():
        fitted = _fit_alone(store, folder, published, say)
        if install:
            _install(fitted.artefact, folder, say)
        return fitted


def _fit_alone(store: Store, folder: Path, published: Estimators, say: Callable[[str], None]) -> Fitted:
    samples = store.samples()
    if not samples:
        raise UsageError(f"{folder} holds no samples yet: go on with smpart profile --out {folder}")
    model, units = store.fingerprint.model, int(store.fingerprint.device["units"])
    measured = Measured.of(samples)
    say(f"fitting {len(samples)} samples of {len(measured.points)} points")
    started = perf_counter()
    estimator, tables = _fit_all(Contention(model, units), measured, folder)
    seconds = perf_counter() - started

    say(f"judging it and {len(published)} published forms on what is held out")
    estimators = {OURS: Contention(model, units), **{name: form(model, units) for name, form in published.items()}}
    judgement = Judgement.of(measured, estimators, processes=min(2, len(Cpus.usable().cores)))
    path = folder / NAME
    report = {
        "schema": 1,
        "command": "fit",
        "host": host(),
        "fingerprint": store.fingerprint.digest,
        **figures(judgement),
        "nominal_coverage": estimator.coverage,
        "repeat_noise": repeat_noise(samples),
        "samples": len(samples),
        "points": len(measured.points),
        "minutes": round(store.minutes, 3),
        "measured": max(sample.moment for sample in samples),
        "tables": deviation(tables, estimator, measured),
        "artefact": str(path),
        "seconds": round(seconds, 3),
    }
    artefact = Artefact(store.fingerprint, tables.arrays(), report)
    return Fitted(samples, report, judgement, _write(artefact, judgement, folder))


def figures(judgement: Judgement) -> dict[str, Any]:
    """The held-out figures of our estimator and, under ``baselines``, of the others, ready for JSON.

    What could not be tested is None, and ``reasons`` says why.
    """
    return {
        **{test: judgement.errors(OURS, test) for test in TESTS},
        "bound": _bounds(judgement),
        "reasons": judgement.reasons(OURS),
        "baselines": {
            name: {
                **{test: judgement.errors(name, test) for test in TESTS},
                "bound": judgement.bound(name),
                "reasons": judgement.reasons(name),
            }
            for name in judgement.trials
            if name != OURS
        },
    }


def _bounds(judgement: Judgement) -> dict[str, Any] | None:
    whole = judgement.bound(OURS)
    if whole is None:
        return None
    return {**whole, **{test: judgement.bound(OURS, [test]) for test in ("solo", "corun")}}


def deviation(tables: Tables, estimator: LatencyEstimator, measured: Measured) -> dict[str, float | None]:
    """How far the compiled tables are from their estimator on the measured points: largest and median, relative.

    Points beside a contender kernel are left out: the engine runs none, so the tables know none.
    """
    rows = [row for row, point in enumerate(measured.points) if not point.contender.kind]
    told = []
    for row in rows:
        point = measured.points[row]
        seconds = tables.seconds(point.shape, point.units)
        if not point.alone:
            seconds *= tables.contention(point.shape, point.units, point.neighbour, point.neighbour_units)
        told.append(seconds)
    if not rows:
        return {"max_deviation": None, "median_deviation": None}
    off = np.abs(np.array(told) / estimator.predict(measured.matrix[rows]) - 1.0)
    return {"max_deviation": round(float(off.max()), 6), "median_deviation": round(float(np.median(off)), 6)}


def _fit_all(estimator: Contention, measured: Measured, folder: Path) -> tuple[Contention, Tables]:
    try:
        fit(estimator, measured, np.arange(len(measured.points)))
        return estimator, compiled(estimator)
    except ValueError as error:
        count, line = len(measured.points), " ".join(str(error).split())
        raise UsageError(f"{folder}: the {count} points measured are too few to fit ({line}); profile on") from None


def _write(artefact: Artefact, judgement: Judgement, folder: Path) -> Artefact:
    try:
        judgement.save(folder)
        path = artefact.save(folder / NAME)
        write_whole(folder / FILE, json.dumps(artefact.report, indent=2).encode() + b"\n")
    except OSError as error:
        raise SmpartError(f"{folder}: the fit cannot be written ({error.strerror})") from None
    return Artefact.load(path)


def _install(artefact: Artefact, folder: Path, say: Callable[[str], None]) -> None:
    """For later runs, if it is of use to them."""
    solo = artefact.report["solo"]
    if solo is None or solo["median_ape"] > _USABLE:
        _log.warning("not installed for later runs, too little was measured: profile on, or give --profile %s", folder)
        return
    try:
        installed = artefact.install()
    except (SmpartError, RuntimeError) as error:  # a read-only home: the profile's own folder has it all the same
        _log.warning("not installed for later runs (%s): give --profile %s", error, folder)
    else:
        say(f"installed as {installed}: wrap, bench, demo and generate take it from now on; delete it to undo that")


def last_fit(folder: Path, samples: Sequence[Sample]) -> Mapping[str, Any] | None:
    """What ``fit.json`` says, if it is about these samples; None if there is none, or it is about fewer."""
    try:
        report = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError):
        return None
    whole = isinstance(report, dict) and report.keys() >= _KEYS
    return report if whole and report["samples"] == len(samples) else None
