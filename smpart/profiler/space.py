"""The space that is swept: which forwards there are, and a point of the unit cube for each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UsageError
from smpart.partition import Split
from smpart.profiler.experiment import Chunks, Experiment
from smpart.profiler.works import Works

T = TypeVar("T")

Cube = NDArray[np.float64]
"""Coordinates in [0, 1]: new tokens, context of the chunks, chunks, rows, context of the rows, split, contender."""

DIMENSIONS = 7
_NEW, _OLD, _CHUNKS, _ROWS, _CONTEXT, _SPLIT, _CONTENDER = range(DIMENSIONS)

_LEAST_PROMPT, _LEAST_CONTEXT = 4, 8
_WITHOUT_CONTEXT, _ONE_CHUNK = 0.5, 0.7
"""Share of prefills that have none, or only one."""
_PACKED = 4


class Kind(StrEnum):
    """Kinds of experiment."""

    PREFILL = "prefill"
    DECODE = "decode"
    HYBRID = "hybrid"
    PAIR = "pair"
    PRESSED = "pressed"

    @property
    def beside(self) -> bool:
        """Whether something runs on both lanes."""
        return self in (Kind.PAIR, Kind.PRESSED)

    @classmethod
    def of(cls, experiment: Experiment) -> Kind:
        """An experiment's."""
        if experiment.contender:
            return cls.PRESSED
        if experiment.chunks and experiment.rows:
            return cls.HYBRID if experiment.hybrid else cls.PAIR
        return cls.PREFILL if experiment.chunks else cls.DECODE


_AXES = {
    Kind.PREFILL: (_NEW, _OLD, _SPLIT),
    Kind.DECODE: (_ROWS, _CONTEXT, _SPLIT),
    Kind.HYBRID: (_NEW, _ROWS, _CONTEXT),
    Kind.PAIR: (_NEW, _ROWS, _CONTEXT, _SPLIT),
    Kind.PRESSED: (_NEW, _ROWS, _SPLIT),
}
"""Whose ends are the corners."""


@dataclass(frozen=True, slots=True)
class Space:
    """Bounds of the space.

    Attributes:
        splits: every split there is, in order of prefill units.
        max_prompt: most new tokens of a forward.
        max_context: most tokens that a chunk or a decode row attends to.
        max_batch: most decode rows.
        chunk_tokens: tokens that all chunks of a forward may have, context included.
        row_tokens: tokens that all rows of a step may have.
        longest: tokens that one sequence may have.
        chunks: most chunks in a forward.
        contenders: kernels that may be a neighbour.
    """

    splits: tuple[Split, ...]
    max_prompt: int
    max_context: int
    max_batch: int
    chunk_tokens: int
    row_tokens: int
    longest: int
    chunks: int = _PACKED
    contenders: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        works: Works,
        splits: Sequence[Split],
        max_prompt: int | None = None,
        max_context: int | None = None,
        max_batch: int | None = None,
        contenders: tuple[str, ...] = (),
    ) -> Space:
        """As large as there is room for on the board, or as asked.

        Raises:
            UsageError: what is asked for does not fit, or is not positive.
        """
        prompt = _bounded("max_prompt", max_prompt, min(works.longest, works.chunk_tokens))
        context = _bounded("max_context", max_context, works.longest)
        batch = _bounded("max_batch", max_batch, len(works.row_slots))
        rows = works.row_tokens(1) if batch == 1 else batch * max(1, works.row_tokens(batch))
        everything = max(rows, works.row_tokens(1))
        chunks = min(_PACKED, len(works.chunk_slots))
        return cls(
            tuple(splits), prompt, context, batch, works.chunk_tokens, everything, works.longest, chunks, contenders
        )

    def kinds(self) -> tuple[Kind, ...]:
        """Those that these lanes can run."""
        if not any(not split.exclusive for split in self.splits):
            return Kind.PREFILL, Kind.DECODE, Kind.HYBRID
        pressed = (Kind.PRESSED,) if self.contenders else ()
        return Kind.PREFILL, Kind.DECODE, Kind.HYBRID, Kind.PAIR, *pressed

    def experiment(self, kind: Kind, at: Cube, splits: Sequence[Split] | None = None) -> Experiment:
        """The experiment at a point of the cube.

        Args:
            splits: those to choose from; all by default.
        """
        pool = self.splits if splits is None else splits
        chunks = self._chunks(at) if kind is not Kind.DECODE else ()
        rows, context = self._rows(at) if kind is not Kind.PREFILL else (0, 0)
        if kind is Kind.PREFILL:
            return Experiment(_pick([s for s in pool if s.prefill], at[_SPLIT]), chunks)
        if kind is Kind.DECODE:
            return Experiment(_pick([s for s in pool if s.decode], at[_SPLIT]), (), rows, context)
        if kind is Kind.HYBRID:
            return Experiment(next(s for s in self.splits if s.prefill == 0), chunks, rows, context)
        split = _pick([s for s in pool if not s.exclusive], at[_SPLIT])
        if kind is Kind.PAIR:
            return Experiment(split, chunks, rows, context)
        # The two halves of this axis: whose neighbour the contender is.
        place = 2 * at[_CONTENDER] % 1.0
        contender = _pick(self.contenders, place)
        return (
            Experiment(split, chunks, contender=contender)
            if at[_CONTENDER] < 0.5
            else Experiment(split, (), rows, context, contender)
        )

    def corners(self, kind: Kind) -> Iterator[Cube]:
        """The ends of the axes that matter, in all combinations, or (of more than three) in half of them."""
        axes = _AXES[kind]
        for ends in itertools.product((1.0, 0.0), repeat=len(axes)):
            if len(axes) <= 3 or sum(ends) % 2 == 0:
                at = np.zeros(DIMENSIONS)
                at[list(axes)] = ends
                yield at

    def _chunks(self, at: Cube) -> Chunks:
        new = _log(at[_NEW], _LEAST_PROMPT if at[_NEW] > 0 else 1, self.max_prompt)
        past = (at[_OLD] - _WITHOUT_CONTEXT) / (1 - _WITHOUT_CONTEXT)
        old = 0 if past <= 0 else _log(past, _LEAST_CONTEXT, self.max_context)
        more = max(0.0, (at[_CHUNKS] - _ONE_CHUNK) / (1 - _ONE_CHUNK))
        count = max(1, min(1 + math.ceil(more * (self.chunks - 1)), self.chunks, new))
        old = max(0, min(old, self.longest - -(-new // count), (self.chunk_tokens - new) // count))
        return tuple((new // count + (i < new % count), old) for i in range(count))

    def _rows(self, at: Cube) -> tuple[int, int]:
        rows = _log(at[_ROWS], 1, self.max_batch)
        most = max(1, min(self.max_context, self.longest, self.row_tokens // rows))
        return rows, _log(at[_CONTEXT], min(_LEAST_CONTEXT, most), most)


def covering(splits: Sequence[Split], count: int) -> tuple[Split, ...]:
    """At most `count` splits that lie evenly over all, the exclusive ones and the most uneven shared ones included.

    >>> from smpart.partition.feasible import feasible_splits
    >>> [str(split) for split in covering(feasible_splits(8), 5)]
    ['0/8', '1/7', '4/4', '7/1', '8/0']
    """
    ends = [split for split in splits if split.exclusive]
    shared = [split for split in splits if not split.exclusive]
    room = max(1, count - len(ends))
    places: list[float] = np.linspace(0, len(shared) - 1, min(room, len(shared))).tolist() if shared else []
    chosen = {*ends, *(shared[round(place)] for place in places)}
    return tuple(split for split in splits if split in chosen)


def _pick(pool: Sequence[T], place: float) -> T:
    return pool[min(len(pool) - 1, int(place * len(pool)))]


def _log(place: float, low: int, high: int) -> int:
    """A whole number between two, by its logarithm."""
    if high <= low:
        return max(1, high)
    return round(math.exp(math.log(low) + min(1.0, max(0.0, place)) * math.log(high / low)))


def _bounded(name: str, asked: int | None, room: int) -> int:
    if asked is None:
        return room
    if asked < 1:
        raise UsageError(f"{name}={asked}: must be at least 1")
    if asked > room:
        raise UsageError(f"{name}={asked}: there is room for {room} here")
    return asked
