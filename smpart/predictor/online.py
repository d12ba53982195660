"""Corrects a prior while serving: by phase, units and coarse size, in log space, with a bound that covers."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from smpart.partition import Shape, Split
from smpart.predictor.drift import Drift
from smpart.predictor.estimate import NOTHING, Estimate, Floats, Sides
from smpart.predictor.residuals import LASTING, Level, Margin

_log = logging.getLogger(__name__)

_BACKING = 0.5
"""How many observations the coarser level counts for beside the finer one, at least."""
_NOISE, _MOST_BACKING = 0.07, 4.0
"""A prior counts for as many observations as noise of this bound (log) is wider than its own, squared; so many at most.
"""
_TRUSTED = 8
"""Residuals before a bound may become narrower than the prior's own."""
_ENOUGH = 64
"""Residuals of one region from which on it has a bound of its own."""

_HYBRID = 3
_SOLO_UNITS, _BESIDE_UNITS = 18, 17
"""Bits of a key below the units."""
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


class _Region:
    """Forwards of one phase, number of units and coarse size (and of one kind of neighbour): what is known of them.

    Attributes:
        log: correction of the prior, backed by the coarser levels as they were when the region was last seen.
        factor: its exponential.
        bound: log width of the prior's own bound here.
        levels: this one's, that of the phase on so many units, and that of the phase.
        margin: the bound that holds here: its own once there is enough of it, otherwise the coarser one.
    """

    __slots__ = ("bound", "coarse", "factor", "levels", "log", "margin", "own")

    def __init__(self, coarse: Margin, bound: float, levels: tuple[Level, Level, Level]) -> None:
        self.levels = levels
        self.bound = bound
        self.log = 0.0
        self.factor = 1.0
        self.coarse = self.margin = coarse
        self.own: Margin | None = None

    def residual(self, value: float) -> None:
        """Learn how far off a prediction was."""
        own = self.own
        if own is not self.margin:
            self.coarse.learn(value)
        if own is not None:
            own.learn(value)
            if own.count == _ENOUGH:
                self.margin = own
        elif self.levels[0].count >= _TRUSTED:
            self.own = Margin()

    def learn(self, value: float) -> None:
        """Learn a correction, here and at the coarser levels, and fold what they all say."""
        level, finer, coarse = self.levels
        coarse.learn(value)
        finer.learn(value)
        if level.learn(value):
            self._forget()
        trust = _NOISE / self.bound if self.bound > 0.0 else _MOST_BACKING
        trust = min(trust * trust, _MOST_BACKING)
        backing = _BACKING + trust
        log = coarse.count * coarse.mean / (coarse.count + trust)
        log = (finer.count * finer.mean + backing * log) / (finer.count + backing)
        self.log = log = (level.count * level.mean + backing * log) / (level.count + backing)
        self.factor = math.exp(log)

    def _forget(self) -> None:
        """The last residuals told of a change that is now learnt."""
        self.coarse.forget(LASTING)
        self.own, self.margin = None, self.coarse


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
        self._regions: dict[int, _Region] = {}
        self._levels: dict[int, Level] = {}
        self._margins = [Margin() for _ in range(16)]
        self._drifts = [Drift() for _ in range(16)]

    def copy(self) -> OnlinePredictor:
        """One that has learnt the same and learns on by itself; the prior, which never changes, is shared."""
        return copy.deepcopy(self, {id(self.prior): self.prior})

    @property
    def drifted(self) -> str | None:
        """In words, what takes lastingly more or less than the profile says; None: nothing, or there is no profile."""
        reasons = [self._drift_words(kind) for kind, drift in enumerate(self._drifts) if drift.side]
        return "; ".join(reasons) or None

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """Seconds of the whole forward of `shape` on `units` units beside `neighbour`, which has the others."""
        prior, regions = self.prior, self._regions
        region = regions.get(_solo_key(shape, units))
        mean = prior.seconds(shape, units)
        mean *= math.exp(self._unseen(shape, units)) if region is None else region.factor
        if neighbour.prefill_tokens or neighbour.decode_batch:
            others = self._units - units
            mean *= prior.contention(shape, units, neighbour, others if others > 0 else 1)
            region = regions.get(_beside_key(shape, units, neighbour))
            if region is None:
                mean *= math.exp(self._folded(_kind(shape, neighbour), units))
            else:
                mean *= region.factor
        if region is not None and region.margin.count >= _TRUSTED:
            return _make(Estimate, (mean, mean * region.margin.widen))
        return _make(Estimate, (mean, mean * self._first_widen(shape, neighbour)))

    def predict_splits(self, step: Shape, head: Shape, splits: Sequence[Split]) -> Sides:
        """What `predict` says of both sides of each split, each beside the other; both sides share out the device."""
        mean = self.prior.both_sides(step, head, tuple(splits))
        factors = [
            self._corrections(step, [split.decode for split in splits], head),
            self._corrections(head, [split.prefill for split in splits], step),
        ]
        corrections = np.array(factors)
        mean *= corrections[:, 0]
        upper = mean * corrections[:, 1]
        return Sides(mean[0], upper[0], mean[1], upper[1])

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Learn from a completed piece: `fraction` of the forward took `seconds`.

        Pieces without measurable time or work are ignored.
        """
        if not (seconds > 0.0 and fraction > 0.0 and math.isfinite(seconds)):
            return
        kind = _kind(shape, neighbour)
        if kind < 4:
            return
        self.observations += 1
        prior, key = self.prior, _solo_key(shape, units)
        region = self._regions.get(key)
        shift = value = math.log(seconds / (fraction * prior.seconds(shape, units)))
        if kind & 3:
            others = self._units - units
            shift -= math.log(prior.contention(shape, units, neighbour, others if others > 0 else 1))
            value = shift - (self._unseen(shape, units) if region is None else region.log)
            key = _beside_key(shape, units, neighbour)
            region = self._regions.get(key)
        if region is not None:
            region.residual(value - region.log)
        else:
            if self.profiled:  # a mere guess at what is new says nothing of how good predictions are
                expected = self._folded(kind, units) if kind & 3 else self._unseen(shape, units)
                self._margins[kind].learn(value - expected)
            region = self._region(key, kind, units, prior.margin(shape, bool(kind & 3)))
        region.learn(value)
        if self.profiled and self._drifts[kind].learn(shift, region.bound):
            self._report(kind)

    def _region(self, key: int, kind: int, units: int, bound: float) -> _Region:
        """A region seen for the first time."""
        levels = self._levels
        coarse = levels.setdefault(kind, Level())
        finer = levels.setdefault(units << 4 | kind, Level())
        made = self._regions[key] = _Region(self._margins[kind], bound, (Level(), finer, coarse))
        return made

    def _folded(self, kind: int, units: int) -> float:
        """The correction of a region that was not seen yet: that of the coarser levels."""
        coarse = self._levels.get(kind)
        if coarse is None:
            return 0.0
        finer = self._levels.get(units << 4 | kind)
        if finer is None:
            return coarse.mean
        return (finer.count * finer.mean + _BACKING * coarse.mean) / (finer.count + _BACKING)

    def _unseen(self, shape: Shape, units: int) -> float:
        """`_folded` for a forward alone; a hybrid step before any was seen takes after its parts."""
        kind = _kind(shape, NOTHING)
        if kind != 4 * _HYBRID or kind in self._levels:
            return self._folded(kind, units)
        prefill = Shape(shape.prefill_tokens, shape.prefill_context, shape.prefill_pairs, shape.prefill_chunks)
        decode = Shape.decode(shape.decode_batch, shape.decode_context)
        weights = self.prior.seconds(prefill, units), self.prior.seconds(decode, units)
        logs = [
            self._folded(_kind(part, NOTHING), units) if region is None else region.log
            for part in (prefill, decode)
            for region in (self._regions.get(_solo_key(part, units)),)
        ]
        return (weights[0] * logs[0] + weights[1] * logs[1]) / (weights[0] + weights[1])

    def _corrections(self, shape: Shape, counts: Sequence[int], neighbour: Shape) -> tuple[list[float], list[float]]:
        """By units: what the prior is to be multiplied with, and the bound over that."""
        alone = self._factors(_solo_key(shape, 0), _SOLO_UNITS, _kind(shape, NOTHING), counts)
        beside = self._factors(_beside_key(shape, 0, neighbour), _BESIDE_UNITS, _kind(shape, neighbour), counts)
        first = self._first_widen(shape, neighbour)
        widens = [first if margin is None or margin.count < _TRUSTED else margin.widen for _, margin in beside]
        return [mine[0] * theirs[0] for mine, theirs in zip(alone, beside, strict=True)], widens

    def _factors(self, key: int, shift: int, kind: int, counts: Sequence[int]) -> list[tuple[float, Margin | None]]:
        """By units: the correction of a region, and its margin; where the region is new, of the coarser levels."""
        get, levels, unseen = self._regions.get, self._levels, math.exp(self._folded(kind, 0))
        found: list[tuple[float, Margin | None]] = []
        for units in counts:
            region = get(key + (units << shift))
            if region is not None:
                found.append((region.factor, region.margin))
            elif units << 4 | kind in levels:
                found.append((math.exp(self._folded(kind, units)), None))
            else:
                found.append((unseen, None))
        return found

    def _first_widen(self, shape: Shape, neighbour: Shape) -> float:
        """The bound over the mean where few residuals were seen, or none of this region."""
        kind = _kind(shape, neighbour)
        margin = self._margins[kind]
        if margin.count >= _TRUSTED:
            return margin.widen
        return math.exp(max(self.prior.margin(shape, bool(kind & 3)), margin.widest))

    def _report(self, kind: int) -> None:
        if self._drifts[kind].side:
            _log.warning("the profile is no longer true: %s; run `smpart profile` again", self._drift_words(kind))
        else:
            _log.info("the profile is true again: %s takes what it says", _words(kind))

    def _drift_words(self, kind: int) -> str:
        drift = self._drifts[kind]
        return f"{_words(kind)} has taken {drift.factor:.2f}x what it says for {drift.run} forwards"


_make = tuple.__new__
"""A named tuple's own constructor takes twice as long."""


def _words(kind: int) -> str:
    return _NAMES[kind >> 2] + (f" beside {_NAMES[kind & 3]}" if kind & 3 else " alone")


def _kind(shape: Shape, neighbour: Shape) -> int:
    """Four times the phase of a forward, and the phase of its neighbour."""
    kind = (4 if shape.prefill_tokens else 0) + (8 if shape.decode_batch else 0)
    return kind + (1 if neighbour.prefill_tokens else 0) + (2 if neighbour.decode_batch else 0)


def _solo_key(shape: Shape, units: int) -> int:
    """Units and coarse size (powers of two of tokens, batch, and of four of the context a sequence has); even."""
    tokens, batch = shape.prefill_tokens, shape.decode_batch
    context = shape.decode_context // batch if batch else 0
    if tokens:
        context += shape.prefill_context // (shape.prefill_chunks or 1)
    key = (units << 6 | tokens.bit_length()) << 6 | batch.bit_length()
    return (key << 5 | context.bit_length() >> 1) << 1


def _beside_key(shape: Shape, units: int, neighbour: Shape) -> int:
    """Units, phases, and the powers of two of both sides' tokens; odd."""
    tokens, batch = shape.prefill_tokens, shape.decode_batch
    others, rows = neighbour.prefill_tokens, neighbour.decode_batch
    phases = (1 if tokens else 0) | (2 if batch else 0) | (4 if others else 0) | (8 if rows else 0)
    return ((units << 6 | (tokens + batch).bit_length()) << 6 | (others + rows).bit_length()) << 5 | phases << 1 | 1
