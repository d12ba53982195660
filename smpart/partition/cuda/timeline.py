"""When work ran, on the host's clock: distances are the device's own, laid along the moments at which it was seen."""

from __future__ import annotations

from math import inf

_WINDOW = 64
"""Works after which the line is moved to the fastest notice among them: clocks drift apart by microseconds a second."""


class Timeline:
    """Of one lane. A watcher that is late (another thread had the interpreter) must not make work look slow.

    An end is where the lane's previous one was, plus the device's own distance between the two. It is never later
    than the moment it was seen; of many works, the one noticed fastest tells by how much the two clocks have drifted.

    >>> line = Timeline()
    >>> line.place(seen=10.0, took=1.0, since=None)
    (9.0, 10.0)
    >>> line.place(seen=12.5, took=1.5, since=2.0)       # noticed half a second late
    (10.5, 12.0)
    """

    def __init__(self) -> None:
        self._last = -inf
        self._count = 0
        self._behind = inf

    def place(self, seen: float, took: float, since: float | None) -> tuple[float, float]:
        """Start and end of a work, in seconds on the host's clock.

        Args:
            seen: when its end was noticed.
            took: seconds from its start to its end, by the device.
            since: seconds from the end of the lane's previous work to its own, by the device; None: not comparable.
        """
        end = seen if since is None else min(seen, self._last + since)
        if since is None:
            self._count, self._behind = 0, inf
        else:
            self._count, self._behind = self._count + 1, min(self._behind, seen - end)
            if self._count == _WINDOW:
                end += self._behind
                self._count, self._behind = 0, inf
        start = max(end - took, self._last)
        self._last = end
        return start, end
