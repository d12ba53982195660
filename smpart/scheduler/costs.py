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
_LIFE = 64
"""Decisions after which a remembered step is asked for anew."""
_PACE = 4
"""Every so many decisions one entry of the prefill work is asked for anew."""
_REFRESH = 2
"""At every so many decisions one entry of the options used is asked for anew."""
_LEARNING = 64
"""...but at each of the first decisions, when the predictor learns most."""
_FORGET = 1024
"""Options not used for so many decisions are asked for anew altogether."""
_MOST = 512
"""Remembered shapes."""
_WASTE = 1.25
"""Seconds a token, over those of the best length, that a prefill may take and still be worth its launch."""
_FINE = 5
"""Significant bits of a step's rows and tokens: what is rounded up more costs splits that would hold the pace."""


class Beside(NamedTuple):
    """A split, seen from both sides.

    Attributes:
        mean, upper: seconds of the step beside the prefill.
        speed: pace of the prefill beside the step; 1 = on the whole device, alone.
    """

    mean: float
    upper: float
    speed: float


class Options:
    """What each way to run the next decode step and the prefills beside it would take; asked when first needed.

    Attributes:
        alone: one step on the whole device, nothing beside it.
        prefill: seconds of the (rounded) head prefill on the whole device, alone (mean).
        used: when it was last looked up, in decisions.
    """

    __slots__ = ("_behind", "_beside", "_head", "_hybrids", "_splits", "_step", "_turn", "_units", "alone", "prefill",
                 "used")  # fmt: skip

    def __init__(
        self,
        predictor: Predictor,
        step: Shape,
        tokens: int,
        behind: int,
        splits: tuple[Split, ...],
        units: int,
        hybrids: list[Estimate | None],
    ) -> None:
        self._step, self._behind, self._units, self._splits = step, behind, units, splits
        self._head = Shape.prefill([(tokens, behind)])
        self._beside: list[Beside | None] = [None] * len(splits)
        self._hybrids = hybrids
        self._turn = 0
        self.used = 0
        self.alone = predictor.predict(step, units)
        self.prefill = predictor.predict(self._head, units).mean

    @property
    def rate(self) -> float:
        """Seconds of prefill (whole device, alone) in one prompt token."""
        return self.prefill / self._head.prefill_tokens

    def refresh(self, predictor: Predictor) -> None:
        """Ask anew for one of the things that were asked for before, in turn."""
        self._turn = turn = (self._turn + 1) % (2 + len(CHUNKS) + len(self._splits))
        if turn == 0:
            self.alone = predictor.predict(self._step, self._units)
        elif turn == 1:
            self.prefill = predictor.predict(self._head, self._units).mean
        elif turn < 2 + len(CHUNKS):
            if self._hybrids[turn - 2] is not None:
                self._ask_hybrid(predictor, turn - 2)
        elif self._beside[turn - 2 - len(CHUNKS)] is not None:
            self._ask_beside(predictor, turn - 2 - len(CHUNKS))

    def beside(self, predictor: Predictor, place: int) -> Beside:
        """Both sides of the split at `place`."""
        return self._beside[place] or self._ask_beside(predictor, place)

    def hybrid(self, predictor: Predictor, limit: float) -> tuple[int, float, float]:
        """The hybrid step whose upper bound is `limit`: its prompt tokens, and its mean and upper bound in seconds.

        At least the smallest chunk, at most the largest; interpolated in between.
        """
        low, high = 0, len(CHUNKS)
        while low < high:
            middle = (low + high) // 2
            if (self._hybrids[middle] or self._ask_hybrid(predictor, middle)).upper <= limit:
                low = middle + 1
            else:
                high = middle
        below = self._hybrids[max(0, low - 1)] or self._ask_hybrid(predictor, max(0, low - 1))
        if low in (0, len(CHUNKS)):
            return int(CHUNKS[max(0, low - 1)]), below.mean, below.upper
        above = self._hybrids[low] or self._ask_hybrid(predictor, low)
        share = (limit - below.upper) / max(1e-12, above.upper - below.upper)
        chunk = CHUNKS[low - 1] + share * (CHUNKS[low] - CHUNKS[low - 1])
        return int(chunk), below.mean + share * (above.mean - below.mean), limit

    def _ask_beside(self, predictor: Predictor, place: int) -> Beside:
        split = self._splits[place]
        step = predictor.predict(self._step, split.decode, self._head)
        head = predictor.predict(self._head, split.prefill, self._step)
        found = Beside(step.mean, step.upper, self.prefill / head.mean)
        self._beside[place] = found
        return found

    def _ask_hybrid(self, predictor: Predictor, place: int) -> Estimate:
        step = self._step.join(Shape.prefill([(int(CHUNKS[place]), self._behind)]))
        found = self._hybrids[place] = predictor.predict(step, self._units)
        return found


class Costs:
    """Asks the predictor, rarely. One per policy; prefill work is refreshed a few entries at a time.

    Attributes:
        saturation: prompt tokens that saturate the device: twice as many take twice as long.
        worth: prompt tokens below which most of a forward's time is what every forward costs. No chunk that could be
            longer should be shorter: a corrected prior takes its cost for slower tokens, and a chunk cut to last so
            many seconds would be shorter still the next time.
    """

    def __init__(self) -> None:
        self._options: dict[tuple[int, ...], Options] = {}
        self._hybrids: dict[tuple[int, int, int], list[Estimate | None]] = {}
        self._steps: dict[tuple[int, int, int], tuple[int, Estimate]] = {}
        self._beside: dict[tuple[int, ...], tuple[int, float]] = {}
        self._raw: list[float] = []
        self._work = np.zeros(0)
        self._work_list: list[float] = []
        self._next = 0
        self._tick = 0
        self.saturation = 0.0
        self.worth = 1

    def tick(self, predictor: Predictor, units: int) -> None:
        """One decision has begun."""
        self._tick += 1
        if not self._raw:
            self._raw = [_prefill_seconds(predictor, int(n), units) for n in TOKENS]
        elif self._tick > _LEARNING and self._tick % _PACE:
            return
        else:
            self._next = (self._next + 1) % len(self._raw)
            self._raw[self._next] = _prefill_seconds(predictor, int(_TOKEN_LIST[self._next]), units)
            if self._next:
                return
        self._work_list = list(accumulate(self._raw, max))
        self._work = np.array(self._work_list)
        longer = zip(self._work_list[1:], self._work_list[2:], _TOKEN_LIST[1:], strict=False)
        self.saturation = next((tokens for short, long, tokens in longer if long > 1.9 * short), _TOKEN_LIST[8])
        rates = self._work / TOKENS
        self.worth = int(TOKENS[(rates <= _WASTE * rates.min()).argmax()])
        for remembered in (self._options, self._hybrids, self._steps, self._beside):
            if len(remembered) > _MOST:
                remembered.clear()

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
        key = (_round(batch, _FINE), _round(context, _FINE), units)
        found = self._steps.get(key)
        if found is None or self._tick - found[0] > _LIFE:
            found = self._tick, predictor.predict(Shape.decode(key[0], key[1]), units)
            self._steps[key] = found
        return found[1]

    def beside(self, predictor: Predictor, shape: Shape, units: int, neighbour: Shape) -> float:
        """Expected seconds of a prefill beside a step, for how many of its layers to launch."""
        key = (
            _round(shape.prefill_tokens, 4), _round(shape.prefill_context, 3), shape.prefill_chunks, units,
            _round(neighbour.decode_batch, 2), _round(neighbour.decode_context, 2),
        )  # fmt: skip
        found = self._beside.get(key)
        if found is None or self._tick - found[0] > _LIFE:
            found = self._tick, predictor.predict(shape, units, neighbour).mean / max(1, shape.prefill_tokens)
            self._beside[key] = found
        return found[1] * shape.prefill_tokens

    def options(
        self, predictor: Predictor, batch: int, context: int, head: Shape, splits: tuple[Split, ...], units: int
    ) -> Options:
        """Every way to run a step of `batch` rows with `context` tokens and the prefill `head`."""
        tokens, behind = _round(max(1, head.prefill_tokens), 1), _round(head.prefill_context, 1)
        key = (_round(batch, _FINE), _round(context, _FINE), tokens, behind)
        found = self._options.get(key)
        if found is None or self._tick - found.used > _FORGET:
            hybrids = self._hybrids.setdefault((key[0], key[1], behind), [None] * len(CHUNKS))
            found = Options(predictor, Shape.decode(key[0], key[1]), tokens, behind, splits, units, hybrids)
            self._options[key] = found
        elif self._tick % _REFRESH == 0:
            found.refresh(predictor)
        found.used = self._tick
        return found


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
