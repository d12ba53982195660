"""The contract of a backend: one way of cutting a device into two lanes."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from smpart.partition.device import Device
from smpart.partition.split import Side, Split


@runtime_checkable
class Backend(Protocol):
    """Knows one device and the ways to split it. Opening one touches no worker and takes no memory."""

    name: str
    """As `open_backend` takes it, for example ``cores`` or ``sim:h100``."""

    def device(self) -> Device:
        """The device whose units are split."""

    def splits(self) -> tuple[Split, ...]:
        """Every split that can be realised, the two exclusive ones included, in order of `Split.prefill`."""

    def why_unusable(self) -> str | None:
        """None if lanes can be made here; otherwise what is missing and what would help."""


class Placement(Protocol):
    """Puts a lane's thread, and the threads that compute for it, onto its side of a split."""

    def place(self, side: Side, split: Split) -> None:
        """Move the calling lane. Called on the lane's thread before its first work under another split."""

    def realised(self, side: Side) -> frozenset[int]:
        """Unit ids the lane is on, read back from the system. Safe from any thread."""
