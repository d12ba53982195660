"""How fast bytes get from one device to another."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.errors import UsageError


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two devices. Transfers follow each other; a latency delays one and holds up no other.

    Attributes:
        bytes_per_s: what really gets through.
        latency_s: from the first byte's departure to its arrival, set-up included.

    >>> Link.gbps(90.0, latency_s=0.0).seconds(1.125 * 10**10)
    1.0
    """

    bytes_per_s: float
    latency_s: float

    @classmethod
    def gbps(cls, rate: float, latency_s: float) -> Link:
        """A link of `rate` gigabits a second. Raises `UsageError` unless that is above 0."""
        if not 0.0 < rate < float("inf"):
            raise UsageError(f"a link of {rate:g} Gbit/s moves nothing: give a rate above 0")
        return cls(rate * 1e9 / 8, latency_s)

    def busy(self, size: float) -> float:
        """Seconds for which a transfer of `size` bytes keeps others waiting."""
        return size / self.bytes_per_s

    def seconds(self, size: float) -> float:
        """Seconds from the begin to the end of a transfer of `size` bytes."""
        return self.busy(size) + self.latency_s
