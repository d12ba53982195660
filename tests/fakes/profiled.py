"""Profiles of machines that physics describes: tables filled from a roofline, without measuring or fitting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np

from smpart.partition import Device, ModelShape, Shape
from smpart.predictor import Rates, RooflinePrior
from smpart.predictor.artefact import Artefact
from smpart.predictor.surface import Axis
from smpart.predictor.tables import Tables
from smpart.profiler.fingerprint import Fingerprint

MARGIN = math.log(1.1)
"""The bound that these profiles state."""


def tables(
    model: ModelShape, device: Device, counts: Sequence[int], *, rates: Rates | None = None, slower: float = 1.2
) -> Tables:
    """Tables of a roofline at some numbers of units; every forward is `slower` beside any other."""
    prior = RooflinePrior(model, device, rates)
    tokens, reach = Axis.over(0.0, 15.0, 0.25), Axis.over(0.0, 16.0, 0.5)
    parts, asked = Axis.over(-15.0, 8.0, 1.0), Axis.over(0.0, 50.0, 25.0)
    prefill = [[[_prefill(prior, x, z, n) for z in reach.nodes] for x in tokens.nodes] for n in counts]
    decode = [[[_decode(prior, x, z, n) for z in reach.nodes] for x in tokens.nodes] for n in counts]
    both = [[max(0.0, (d - p) / math.log2(math.e)) for d in parts.nodes] for p in parts.nodes]
    flat = np.full((tokens.count, reach.count), MARGIN)
    beside = np.full((len(counts), asked.count, asked.count), math.log(slower))

    def axes(x: Axis, z: Axis) -> np.ndarray:
        return np.array([astuple(x), astuple(z)])

    return Tables(
        {
            "model": np.array(astuple(model), dtype=np.int64),
            "units": np.array([device.units, *counts], dtype=np.int64),
            "prefill": np.array(prefill), "prefill_axes": axes(tokens, reach), "prefill_margin": flat,
            "prefill_packed": np.array(prefill), "prefill_packed_axes": axes(tokens, reach),
            "decode": np.array(decode), "decode_axes": axes(tokens, reach), "decode_margin": flat,
            "hybrid": np.array(both), "hybrid_axes": axes(parts, parts),
            "hybrid_margin": np.full((parts.count, parts.count), MARGIN),
            "prefill_beside": beside, "prefill_beside_axes": axes(asked, asked),
            "decode_beside": beside, "decode_beside_axes": axes(asked, asked),
            "beside_margin": np.array([MARGIN, MARGIN]),
        }
    )  # fmt: skip


def artefact(fingerprint: Fingerprint, made: Tables) -> Artefact:
    """An artefact with what ``smpart fit`` would tell of it."""
    report = {"solo": {"median_ape": 0.021}, "corun": {"median_ape": 0.043}, "measured": 1.75e9, "bound": None}
    return Artefact(fingerprint, made.arrays(), report)


def _prefill(prior: RooflinePrior, x: float, z: float, units: int) -> float:
    tokens = 2.0**x
    return math.log(prior.seconds(Shape(int(tokens), 0, (2.0**z - 1.0) * tokens, 1), units))


def _decode(prior: RooflinePrior, x: float, z: float, units: int) -> float:
    rows = 2.0**x
    return math.log(prior.seconds(Shape.decode(int(rows), int((2.0**z - 1.0) * rows)), units))
