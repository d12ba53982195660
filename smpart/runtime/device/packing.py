"""One packed forward whose index tensors live on a device."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smpart.runtime.batch import Rows
from smpart.runtime.device.attention import Attention
from smpart.runtime.device.layout import Layout
from smpart.runtime.device.upload import Upload


class DevicePacking:
    """`Packed`, on a device. Nothing here waits for the device.

    Args:
        layout: the forward.
        board: int32[slots, max_len], the tokens on the device.
        attention: for this forward alone, until it ends.
    """

    def __init__(self, layout: Layout, board: Tensor, attention: Attention) -> None:
        self._upload = Upload(board.device, layout.arrays)
        self._board = board
        self._attention = attention
        (
            self._row_slots,
            self._row_at,
            self._targets,
            self.sampled,
            self.to_slots,
            self.to_at,
            self._known_slots,
            self._known_at,
            self._known,
            self._lengths,
            self._tables,
            self._offsets,
            self._starts,
            self._chunk_tables,
        ) = self._upload.parts
        self.positions = self._row_at[None]
        self._take(layout)

    def renew(self, layout: Layout) -> None:
        """Make this another forward of the same shape: the same tensors get new values."""
        self._upload.send(layout.arrays)
        self._take(layout)

    @property
    def tokens(self) -> Tensor:
        """int64[1, n], read from the board when asked: a decode row's token may be the work of the step before."""
        if self._layout.chunks:
            self._board.index_put_((self._known_slots, self._known_at), self._known.int())
        return self._board[self._row_slots, self._row_at].long()[None]

    def write(self, pages: Tensor, key: Tensor, value: Tensor) -> None:
        """See `Packed`."""
        for rows, new in zip(pages.flatten(1, 2).unbind(), (key, value), strict=True):
            rows.index_copy_(0, self._targets, new[0].transpose(0, 1))

    def attend(
        self, pages: Tensor, query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float | None
    ) -> Tensor:
        """See `Packed`. Decode rows and chunks with context read the pages in place."""
        rows = query[0].transpose(0, 1)
        factor = scale if scale is not None else 1.0 / math.sqrt(rows.shape[2])
        count = len(self._lengths)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        if count:
            self._attention.decode(rows[:count], pages, self._tables, self._lengths, window, factor, out[:count])
        if not self._layout.chunks:
            return out
        if self._fresh(window):
            for start, stop in self._bounds(count):
                q, k, v = (tensor[:, :, start:stop] for tensor in (query, key, value))
                result = scaled_dot_product_attention(q, k, v, is_causal=True, scale=factor, enable_gqa=True)
                out[start:stop] = result[0].transpose(0, 1)
            return out
        self._attention.prefill(
            rows[count:], pages, self._chunk_tables, self._offsets, self._starts, window, factor, out[count:]
        )
        return out

    def _take(self, layout: Layout) -> None:
        self._layout = layout
        self.slots: Rows = layout.slots
        self.at: Rows = layout.at
        self._attention.prepare(layout.attended)

    def _fresh(self, window: int | None) -> bool:
        """Whether every chunk attends to all of itself and to nothing else: torch's own kernel is best then."""
        return all(c.start == 0 and (window is None or c.length <= window) for c in self._layout.chunks)

    def _bounds(self, start: int) -> list[tuple[int, int]]:
        bounds = []
        for chunk in self._layout.chunks:
            bounds.append((start, start + chunk.length))
            start += chunk.length
        return bounds
