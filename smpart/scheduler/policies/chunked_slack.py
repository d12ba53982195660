"""All that smpart does on one lane, and no split: it tells what the split itself is worth.

Not published by others. Order, admission, deadlines and what every way to go on is worth are those of `smpart`, which
it is; only the splits are taken away. What is left: hybrid steps of any size, bursts of prefill on the whole device
within the readers' slack, decode alone.
"""

from __future__ import annotations

from smpart.partition import Split
from smpart.scheduler.policies.smpart import Smpart
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot


@register("chunked+slack")
class ChunkedSlack(Smpart):
    """``chunked+slack``."""

    def __init__(self, setup: Setup) -> None:
        setup.nothing("chunked+slack")
        super().__init__(setup)
        self.name = "chunked+slack"

    def proper(self, snapshot: Snapshot) -> tuple[Split, ...]:
        """None."""
        return ()
