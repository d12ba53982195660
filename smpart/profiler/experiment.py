"""What is measured at once: a forward alone, a hybrid step, or one forward on each lane."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from smpart.partition import Shape, Side, Split
from smpart.profiler.sample import NOBODY, Point, Pressure

Chunks = tuple[tuple[int, int], ...]
"""Packed chunks, each ``(new tokens, context tokens)``."""


@dataclass(frozen=True)
class Experiment:
    """One forward or two, and where they run.

    Attributes:
        split: with chunks and rows, a hybrid step if it gives decode the device, else prefill beside decode.
        chunks: of the prefill, or of the hybrid step.
        rows: sequences that decode.
        context: tokens that each of them attends to.
        contender: a kernel in the place of the forward that is not there (see `smpart.runtime.contender`).

    >>> both = Experiment(Split(1, 1), ((64, 0),), rows=4, context=100)
    >>> [(point.shape.tokens, point.neighbour.tokens) for point in both.points()]
    [(64, 4), (4, 64)]
    >>> Experiment(Split(0, 2), ((64, 0),), rows=4, context=100).points()[0].shape.hybrid
    True
    """

    split: Split
    chunks: Chunks = ()
    rows: int = 0
    context: int = 0
    contender: str = ""

    @cached_property
    def prefill(self) -> Shape:
        """Of the chunks; empty without any."""
        return Shape.prefill(self.chunks)

    @cached_property
    def decode(self) -> Shape:
        """Of the rows; empty without any."""
        return Shape.decode(self.rows, self.rows * self.context)

    @property
    def hybrid(self) -> bool:
        """Whether chunks and rows are one forward."""
        return bool(self.chunks) and self.rows > 0 and self.split.prefill == 0

    @property
    def pair(self) -> bool:
        """Whether both lanes run a forward."""
        return bool(self.chunks) and self.rows > 0 and not self.hybrid

    @property
    def beside(self) -> bool:
        """Whether something runs on both lanes."""
        return self.pair or bool(self.contender)

    @property
    def side(self) -> Side:
        """Where the forward runs; of a pair, the prefill."""
        return Side.PREFILL if self.chunks and not self.hybrid else Side.DECODE

    def points(self, pressure: Pressure = NOBODY) -> tuple[Point, ...]:
        """The points it gives samples of: one, or of a pair the prefill's and the decode step's.

        Args:
            pressure: of the contender, as it was measured.
        """
        split, side = self.split, self.side
        if self.pair:
            return (
                Point(self.prefill, split.prefill, self.decode, split.decode),
                Point(self.decode, split.decode, self.prefill, split.prefill),
            )
        shape = self.decode.join(self.prefill)
        if self.contender:
            return (Point(shape, split.units(side), Shape(), split.units(side.other), pressure),)
        return (Point(shape, split.units(side)),)

    @property
    def key(self) -> tuple[Point, ...]:
        """Equal for experiments that measure the same, whatever split gives the units."""
        return self.points(Pressure(self.contender))

    def __str__(self) -> str:
        parts = [f"prefill of {'+'.join(f'{new}@{old}' for new, old in self.chunks)}"] if self.chunks else []
        parts += [f"decode of {self.rows}x{self.context}"] if self.rows else []
        parts += [f"contender {self.contender}"] if self.contender else []
        return f"{(' with ' if self.hybrid else ' beside ').join(parts)} on {self.split}"
