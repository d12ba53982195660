"""How much better a profile gets with the minutes spent on it: error on points of another profile, never fitted.

Profiles of different lengths are each fitted and judged on one more, which was measured with another seed (and so at
other points) on the same machine, at another time. Machines that are shared drift by more from one hour to the next
than estimators differ: what the anchors of both profiles have in common, the machine's pace, is taken out.

    for n in 2 5 10 20; do smpart profile smollm2 --backend cores --minutes $n --out out/$n; done
    smpart profile smollm2 --backend cores --minutes 8 --seed 1 --out out/other
    python examples/profile_minutes.py out/2 out/5 out/10 out/20 --judge out/other --json out/profile_minutes.json
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
from smpart.profiler.pace import paces
from smpart.profiler.store import Store

ESTIMATORS: dict[str, type[LatencyEstimator]] = {"smpart": Contention, **PUBLISHED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("profiles", type=Path, nargs="+", help="folders of the profiles to fit")
    parser.add_argument("--judge", type=Path, required=True, metavar="DIR", help="folder of the one to judge on")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    try:
        judge = Store.open(options.judge)
        stores = [Store.open(folder) for folder in options.profiles]
        for store in stores:
            if differ := judge.fingerprint.differences(store.fingerprint):
                raise UsageError(f"{store.folder} is no profile of the same thing: {'; '.join(differ)}")
        rows = [row for store in stores for row in rows_of(store, judge)]
    except SmpartError as error:
        raise SystemExit(f"profile_minutes: {error}") from None
    Console().print(table(rows))
    if options.json:
        noise = {store.folder.name: repeat_noise(store.samples()) for store in (*stores, judge)}
        record = {"schema": 1, "host": host(), "fingerprint": judge.fingerprint.digest, "noise": noise, "rows": rows}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1))


def rows_of(profile: Store, judge: Store) -> list[Any]:
    """What each estimator is off by, fitted to one profile and asked for the points of the other."""
    samples, judged = profile.samples(), judge.samples()
    slow = paces([*samples, *judged]).tolist()
    seen = Measured.of(samples, slow[: len(samples)])
    known = set(seen.points)
    paced = zip(judged, slow[len(samples) :], strict=True)
    asked = Measured.of(*zip(*((sample, pace) for sample, pace in paced if sample.point not in known), strict=True))
    model, units = profile.fingerprint.model, int(profile.fingerprint.device["units"])
    found = {"minutes": round(profile.minutes, 1), "points": len(seen.points)}
    return [
        {**found, "estimator": name, **errors_of(form(model, units), seen, asked)} for name, form in ESTIMATORS.items()
    ]


def errors_of(estimator: LatencyEstimator, seen: Measured, asked: Measured) -> dict[str, Any]:
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
