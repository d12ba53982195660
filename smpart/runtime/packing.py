"""One forward as index tensors: computed once from a `Batch` and the board, used by every layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smpart.runtime.batch import Batch, Chunk
from smpart.runtime.board import Board

_SLACK = 64
"""Tokens by which contexts of one decode group may always differ: padding that costs less than another call."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of the packed forward whose attention is one call.

    Attributes:
        decode: each row is a sequence of its own; otherwise all rows are one chunk.
        context: tokens of the chunk's sequence before it.
        blocks: int64[sequences * blocks each] to gather, or None when `first` names a consecutive run of blocks.
        first: block at which the consecutive run starts.
        offset: tokens to skip at the front of what is read.
        length: tokens to read after them.
        mask: added to the scores, broadcastable to [sequences, 1, queries, length]; None: nothing to mask, or
            plainly causal for a chunk without context.
    """

    rows: slice
    decode: bool
    context: int
    blocks: Tensor | None
    first: int
    offset: int
    length: int
    mask: Tensor | None

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the piece, each [sequences, kv_heads, length, head_dim].

        Views of the pages where a single sequence's blocks are consecutive, else gathered.

        Args:
            pages: a layer's memory, [2, blocks, block_tokens, kv_heads, head_dim].
        """
        _, blocks, size, heads, dim = pages.shape
        if self.blocks is None:
            both, start = pages.view(2, 1, blocks * size, heads, dim), self.first * size + self.offset
        else:
            sequences = self.rows.stop - self.rows.start if self.decode else 1
            both, start = pages.index_select(1, self.blocks).view(2, sequences, -1, heads, dim), self.offset
        keys, values = both.narrow(2, start, self.length).transpose(2, 3).unbind()
        return keys, values


class Packed(Protocol):
    """One forward over paged memory, wherever its index tensors live.

    Attributes:
        tokens, positions: int[1, n].
        sampled: int[m], rows whose logits are wanted.
        slots, at: int32[m] on the host, for each of them the request and the board position its token goes to.
    """

    positions: Tensor
    sampled: Tensor
    slots: NDArray[np.int32]
    at: NDArray[np.int32]

    @property
    def tokens(self) -> Tensor:
        """See the class. On a device this looks at the board, so ask once a forward."""

    def write(self, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """Store new keys and values, each [1, kv_heads, n, head_dim], in a layer's pages."""

    def attend(
        self, pages: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """Attention of every row to its own sequence, after `write`; [n, heads, head_dim].

        Args:
            query: [1, heads, n, head_dim].
            key, value: as `write` was given them.
            window: sliding window of the layer; None: full attention.
        """


class Packing:
    """Where each token of one forward comes from, goes to, and what it attends to.

    Decode rows come first, longest context first, so that rows of similar length are neighbours; chunks follow.

    Attributes:
        tokens, positions: int64[1, n].
        sampled: int64[m], rows whose logits are wanted: decode rows in the batch's order, then sampling chunks.
        slots, at: int32[m], for each of them the request and the board position its token goes to.
        targets: int64[n], place of each row's key and value in a layer's pages.
        run: the same as one slice, when they are consecutive; else None.
        fresh: places after the last token of blocks first written now, to be zeroed so that whatever an earlier
            owner left there (NaN even) cannot reach a masked sum; None if there are none.
    """

    def __init__(self, batch: Batch, board: Board, dtype: torch.dtype) -> None:
        order = np.argsort(-batch.decode_positions, kind="stable")
        self._slots = batch.decode_slots[order]
        self._ends = batch.decode_positions[order].astype(np.int64)
        self._chunks, self._board, self._dtype = batch.chunks, board, dtype
        self._pieces: dict[int | None, list[Piece]] = {}
        chunks = batch.chunks
        slots = np.concatenate([self._slots, *(np.full(c.length, c.slot, np.int32) for c in chunks)])
        positions = np.concatenate([self._ends, *(np.arange(c.start, c.start + c.length) for c in chunks)])
        blocks, within = np.divmod(positions, board.block_tokens)
        targets = board.tables[slots, blocks].astype(np.int64) * board.block_tokens + within
        self.tokens = torch.from_numpy(board.tokens[slots, positions].astype(np.int64))[None]
        self.positions = torch.from_numpy(positions)[None]
        self.targets = torch.from_numpy(targets)
        first, last = int(targets[0]), int(targets[-1])
        straight = last - first == len(targets) - 1 and bool((np.diff(targets) == 1).all())
        self.run = slice(first, last + 1) if straight else None
        self.fresh = self._fresh()
        ends = np.cumsum([c.length for c in chunks], dtype=np.int64) + len(order) - 1
        sampling = [i for i, c in enumerate(chunks) if c.sample]
        self.sampled = torch.from_numpy(np.concatenate([np.argsort(order), ends[sampling]]))
        self.slots = np.concatenate([batch.decode_slots, np.array([chunks[i].slot for i in sampling], np.int32)])
        self.at = np.concatenate(
            [batch.decode_positions + 1, np.array([chunks[i].start + chunks[i].length for i in sampling], np.int32)]
        )

    def write(self, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """See `Packed`."""
        flat = pages.flatten(1, 2)
        for rows, new in zip(flat.unbind(), (key, value), strict=True):
            if self.run is not None:
                rows[self.run] = new[0].transpose(0, 1)
            else:
                rows.index_copy_(0, self.targets, new[0].transpose(0, 1))
        if self.fresh is not None:
            flat.index_fill_(1, self.fresh, 0)

    def attend(
        self, pages: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """See `Packed`."""
        outputs = [_attend(piece, query, key, value, pages, scale) for piece in self.pieces(window)]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def pieces(self, window: int | None) -> list[Piece]:
        """The attention calls of a layer with this sliding window (None: full attention)."""
        if window not in self._pieces:
            self._pieces[window] = [*self._decode_pieces(window), *self._chunk_pieces(window)]
        return self._pieces[window]

    def _fresh(self) -> Tensor | None:
        """See the class. Only the last block of each sequence can have an unwritten tail."""
        size, tables = self._board.block_tokens, self._board.tables
        spans = [(int(s), int(p), int(p)) for s, p in zip(self._slots, self._ends, strict=True) if p % size == 0]
        spans += [(c.slot, c.start, c.start + c.length - 1) for c in self._chunks]
        tails = [
            np.arange(last % size + 1, size) + int(tables[slot, last // size]) * size
            for slot, first, last in spans
            if first <= last - last % size and (last + 1) % size
        ]
        return torch.from_numpy(np.concatenate(tails)) if tails else None

    def _decode_pieces(self, window: int | None) -> Iterator[Piece]:
        start, size = 0, self._board.block_tokens
        while start < len(self._ends):
            longest = int(self._ends[start]) + 1
            shortest = longest - max(_SLACK, longest // 4)
            stop = start + int(np.searchsorted(-self._ends[start:], 1 - shortest, side="right"))
            lengths = self._ends[start:stop] + 1
            firsts = np.maximum(0, lengths - window) if window is not None else np.zeros_like(lengths)
            skipped = firsts // size
            # Read as many blocks of each sequence as the neediest has, from the first one its window touches.
            count = int(((lengths - 1) // size - skipped).max()) + 1
            wanted = skipped[:, None] + np.arange(count)
            # A row past its end re-reads its own last block: real, finite data, masked away.
            wanted = np.minimum(wanted, ((lengths - 1) // size)[:, None])
            blocks = self._board.tables[self._slots[start:stop, None], wanted].astype(np.int64)
            yield self._decode_piece(slice(start, stop), blocks, firsts - skipped * size, lengths - skipped * size)
            start = stop

    def _decode_piece(
        self, rows: slice, blocks: NDArray[np.int64], firsts: NDArray[np.int64], lasts: NDArray[np.int64]
    ) -> Piece:
        """A decode piece that attends, in what it reads, to tokens ``firsts ... lasts`` (exclusive) of each row."""
        low, high = int(firsts.min()), int(lasts.max())
        mask = None
        if low != int(firsts.max()) or high != int(lasts.min()):
            at = np.arange(low, high)
            mask = self._mask((at >= firsts[:, None]) & (at < lasts[:, None]))[:, None, None]
        return self._piece(rows, True, 0, blocks, low, high - low, mask)

    def _chunk_pieces(self, window: int | None) -> Iterator[Piece]:
        row = len(self._ends)
        for chunk in self._chunks:
            yield self._chunk_piece(chunk, slice(row, row + chunk.length), window)
            row += chunk.length

    def _chunk_piece(self, chunk: Chunk, rows: slice, window: int | None) -> Piece:
        end, size = chunk.start + chunk.length, self._board.block_tokens
        low = max(0, chunk.start + 1 - window) if window is not None else 0
        windowed = window is not None and end > window
        mask = None
        if windowed or chunk.start > 0:
            queries, keys = np.arange(chunk.start, end)[:, None], np.arange(low, end)
            allowed = keys <= queries
            if window is not None:
                allowed &= keys > queries - window
            mask = self._mask(allowed)
        skipped = low // size
        blocks = self._board.tables[chunk.slot, skipped : -(-end // size)].astype(np.int64)[None]
        return self._piece(rows, False, chunk.start, blocks, low - skipped * size, end - low, mask)

    def _piece(
        self,
        rows: slice,
        decode: bool,
        context: int,
        blocks: NDArray[np.int64],
        offset: int,
        length: int,
        mask: Tensor | None,
    ) -> Piece:
        straight = len(blocks) == 1 and bool((np.diff(blocks[0]) == 1).all())
        gather = None if straight else torch.from_numpy(blocks.reshape(-1))
        return Piece(rows, decode, context, gather, int(blocks[0, 0]), offset, length, mask)

    def _mask(self, allowed: NDArray[np.bool_]) -> Tensor:
        """Scores to add: in the model's own type, so that no layer has to convert it again."""
        return torch.zeros(allowed.shape, dtype=self._dtype).masked_fill_(torch.from_numpy(~allowed), float("-inf"))


def _attend(piece: Piece, query: Tensor, key: Tensor, value: Tensor, pages: Tensor, scale: float | None) -> Tensor:
    """One piece's attention, [rows, heads, head_dim]: grouped heads share keys and values without a copy of them."""
    if piece.decode:
        # The heads of a group become the "queries" of their one shared KV head.
        k, v = piece.read(pages)
        rows = query.transpose(1, 2)[0, piece.rows]
        grouped = rows.reshape(len(rows), k.shape[1], -1, k.shape[3])
        return scaled_dot_product_attention(grouped, k, v, attn_mask=piece.mask, scale=scale).view(rows.shape)
    rows = query[:, :, piece.rows]
    k, v = piece.read(pages) if piece.context else (key[:, :, piece.rows], value[:, :, piece.rows])
    out = scaled_dot_product_attention(
        rows, k, v, attn_mask=piece.mask, is_causal=piece.mask is None, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
