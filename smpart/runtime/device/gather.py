"""Paged attention in plain torch, on any device: copies the pages a call needs, then runs torch's own attention.

The last resort where no kernel reads pages in place, and what the others are checked against.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smpart.runtime.device.attention import Attended, AttentionShape, Bucket, Scratch


class GatherAttention:
    """See `Attention`. Captured decode rows always gather their whole tables."""

    name = "gather"

    def __init__(self, shape: AttentionShape, scratch: Scratch, units: int, bucket: Bucket | None = None) -> None:
        self._shape = shape
        self._bucket = bucket
        self._attended = Attended()

    def prepare(self, attended: Attended) -> None:
        """See `Attention.prepare`."""
        if self._bucket is not None:
            self._bucket.check(attended)
        self._attended = attended

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
        size, kv_heads, dim = self._shape.block_tokens, self._shape.kv_heads, self._shape.head_dim
        if self._bucket is None:
            tables = tables[:, : max(1, -(-int(self._attended.lengths.max(initial=0)) // size))]
        rows, width = tables.shape
        token = torch.arange(width * size, device=query.device)
        length = lengths[:, None]
        kept = token < length
        used = torch.where(kept.view(rows, width, size).any(2), tables, 0)  # the others may name no block at all
        both = pages.index_select(1, used.flatten()).view(2, rows, width * size, kv_heads, dim)
        both = both.masked_fill(~kept[None, :, :, None, None], 0)
        # A row without tokens attends to one zeroed value: torch's own answer to "nothing" would be NaN.
        allowed = token < length.clamp(min=1)
        if window is not None:
            allowed &= token >= length - window
        keys, values = both.transpose(2, 3).unbind()
        # The heads of a group become the "queries" of their one shared KV head.
        grouped = query.reshape(rows, kv_heads, -1, dim)
        result = scaled_dot_product_attention(grouped, keys, values, attn_mask=allowed[:, None, None], scale=scale)
        return _put(result.reshape(query.shape), out)

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
        size, chunks = self._shape.block_tokens, self._attended
        results = []
        for chunk, start in enumerate(chunks.starts.tolist()):
            rows = query[chunks.offsets[chunk] : chunks.offsets[chunk + 1]]
            end = start + len(rows)
            first = 0 if window is None else max(0, start + 1 - window)
            skipped = first // size
            blocks = tables[chunk, skipped : -(-end // size)]
            both = pages.index_select(1, blocks).flatten(1, 2)[:, first - skipped * size : end - skipped * size]
            keys, values = both.transpose(1, 2).unbind()
            position = torch.arange(start, end, device=query.device)[:, None]
            token = torch.arange(first, end, device=query.device)
            allowed = token <= position
            if window is not None:
                allowed &= token > position - window
            result = scaled_dot_product_attention(
                rows.transpose(0, 1)[None], keys[None], values[None], attn_mask=allowed, scale=scale, enable_gqa=True
            )
            results.append(result[0].transpose(0, 1))
        return _put(torch.cat(results), out)


def _put(result: Tensor, out: Tensor | None) -> Tensor:
    return result if out is None else out.copy_(result)
