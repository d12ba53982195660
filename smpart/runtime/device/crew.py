"""`Crew` of a GPU: one process that holds the device, for both lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from smpart.errors import SmpartError
from smpart.partition.device import Device
from smpart.partition.split import Side, Split
from smpart.partition.work import Work
from smpart.runtime.crew import Seat
from smpart.runtime.device.machine import DeviceArgs, DeviceInfo
from smpart.runtime.device.worker import Start, Task


class DeviceCrew:
    """See `Crew`.

    Args:
        device: the GPU.
        args: what its process builds.

    Attributes:
        info: what the process said when it was ready.
    """

    seats: Sequence[Seat] = (Seat("the device's worker", "smpart.runtime.device.worker:main"),)

    def __init__(self, device: Device, args: DeviceArgs) -> None:
        self.device = device
        self.info: DeviceInfo | None = None
        self._args = args

    def splits(self) -> tuple[Split, ...]:
        """Those that the device really made."""
        return self._known().splits

    def overlapping(self) -> tuple[Split, ...]:
        """None: not built yet."""
        return ()

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """As the device's process found out."""
        return (prefill, decode) in self._known().disjoint

    def seat(self, side: Side, split: Split) -> int:
        """The one for both sides."""
        return 0

    def fatal(self, seat: int, code: int) -> bool:
        """The KV memory dies with the process that holds the device."""
        return True

    def fds(self, seat: int) -> Sequence[int]:
        """None."""
        return ()

    def first_message(self, seat: int, segments: Sequence[str], last: Work | None) -> Start:
        """See `Crew`. A replacement has the KV blocks of the first: the engine counts on them."""
        blocks = self.info.blocks if self.info is not None else self._args.blocks
        return Start(replace(self._args, blocks=blocks), tuple(segments))

    def ready(self, seat: int, info: DeviceInfo) -> None:
        """Keep what is said of the device.

        Raises:
            SmpartError: another process of the same device made other splits.
        """
        if self.info is not None and self.info.splits != info.splits:
            raise SmpartError("the device came back with other splits than before: restart the engine")
        self.info = info

    @property
    def blocks(self) -> int:
        """KV blocks on the device."""
        return self._known().blocks

    def message(self, work: Work) -> Task:
        """See `Crew`."""
        return Task(work.id, work.side, work.split, work.payload)

    def before_kill(self, pid: int) -> None:
        """Nobody else is on the device."""

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """As many of the side's positions as the driver gave it SMs."""
        if last is None:
            return frozenset()
        count, ids = self._known().units[side, last.split], self.device.unit_ids
        return frozenset(ids[:count] if side is Side.PREFILL else ids[len(ids) - count :])

    def _known(self) -> DeviceInfo:
        assert self.info is not None, "the device's process is not ready"
        return self.info
