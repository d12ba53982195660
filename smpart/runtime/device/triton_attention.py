"""Paged attention by this package's own Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from smpart.runtime.device.attention import Attended, AttentionShape, Bucket, Scratch
from smpart.runtime.device.paged_decode import choose_splits, paged_decode, workspace_size
from smpart.runtime.device.paged_prefill import paged_prefill


class TritonAttention:
    """See `Attention`."""

    name = "triton"

    def __init__(self, shape: AttentionShape, scratch: Scratch, units: int, bucket: Bucket | None = None) -> None:
        self._shape = shape
        self._scratch = scratch
        self._units = units
        self._bucket = bucket
        self._longest = 0
        if bucket is not None:
            self._size(bucket.rows, bucket.width)

    def prepare(self, attended: Attended) -> None:
        """See `Attention.prepare`."""
        if self._bucket is not None:
            self._bucket.check(attended)
        elif len(attended.lengths):
            self._size(*attended.tables.shape)
        self._longest = int((attended.offsets[1:] - attended.offsets[:-1]).max(initial=0))

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
        """See `Attention.decode`."""
        out = torch.empty_like(query) if out is None else out
        paged_decode(
            query, pages, tables, lengths, out, self._workspace, splits=self._splits, window=window, scale=scale
        )
        return out

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
        """See `Attention.prefill`."""
        out = torch.empty_like(query) if out is None else out
        paged_prefill(query, pages, tables, offsets, starts, out, longest=self._longest, window=window, scale=scale)
        return out

    def _size(self, rows: int, width: int) -> None:
        shape = self._shape
        self._splits = choose_splits(rows, shape.kv_heads, self._units, width * shape.block_tokens)
        self._workspace = self._scratch.take(workspace_size(rows, shape.heads, shape.head_dim, self._splits))
