"""What physics says before anything was measured: a roofline of the model over the units of a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from smpart.partition import Device, ModelShape, Shape, Split
from smpart.predictor.estimate import NOTHING, Estimate, Floats, Sides, split_by_split

_GUESSED, _MEASURED = 1.5, 1.25
"""Upper bound over mean: of rates that were guessed, and of such that were fitted to a few measured forwards."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do.

    Attributes:
        unit_flops: floating-point operations a second of one unit.
        bandwidth: bytes a second of the whole device.
        knee: units from which on the bandwidth no longer grows.
        forward_seconds: fixed cost of a forward.
        layer_seconds: fixed cost of a decoder layer.
        row_seconds: cost of each decoding sequence beyond its arithmetic and traffic.
        overlap: share of the lesser of arithmetic and weight traffic that hides behind the greater.
    """

    unit_flops: float
    bandwidth: float
    knee: float
    forward_seconds: float
    layer_seconds: float
    row_seconds: float = 0.0
    overlap: float = 1.0

    @classmethod
    def guess(cls, device: Device) -> Rates:
        """Rough rates for a kind of device: data-sheet peaks of known GPUs, a middling core otherwise."""
        if device.kind == "cpu":
            return cls(15e9, 8e9, 1.0, 1e-3, 1e-4, 1e-3, overlap=0.0)
        name = device.name.lower()
        flops, bandwidth = next((peaks for key, peaks in _GPU_PEAKS.items() if key in name), _GPU_PEAKS["a100"])
        return cls(0.6 * flops / device.units, 0.8 * bandwidth, max(1.0, 0.3 * device.units), 3e-4, 1e-5)


_GPU_PEAKS = {
    "a100": (312e12, 2.04e12),
    "h100": (989e12, 3.35e12),
    "h200": (989e12, 4.8e12),
    "4090": (165e12, 1.01e12),
}
"""Dense 16-bit operations and bytes a second, from the vendor's data sheets."""


class RooflinePrior:
    """An analytic `Predictor`: matmuls and attention each take the longer of their arithmetic and their traffic.

    The form is that of Bullet (arXiv 2504.19516, section 3.2). It learns nothing: `OnlinePredictor` corrects it.

    Args:
        rates: what the device can do; by default guessed from its kind and name.
    """

    drifted: str | None = None

    def __init__(self, model: ModelShape, device: Device, rates: Rates | None = None) -> None:
        self.model = model
        self.units = device.units
        self._margin = math.log(_GUESSED if rates is None else _MEASURED)
        self.rates = rates or Rates.guess(device)
        self._fixed = self.rates.forward_seconds + model.layers * self.rates.layer_seconds
        self._linear = 2.0 * model.linear_params
        self._head = 2.0 * model.head_params
        self._pair = 4.0 * model.layers * model.heads * model.head_dim
        self._kv = float(model.kv_token_bytes)

    def seconds(self, shape: Shape, units: int) -> float:
        """Expected seconds of one forward alone on `units` units."""
        rates = self.rates
        flops = rates.unit_flops * units
        bandwidth = rates.bandwidth * min(1.0, units / rates.knee)
        tokens = shape.prefill_tokens + shape.decode_batch
        sampled = shape.prefill_chunks + shape.decode_batch
        linear = (self._linear * tokens + self._head * sampled) / flops
        weights = self.model.weight_bytes / bandwidth
        less, more = (linear, weights) if linear < weights else (weights, linear)
        prefill = self._pair * shape.prefill_pairs / flops
        prefill_read = self._kv * (shape.prefill_context + shape.prefill_tokens) / bandwidth
        decode_read = self._kv * (shape.decode_context + shape.decode_batch) / bandwidth
        return (
            self._fixed
            + more
            + (1.0 - rates.overlap) * less
            + (prefill if prefill > prefill_read else prefill_read)
            + decode_read
            + rates.row_seconds * shape.decode_batch
        )

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """How many times slower beside the neighbour: what both ask of the bandwidth, over what there is."""
        if not neighbour.prefill_tokens and not neighbour.decode_batch:
            return 1.0
        asked = self.model.bytes(shape) / self.seconds(shape, units)
        asked += self.model.bytes(neighbour) / self.seconds(neighbour, max(1, neighbour_units))
        return max(1.0, min(2.0, asked / self.rates.bandwidth))

    def margin(self, shape: Shape, beside: bool) -> float:
        """Log of the upper bound over the expected time: a guess."""
        return self._margin

    def both_sides(self, step: Shape, head: Shape, splits: tuple[Split, ...]) -> Floats:
        """Seconds of a decode step and of a prefill, each beside the other: float64[2, splits]."""
        sides = split_by_split(self, step, head, splits)
        return np.array([sides.step, sides.head])

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """Seconds of the forward beside a neighbour on the other units, with a wide margin as its upper bound."""
        mean = self.seconds(shape, units) * self.contention(shape, units, neighbour, self.units - units)
        return Estimate(mean, mean * math.exp(self._margin))

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """Both sides of each split, each beside the other."""
        return split_by_split(self, step, head, splits)

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Physics does not learn."""
