"""An estimator as plain arrays: what the controller asks in microseconds, without scikit-learn.

Times are kept as logs over uniform grids and read by bilinear interpolation: a forward alone over its place (log2 of
tokens, and of the tokens each of them attends to), one table a phase and number of units; the slowdown beside a
neighbour over what both ask of the memory; a hybrid step over what its two parts take alone.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log2
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UsageError
from smpart.partition import ModelShape, Shape

Floats = NDArray[np.float64]

_LOG2_E = 1.4426950408889634
"""log2(e)."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A uniform axis of a grid: nodes at ``start + step * i``."""

    start: float
    step: float
    count: int

    @classmethod
    def over(cls, low: float, high: float, step: float) -> Self:
        """From `low` to `high` or a little beyond; at least two nodes."""
        return cls(low, step, max(2, int(np.ceil((high - low) / step - 1e-9)) + 1))

    @property
    def nodes(self) -> Floats:
        """Where the nodes are: float64[count]."""
        nodes: Floats = self.start + self.step * np.arange(self.count, dtype=np.float64)
        return nodes


class Surface:
    """Values over two uniform axes, read by bilinear interpolation.

    Beyond the first axis values go on linearly, beyond the second they are held.

    >>> Surface(Axis(0.0, 1.0, 2), Axis(0.0, 1.0, 2), [0.0, 1.0, 2.0, 3.0]).at(0.5, 0.5)
    1.5
    """

    __slots__ = ("_columns", "_last_x", "_last_z", "_per_x", "_per_z", "_values", "_x", "_z")

    def __init__(self, x: Axis, z: Axis, values: Sequence[float]) -> None:
        self._x, self._per_x, self._last_x = x.start, 1.0 / x.step, x.count - 2
        self._z, self._per_z, self._last_z = z.start, 1.0 / z.step, z.count - 1
        self._columns = z.count
        self._values = values

    def at(self, x: float, z: float) -> float:
        """The value at a place."""
        x = (x - self._x) * self._per_x
        z = (z - self._z) * self._per_z
        row = int(x)
        if row > self._last_x:
            row = self._last_x
        elif row < 0:
            row = 0
        if z <= 0.0:
            column, z = 0, 0.0
        elif z >= self._last_z:
            column, z = self._last_z - 1, 1.0
        else:
            column = int(z)
            z -= column
        values, columns = self._values, self._columns
        place = row * columns + column
        low, high = values[place], values[place + columns]
        low += z * (values[place + 1] - low)
        high += z * (values[place + columns + 1] - high)
        return low + (x - row) * (high - low)

    def blend(self, other: Surface, share: float) -> Surface:
        """A surface between this one (0) and another over the same axes (1)."""
        made = copy.copy(self)
        pairs = zip(self._values, other._values, strict=True)
        made._values = [mine + share * (theirs - mine) for mine, theirs in pairs]
        return made

    def nearest(self, x: float, z: float) -> float:
        """The value of the nearest node."""
        row = min(max(0, round((x - self._x) * self._per_x)), self._last_x + 1)
        column = min(max(0, round((z - self._z) * self._per_z)), self._last_z)
        return self._values[row * self._columns + column]


PREFILL, DECODE, HYBRID = "prefill", "decode", "hybrid"

_NO_TIME = -50.0
"""Log seconds of a forward of nothing."""


class Tables:
    """A compiled estimator; what `OnlinePredictor` corrects.

    Args:
        arrays: what `arrays` gave, by name.

    Raises:
        UsageError: arrays are missing or do not fit together.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        try:
            self._read(self._arrays)
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise UsageError(f"the tables of this profile cannot be read ({error!r}): run smpart fit again") from None
        self._own: tuple[Shape | None, int, float] = (None, 0, 0.0)
        self._other: tuple[Shape | None, int, float] = (None, 0, 0.0)

    def _read(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.model = ModelShape(*(int(value) for value in arrays["model"]))
        self.units, *self.counts = (int(count) for count in arrays["units"])
        self._weights, self._kv = float(self.model.weight_bytes), float(self.model.kv_token_bytes)
        self._prefill, self._prefill_slower = self._by_units(PREFILL), self._by_units("prefill_beside")
        self._decode, self._decode_slower = self._by_units(DECODE), self._by_units("decode_beside")
        self._hybrid = self._surface(HYBRID, arrays[HYBRID])
        self._margins = {phase: self._surface(phase, arrays[f"{phase}_margin"]) for phase in (PREFILL, DECODE, HYBRID)}
        self._beside = [float(width) for width in arrays["beside_margin"]]

    def _by_units(self, name: str) -> dict[int, Surface]:
        return {
            count: self._surface(name, values) for count, values in zip(self.counts, self._arrays[name], strict=True)
        }

    def _surface(self, name: str, values: NDArray[Any]) -> Surface:
        x, z = (Axis(float(s), float(d), int(n)) for s, d, n in self._arrays[f"{name}_axes"])
        flat = values.astype(np.float64).reshape(-1)
        if len(flat) != x.count * z.count or not np.isfinite(flat).all():
            raise ValueError(f"{name}: {len(flat)} values for {x.count} x {z.count} nodes")
        return Surface(x, z, flat.tolist())

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> Self:
        """The tables that `arrays` came from. Raises `UsageError` for others."""
        return cls(arrays)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Everything, as plain arrays by name."""
        return dict(self._arrays)

    def seconds(self, shape: Shape, units: int) -> float:
        """Expected seconds of one forward alone on `units` units."""
        logarithm = self._log(shape, units)
        self._own = shape, units, logarithm
        return exp(logarithm)

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """How many times slower beside the neighbour; a hybrid step has the whole device, and none."""
        prefill, decode = shape.prefill_tokens, shape.decode_batch
        if (prefill and decode) or not (neighbour.prefill_tokens or neighbour.decode_batch):
            return 1.0
        own, other = self._own, self._other
        logarithm = own[2] if own[0] is shape and own[1] == units else self._log(shape, units)
        asked = log2(self._weights + self._kv * (shape.prefill_context + shape.decode_context + prefill + decode))
        if not (other[0] is neighbour and other[1] == neighbour_units):
            self._other = other = neighbour, neighbour_units, self._asked(neighbour, neighbour_units)
        surfaces = self._decode_slower if decode else self._prefill_slower
        surface = surfaces.get(units) or self._between(surfaces, units)
        return exp(surface.at(asked - logarithm * _LOG2_E, other[2]))

    def margin(self, shape: Shape, beside: bool) -> float:
        """Log of the upper bound of single runs over the expected time."""
        prefill, decode = shape.prefill_tokens, shape.decode_batch
        if prefill and decode:
            return self._margins[HYBRID].nearest(*self._parts(shape, self.units))
        if beside:
            return self._beside[1 if decode else 0]
        return (
            self._margins[DECODE].nearest(*_decode_place(shape))
            if decode
            else self._margins[PREFILL].nearest(*_prefill_place(shape))
        )

    def _asked(self, shape: Shape, units: int) -> float:
        """log2 of the bytes a second that a forward moves alone."""
        read = shape.prefill_context + shape.decode_context + shape.prefill_tokens + shape.decode_batch
        return log2(self._weights + self._kv * read) - self._log(shape, units) * _LOG2_E

    def _log(self, shape: Shape, units: int) -> float:
        """Log seconds alone."""
        tokens, rows = shape.prefill_tokens, shape.decode_batch
        if tokens and rows:
            prefill, decode = self._parts(shape, units)
            return prefill / _LOG2_E + self._hybrid.at(prefill, decode)
        if tokens:
            surface = self._prefill.get(units) or self._between(self._prefill, units)
            return surface.at(log2(tokens), log2(1.0 + shape.prefill_pairs / tokens))
        if rows:
            surface = self._decode.get(units) or self._between(self._decode, units)
            return surface.at(log2(rows), log2(1.0 + shape.decode_context / rows))
        return _NO_TIME

    def _parts(self, shape: Shape, units: int) -> tuple[float, float]:
        """log2 seconds of both parts of a hybrid step, each alone."""
        prefill = self._prefill.get(units) or self._between(self._prefill, units)
        decode = self._decode.get(units) or self._between(self._decode, units)
        return prefill.at(*_prefill_place(shape)) * _LOG2_E, decode.at(*_decode_place(shape)) * _LOG2_E

    def _between(self, surfaces: dict[int, Surface], units: int) -> Surface:
        """A surface for a number of units that was not compiled: between its neighbours, in log units; kept."""
        above = next((count for count in self.counts if count >= units), self.counts[-1])
        below = next((count for count in reversed(self.counts) if count <= units), self.counts[0])
        share = 0.0 if above == below else log2(units / below) / log2(above / below)
        surfaces[units] = made = surfaces[below].blend(surfaces[above], share)
        return made


def _prefill_place(shape: Shape) -> tuple[float, float]:
    return log2(shape.prefill_tokens), log2(1.0 + shape.prefill_pairs / shape.prefill_tokens)


def _decode_place(shape: Shape) -> tuple[float, float]:
    return log2(shape.decode_batch), log2(1.0 + shape.decode_context / shape.decode_batch)
