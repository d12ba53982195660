"""Predictions that a decision needs, on rounded shapes, remembered for a while: asking anew costs microseconds each."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING, Estimate, Predictor

Floats = NDArray[np.float64]

TOKENS = np.array([1, *(2**n for n in range(4, 18))], dtype=np.float64)
"""Prompt lengths at which prefill work is predicted; in between it is interpolated."""
CHUNKS = [float(2**n) for n in range(3, 14)]
"""Hybrid chunks, likewise."""
_TOKEN_LIST: list[float] = TOKENS.tolist()
_BLANK = (0.0,) * 4
_LIFE = 64
"""Decisions after which a remembered prediction is asked for anew."""
_MOST = 512
"""Remembered tables."""


class Options(NamedTuple):
    """What each way to run the next decode step and the prefills beside it would take.

    Attributes:
        alone: one step on the whole device, nothing beside it.
        prefill: seconds of the head prefill on the whole device, alone (mean).
        step_mean, step_upper: [splits + 4] the step beside the prefill; the last four are left to the choice.
        speed_mean, speed_sure: [splits + 4] pace of the prefill beside the step, 1 = on the whole device, alone.
        chunk_mean, chunk_upper: [CHUNKS] a hybrid step with so many prompt tokens.
    """

    alone: Estimate
    prefill: float
    step_mean: Floats
    step_upper: Floats
    speed_mean: Floats
    speed_sure: Floats
    chunk_mean: list[float]
    chunk_upper: list[float]


class Costs:
    """Asks the predictor, rarely. One per policy; prefill work is refreshed a few entries at a time."""

    def __init__(self) -> None:
        self._options: dict[tuple[int, ...], tuple[int, Options]] = {}
        self._steps: dict[tuple[int, int, int], tuple[int, Estimate]] = {}
        self._raw: list[float] = []
        self._work = np.zeros(0)
        self._work_list: list[float] = []
        self._next = 0
        self._tick = 0
        self.saturation = 0.0

    def tick(self, predictor: Predictor, units: int) -> None:
        """One decision has begun."""
        self._tick += 1
        if not self._raw:
            self._raw = [_prefill_seconds(predictor, int(n), units) for n in TOKENS]
        else:
            self._next = (self._next + 1) % len(TOKENS)
            self._raw[self._next] = _prefill_seconds(predictor, int(TOKENS[self._next]), units)
            if self._next and self._work.size:
                return
        self._work = np.maximum.accumulate(np.asarray(self._raw))
        self._work_list = self._work.tolist()
        doubled = self._work[2:] > 1.9 * self._work[1:-1]
        self.saturation = float(TOKENS[1 + int(np.argmax(doubled))]) if doubled.any() else float(TOKENS[8])
        if len(self._options) > _MOST:
            self._options.clear()
            self._steps.clear()

    def work(self, tokens: NDArray[np.int64] | NDArray[np.int32]) -> Floats:
        """Seconds that prompts of `tokens` tokens take, each alone on the whole device."""
        seconds: Floats = np.interp(tokens, TOKENS, self._work)
        return seconds

    def work_of(self, tokens: int) -> float:
        """Seconds that one prompt of `tokens` tokens takes, alone on the whole device."""
        return between(tokens, _TOKEN_LIST, self._work_list)

    def tokens_in(self, seconds: float) -> int:
        """Prompt tokens that fit into `seconds` on the whole device; at least 1."""
        return max(1, int(between(seconds, self._work_list, _TOKEN_LIST)))

    def step(self, predictor: Predictor, batch: int, context: int, units: int) -> Estimate:
        """A decode step alone."""
        key = (_round(batch, 4), _round(context, 3), units)
        found = self._steps.get(key)
        if found is None or self._tick - found[0] > _LIFE:
            found = self._tick, predictor.predict(Shape.decode(key[0], key[1]), units)
            self._steps[key] = found
        return found[1]

    def options(
        self, predictor: Predictor, batch: int, context: int, head: Shape, splits: tuple[Split, ...], units: int
    ) -> Options:
        """Every way to run a step of `batch` rows with `context` tokens and the prefill `head`."""
        tokens, behind = _round(head.prefill_tokens, 2), _round(head.prefill_context, 1)
        key = (_round(batch, 4), _round(context, 3), tokens, behind)
        found = self._options.get(key)
        if found is None or self._tick - found[0] > _LIFE:
            found = self._tick, _ask(predictor, Shape.decode(key[0], key[1]), tokens, behind, splits, units)
            self._options[key] = found
        return found[1]


def _ask(predictor: Predictor, step: Shape, tokens: int, behind: int, splits: tuple[Split, ...], units: int) -> Options:
    predict = predictor.predict
    head = Shape.prefill([(tokens, behind)])
    prefill = predict(head, units).mean
    steps = [predict(step, split.decode, head) for split in splits]
    heads = [predict(head, split.prefill, step) for split in splits]
    hybrids = [predict(step.join(Shape.prefill([(int(n), behind)])), units) for n in CHUNKS]
    return Options(
        predict(step, units),
        prefill,
        np.array([*(e.mean for e in steps), *_BLANK]),
        np.array([*(e.upper for e in steps), *_BLANK]),
        np.array([*(prefill / e.mean for e in heads), *_BLANK]),
        np.array([*(prefill / e.upper for e in heads), *_BLANK]),
        list(accumulate((e.mean for e in hybrids), max)),
        list(accumulate((e.upper for e in hybrids), max)),
    )


def _prefill_seconds(predictor: Predictor, tokens: int, units: int) -> float:
    return predictor.predict(Shape.prefill([(tokens, 0)]), units, NOTHING).mean


def between(x: float, xs: list[float], ys: list[float]) -> float:
    """Linear interpolation over ascending `xs`, flat outside: `numpy.interp` for one number, in a tenth of the time.

    >>> between(1.5, [1.0, 2.0], [10.0, 20.0]), between(9.0, [1.0, 2.0], [10.0, 20.0])
    (15.0, 20.0)
    """
    place = bisect_right(xs, x)
    if place == 0:
        return ys[0]
    if place == len(xs):
        return ys[-1]
    left, right = xs[place - 1], xs[place]
    return ys[place - 1] + (ys[place] - ys[place - 1]) * (x - left) / (right - left)


def _round(value: int, bits: int) -> int:
    """Round up, keeping about `bits` significant bits.

    >>> _round(7, 3), _round(9, 3), _round(1000, 3)
    (7, 10, 1024)
    """
    shift = max(0, int(value).bit_length() - bits)
    return -(-int(value) >> shift) << shift
