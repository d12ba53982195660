"""Paged attention written down plainly, in float64 and token by token, and inputs that catch stray reads."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from smpart.runtime.device.attention import Attended, AttentionShape

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def attend(query: Tensor, pages: Tensor, table: Sequence[int], first: int, end: int, scale: float) -> Tensor:
    """One row, [heads, dim], against tokens ``first ... end`` of a sequence; zeros if there are none."""
    if first >= end:
        return torch.zeros_like(query)
    size = pages.shape[2]
    keys, values = (
        torch.stack([kind[table[token // size], token % size] for token in range(first, end)]).double()
        for kind in pages
    )
    group = query.shape[0] // keys.shape[1]
    result = torch.empty_like(query)
    for head in range(query.shape[0]):
        scores = keys[:, head // group] @ query[head].double() * scale
        result[head] = (torch.softmax(scores, 0) @ values[:, head // group]).to(query.dtype)
    return result


class Problem:
    """Random decode rows and chunks over scattered blocks.

    Every place of the pages that no row may read is NaN, and table entries that name no block name one full of NaN.

    Args:
        lengths: of the decode rows' sequences.
        chunks: ``(start, rows)``.
    """

    def __init__(
        self,
        lengths: Sequence[int] = (),
        chunks: Sequence[tuple[int, int]] = (),
        *,
        heads: int = 2,
        kv_heads: int = 1,
        dim: int = 16,
        size: int = 16,
        dtype: torch.dtype = torch.float32,
        window: int | None = None,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        random = torch.Generator().manual_seed(seed)
        ends = [*lengths, *(start + rows for start, rows in chunks)]
        counts = [-(-end // size) for end in ends]
        width = max(counts, default=0) + 1
        blocks = (torch.randperm(sum(counts), generator=random) + 1).tolist()
        tables = np.zeros((len(ends), width), np.int32)  # block 0 is nobody's
        pages = torch.full((2, len(blocks) + 1, size, kv_heads, dim), math.nan)
        for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
            tables[row, :count] = [blocks.pop() for _ in range(count)]
            for token in range(end):
                drawn = torch.randn(2, kv_heads, dim, generator=random)
                pages[:, tables[row, token // size], token % size] = drawn
        self.lengths, self.chunks, self.window = list(lengths), list(chunks), window
        offsets = np.cumsum([0, *(rows for _, rows in chunks)])
        self.attended = Attended(
            np.array(lengths, np.int32),
            tables[: len(lengths)],
            offsets.astype(np.int32),
            np.array([start for start, _ in chunks], np.int32),
            tables[len(lengths) :],
        )
        self.shape = AttentionShape(heads, kv_heads, dim, size, dtype, dim**-0.5, (window,))
        self.pages = pages.to(device, dtype)
        self.rows = torch.randn(len(lengths), heads, dim, generator=random).to(device, dtype)
        self.chunk_rows = torch.randn(int(offsets[-1]), heads, dim, generator=random).to(device, dtype)
        self.tables, self.row_lengths, self.offsets, self.starts, self.chunk_tables = (
            torch.from_numpy(array).to(device)
            for array in (
                self.attended.tables,
                self.attended.lengths,
                self.attended.offsets,
                self.attended.starts,
                self.attended.chunk_tables,
            )
        )

    @property
    def decode(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int | None, float]:
        """Arguments of `Attention.decode`."""
        return self.rows, self.pages, self.tables, self.row_lengths, self.window, self.shape.scale

    @property
    def prefill(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int | None, float]:
        """Arguments of `Attention.prefill`."""
        chunks = (self.chunk_tables, self.offsets, self.starts)
        return self.chunk_rows, self.pages, *chunks, self.window, self.shape.scale

    def check_decode(self, result: Tensor) -> None:
        """Compare with the oracle."""
        ends = self.lengths
        self._check(result, self.rows, ends, self.attended.tables.tolist())

    def check_prefill(self, result: Tensor) -> None:
        """Compare with the oracle."""
        ends, tables = [], []
        for (start, rows), table in zip(self.chunks, self.attended.chunk_tables.tolist(), strict=True):
            ends += range(start + 1, start + rows + 1)
            tables += [table] * rows
        self._check(result, self.chunk_rows, ends, tables)

    def _check(self, result: Tensor, rows: Tensor, ends: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        pages, window = self.pages.cpu(), self.window
        firsts = [0 if window is None else max(0, end - window) for end in ends]
        wanted = [
            attend(row, pages, table, first, end, self.shape.scale)
            for row, table, first, end in zip(rows.cpu(), tables, firsts, ends, strict=True)
        ]
        assert result.shape == rows.shape
        assert result.dtype == rows.dtype
        error = (result.cpu().float() - torch.stack(wanted).float()).abs().max().item()
        assert error <= TOLERANCE[self.shape.dtype], f"off by {error:.2g}"
