"""What a published measurement becomes: a matrix an estimator takes, and whose numbers they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from smpart.partition import ModelShape
from smpart.profiler.sample import Point, matrix

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Truth:
    """Times that others measured, as estimators are fitted to.

    Attributes:
        name: unique, in words parted by ``/``: family, device, and what tells it from the others of its family.
        source: where the numbers come from.
        licence: SPDX identifier of the data's licence.
        model: dimensions of what was timed; parts that were not (a head, all but one layer) are 0.
        units: units of the whole device.
        X: float64[n, len(COLUMNS)] as of `smpart.profiler.sample.matrix`; all alone, none beside a neighbour.
        y: seconds, float64[n].
        notes: what was assumed, left out or summed, in words.
    """

    name: str
    source: str
    licence: str
    model: ModelShape
    units: int
    X: Floats = field(repr=False)
    y: Floats = field(repr=False)
    notes: str

    @classmethod
    def of(
        cls,
        name: str,
        measured: Sequence[tuple[Point, float]],
        *,
        model: ModelShape,
        units: int,
        source: str,
        licence: str,
        notes: str,
    ) -> Truth:
        """From points and the seconds each took."""
        X = matrix(point for point, _ in measured)  # noqa: N806
        y = np.array([seconds for _, seconds in measured], dtype=np.float64)
        return cls(name, source, licence, model, units, X, y, notes)

    @property
    def family(self) -> str:
        """First word of the name: truths of one family are reported together."""
        return self.name.split("/", 1)[0]
