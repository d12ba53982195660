"""Where a body's kernels go: a seam between the body and CUDA, so that all but this runs anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from smpart.partition.cuda.places import Place


class Replay(Protocol):
    """Captured work.

    Attributes:
        output: where its result lies after each replay.
        memory_bytes: what holding it takes on the device.
    """

    output: Tensor
    memory_bytes: int

    def __call__(self) -> None:
        """Queue it all again where the lane is. It reads and writes the tensors that it was captured with."""


class Queue(Protocol):
    """A device's streams, as a body uses them. For one thread."""

    def at(self, place: Place) -> AbstractContextManager[None]:
        """Kernels launched inside go to the place's stream, and libraries size their grids for its SMs."""

    def capture(self, place: Place, run: Callable[[], Tensor]) -> Replay:
        """Capture what `run` queues, without running it. Call it inside ``at(place)``, once `run` has run there.

        Raises:
            Exception: it does something that cannot be captured. Nothing was queued.
        """
