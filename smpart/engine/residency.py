"""What an admitted request holds: a board slot, KV blocks, and its place in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from smpart.engine.request import Request
from smpart.kvcache import BlockPool, BlockTable, HashChain, OutOfBlocks
from smpart.runtime.board import Noticeboard
from smpart.scheduler.table import RequestTable

_REFRESHED = 32
"""Waiting rows whose prefix hit is kept current; rows further back are refreshed when they come near the head."""
_EACH = 8
"""...of which so many are looked up at one decision."""


class Residency:
    """Slots and blocks of admitted rows; keeps the table's ``slot``, ``blocks`` and ``cached`` columns true."""

    def __init__(self, table: RequestTable, pool: BlockPool, board: Noticeboard, prefix_cache: bool) -> None:
        self.table = table
        self.pool = pool
        self.board = board
        self._prefix_cache = prefix_cache
        self._slots = list(range(board.slots - 1, -1, -1))
        self._blocks: dict[int, BlockTable] = {}
        self._chains: dict[int, HashChain | None] = {}
        self._published = 0
        self._looked = _REFRESHED

    @property
    def slots(self) -> int:
        """Requests that may be admitted at once."""
        return self.board.slots

    @property
    def free_slots(self) -> int:
        """Requests that may still be admitted."""
        return len(self._slots)

    def arrive(self, row: int, request: Request) -> None:
        """Compute the prefix keys of a new request and look its prefix up."""
        self._chains[row] = self._chain(request)
        self._look_up(row)

    def leave(self, row: int) -> None:
        """Forget a request that holds nothing any more."""
        self._chains.pop(row, None)

    def admit(self, row: int, request: Request) -> None:
        """Give a waiting row a slot, the cached blocks of its prefix, and write its known tokens to the board.

        Sets ``slot``, ``blocks`` and ``computed`` (tokens that need not be computed again).
        """
        slot = self._slots.pop()
        blocks = BlockTable(self.pool)
        blocks.adopt(self.pool.acquire(self._reusable(row)))
        self._blocks[row] = blocks
        self.table.slot[row] = slot
        self.table.blocks[row] = len(blocks.ids)
        self.table.computed[row] = blocks.capacity
        request.cached_tokens = max(request.cached_tokens, blocks.capacity)
        self.board.write_tokens(slot, request.prompt, request.token_ids)
        self.board.append_blocks(slot, 0, blocks.ids)

    def ensure(self, row: int, tokens: int) -> bool:
        """Own blocks for `tokens` tokens; False (and nothing changed) if the pool has too few."""
        blocks = self._blocks[row]
        first = len(blocks.ids)
        try:
            added = blocks.ensure(tokens)
        except OutOfBlocks:
            return False
        self.board.append_blocks(int(self.table.slot[row]), first, added)
        self.table.blocks[row] = len(blocks.ids)
        return True

    def grow(self, rows: NDArray[np.intp]) -> NDArray[np.intp]:
        """Blocks for one more token of each row; the rows that got them, in order."""
        full = self.table.computed[rows] >= self.table.blocks[rows] * self.pool.block_tokens
        if not full.any():
            return rows
        kept = [not f or self.ensure(int(r), int(self.table.computed[r]) + 1) for r, f in zip(rows, full, strict=True)]
        grown: NDArray[np.intp] = rows[np.asarray(kept, dtype=bool)]
        return grown

    def grow_all(self, rows: NDArray[np.intp]) -> bool:
        """Blocks for one more token of each row; False, and nothing changed, if there are not enough for all."""
        full = rows[self.table.computed[rows] >= self.table.blocks[rows] * self.pool.block_tokens].tolist()
        if full and len(full) > self._blocks[full[0]].pool.free:
            return False
        return all(self.ensure(row, int(self.table.computed[row]) + 1) for row in full)

    def cross(self, row: int, blocks: BlockTable) -> None:
        """A row's KV lies in other blocks, of another memory, from now on: give the old ones back."""
        self._blocks[row].release()
        self._blocks[row] = blocks
        self.table.blocks[row] = len(blocks.ids)
        self.board.append_blocks(int(self.table.slot[row]), 0, blocks.ids)
        self._published += 1

    def wrote(self, row: int, tokens: int, request: Request) -> None:
        """The KV of the first `tokens` tokens is completely written: make complete blocks findable."""
        chain = self._chains.get(row)
        if chain is None or tokens // self.pool.block_tokens <= self._blocks[row].published:
            return
        if request.hashes is None and (missing := tokens - chain.tokens) > 0:
            done = chain.tokens - len(request.prompt)
            chain.extend(request.token_ids[done : done + missing])
        self._blocks[row].publish_upto(tokens, chain.hashes)
        self._published += 1

    def feeds(self, rows: Iterable[int]) -> bool:
        """Whether any of the rows makes blocks findable."""
        return any(self._chains.get(row) is not None for row in rows)

    def release(self, row: int) -> None:
        """Give slot and blocks back."""
        self._blocks.pop(row).release()
        self._slots.append(int(self.table.slot[row]))
        self.table.slot[row] = -1
        self.table.blocks[row] = 0
        self.table.computed[row] = 0
        self._published += 1

    def refresh(self, waiting: NDArray[np.intp]) -> None:
        """Bring ``cached`` of the first waiting rows up to date if the cache has changed, a few rows a call."""
        most = min(len(waiting), _REFRESHED)
        if self._looked >= most and self._published:
            self._published = self._looked = 0
        if self._looked < most:
            for row in waiting[self._looked : min(most, self._looked + _EACH)].tolist():
                self._look_up(row)
            self._looked += _EACH

    def _chain(self, request: Request) -> HashChain | None:
        if not self._prefix_cache or (request.hashes is not None and not request.hashes):
            return None
        chain = HashChain(self.pool.block_tokens, request.salt)
        if request.hashes is None:
            chain.extend(request.prompt)
        else:
            chain.hashes.extend(request.hashes)
        return chain

    def _reusable(self, row: int) -> Sequence[bytes]:
        """Keys of complete blocks before the last known token, which is always computed anew."""
        chain = self._chains.get(row)
        if chain is None:
            return ()
        return chain.hashes[: (int(self.table.known[row]) - 1) // self.pool.block_tokens]

    def _look_up(self, row: int) -> None:
        self.table.cached[row] = self.pool.match(self._reusable(row)) * self.pool.block_tokens
