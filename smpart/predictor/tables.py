"""An estimator as plain arrays: what the controller asks in microseconds, without scikit-learn.

Times are kept as logs over uniform grids and read by bilinear interpolation: a forward alone over its place (log2 of
tokens, and of the tokens each of them attends to), one table a phase and number of units; two for prefills, of one
prompt and of many packed ones, between which seconds are interpolated; the slowdown beside a neighbour over what both
ask of the memory; a hybrid step over what its two parts take alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log, log2
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UsageError
from smpart.partition import ModelShape, Shape, Split
from smpart.predictor.both_sides import BothSides
from smpart.predictor.surface import Axis, Surface

Floats = NDArray[np.float64]
T = TypeVar("T", float, Floats)

_LOG2_E = 1.4426950408889634
"""log2(e)."""


PREFILL, DECODE, HYBRID = "prefill", "decode", "hybrid"

PACKED = 16.0
"""Prompts in the forwards that the second table of prefills is of."""

_NO_TIME = -50.0
"""Log seconds of a forward of nothing."""


class _ByUnits(dict[int, Surface]):
    """Surfaces by number of units. One that was not compiled lies between its neighbours, in log units, and is kept."""

    def __missing__(self, units: int) -> Surface:
        above = min((count for count in self if count >= units), default=max(self))
        below = max((count for count in self if count <= units), default=min(self))
        share = 0.0 if above == below else log2(units / below) / log2(above / below)
        self[units] = made = self[below].blend(self[above], share)
        return made

    def over(self, counts: Sequence[int]) -> list[Surface]:
        """One for each number of units."""
        return [self[units] for units in counts]


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
        self._both: tuple[tuple[Split, ...], BothSides] | None = None

    def _read(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.model = ModelShape(*(int(value) for value in arrays["model"]))
        self.units, *self.counts = (int(count) for count in arrays["units"])
        self._weights, self._kv = float(self.model.weight_bytes), float(self.model.kv_token_bytes)
        self._prefill, self._prefill_slower = self._by_units(PREFILL), self._by_units("prefill_beside")
        self._packed = self._by_units("prefill_packed")
        self._decode, self._decode_slower = self._by_units(DECODE), self._by_units("decode_beside")
        self._hybrid = self._surface(HYBRID, arrays[HYBRID])
        self._margins = {phase: self._surface(phase, arrays[f"{phase}_margin"]) for phase in (PREFILL, DECODE, HYBRID)}
        self._beside = [float(width) for width in arrays["beside_margin"]]

    def _by_units(self, name: str) -> _ByUnits:
        return _ByUnits(
            (count, self._surface(name, values)) for count, values in zip(self.counts, self._arrays[name], strict=True)
        )

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
        if not (other[0] is neighbour and other[1] == neighbour_units):
            bytes_s = self._asked(neighbour, self._log(neighbour, neighbour_units))
            self._other = other = neighbour, neighbour_units, bytes_s
        surfaces = self._decode_slower if decode else self._prefill_slower
        return exp(surfaces[units].at(self._asked(shape, logarithm), other[2]))

    def both_sides(self, step: Shape, head: Shape, splits: tuple[Split, ...]) -> Floats:
        """`seconds` times `contention` of a decode step and of a prefill beside it: float64[2, splits]."""
        known = self._both
        if known is None or known[0] is not splits:
            decode, prefill = [split.decode for split in splits], [split.prefill for split in splits]
            both = BothSides(
                (self._decode.over(decode), self._prefill.over(prefill)),
                self._packed.over(prefill),
                (self._decode_slower.over(decode), self._prefill_slower.over(prefill)),
            )
            self._both = known = splits, both
        moved = self._asked(step, 0.0), self._asked(head, 0.0)
        return known[1].seconds((_decode_place(step), _prefill_place(head)), _packing(head), moved)

    def margin(self, shape: Shape, beside: bool) -> float:
        """Log of the upper bound of single runs over the expected time."""
        prefill, decode = shape.prefill_tokens, shape.decode_batch
        if prefill and decode:
            return self._margins[HYBRID].nearest(*self._parts(shape, self.units))
        if beside:
            return self._beside[1 if decode else 0]
        if decode:
            return self._margins[DECODE].nearest(*_decode_place(shape))
        return self._margins[PREFILL].nearest(*_prefill_place(shape)) if prefill else 0.0

    def _asked(self, shape: Shape, log_seconds: float) -> float:
        """log2 of the bytes a second that a forward moves when it takes so long."""
        read = shape.prefill_context + shape.decode_context + shape.prefill_tokens + shape.decode_batch
        return log2(self._weights + self._kv * read) - log_seconds * _LOG2_E

    def _log(self, shape: Shape, units: int) -> float:
        """Log seconds alone."""
        tokens, rows = shape.prefill_tokens, shape.decode_batch
        if tokens and rows:
            prefill, decode = self._parts(shape, units)
            return prefill / _LOG2_E + self._hybrid.at(prefill, decode)
        if tokens:
            return self._prefill_log(shape, units)
        if rows:
            return self._decode[units].at(log2(rows), log2(1.0 + shape.decode_context / rows))
        return _NO_TIME

    def _parts(self, shape: Shape, units: int) -> tuple[float, float]:
        """log2 seconds of both parts of a hybrid step, each alone."""
        decode = self._decode[units]
        return self._prefill_log(shape, units) * _LOG2_E, decode.at(*_decode_place(shape)) * _LOG2_E

    def _prefill_log(self, shape: Shape, units: int) -> float:
        """Log seconds of the prefill part alone."""
        place, share = _prefill_place(shape), _packing(shape)
        one = self._prefill[units].at(*place)
        if not share:
            return one
        many = self._packed[units].at(*place)
        return log((1.0 - share) * exp(one) + share * exp(many))


def _prefill_place(shape: Shape) -> tuple[float, float]:
    return log2(shape.prefill_tokens), log2(1.0 + shape.prefill_pairs / shape.prefill_tokens)


def fewest_chunks(tokens: T, span: T) -> T:
    """Equal prompts that tokens are of at least if each attends to `span` others on average and none has a context."""
    return tokens / (2.0 * span - 1.0)


def _packing(shape: Shape) -> float:
    """Where between one prompt (0) and `PACKED` ones (1) a prefill lies."""
    if shape.prefill_chunks <= 1:
        return 0.0
    least = max(1.0, fewest_chunks(shape.prefill_tokens, max(1.0, shape.prefill_pairs / shape.prefill_tokens)))
    return min(1.0, max(0.0, (shape.prefill_chunks - least) / (PACKED - least))) if least < PACKED else 0.0


def _decode_place(shape: Shape) -> tuple[float, float]:
    return log2(shape.decode_batch), log2(1.0 + shape.decode_context / shape.decode_batch)
