"""Estimators judged on one profile: everyone's held-out predictions, the figures drawn from them, and their file."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from smpart.bench.heldout import TESTS, Held, Measured, Trials, accuracy, bound_of, trials
from smpart.durable import write_whole
from smpart.errors import BackendUnavailable, UsageError
from smpart.predictor.estimators.base import LatencyEstimator

OURS = "smpart"
FILE = "heldout.parquet"
_COLUMNS = ("predicted", "upper", "alone", "fold")


@dataclass(frozen=True)
class Judgement:
    """Attributes:
    measured: the points that all were judged on.
    trials: by estimator, ours (`OURS`) first.
    """

    measured: Measured
    trials: Mapping[str, Trials]

    @classmethod
    def of(cls, measured: Measured, estimators: Mapping[str, LatencyEstimator], processes: int = 1) -> Self:
        """Put every estimator through every test."""
        return cls(measured, {name: trials(each, measured, processes=processes) for name, each in estimators.items()})

    def held(self, name: str, test: str) -> Held | None:
        """An estimator's predictions in one test, if there are any."""
        trial = self.trials[name][test]
        return None if isinstance(trial, str) else trial

    def errors(self, name: str, test: str) -> dict[str, float] | None:
        """Its errors in one test, ready for JSON."""
        held = self.held(name, test)
        return None if held is None else accuracy(self.measured, held)._asdict()

    def bound(self, name: str, tests: Iterable[str] = ("solo", "corun")) -> dict[str, float] | None:
        """How its bounds held in these tests against every single repeat, ready for JSON."""
        helds = [held for test in tests if (held := self.held(name, test)) is not None]
        found = bound_of(self.measured, helds)
        return None if found is None else found._asdict()

    def reasons(self, name: str) -> dict[str, str]:
        """Why it has no figures, by test; empty if it has all."""
        return {test: trial for test, trial in self.trials[name].items() if isinstance(trial, str)}

    def save(self, folder: Path) -> Path:
        """Write ``heldout.parquet``: a row for each prediction; a row with a `reason` where a test could not be made.

        Raises:
            BackendUnavailable: pyarrow is missing.
            OSError: it cannot be written.
        """
        rows: list[dict[str, object]] = []
        for name, by_test in self.trials.items():
            for test, trial in by_test.items():
                if isinstance(trial, str):
                    rows.append({"estimator": name, "test": test, "reason": trial})
                    continue
                for point in np.flatnonzero(trial.fold >= 0).tolist():
                    values = {column: getattr(trial, column)[point].item() for column in _COLUMNS}
                    actual = float(self.measured.seconds[point])
                    rows.append({"estimator": name, "test": test, "point": point, "actual": actual, **values})
        pa, parquet = _arrow()
        buffer = io.BytesIO()
        parquet.write_table(pa.Table.from_pylist(rows, schema=_schema(pa)), buffer)
        return write_whole(folder / FILE, buffer.getvalue())

    @classmethod
    def load(cls, folder: Path, measured: Measured) -> Self:
        """Read back what `save` wrote for the same points.

        Raises:
            UsageError: the file is missing, damaged, or about other points.
            BackendUnavailable: pyarrow is missing.
        """
        pa, parquet = _arrow()
        try:
            rows = parquet.read_table(folder / FILE, schema=_schema(pa)).to_pylist()
        except (OSError, ValueError, pa.ArrowException) as error:
            line = " ".join(str(error).split())[:120]
            raise UsageError(f"{folder / FILE} cannot be read ({line}): run smpart fit {folder} again") from None
        found: dict[str, dict[str, Held | str]] = {}
        for row in rows:
            by_test = found.setdefault(row["estimator"], {})
            if row["reason"] is not None:
                by_test[row["test"]] = row["reason"]
        for name, test in dict.fromkeys((r["estimator"], r["test"]) for r in rows if r["reason"] is None):
            found[name][test] = _held([r for r in rows if (r["estimator"], r["test"]) == (name, test)], measured)
        if OURS not in found or any(set(TESTS) - by_test.keys() for by_test in found.values()):
            raise UsageError(f"{folder / FILE} is not complete: run smpart fit {folder} again")
        return cls(measured, found)


def _held(rows: Sequence[Mapping[str, Any]], measured: Measured) -> Held:
    points = np.array([row["point"] for row in rows])
    count = len(measured.points)
    if points.max() >= count or not np.allclose(measured.seconds[points], [row["actual"] for row in rows], rtol=1e-9):
        raise UsageError(f"{FILE} is about other samples: run smpart fit again")
    columns, fold = np.full((3, count), np.nan), np.full(count, -1, dtype=np.intp)
    for row in rows:
        columns[:, row["point"]] = row["predicted"], row["upper"], row["alone"]
        fold[row["point"]] = row["fold"]
    return Held(columns[0], columns[1], columns[2], fold)


def _schema(pa: Any) -> Any:
    kinds = {"estimator": pa.string(), "test": pa.string(), "point": pa.int64(), "actual": pa.float64()}
    return pa.schema({**kinds, **dict.fromkeys(_COLUMNS[:3], pa.float64()), "fold": pa.int64(), "reason": pa.string()})


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BackendUnavailable("pyarrow is missing: pip install 'smpart[profile]'") from None
    return pyarrow, parquet
