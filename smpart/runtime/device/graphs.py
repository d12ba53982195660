"""Decode steps as captured graphs: one a lane size and batch size, captured when first met, within a memory budget.

A captured kernel runs in the context of the stream it was captured on, not of the stream it is replayed on, so a
lane needs a graph of its own for every split.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable

from torch import Tensor

from smpart.partition.cuda.places import Place
from smpart.partition.split import Split
from smpart.runtime.device.attention import Bucket
from smpart.runtime.device.layout import Layout
from smpart.runtime.device.packing import DevicePacking
from smpart.runtime.device.queue import Queue, Replay

logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Batch sizes that are captured; a step is padded up to the next."""

_WIDTH_STEP = 4


class CapturedStep:
    """One graph and the tensors it reads and writes."""

    def __init__(self, bucket: Bucket, packing: DevicePacking, replay: Replay) -> None:
        self.bucket = bucket
        self.packing = packing
        self._replay = replay

    def run(self, layout: Layout) -> tuple[DevicePacking, Tensor]:
        """Replay with another batch, padded to the bucket; its packing, and the logits of its real rows."""
        self.packing.renew(layout)
        self._replay()
        return self.packing, self._replay.output[: len(layout.slots)]


class DecodeGraphs:
    """The graphs of one lane.

    Args:
        width: most blocks of a sequence.
        budget_bytes: device memory that all of them together may take. What a graph takes is known only when it is
            there: another is begun as long as the largest so far would still fit.
    """

    def __init__(self, queue: Queue, width: int, budget_bytes: int) -> None:
        self._queue = queue
        self._widths = _widths(width)
        self._left = budget_bytes
        self._largest = 1
        self._steps: dict[tuple[Split, Bucket], CapturedStep | None] = {}
        self.memory_bytes = 0

    def __len__(self) -> int:
        return sum(step is not None for step in self._steps.values())

    def bucket(self, rows: int, blocks: int) -> Bucket | None:
        """The smallest that holds a step of so many rows with so many blocks each; None if there is none."""
        at = bisect_left(ROWS, rows)
        return Bucket(ROWS[at], self._widths[bisect_left(self._widths, blocks)]) if at < len(ROWS) else None

    def find(self, place: Place, bucket: Bucket) -> CapturedStep | None:
        """The graph of a place and a bucket, if it was captured."""
        return self._steps.get((place.split, bucket))

    def wanted(self, place: Place, bucket: Bucket) -> bool:
        """Whether it was not captured yet, and may be."""
        return (place.split, bucket) not in self._steps and self._left >= self._largest

    def capture(
        self, place: Place, bucket: Bucket, packing: DevicePacking, forward: Callable[[DevicePacking], Tensor]
    ) -> None:
        """Capture the step that `packing` has just run on the lane's stream. Failure is said, and remembered."""
        key = (place.split, bucket)
        self._steps[key] = None
        try:
            replay = self._queue.capture(place, lambda: forward(packing))
        except Exception as error:
            logger.warning("decode steps of %d rows on split %s are not captured: %s", bucket.rows, place.split, error)
            return
        self.memory_bytes += replay.memory_bytes
        self._left -= replay.memory_bytes
        self._largest = max(self._largest, replay.memory_bytes)
        if self._left < self._largest:
            logger.warning("decode graphs take %d MiB, all they may: others run uncaptured", self.memory_bytes >> 20)
        self._steps[key] = CapturedStep(bucket, packing, replay)


def _widths(most: int) -> tuple[int, ...]:
    """Table widths that are captured: few, so that short contexts do not pay for the longest."""
    widths = [most]
    while widths[-1] > 32 * _WIDTH_STEP:
        widths.append(-(-widths[-1] // _WIDTH_STEP))
    return tuple(reversed(widths))
