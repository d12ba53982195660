"""Where work lies in a picture of the lanes: heights are units, of one device, or of two with prefill's below."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from smpart.engine.log import Span
from smpart.partition import Side

Seconds = NDArray[np.float64]


class Part(NamedTuple):
    """Some units for some time: seconds on the core's clock."""

    started: float
    finished: float
    units: int


@dataclass(frozen=True, slots=True)
class Bands:
    """The units that a run had.

    Attributes:
        units: of one device.
        devices: how many the lanes lay on.
    """

    units: int
    devices: int = 1

    @property
    def height(self) -> int:
        """Units of all devices."""
        return self.units * self.devices

    def owned(self, span: Span) -> range:
        """Heights that a span ran on."""
        return span.split.indices(span.side, self.height)

    def shared(self, span: Span) -> range:
        """Heights among them that the split gave to the other side as well; empty but for splits that overlap.

        >>> from smpart.partition import Split
        >>> span = Span(Side.DECODE, 0.0, 1.0, "decode", 1, 1, Split(3, 2))
        >>> Bands(4).owned(span), Bands(4).shared(span), Bands(4, devices=2).shared(span)
        (range(2, 4), range(2, 3), range(0, 0))
        """
        return _both(self.owned(span), span.split.indices(span.side.other, self.height))

    def at_once(self, spans: Sequence[Span]) -> list[Part]:
        """Units on which both sides ran at the same time, and when."""
        ours, theirs = (
            sorted((span for span in spans if span.side is side), key=lambda span: span.started) for side in Side
        )
        found, mine, yours = list[Part](), 0, 0
        while mine < len(ours) and yours < len(theirs):
            one, two = ours[mine], theirs[yours]
            started, finished = max(one.started, two.started), min(one.finished, two.finished)
            if started < finished and (both := _both(self.owned(one), self.owned(two))):
                found.append(Part(started, finished, len(both)))
            if one.finished <= two.finished:
                mine += 1
            else:
                yours += 1
        return found

    def shares(self, spans: Sequence[Span], edges: Seconds) -> dict[str, Seconds]:
        """Units at work in each bin, its mean: by kind of work, and under ``both`` what two kinds ran on at once.

        Each unit counts once, so that all together are never more than there are.
        """
        width = np.diff(edges)
        both = _unit_seconds(self.at_once(spans), edges) / width
        kinds = {
            kind: _unit_seconds(
                (Part(s.started, s.finished, s.split.units(s.side)) for s in spans if s.kind == kind), edges
            )
            / width
            for kind in ("prefill", "decode", "hybrid")
        }
        return {**kinds, "prefill": kinds["prefill"] - both, "decode": kinds["decode"] - both, "both": both}


def _both(one: range, two: range) -> range:
    start, stop = max(one.start, two.start), min(one.stop, two.stop)
    return range(start, stop) if start < stop else range(0)


def _unit_seconds(parts: Iterable[Part], edges: Seconds) -> Seconds:
    """Unit-seconds in each bin: differences of the sum up to each edge."""
    started, finished, units = np.array(list(parts), dtype=np.float64).reshape(-1, 3).T
    done = [float(np.sum(units * np.clip(edge - started, 0.0, finished - started))) for edge in edges]
    return np.diff(done)
