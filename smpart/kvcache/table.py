"""A block table: the blocks that hold one request's KV, in order."""

from __future__ import annotations

from collections.abc import Sequence

from smpart.kvcache.pool import BlockPool


class BlockTable:
    """One request's blocks over a pool; entry ``i`` holds tokens ``i * block_tokens ...``.

    Attributes:
        ids: block ids in token order. Read only; it changes through the methods.
        published: leading blocks that were made findable (or were found).

    >>> pool = BlockPool(4, block_tokens=16)
    >>> table = BlockTable(pool)
    >>> table.ensure(20), table.capacity, table.missing(40)
    ([0, 1], 32, 1)
    >>> table.release()
    >>> pool.free
    4
    """

    __slots__ = ("ids", "pool", "published")

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.ids: list[int] = []
        self.published = 0

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks owned."""
        return len(self.ids) * self.pool.block_tokens

    def missing(self, tokens: int) -> int:
        """Blocks lacking for `tokens` tokens in all."""
        return max(-(-tokens // self.pool.block_tokens) - len(self.ids), 0)

    def adopt(self, ids: Sequence[int]) -> None:
        """Begin with a prefix hit: take over the references that `BlockPool.acquire` took.

        Raises:
            AssertionError: the table has blocks already (a fault of the caller).
        """
        if self.ids:
            raise AssertionError(f"a table of {len(self.ids)} blocks cannot adopt a prefix")
        self.ids = list(ids)
        self.published = len(self.ids)

    def ensure(self, tokens: int) -> list[int]:
        """Own blocks for `tokens` tokens in all; the ids added.

        Raises:
            OutOfBlocks: the pool has too few; the table is unchanged.
        """
        added = self.pool.allocate(self.missing(tokens))
        self.ids += added
        return added

    def publish_upto(self, tokens_written: int, hashes: Sequence[bytes]) -> None:
        """Make blocks findable that are completely written: the KV of the first `tokens_written` tokens is.

        Args:
            tokens_written: tokens from the request's first one on.
            hashes: keys of the request's complete blocks from the first on; a block without a key is left for later.

        Raises:
            AssertionError: more tokens are written than the table has room for (a fault of the caller).
        """
        if tokens_written > self.capacity:
            raise AssertionError(f"{tokens_written} tokens written into a table of {self.capacity}")
        complete = min(tokens_written // self.pool.block_tokens, len(hashes))
        for index in range(self.published, complete):
            self.pool.publish(self.ids[index], hashes[index])
        self.published = max(self.published, complete)

    def release(self) -> None:
        """Give every block back. Idempotent; the table can be used anew."""
        ids, self.ids, self.published = self.ids, [], 0
        self.pool.release(ids)
