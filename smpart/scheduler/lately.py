"""How long steps have taken lately: what readers who fell behind their pace have to expect."""

from __future__ import annotations

import math

MEMORY = 20.0
"""TPOT objectives after which what was counts for a third."""


class Lately:
    """Seconds from step to step, averaged over the last ones by their length.

    A reader who is behind catches up by what steps take less than its TPOT, and whether steps will be short is told
    best by whether they were. Where prompts keep coming, to count on the whole device for the next steps is to be
    late a little more each time and never to catch up: answers of ten tokens all end behind.

    >>> lately = Lately()
    >>> for step in range(100):
    ...     lately.chosen(begin=0.05 * step, seconds=0.05, memory=0.5)
    >>> f"{lately.seconds(5.0, alone=0.02, memory=0.5):.3f} {lately.seconds(9.0, alone=0.02, memory=0.5):.3f}"
    '0.050 0.020'
    """

    __slots__ = ("_end", "_mean")

    def __init__(self) -> None:
        self._mean = 0.0
        self._end = 0.0

    def seconds(self, begin: float, alone: float, memory: float) -> float:
        """What they took before a step that begins at `begin`; in times without any choice, as much as `alone`.

        Args:
            alone: seconds of one step with nothing beside it.
            memory: seconds.
        """
        kept = math.exp(min(0.0, self._end - begin) / memory)
        return max(alone, kept * self._mean + (1.0 - kept) * alone)

    def chosen(self, begin: float, seconds: float, memory: float) -> None:
        """The step that begins at `begin` will have taken so long, waiting included."""
        kept = math.exp(-seconds / memory)
        self._mean = kept * self._mean + (1.0 - kept) * seconds
        self._end = begin + seconds
