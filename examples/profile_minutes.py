"""How much better a profile gets with the minutes spent on it: error on points of another profile, never fitted.

The first profile is cut where so many minutes had passed; each beginning is fitted and judged on the second one, which
was measured with another seed (and so at other points) on the same machine, at another time.

    smpart profile smollm2 --backend cores --minutes 20 --out out/long
    smpart profile smollm2 --backend cores --minutes 8 --seed 1 --out out/other
    python examples/profile_minutes.py out/long out/other --json out/profile_minutes.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from smpart.bench.heldout import Measured, fit
from smpart.bench.host import host
from smpart.bench.noise import repeat_noise
from smpart.errors import SmpartError, UsageError
from smpart.predictor.accuracy import bound, errors
from smpart.predictor.estimators.base import LatencyEstimator
from smpart.predictor.estimators.contention import Contention
from smpart.predictor.estimators.published import PUBLISHED
from smpart.profiler.sample import Sample
from smpart.profiler.store import Store

ESTIMATORS: dict[str, type[LatencyEstimator]] = {"smpart": Contention, **PUBLISHED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("long", type=Path, help="folder of the profile to cut")
    parser.add_argument("other", type=Path, help="folder of the profile to judge on")
    parser.add_argument("--minutes", default="2,5,10,20", help="where to cut")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        long, other = Store.open(options.long), Store.open(options.other)
        if differ := long.fingerprint.differences(other.fingerprint):
            raise UsageError(f"{options.other} is no profile of the same thing: {'; '.join(differ)}")
        samples, judged = long.samples(), other.samples()
        cuts = [float(cut) for cut in options.minutes.split(",")]
        model, units = long.fingerprint.model, int(long.fingerprint.device["units"])
        rows = [row for cut in cuts for row in rows_at(cut, samples, judged, model, units)]
    except SmpartError as error:
        raise SystemExit(f"profile_minutes: {error}") from None
    Console().print(table(rows))
    if options.json:
        noise = {"long": repeat_noise(samples), "other": repeat_noise(judged)}
        record = {"schema": 1, "host": host(), "fingerprint": long.fingerprint.digest, "noise": noise, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1))


def rows_at(cut: float, samples: Sequence[Sample], judged: Sequence[Sample], model: Any, units: int) -> list[Any]:
    """What each estimator is off by after so many minutes."""
    began = samples[0].moment
    seen = Measured.of([sample for sample in samples if sample.moment - began <= 60.0 * cut])
    known = set(seen.points)
    asked = Measured.of([sample for sample in judged if sample.point not in known])
    return [
        {"minutes": cut, "points": len(seen.points), "estimator": name, **judge(form(model, units), seen, asked)}
        for name, form in ESTIMATORS.items()
    ]


def judge(estimator: LatencyEstimator, seen: Measured, asked: Measured) -> dict[str, Any]:
    """Errors on points that were not fitted, alone and beside a neighbour; and how its bound held single runs."""
    try:
        fit(estimator, seen, np.arange(len(seen.points)))
        predicted = estimator.predict(asked.matrix)
    except ValueError as error:
        return {"reason": str(error)}
    found: dict[str, Any] = {}
    for name, rows in (("solo", asked.alone), ("corun", ~asked.alone)):
        found[name] = errors(asked.seconds[rows], predicted[rows])._asdict()
    if isinstance(estimator, Contention):
        upper = estimator.predict_upper(asked.matrix)
        shares = 1.0 / np.bincount(asked.repeat_rows)[asked.repeat_rows]
        found["bound"] = bound(asked.repeat_seconds, upper[asked.repeat_rows], shares)._asdict()
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Median and 95th percentile errors in percent, and the bound's coverage and mean excess."""
    view = Table(title="errors on points of another profile: median / 95th percentile, %")
    for name in ("minutes", "points", "estimator", "alone", "beside", "bound: covers / excess"):
        view.add_column(name, justify="left" if name == "estimator" else "right")
    for row in rows:
        cells = [
            f"{100 * row[k]['median_ape']:.1f} / {100 * row[k]['p95_ape']:.1f}" if k in row else "-"
            for k in ("solo", "corun")
        ]
        found = row.get("bound")
        cells.append(f"{100 * found['coverage']:.1f} / {100 * found['mean_excess']:.1f}" if found else "")
        view.add_row(f"{row['minutes']:g}", str(row["points"]), row["estimator"], *cells)
    return view


if __name__ == "__main__":
    main()
