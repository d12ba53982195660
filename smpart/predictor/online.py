"""Corrects a prior while serving: by phase, units and coarse size, in log space, with a bound that covers."""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from typing import Protocol

from smpart.partition import Shape
from smpart.predictor.estimate import NOTHING, Estimate

_SLOWEST_RATE = 0.06
"""Weight of a new observation once many have been seen."""
_BACKING = 0.5
"""How many observations the coarser level counts for beside the finer one."""
_COVERAGE = 0.97
_WINDOW = 128
"""Residuals that the bound is taken from."""
_TRUSTED = 8
"""Residuals before the bound may become narrower than `_FIRST_MARGIN`."""
_FIRST_MARGIN = math.log(1.25)
_WIDEST = 1.5
"""No single residual widens the bound by more than this (log)."""


class Prior(Protocol):
    """What `OnlinePredictor` corrects."""

    def seconds(self, shape: Shape, units: int) -> float:
        """Expected seconds alone on `units` units."""

    def contention(self, shape: Shape, units: int, neighbour: Shape, neighbour_units: int) -> float:
        """Times slower beside the neighbour."""


class _Level:
    """A running mean of log ratios that outliers move little, and that still follows a real change.

    The first few observations count by recency, so that a slow first one is soon forgotten. After that an
    innovation is clipped to a few times the usual one, unless four in a row point the same way.
    """

    __slots__ = ("count", "mean", "spread", "streak")

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self.spread = 0.1
        self.streak = 0

    def learn(self, value: float) -> None:
        innovation = value - self.mean
        if self.count >= 4:
            limit = 3.0 * self.spread + 0.02
            if abs(innovation) > limit:
                sign = 1 if innovation > 0 else -1
                self.streak = self.streak + sign if self.streak * sign > 0 else sign
                if abs(self.streak) < 4:
                    innovation = sign * limit
            else:
                self.streak = 0
            self.spread += 0.1 * (min(abs(innovation), 1.0) - self.spread)
        self.count += 1
        self.mean += max(_SLOWEST_RATE, 2.0 / (self.count + 1)) * innovation


class _Margin:
    """The quantile of recent residuals that an upper bound needs (split conformal, over a sliding window)."""

    __slots__ = ("_recent", "_sorted", "width")

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []
        self.width = _FIRST_MARGIN

    def learn(self, residual: float) -> None:
        residual = max(-_WIDEST, min(_WIDEST, residual))
        self._recent.append(residual)
        insort(self._sorted, residual)
        if len(self._recent) > _WINDOW:
            self._sorted.remove(self._recent.popleft())
        count = len(self._sorted)
        rank = min(count, math.ceil((count + 1) * _COVERAGE)) - 1
        if count > 32 and rank == count - 1:
            rank -= 1  # too few to tell one outlier from the tail
        widest = max(0.01, self._sorted[rank])
        self.width = widest if count >= _TRUSTED else max(_FIRST_MARGIN, widest)


_Key = tuple[int, ...]


class OnlinePredictor:
    """A `Predictor`: prior × correction × contention, each learnt from what really ran.

    The correction of a forward is looked up by (phase, units, size), backed by (phase, units), backed by the phase
    alone, so that how a phase scales over units comes from observations as soon as there are any. Contention is
    learnt apart from solo speed, from pieces that ran beside a neighbour. `predict` and `observe` take microseconds.

    Args:
        prior: solo seconds and contention before anything was seen.

    >>> class Flat:
    ...     def seconds(self, shape, units): return 1.0
    ...     def contention(self, shape, units, neighbour, neighbour_units): return 1.0
    >>> predictor = OnlinePredictor(Flat())
    >>> step = Shape.decode(4, 100)
    >>> for _ in range(3):
    ...     predictor.observe(step, 1, NOTHING, 1.0, 10.0)
    >>> round(predictor.predict(step, 1).mean, 6)
    10.0
    """

    def __init__(self, prior: Prior) -> None:
        self.prior = prior
        self._levels: dict[_Key, _Level] = {}
        self._margins: dict[_Key, _Margin] = {}
        self.observations = 0

    def predict(self, shape: Shape, units: int, neighbour: Shape = NOTHING) -> Estimate:
        """Seconds of the whole forward of `shape` on `units` units beside `neighbour`."""
        phase = _phase(shape)
        logarithm = self._solo_log(phase, shape, units)
        beside = _phase(neighbour)
        if beside:
            logarithm += self._contention_log(phase, shape, units, beside, neighbour)
        mean = self.prior.seconds(shape, units) * math.exp(logarithm)
        margin = self._margins.get((phase, 1 if beside else 0))
        return Estimate(mean, mean * math.exp(margin.width if margin is not None else _FIRST_MARGIN))

    def observe(self, shape: Shape, units: int, neighbour: Shape, fraction: float, seconds: float) -> None:
        """Learn from a completed piece: `fraction` of the forward took `seconds`.

        Pieces without measurable time or work are ignored.
        """
        phase = _phase(shape)
        if not phase or not (seconds > 0.0 and fraction > 0.0 and math.isfinite(seconds)):
            return
        self.observations += 1
        beside = _phase(neighbour)
        keys = _contention_keys(phase, units, beside, shape, neighbour) if beside else _solo_keys(phase, units, shape)
        if keys[-1] in self._levels:  # what is new is guessed at, which says nothing of how good predictions are
            expected = self.predict(shape, units, neighbour).mean
            self._margin((phase, 1 if beside else 0)).learn(math.log(seconds / (fraction * expected)))
        ratio = math.log(seconds / (fraction * self.prior.seconds(shape, units)))
        if beside:
            ratio -= self._solo_log(phase, shape, units)
        for key in keys:
            self._level(key).learn(ratio)

    def _solo_log(self, phase: int, shape: Shape, units: int) -> float:
        if phase == _HYBRID and (_HYBRID,) not in self._levels:
            return self._blend(shape, units)
        return self._backed(_solo_keys(phase, units, shape), 0.0)

    def _blend(self, shape: Shape, units: int) -> float:
        """A hybrid step before any was seen: the corrections of its parts, weighted by what each takes."""
        prefill = Shape(shape.prefill_tokens, shape.prefill_context, shape.prefill_pairs, shape.prefill_chunks)
        decode = Shape.decode(shape.decode_batch, shape.decode_context)
        weights = self.prior.seconds(prefill, units), self.prior.seconds(decode, units)
        logs = self._solo_log(_PREFILL, prefill, units), self._solo_log(_DECODE, decode, units)
        return (weights[0] * logs[0] + weights[1] * logs[1]) / (weights[0] + weights[1])

    def _contention_log(self, phase: int, shape: Shape, units: int, beside: int, neighbour: Shape) -> float:
        keys = _contention_keys(phase, units, beside, shape, neighbour)
        if keys[0] not in self._levels:
            return math.log(self.prior.contention(shape, units, neighbour, units))
        return self._backed(keys, 0.0)

    def _backed(self, keys: tuple[_Key, ...], start: float) -> float:
        """The finest level's mean, backed by the coarser ones where it has seen little."""
        value, levels = start, self._levels
        for key in keys:
            level = levels.get(key)
            if level is not None:
                backing = _BACKING if value != start else 0.0
                value = (level.count * level.mean + backing * value) / (level.count + backing)
        return value

    def _level(self, key: _Key) -> _Level:
        level = self._levels.get(key)
        if level is None:
            level = self._levels[key] = _Level()
        return level

    def _margin(self, key: _Key) -> _Margin:
        margin = self._margins.get(key)
        if margin is None:
            margin = self._margins[key] = _Margin()
        return margin


_PREFILL, _DECODE, _HYBRID = 1, 2, 3
_CONTENTION = 8


def _phase(shape: Shape) -> int:
    return (1 if shape.prefill_tokens else 0) + (2 if shape.decode_batch else 0)


def _bucket(shape: Shape) -> int:
    """Coarse size: powers of two of tokens, batch and the context a sequence has, in one number."""
    tokens, batch = shape.prefill_tokens, shape.decode_batch
    context = shape.prefill_context // (shape.prefill_chunks or 1) + shape.decode_context // (batch or 1)
    return (tokens.bit_length() * 32 + batch.bit_length()) * 16 + (context.bit_length() >> 1)


def _solo_keys(phase: int, units: int, shape: Shape) -> tuple[_Key, ...]:
    return (phase,), (phase, units), (phase, units, _bucket(shape))


def _contention_keys(phase: int, units: int, beside: int, shape: Shape, neighbour: Shape) -> tuple[_Key, ...]:
    kind = _CONTENTION + 4 * phase + beside
    size = shape.tokens.bit_length() * 32 + neighbour.tokens.bit_length()
    return (kind,), (kind, units), (kind, units, size)
