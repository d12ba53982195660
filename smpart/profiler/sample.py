"""What a profile is made of: points of the space that is swept, and what was measured at them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field, fields
from statistics import median

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pressure:
    """A neighbour that is no forward: a contender kernel, by what it asks of the device all the while.

    Attributes:
        kind: the kernel's name; empty: nobody.
        bytes_s: bytes of memory it moves a second while it runs alone on the neighbour's units.
        flops_s: floating-point operations a second, likewise.
    """

    kind: str = ""
    bytes_s: float = 0.0
    flops_s: float = 0.0


NOBODY = Pressure()
"""No contender."""


@dataclass(frozen=True, slots=True)
class Point:
    """One forward, where it runs, and what runs beside it all the while.

    Attributes:
        shape: the forward that is timed; a prefill, a decode step or a hybrid step.
        units: units it runs on.
        neighbour: the forward on the other lane, over and over; empty: none.
        neighbour_units: units the neighbour runs on; 0 without one.
        contender: a kernel as the neighbour, instead of a forward.
    """

    shape: Shape
    units: int
    neighbour: Shape = field(default_factory=Shape)
    neighbour_units: int = 0
    contender: Pressure = NOBODY

    @property
    def alone(self) -> bool:
        """Whether nothing runs beside it."""
        return self.neighbour_units == 0


@dataclass(frozen=True, slots=True)
class Conditions:
    """The state of a GPU while a sample was taken, where NVML tells; None where it does not.

    Attributes:
        sm_mhz, memory_mhz: clocks.
        celsius: temperature of the chip.
        watts: power drawn.
    """

    sm_mhz: float | None = None
    memory_mhz: float | None = None
    celsius: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """What was measured at a point.

    Attributes:
        seconds: of each undisturbed repeat, in the order they ran; at least one.
        disturbed: repeats that were thrown away.
        stage: why it was measured: ``fill`` (space-filling), ``active`` (the model was unsure), ``anchor`` (the
            same point again and again, which tells the machine's own noise).
        moment: Unix time of the first repeat.
    """

    point: Point
    seconds: tuple[float, ...]
    disturbed: int = 0
    stage: str = "fill"
    moment: float = 0.0
    conditions: Conditions = field(default_factory=Conditions)

    @property
    def median(self) -> float:
        """Median seconds of a whole forward."""
        return median(self.seconds)


SHAPE_COLUMNS = tuple(f.name for f in fields(Shape))
COLUMNS = (
    *SHAPE_COLUMNS,
    "units",
    *(f"neighbour_{name}" for name in SHAPE_COLUMNS),
    "neighbour_units",
    "contender_bytes_s",
    "contender_flops_s",
)
"""Columns of the matrix that estimators take, in order."""


def matrix(points: Iterable[Point]) -> Floats:
    """Points as an estimator takes them: float64[n, len(COLUMNS)].

    >>> step = Point(Shape.decode(4, 400), 2)
    >>> dict(zip(COLUMNS, matrix([step])[0].tolist()))["decode_context"]
    400.0
    """
    rows = [
        (*astuple(p.shape), p.units, *astuple(p.neighbour), p.neighbour_units, p.contender.bytes_s, p.contender.flops_s)
        for p in points
    ]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(COLUMNS))


def targets(samples: Sequence[Sample]) -> Floats:
    """Median seconds of each sample: float64[n]."""
    return np.array([sample.median for sample in samples], dtype=np.float64)
