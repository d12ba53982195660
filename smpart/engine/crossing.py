"""Prefill and decode on two devices: KV crosses a link from the memory of the one to that of the other."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from smpart.kvcache import BlockPool, BlockTable, OutOfBlocks
from smpart.partition.link import Link


class _Transfer(NamedTuple):
    row: int
    blocks: BlockTable
    lands: float


class Crossing:
    """KV on its way, and the memory it goes to.

    Transfers run one after the other in the order they are begun, beside all that both devices compute. One takes
    blocks on both sides until it has landed.

    Args:
        pool: of the device that decodes; blocks as large as those of the device that prefills.
        token_bytes: KV bytes of one token.
    """

    def __init__(self, pool: BlockPool, link: Link, token_bytes: int) -> None:
        self.pool = pool
        self._link = link
        self._token_bytes = token_bytes
        self._free_at = 0.0
        self._under_way: deque[_Transfer] = deque()

    @property
    def lands(self) -> float | None:
        """When the next transfer lands; None: nothing is under way."""
        return self._under_way[0].lands if self._under_way else None

    def begin(self, row: int, tokens: int, now: float) -> bool:
        """Move a row's KV as soon as the link is free; False (and nothing changed) if there is no room for it."""
        blocks = BlockTable(self.pool)
        try:
            blocks.ensure(tokens)
        except OutOfBlocks:
            return False
        size = tokens * self._token_bytes
        begins = max(now, self._free_at)
        self._free_at = begins + self._link.busy(size)
        self._under_way.append(_Transfer(row, blocks, begins + self._link.seconds(size)))
        return True

    def landed(self, now: float) -> list[tuple[int, BlockTable]]:
        """Rows whose KV has crossed by `now`, each with its blocks over there."""
        done = []
        while self._under_way and self._under_way[0].lands <= now:
            done.append(self._under_way.popleft()[:2])
        return done
