"""Prefix keys: a hash chain that names a block by its tokens and all tokens before them.

Two requests share a block exactly if their keys are equal, that is if salt, block size and every token up to the
block's end agree. The chain is that of vLLM's and SGLang's prefix caches, with a cryptographic hash, so that nobody
can construct a prompt that reads another tenant's blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from smpart.errors import UsageError

Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer]"

_KEY_BYTES = 16


class HashChain:
    """The keys of one request's complete blocks, extended as its tokens become known.

    Attributes:
        hashes: 16-byte keys of the complete blocks so far, in order.

    >>> chain = HashChain(block_tokens=4)
    >>> len(chain.extend(range(6))), len(chain.extend([6])), len(chain.extend([7])), chain.tokens
    (1, 0, 1, 8)
    >>> chain.hashes == block_hashes(range(8), 4)
    True
    """

    def __init__(self, block_tokens: int, salt: bytes | str = b"") -> None:
        if block_tokens < 1:
            raise UsageError(f"block_tokens={block_tokens}: must be at least 1")
        self.block_tokens = block_tokens
        self.hashes: list[bytes] = []
        self._seed = _seed(block_tokens, salt)
        self._pending: list[int] = []

    @property
    def tokens(self) -> int:
        """Tokens taken in so far, those of the incomplete last block included."""
        return len(self.hashes) * self.block_tokens + len(self._pending)

    def extend(self, tokens: Tokens) -> list[bytes]:
        """Append token ids (any sequence of integers; a range and an array are quick).

        Returns:
            The keys of the blocks that became complete.

        Raises:
            UsageError: `tokens` is not one row of integers.
        """
        ids = _as_ids(tokens)
        if self._pending:
            ids = np.concatenate((np.array(self._pending, dtype=ids.dtype), ids))
        complete = len(ids) // self.block_tokens * self.block_tokens
        self._pending = ids[complete:].tolist()
        width = self.block_tokens * ids.itemsize
        raw = memoryview(ids[:complete].tobytes())
        parent = self.hashes[-1] if self.hashes else self._seed
        new: list[bytes] = []
        for start in range(0, len(raw), width):
            parent = sha256(parent + raw[start : start + width]).digest()[:_KEY_BYTES]
            new.append(parent)
        self.hashes += new
        return new


def block_hashes(tokens: Tokens, block_tokens: int, salt: bytes | str = b"") -> list[bytes]:
    """Keys of the complete blocks of `tokens`; a rest shorter than a block has none.

    Raises:
        UsageError: `tokens` is not one row of integers, or `block_tokens` is below 1.

    >>> block_hashes([1, 2, 3], 2) == block_hashes([1, 2, 4], 2)
    True
    >>> block_hashes([1, 2], 2, salt="alice") == block_hashes([1, 2], 2, salt="bob")
    False
    """
    return HashChain(block_tokens, salt).extend(tokens)


def _seed(block_tokens: int, salt: bytes | str) -> bytes:
    raw = salt.encode() if isinstance(salt, str) else salt
    return sha256(b"smpart.kvcache/%d/" % block_tokens + raw).digest()[:_KEY_BYTES]


def _as_ids(tokens: Tokens) -> NDArray[np.int64]:
    """Token ids as little-endian int64, whatever they came as, so that equal tokens give equal bytes."""
    if isinstance(tokens, range):
        return np.arange(tokens.start, tokens.stop, tokens.step, dtype="<i8")
    ids = np.asarray(tokens)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise UsageError(f"token ids of shape {ids.shape} and type {ids.dtype}: must be one row of integers")
    return ids.astype("<i8", copy=False)
