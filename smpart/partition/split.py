"""How one device's units are shared between prefill and decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from smpart.errors import UsageError


class Side(StrEnum):
    """Which phase a lane serves."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Side:
        """The neighbour lane's side.

        >>> Side.PREFILL.other
        <Side.DECODE: 'decode'>
        """
        return Side.DECODE if self is Side.PREFILL else Side.PREFILL


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """Units given to each side; one side may be 0, then the other has the device.

    Prefill takes units from the front of the device and decode from the back, so two sides of one split
    are disjoint by construction, unless together they are more than the device: then they *overlap*.

    >>> Split(prefill=96, decode=36).total
    132
    >>> str(Split.parse("96/36"))
    '96/36'
    """

    prefill: int
    decode: int

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 0 or self.prefill + self.decode == 0:
            raise UsageError(f"split {self.prefill}/{self.decode}: both sides must be >= 0 and one of them > 0")

    @property
    def total(self) -> int:
        """Units of both sides together."""
        return self.prefill + self.decode

    @property
    def exclusive(self) -> bool:
        """Whether one phase has the device to itself."""
        return self.prefill == 0 or self.decode == 0

    def units(self, side: Side) -> int:
        """Number of units of one side."""
        return self.prefill if side is Side.PREFILL else self.decode

    def overlaps(self, units: int) -> bool:
        """Whether the sides have units in common, on a device of `units` units.

        >>> Split(3, 1).overlaps(4), Split(4, 4).overlaps(4)
        (False, True)
        """
        return self.prefill + self.decode > units

    def indices(self, side: Side, total: int) -> range:
        """Positions, on a device of `total` units, that one side owns.

        >>> Split(3, 1).indices(Side.DECODE, 4)
        range(3, 4)
        """
        return range(self.prefill) if side is Side.PREFILL else range(total - self.decode, total)

    @classmethod
    def parse(cls, text: str) -> Split:
        """Read ``P/D``. Raises `UsageError` on anything else."""
        left, slash, right = text.partition("/")
        if not slash or not left.strip().isdecimal() or not right.strip().isdecimal():
            raise UsageError(f"split {text!r}: write PREFILL/DECODE in units, for example 1/1")
        return cls(int(left), int(right))

    def __str__(self) -> str:
        return f"{self.prefill}/{self.decode}"


Disjoint = Callable[[Split, Split], bool]
"""Whether prefill under one split and decode under another (of the same device) may run at once: they own no unit
together, or both splits overlap, for whoever plans such a split asks for it."""


def nested(prefill: Split, decode: Split) -> bool:
    """`Disjoint` where a side's share under one split contains its smaller shares: units have fixed positions.

    >>> nested(Split(3, 1), Split(2, 2)), nested(Split(2, 2), Split(3, 1))
    (False, True)
    """
    return prefill.prefill + decode.decode <= prefill.total


def nested_or_overlapping(units: int) -> Disjoint:
    """`Disjoint` like `nested`, on a device of `units` units that also has overlapping splits.

    >>> apart = nested_or_overlapping(4)
    >>> apart(Split(2, 2), Split(3, 1)), apart(Split(4, 4), Split(3, 4)), apart(Split(4, 4), Split(3, 1))
    (True, True, False)
    """

    def may_run(prefill: Split, decode: Split) -> bool:
        return prefill.prefill + decode.decode <= units or (prefill.overlaps(units) and decode.overlaps(units))

    return may_run
