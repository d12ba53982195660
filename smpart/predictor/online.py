"""Corrects a prior while serving: by phase, units and coarse size, in log space, with a bound that covers."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING, Estimate, Floats, Sides, require_shared, require_sides
from smpart.predictor.keys import HYBRID, beside_key, kind_of, solo_key
from smpart.predictor.regions import TRUSTED, Family, Kind, Region

_log = logging.getLogger(__name__)

Units = NDArray[np.intp]

_ABSURD = 12.0
"""Log ratio beyond which no clock is believed: what is further off counts as so much."""
_NAMES = ("", "prefill", "decode", "a hybrid step")


class Prior(Protocol):
    """What `OnlinePredictor` corrects: physics, or a profile's tables."""

    units: int
    """Units of the whole device."""

    def seconds(self, shape: Shape, units: int) -> float:
        """Expected seconds alone on `units` units."""

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """Times slower beside the neighbour."""

    def both_sides(self, step: Shape, head: Shape, splits: tuple[Split, ...]) -> Floats:
        """`seconds` times `contention` of a decode step and of a prefill beside it: a new float64[2, splits]."""

    def margin(self, shape: Shape, beside: bool) -> float:
        """Log of an upper bound of single forwards over the expected time, by the prior's own account."""


class OnlinePredictor:
    """A `Predictor`: prior × correction × contention × correction, both corrections learnt from what really ran.

    The correction of a forward is looked up by (phase, units, size), backed by (phase, units), backed by the phase
    alone, backed by the prior as far as its own bound says that it can be trusted: how a phase scales over units comes
    from observations as soon as there are any. Contention is corrected apart from solo speed, from pieces that ran
    beside a neighbour, which has the rest of the device.

    What is learnt is folded into one factor a region when it is observed, so that a prediction takes two look-ups
    beyond what it asks of the prior.

    Args:
        prior: solo seconds and contention before anything was seen.
        profiled: the prior was measured on this machine with this model: watch whether it still holds.

    Attributes:
        observations: pieces learnt from.

    >>> class Flat:
    ...     units = 2
    ...     def seconds(self, shape, units): return 1.0
    ...     def contention(self, shape, units, neighbour, neighbour_units): return 1.0
    ...     def margin(self, shape, beside): return 2.0
    >>> predictor = OnlinePredictor(Flat())
    >>> step = Shape.decode(4, 100)
    >>> for _ in range(3):
    ...     predictor.observe(step, 1, NOTHING, 1.0, 10.0)
    >>> round(predictor.predict(step, 1).mean, 1)
    10.0
    """

    def __init__(self, prior: Prior, *, profiled: bool = False) -> None:
        self.prior = prior
        self.profiled = profiled
        self.observations = 0
        self._units = prior.units
        self._kinds = [Kind(prior.units) for _ in range(16)]
        self._families: dict[int, Family] = {}
        self._regions: dict[int, Region] = {}
        self._candidates: tuple[tuple[Split, ...], Units] = (), np.empty((2, 0), dtype=np.intp)

    def copy(self) -> OnlinePredictor:
        """One that has learnt the same and learns on by itself; the prior, which never changes, is shared."""
        return copy.deepcopy(self, {id(self.prior): self.prior})

    @property
    def drifted(self) -> str | None:
        """In words, what takes lastingly more or less than the profile says; None: nothing, or there is no profile."""
        reasons = [self._drift_words(number) for number, kind in enumerate(self._kinds) if kind.drift.side]
        return "; ".join(reasons) or None

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """Seconds of the whole forward of `shape` on `units` units beside `neighbour`, which has the others."""
        prior, regions = self.prior, self._regions
        region = regions.get(solo_key(shape, units))
        mean = prior.seconds(shape, units)
        mean *= math.exp(self._unseen(shape, units)) if region is None else region.factor
        if neighbour.prefill_tokens or neighbour.decode_batch:
            others = self._units - units
            mean *= prior.contention(shape, units, neighbour, others if others > 0 else 1)
            region = regions.get(beside_key(shape, units, neighbour))
            if region is None:
                mean *= math.exp(self._kinds[kind_of(shape, neighbour)].folded(units))
            else:
                mean *= region.factor
        if region is not None and region.margin.count >= TRUSTED:
            return _make(Estimate, (mean, mean * region.margin.widen))
        return _make(Estimate, (mean, mean * self._first_widen(shape, neighbour)))

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """What `predict` says of both sides of each split, each beside the other; both sides share out the device.

        Quickest where `splits` is the same tuple from call to call.
        """
        require_sides(step, head)
        known = self._candidates
        if known[0] is not splits:
            require_shared(splits)
            units = [[split.decode for split in splits], [split.prefill for split in splits]]
            self._candidates = known = tuple(splits), np.array(units, dtype=np.intp)
        steps, heads = known[1]
        if not len(steps):
            return Sides(*(np.empty(0) for _ in range(4)))
        seconds = self.prior.both_sides(step, head, known[0])
        step_upper = self._corrected(seconds[0], step, steps, head)
        return Sides(seconds[0], step_upper, seconds[1], self._corrected(seconds[1], head, heads, step))

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Learn from a completed piece: `fraction` of the forward took `seconds`.

        Pieces without measurable time or work, or on units that there are not, are ignored.
        """
        if not (0.0 < seconds < math.inf and 0.0 < fraction < math.inf and 0 < units <= self._units):
            return
        kind = kind_of(shape, neighbour)
        if kind < 4:
            return
        self.observations += 1
        prior, key = self.prior, solo_key(shape, units)
        region = self._regions.get(key)
        shift = math.log(seconds) - math.log(fraction) - math.log(prior.seconds(shape, units))
        shift = value = -_ABSURD if shift < -_ABSURD else _ABSURD if shift > _ABSURD else shift
        if kind & 3:
            others = self._units - units
            shift -= math.log(prior.contention(shape, units, neighbour, others if others > 0 else 1))
            value = shift - (self._unseen(shape, units) if region is None else region.log)
            key = beside_key(shape, units, neighbour)
            region = self._regions.get(key)
        if region is not None:
            region.residual(value - region.log)
        else:
            if self.profiled:  # a mere guess at what is new says nothing of how good predictions are
                expected = self._kinds[kind].folded(units) if kind & 3 else self._unseen(shape, units)
                self._kinds[kind].margin.learn(value - expected)
            family = beside_key(shape, 0, neighbour) if kind & 3 else solo_key(shape, 0)
            region = self._regions[key] = self._region(family, kind, units, prior.margin(shape, bool(kind & 3)))
        region.learn(value)
        if self.profiled and self._kinds[kind].drift.learn(shift, region.bound):
            self._report(kind)

    def _region(self, key: int, kind: int, units: int, bound: float) -> Region:
        """A region seen for the first time, of the family `key`."""
        family = self._families.get(key)
        if family is None:
            family = self._families[key] = Family(self._kinds[kind], self._units)
        return Region(family, units, bound)

    def _unseen(self, shape: Shape, units: int) -> float:
        """What its kind says of a forward alone; a hybrid step before any was seen takes after its parts."""
        kind = kind_of(shape, NOTHING)
        if kind != 4 * HYBRID or self._kinds[kind].version:
            return self._kinds[kind].folded(units)
        prefill = Shape(shape.prefill_tokens, shape.prefill_context, shape.prefill_pairs, shape.prefill_chunks)
        decode = Shape.decode(shape.decode_batch, shape.decode_context)
        weights = self.prior.seconds(prefill, units), self.prior.seconds(decode, units)
        logs = [
            self._kinds[kind_of(part, NOTHING)].folded(units) if region is None else region.log
            for part in (prefill, decode)
            for region in (self._regions.get(solo_key(part, units)),)
        ]
        return (weights[0] * logs[0] + weights[1] * logs[1]) / (weights[0] + weights[1])

    def _corrected(self, seconds: Floats, shape: Shape, units: Units, neighbour: Shape) -> Floats:
        """Correct the prior's seconds of one side of each split in place; their upper bounds: float64[splits]."""
        get = self._families.get
        alone, beside = get(solo_key(shape, 0)), get(beside_key(shape, 0, neighbour))
        seconds *= (self._kinds[kind_of(shape, NOTHING)] if alone is None else alone).factors()[units]
        seconds *= (self._kinds[kind_of(shape, neighbour)] if beside is None else beside).factors()[units]
        first = self._first_widen(shape, neighbour)
        upper: Floats = seconds * (first if beside is None else beside.widens(units, first))
        return upper

    def _first_widen(self, shape: Shape, neighbour: Shape) -> float:
        """The bound over the mean where few residuals were seen, or none of this region."""
        kind = kind_of(shape, neighbour)
        margin = self._kinds[kind].margin
        if margin.count >= TRUSTED:
            return margin.widen
        bound = self.prior.margin(shape, bool(kind & 3))
        if kind == 4 * HYBRID and not self.profiled:  # its parts' errors say more than a guess: else it is never tried
            parts = [self._kinds[4 * phase].margin for phase in (1, 2)]
            if all(part.count >= TRUSTED for part in parts):
                bound = math.log(max(part.widen for part in parts))
        return math.exp(max(bound, margin.widest))

    def _report(self, kind: int) -> None:
        if self._kinds[kind].drift.side:
            _log.warning("the profile is no longer true: %s; run `smpart profile` again", self._drift_words(kind))
        else:
            _log.info("the profile is true again: %s takes what it says", _words(kind))

    def _drift_words(self, kind: int) -> str:
        drift = self._kinds[kind].drift
        return f"{_words(kind)} has taken {drift.factor:.2f}x what it says for {drift.run} forwards"


_make = tuple.__new__
"""A named tuple's own constructor takes twice as long."""


def _words(kind: int) -> str:
    return _NAMES[kind >> 2] + (f" beside {_NAMES[kind & 3]}" if kind & 3 else " alone")
