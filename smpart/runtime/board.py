"""The board: token history and block tables that the engine and every lane worker see.

A request owns one *slot* from admission to its end. Its known tokens (prompt, then outputs) and the ids of its
KV blocks live in fixed arrays, so that a token travels from one step to the next, and a request from the prefill
lane to the decode lane, without a message. There is no lock: the engine writes a slot's prompt and appends block
ids *before* it launches the work that reads them, a lane writes only the token it samples, and a slot is reused
only after the last work that may touch it has completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Noticeboard(Protocol):
    """What the engine writes to; in virtual time nobody reads it, and nothing is kept."""

    @property
    def slots(self) -> int:
        """Number of requests that may be admitted at once."""

    @property
    def max_len(self) -> int:
        """Longest prompt and answer together."""

    def write_tokens(self, slot: int, prompt: Sequence[int], outputs: Sequence[int] = ()) -> None:
        """Set the known tokens of a slot from position 0."""

    def append_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set table entries ``first ...`` of a slot."""


@dataclass(frozen=True, slots=True)
class Board:
    """Arrays over one shared buffer.

    Attributes:
        tokens: int32[slots, max_len].
        tables: int32[slots, max_blocks]; entry ``i`` is the block of positions ``i * block_tokens ...``.
        block_tokens: tokens in one block.
    """

    tokens: NDArray[np.int32]
    tables: NDArray[np.int32]
    block_tokens: int

    @staticmethod
    def size(slots: int, max_len: int, block_tokens: int) -> int:
        """Bytes that a buffer for such a board needs."""
        return 4 * slots * (max_len + -(-max_len // block_tokens))

    @classmethod
    def over(cls, buffer: memoryview | bytearray, slots: int, max_len: int, block_tokens: int) -> Board:
        """Lay a board over a zeroed buffer of at least `size` bytes."""
        blocks = -(-max_len // block_tokens)
        flat = np.frombuffer(buffer, dtype=np.int32, count=slots * (max_len + blocks))
        return cls(
            flat[: slots * max_len].reshape(slots, max_len),
            flat[slots * max_len :].reshape(slots, blocks),
            block_tokens,
        )

    @property
    def slots(self) -> int:
        """Number of requests that may be admitted at once."""
        return int(self.tokens.shape[0])

    @property
    def max_len(self) -> int:
        """Longest prompt and answer together."""
        return int(self.tokens.shape[1])

    def write_tokens(self, slot: int, prompt: Sequence[int], outputs: Sequence[int] = ()) -> None:
        """Set the known tokens of a slot from position 0."""
        self.tokens[slot, : len(prompt)] = prompt
        self.tokens[slot, len(prompt) : len(prompt) + len(outputs)] = outputs

    def append_blocks(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set table entries ``first ...`` of a slot."""
        self.tables[slot, first : first + len(blocks)] = blocks
