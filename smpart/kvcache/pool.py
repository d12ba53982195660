"""The block pool: which block of KV memory is whose. Accounting only; the memory itself is elsewhere."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from smpart.errors import SmpartError, UsageError


class OutOfBlocks(SmpartError):  # noqa: N818
    """Fewer blocks are free than were asked for. The pool is unchanged: preempt or finish a request and try again."""


class BlockPool:
    """Hands out blocks, shares published ones by reference count, and keeps what nobody uses as a prefix cache.

    A block is at any time exactly one of

    * *free*: its content means nothing;
    * *owned*: at least one reference is held on it (or it is unpublished and a pin holds it);
    * *cached*: published under a hash and not owned. It is evictable unless pinned.

    A hash names a block's content **and everything before it** (`smpart.kvcache.prefix`), so a block is reachable
    only through its parents. Eviction is least recently used, and a parent is always more recent than its children:
    references are taken on leading blocks only and dropped from the tail. Hence leaves go first, and no reachable
    block is lost with its parent. Every operation costs amortised O(1) a block.

    Two requests that compute the same prefix at the same time end up with *twins*. The first published stays the
    one that is found; the other returns to the free blocks, or takes its place if that was evicted meanwhile.

    Attributes:
        blocks: number of blocks; ids are ``0 ... blocks - 1``.
        block_tokens: tokens in one block.
        evictions: cached blocks that were given away so far.
        queries, hits: tokens looked up by `acquire`, and found, so far.

    >>> pool = BlockPool(2, block_tokens=16)
    >>> [block] = pool.allocate(1)
    >>> pool.publish(block, b"key")
    0
    >>> pool.release([block])
    >>> pool.free, pool.cached, pool.acquire([b"key", b"other"])
    (2, 1, [0])
    """

    def __init__(self, blocks: int, block_tokens: int = 16) -> None:
        if blocks < 1 or block_tokens < 1:
            raise UsageError(f"a pool of {blocks} blocks of {block_tokens} tokens: both must be at least 1")
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.evictions = 0
        self.queries = 0
        self.hits = 0
        self._refs = [0] * blocks
        self._pins = [0] * blocks
        self._hash: list[bytes | None] = [None] * blocks
        self._found: dict[bytes, int] = {}
        self._unused = list(range(blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._owned = 0

    @property
    def free(self) -> int:
        """Blocks that `allocate` can give: free ones and evictable ones."""
        return len(self._unused) + len(self._evictable)

    @property
    def owned(self) -> int:
        """Blocks in use."""
        return self._owned

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that a prefix can hit, pinned ones included."""
        return self.blocks - self._owned - len(self._unused)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with one reference each, in ascending order.

        Free blocks go first, then cached ones are evicted.

        Raises:
            OutOfBlocks: fewer than `count` are free or evictable; nothing was taken.
        """
        assert count >= 0, f"{count} blocks wanted"
        if count > self.free:
            raise OutOfBlocks(f"{count} KV blocks wanted, {self.free} of {self.blocks} are free or evictable")
        keep = max(len(self._unused) - count, 0)
        taken = self._unused[keep:]
        del self._unused[keep:]
        for _ in range(count - len(taken)):
            taken.append(self._evict())
            self.evictions += 1
        taken.sort()
        for block in taken:
            self._refs[block] = 1
        self._owned += count
        return taken

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many leading hashes are present. Changes nothing."""
        found = self._found
        for count, key in enumerate(hashes):
            if key not in found:
                return count
        return len(hashes)

    def acquire(self, hashes: Sequence[bytes]) -> list[int]:
        """Take one reference on each leading block that is present; their ids, in order."""
        taken: list[int] = []
        for key in hashes:
            block = self._found.get(key)
            if block is None:
                break
            if self._refs[block] == 0:
                self._evictable.pop(block, None)
                self._owned += 1
            self._refs[block] += 1
            taken.append(block)
        self.queries += len(hashes) * self.block_tokens
        self.hits += len(taken) * self.block_tokens
        return taken

    def publish(self, block: int, key: bytes) -> int:
        """Make a completely written block findable under the hash of its content.

        Returns:
            The block that is found under `key`: `block`, or the one that was published earlier.

        Raises:
            AssertionError: the block is not in use, or already has another hash (a fault of the caller).
        """
        self._require_in_use(block)
        if self._hash[block] not in (None, key):
            raise AssertionError(f"block {block} is published already, under another hash: it was written twice")
        self._hash[block] = key
        if key not in self._found:
            self._found[key] = block
            if self._refs[block] == 0:
                self._owned -= 1
        return self._found[key]

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference on each block, given in table order; they are released from the tail.

        A published block without references stays as cached, the most recently used; another becomes free.

        Raises:
            AssertionError: a block is not owned (a double free: a fault of the caller). Blocks behind it in the
                list are released, and the pool is consistent.
        """
        refs = self._refs
        for block in reversed(blocks):
            if not (0 <= block < self.blocks and refs[block] > 0):
                raise AssertionError(f"block {block} was released, but nobody owns it (double free)")
            refs[block] -= 1
            if refs[block] == 0:
                self._retire(block)

    def pin(self, blocks: Sequence[int]) -> None:
        """Keep owned or cached blocks from eviction and reuse until `unpin`, whoever releases them. Pins count.

        For whoever reads or writes a block's memory on his own time (a tier, a load under way). Pin a prefix from
        its first block, else the unpinned parents may go and leave the pinned ones unreachable.

        Raises:
            AssertionError: a block is free (a fault of the caller).
        """
        for block in blocks:
            self._require_in_use(block)
            self._pins[block] += 1
            self._evictable.pop(block, None)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Undo one `pin` of each block, given in the same order; the last one gives an unused block up.

        Raises:
            AssertionError: a block is not pinned (a fault of the caller).
        """
        for block in reversed(blocks):
            if not (0 <= block < self.blocks and self._pins[block] > 0):
                raise AssertionError(f"block {block} was unpinned, but is not pinned")
            self._pins[block] -= 1
            if self._pins[block] == 0 and self._refs[block] == 0:
                if self._is_found(block):
                    self._evictable[block] = None
                else:
                    self._retire(block)

    def clear_cached(self) -> None:
        """Forget every cached block that is not pinned."""
        while self._evictable:
            self._unused.append(self._evict())

    def check(self) -> None:
        """Verify that every block is accounted for exactly once, in time linear in the blocks.

        Raises:
            AssertionError: it is not.
        """
        unused = set(self._unused)
        found = set(self._found.values())
        assert len(unused) == len(self._unused), "a block is free twice"
        assert len(found) == len(self._found), "a block is found under two hashes"
        assert all(self._hash[block] == key for key, block in self._found.items()), "a hash finds a foreign block"
        owned = 0
        for block in range(self.blocks):
            refs, pins = self._refs[block], self._pins[block]
            assert refs >= 0 and pins >= 0, f"block {block}: {refs} references, {pins} pins"
            used = refs > 0 or (pins > 0 and block not in found)
            cached = block in found and not used
            assert (block in unused) + used + cached == 1, f"block {block} is not exactly one of free, owned, cached"
            assert (block in self._evictable) == (cached and pins == 0), f"block {block} is wrongly (not) evictable"
            assert not (block in unused and self._hash[block] is not None), f"free block {block} has a hash"
            owned += used
        assert owned == self._owned, f"{owned} blocks are owned, {self._owned} counted"
        assert len(unused) + self.owned + self.cached == self.blocks, "blocks are not conserved"

    def _retire(self, block: int) -> None:
        """File an owned block without references: cached if its prefix is found nowhere else, free if no pin holds it.

        A twin stands for the same prefix as the block that is found, which must stay more recent than the children
        released just before.
        """
        key = self._hash[block]
        found = None if key is None else self._found.setdefault(key, block)
        if found == block:
            self._owned -= 1
            if self._pins[block] == 0:
                self._evictable[block] = None
            return
        if found is not None and found in self._evictable:
            self._evictable.move_to_end(found)
        if self._pins[block] == 0:
            self._owned -= 1
            self._hash[block] = None
            self._unused.append(block)

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        key = self._hash[block]
        assert key is not None
        del self._found[key]
        self._hash[block] = None
        return block

    def _is_found(self, block: int) -> bool:
        key = self._hash[block]
        return key is not None and self._found.get(key) == block

    def _require_in_use(self, block: int) -> None:
        if not 0 <= block < self.blocks:
            raise AssertionError(f"block {block} does not exist: the pool has {self.blocks}")
        if self._refs[block] == 0 and self._pins[block] == 0 and self._hash[block] is None:
            raise AssertionError(f"block {block} is free: only owned or cached blocks can be published or pinned")
