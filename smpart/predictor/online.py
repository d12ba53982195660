"""Corrects a prior while serving: by phase, units and coarse size, in log space, with a bound that covers."""

from __future__ import annotations

import copy
import logging
import math
from typing import Protocol

from smpart.partition import Shape
from smpart.predictor.drift import Drift
from smpart.predictor.estimate import NOTHING, Estimate
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

_PREFILL, _DECODE, _HYBRID = 1, 2, 3
_NAMES = ("", "prefill", "decode", "a hybrid step")


class Prior(Protocol):
    """What `OnlinePredictor` corrects: physics, or a profile's tables."""

    units: int
    """Units of the whole device."""

    def seconds(self, shape: Shape, units: int) -> float:
        """Expected seconds alone on `units` units."""

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """Times slower beside the neighbour."""

    def margin(self, shape: Shape, beside: bool) -> float:
        """Log of an upper bound of single forwards over the expected time, by the prior's own account."""


class _Region:
    """Forwards of one phase, number of units and coarse size (and of one kind of neighbour): what is known of them.

    Attributes:
        log: correction of the prior, backed by the coarser levels as they were when the region was last seen.
        factor: its exponential.
        margin: the bound that holds here.
    """

    __slots__ = ("coarse", "factor", "level", "log", "margin", "own")

    def __init__(self, coarse: Margin) -> None:
        self.level = Level()
        self.log = 0.0
        self.factor = 1.0
        self.coarse = self.margin = coarse
        self.own: Margin | None = None

    def residual(self, value: float) -> None:
        """Learn how far off a prediction was."""
        self.coarse.learn(value)
        own = self.own
        if own is not None:
            own.learn(value)
            if own.count == _ENOUGH:
                self.margin = own
        elif self.level.count >= _TRUSTED:
            self.own = Margin()

    def forget(self) -> None:
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
        prior = self.prior
        region = self._regions.get(_solo_key(shape, units))
        mean = prior.seconds(shape, units)
        mean *= math.exp(self._unseen(shape, units)) if region is None else region.factor
        if neighbour.prefill_tokens or neighbour.decode_batch:
            others = self._units - units
            mean *= prior.contention(shape, units, neighbour, others if others > 0 else 1)
            region = self._regions.get(_beside_key(shape, units, neighbour))
            kind = 4 * _phase(shape) + _phase(neighbour)
            if region is None:
                mean *= math.exp(self._folded(kind, units))
            else:
                mean *= region.factor
        else:
            kind = 4 * _phase(shape)
        margin = self._margins[kind] if region is None else region.margin
        widen = margin.widen if margin.count >= _TRUSTED else self._first_widen(shape, kind)
        return _make(Estimate, (mean, mean * widen))

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Learn from a completed piece: `fraction` of the forward took `seconds`.

        Pieces without measurable time or work are ignored.
        """
        kind = 4 * _phase(shape)
        if not kind or not (seconds > 0.0 and fraction > 0.0 and math.isfinite(seconds)):
            return
        self.observations += 1
        prior, key = self.prior, _solo_key(shape, units)
        region = self._regions.get(key)
        ratio = math.log(seconds / (fraction * prior.seconds(shape, units)))
        alone = not (neighbour.prefill_tokens or neighbour.decode_batch)
        bound = prior.margin(shape, not alone)
        if alone:
            shift = value = ratio
        else:
            others = self._units - units
            shift = ratio - math.log(prior.contention(shape, units, neighbour, others if others > 0 else 1))
            value = shift - (self._unseen(shape, units) if region is None else region.log)
            kind += _phase(neighbour)
            key = _beside_key(shape, units, neighbour)
            region = self._regions.get(key)
        if region is None:
            if self.profiled:  # a mere guess at what is new says nothing of how good predictions are
                expected = self._unseen(shape, units) if alone else self._folded(kind, units)
                self._margins[kind].learn(value - expected)
            region = self._regions[key] = _Region(self._margins[kind])
        else:
            region.residual(value - region.log)
        if region.level.learn(value):
            region.forget()
        self._fold(region, kind, units, value, bound)
        if self.profiled and self._drifts[kind].learn(shift, bound):
            self._report(kind)

    def _fold(self, region: _Region, kind: int, units: int, value: float, bound: float) -> None:
        """Learn at the coarser levels, and back the region by them."""
        levels = self._levels
        coarse, finer = levels.get(kind), levels.get(units << 4 | kind)
        if coarse is None:
            coarse = levels[kind] = Level()
        if finer is None:
            finer = levels[units << 4 | kind] = Level()
        coarse.learn(value)
        finer.learn(value)
        trust = _NOISE / bound if bound > 0.0 else 1.0
        trust = min(trust * trust, _MOST_BACKING)
        backing = _BACKING + trust
        log = coarse.count * coarse.mean / (coarse.count + trust)
        log = (finer.count * finer.mean + backing * log) / (finer.count + backing)
        level = region.level
        region.log = log = (level.count * level.mean + backing * log) / (level.count + backing)
        region.factor = math.exp(log)

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
        kind = 4 * _phase(shape)
        if kind != 4 * _HYBRID or kind in self._levels:
            return self._folded(kind, units)
        prefill = Shape(shape.prefill_tokens, shape.prefill_context, shape.prefill_pairs, shape.prefill_chunks)
        decode = Shape.decode(shape.decode_batch, shape.decode_context)
        weights = self.prior.seconds(prefill, units), self.prior.seconds(decode, units)
        logs = [
            self._folded(4 * _phase(part), units) if region is None else region.log
            for part in (prefill, decode)
            for region in (self._regions.get(_solo_key(part, units)),)
        ]
        return (weights[0] * logs[0] + weights[1] * logs[1]) / (weights[0] + weights[1])

    def _first_widen(self, shape: Shape, kind: int) -> float:
        """The bound over the mean until enough residuals were seen."""
        return math.exp(max(self.prior.margin(shape, bool(kind & 3)), self._margins[kind].widest))

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


def _phase(shape: Shape) -> int:
    return (1 if shape.prefill_tokens else 0) + (2 if shape.decode_batch else 0)


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
