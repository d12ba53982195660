"""One forward as index arrays on the host, ready to be sent to a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from smpart.runtime.batch import Batch, Chunk, Rows
from smpart.runtime.board import Board
from smpart.runtime.device.attention import Attended, Bucket
from smpart.runtime.device.upload import Ints

Index = NDArray[np.int64]

_NONE: Index = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Spare:
    """Where the padded rows of a captured step come from and go to: a slot and a block that no request owns."""

    slot: int
    block: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A forward: decode rows first, then the rows of prefill chunks.

    Attributes:
        chunks: the chunks, in order.
        slots, at: int32[m], of each sampled row the request, and the board position its token goes to (no padding).
        row_slots, row_at: int64[n], of each row the request, and the position of its token.
        targets: int64[n], place of each row's key and value in a layer's pages.
        sampled: int64, rows whose logits are wanted (padding included, last).
        to_slots, to_at: int64, `slots` and `at` of those rows.
        known_slots, known_at, known: int64, tokens that the device may not have seen: where they go, and which.
        attended: what the rows attend to.
    """

    chunks: tuple[Chunk, ...]
    slots: Rows
    at: Rows
    row_slots: Index
    row_at: Index
    targets: Index
    sampled: Index
    to_slots: Index
    to_at: Index
    known_slots: Index
    known_at: Index
    known: Index
    attended: Attended

    @property
    def arrays(self) -> Sequence[Ints]:
        """Everything that the device needs."""
        indices = (self.row_slots, self.row_at, self.targets, self.sampled, self.to_slots, self.to_at)
        known = (self.known_slots, self.known_at, self.known)
        a = self.attended
        return (*indices, *known, a.lengths, a.tables, a.offsets, a.starts, a.chunk_tables)


def lay_out(batch: Batch, board: Board, spare: Spare, bucket: Bucket | None = None) -> Layout:
    """Lay a batch out; with `bucket`, a batch without chunks that is padded to it.

    Args:
        board: its tables say where each token lies; its tokens are read for chunks only.
    """
    chunks, count = batch.chunks, len(batch.decode_slots)
    padding = bucket.rows - count if bucket is not None else 0
    slots, at = batch.decode_slots.astype(np.int64), batch.decode_positions.astype(np.int64)
    chunk_slots, chunk_at = _spans([(c.slot, c.start, c.start + c.length) for c in chunks])
    nobody, nowhere = np.full(padding, spare.slot, np.int64), np.zeros(padding, np.int64)
    place = np.full(padding, spare.block * board.block_tokens, np.int64)
    sampling = [i for i, c in enumerate(chunks) if c.sample]
    first_slots = np.array([chunks[i].slot for i in sampling], np.int64)
    first_at = np.array([chunks[i].start + chunks[i].length for i in sampling], np.int64)
    offsets = np.cumsum([0, *(c.length for c in chunks)], dtype=np.int64)
    # The last chunk of a prompt brings the whole prompt along: penalties look back over it, and what a cached prefix
    # holds was never computed here.
    known_slots, known_at = _spans([(c.slot, 0 if c.sample else c.start, c.start + c.length) for c in chunks])
    return Layout(
        chunks=chunks,
        slots=np.concatenate([slots, first_slots]).astype(np.int32),
        at=np.concatenate([at + 1, first_at]).astype(np.int32),
        row_slots=np.concatenate([slots, nobody, chunk_slots]),
        row_at=np.concatenate([at, nowhere, chunk_at]),
        targets=np.concatenate([_place(board, slots, at), place, _place(board, chunk_slots, chunk_at)]),
        sampled=np.concatenate([np.arange(count + padding), count + padding + offsets[1:][sampling] - 1]),
        to_slots=np.concatenate([slots, first_slots, nobody]),
        to_at=np.concatenate([at + 1, first_at, nowhere]),
        known_slots=known_slots,
        known_at=known_at,
        known=board.tokens[known_slots, known_at].astype(np.int64),
        attended=_attended(batch, board, padding, bucket, offsets),
    )


def _attended(batch: Batch, board: Board, padding: int, bucket: Bucket | None, offsets: Index) -> Attended:
    lengths = np.concatenate([batch.decode_positions + 1, np.zeros(padding, np.int32)]).astype(np.int32)
    slots = np.array([c.slot for c in batch.chunks], np.int64)
    ends = np.array([c.start + c.length for c in batch.chunks], np.int32)
    return Attended(
        lengths,
        _tables(board, batch.decode_slots, lengths, bucket.width if bucket is not None else None),
        offsets.astype(np.int32),
        np.array([c.start for c in batch.chunks], np.int32),
        _tables(board, slots, ends, None),
    )


def _tables(board: Board, slots: NDArray[np.integer], lengths: Rows, width: int | None) -> Rows:
    """Block tables of `slots`, padded with rows of zeros to as many as there are lengths."""
    needed = -(-int(lengths.max(initial=1)) // board.block_tokens)
    tables = np.zeros((len(lengths), width or needed), np.int32)
    tables[: len(slots), :needed] = board.tables[slots, :needed]
    return tables


def _place(board: Board, slots: Index, at: Index) -> Index:
    blocks, within = np.divmod(at, board.block_tokens)
    return board.tables[slots, blocks].astype(np.int64) * board.block_tokens + within


def _spans(spans: list[tuple[int, int, int]]) -> tuple[Index, Index]:
    """Slot and position of every token of ``(slot, start, end)`` spans."""
    slots = [np.full(end - start, slot, np.int64) for slot, start, end in spans]
    return np.concatenate([_NONE, *slots]), np.concatenate([_NONE, *(np.arange(s, e) for _, s, e in spans)])
