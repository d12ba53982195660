"""What attention over paged KV memory is asked for on a device, whoever computes it.

Rows of a packed forward lie one after the other: decode rows first (each a sequence of its own), then the rows of
prefill chunks. Both kinds read the pages in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from smpart.errors import UsageError

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What is the same in every attention call of one model.

    Attributes:
        heads, kv_heads: query heads and KV heads; the first is a multiple of the second.
        block_tokens: tokens of one page, a power of two.
        dtype: of queries and pages.
        scale: factor of the scores before the softmax.
        windows: the distinct sliding windows of the model's layers, in tokens, the row's own included; None: full.
    """

    heads: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: torch.dtype
    scale: float
    windows: tuple[int | None, ...] = (None,)


@dataclass(frozen=True, slots=True)
class Attended:
    """What one forward attends to, as the host knows it: the same numbers that it uploads for the kernels.

    Attributes:
        lengths: int32[rows], tokens each decode row attends to, its own included; 0 for padding.
        tables: int32[rows, width], the blocks that hold them; entries past a row's last block mean nothing.
        offsets: int32[chunks + 1], where each chunk's rows start among the rows of all chunks, and their number.
        starts: int32[chunks], tokens of each chunk's sequence before it.
        chunk_tables: int32[chunks, width].
    """

    lengths: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    tables: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int32))
    offsets: Ints = field(default_factory=lambda: np.zeros(1, np.int32))
    starts: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    chunk_tables: Ints = field(default_factory=lambda: np.zeros((0, 0), np.int32))


@dataclass(frozen=True, slots=True)
class Bucket:
    """Static size of the decode rows of one CUDA graph: `rows` rows, whose tables have `width` entries."""

    rows: int
    width: int

    def check(self, attended: Attended) -> None:
        """Raise UsageError if a forward is not of this size, or has chunks."""
        rows, width = attended.tables.shape
        if (rows, width) != (self.rows, self.width) or len(attended.starts):
            raise UsageError(
                f"{rows} decode rows with tables of {width} entries and {len(attended.starts)} chunks do not fit "
                f"a graph of {self.rows} decode rows with tables of {self.width} entries"
            )


class Scratch:
    """Scratch memory of one lane, shared by attentions whose work never overlaps in time.

    Whoever took a smaller buffer keeps it: a captured graph's addresses stay valid when a later one needs more.
    Buffers are zeroed on the current stream, so make a lane's attentions with the lane's stream current.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def take(self, size: int) -> Tensor:
        """uint8[size], zero until it is first used."""
        if self._buffer.numel() < size:
            self._buffer = torch.zeros(size, dtype=torch.uint8, device=self.device)
        return self._buffer[:size]


class Attention(Protocol):
    """Attention of one forward at a time: each CUDA graph has its own, and so has each paused prefill.

    Nothing here reads the device. `decode` may be captured in a CUDA graph if the attention was made for a `Bucket`
    and has run once before (that compiles and loads its kernels); before each replay the host calls `prepare`. Such an
    attention serves no chunks.

    Tensors are on one device; `pages` is a layer's memory, [2, blocks, block_tokens, kv_heads, head_dim] (keys, then
    values). What lies there past a sequence's length is never used, be it NaN. Where `out` is given, the result is
    written there; its last dimension is contiguous, and it may be a view of rows of a larger tensor.
    """

    @property
    def name(self) -> str:
        """``flashinfer``, ``triton`` or ``gather``."""

    def prepare(self, attended: Attended) -> None:
        """Get ready for a forward or a replay, on the lane's stream. The device tensors below hold the same numbers.

        Raises:
            UsageError: it does not fit the bucket.
        """

    def decode(
        self,
        query: Tensor,
        pages: Tensor,
        tables: Tensor,
        lengths: Tensor,
        window: int | None,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Attention of decode rows, each to the last `window` tokens of its own sequence.

        Args:
            query: [rows, heads, head_dim].
            tables, lengths: see `Attended`. A row of length 0 gives zeros.

        Returns:
            [rows, heads, head_dim].
        """

    def prefill(
        self,
        query: Tensor,
        pages: Tensor,
        tables: Tensor,
        offsets: Tensor,
        starts: Tensor,
        window: int | None,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of packed chunks, whose keys and values are in the pages already.

        Args:
            query: [tokens of all chunks, heads, head_dim].
            tables, offsets, starts: see `Attended` (`tables` are the chunks').

        Returns:
            [tokens of all chunks, heads, head_dim].
        """


class AttentionMaker(Protocol):
    """Makes the attentions of one model on one device."""

    def __call__(
        self, shape: AttentionShape, scratch: Scratch, units: int, bucket: Bucket | None = None, /
    ) -> Attention:
        """An attention for a lane of `units` SMs; with `bucket`, one for decode rows in a CUDA graph."""
