"""What lanes on CUDA streams are given: for each side of each split a stream that stays on that side's SMs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from smpart.partition.split import Side, Split


@dataclass(frozen=True, slots=True)
class Place:
    """One side of one split on the device.

    Attributes:
        units: SMs it has, read back from the driver.
        stream: a `CUstream` whose kernels run on those SMs; ``int(stream)`` is what torch and cupy take as external.
        context: the `CUcontext` that the stream belongs to, for graphs and events.
        green: the `CUgreenCtx` behind it; None where the side has the whole device.
    """

    side: Side
    split: Split
    units: int
    stream: Any
    context: Any
    green: Any = field(default=None, repr=False)

    @property
    def handle(self) -> int:
        """The stream as a number, for `torch.cuda.ExternalStream` and `cupy.cuda.ExternalStream`."""
        return int(self.stream)


class Places(Protocol):
    """Every place of a device, made at start and reused for life."""

    @property
    def primary(self) -> Any:
        """The device's primary `CUcontext`."""

    def all(self) -> Mapping[tuple[Side, Split], Place]:
        """By side and split."""

    def splits(self) -> tuple[Split, ...]:
        """Those that were made, the two exclusive ones included, in order of `Split.prefill`."""

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """See `Lanes.disjoint`."""

    def read_back(self, place: Place) -> int:
        """SMs of a place, asked of the driver now."""
