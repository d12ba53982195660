"""A Triton kernel: causal attention of packed prefill chunks over paged KV memory.

Flash attention with an online softmax. One program has a tile of one chunk's queries and all query heads that share
one KV head; several chunks, each with a context of its own, are one launch.
"""

# Triton kernels: constants are upper case by convention, arguments are pointers and integers without Python types.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from smpart.runtime.device.paged_decode import tile_tokens

_ROWS = {2: 64, 4: 16}
"""Queries times heads of a program, by bytes of an element; for float32 see `tile_tokens`."""


def paged_prefill(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    offsets: Tensor,
    starts: Tensor,
    out: Tensor,
    *,
    longest: int,
    window: int | None,
    scale: float,
) -> None:
    """Attention of each chunk's rows to their sequence's tokens up to their own; see `Attention.prefill`.

    Args:
        query: [tokens of all chunks, heads, head_dim], float32, bfloat16 or float16, its last dimension contiguous.
        pages: [2, blocks, block_tokens, kv_heads, head_dim], of the same type, the last dimension contiguous.
        tables: int32[chunks, width].
        offsets: int32[chunks + 1], where each chunk's rows start.
        starts: int32[chunks], tokens before each chunk.
        out: like `query`.
        longest: rows of the longest chunk.
    """
    heads, dim = query.shape[1:]
    size, kv_heads = pages.shape[2:4]
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    rows = max(_ROWS[query.element_size()], triton.next_power_of_2(group))
    grid = (-(-longest // (rows // group)), kv_heads, starts.shape[0])
    _prefill[grid](
        query,
        pages,
        tables,
        offsets,
        starts,
        out,
        scale * math.log2(math.e),
        *query.stride()[:2],
        *pages.stride()[:4],
        tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        ROWS=rows,
        DIM=dim,
        PADDED=padded,
        SIZE=size,
        TILE=min(64, tile_tokens(padded, query.element_size())),
        WINDOW=window or 0,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
    )


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["tables", "offsets", "starts"],
)
def _prefill(
    query,
    pages,
    tables,
    offsets,
    starts,
    out,
    scale,
    query_row,
    query_head,
    pages_kind,
    pages_block,
    pages_token,
    pages_head,
    table_row,
    out_row,
    out_head,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One tile of queries of one chunk. `scale` includes log2(e): exponentials are powers of two."""
    QUERIES: tl.constexpr = ROWS // GROUP
    kv_head, chunk = tl.program_id(1), tl.program_id(2)
    offset = tl.load(offsets + chunk)
    count = tl.load(offsets + chunk + 1) - offset
    # Late queries read the most keys: they start first.
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    if first >= count:
        return
    start = tl.load(starts + chunk)
    row, dim = tl.arange(0, ROWS), tl.arange(0, PADDED)
    index, head = first + row // GROUP, kv_head * GROUP + row % GROUP
    position = start + index
    high = start + tl.minimum(first + QUERIES, count)
    low = tl.maximum(start + first - WINDOW + 1, 0) // TILE * TILE if WINDOW else 0

    real = ((row < QUERIES * GROUP) & (index < count))[:, None] & (dim < DIM)[None, :]
    token_row = (offset + index).to(tl.int64)[:, None]
    q = tl.load(query + token_row * query_row + head[:, None] * query_head + dim[None, :], mask=real, other=0.0)
    if WIDEN:  # Triton's interpreter computes bfloat16 wrongly
        q = q.to(tl.float32)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    for at in range(low, high, TILE):
        token = at + tl.arange(0, TILE)
        kept = token < high
        block = tl.load(tables + chunk.to(tl.int64) * table_row + token // SIZE, mask=kept, other=0).to(tl.int64)
        place = block * pages_block + (token % SIZE) * pages_token + kv_head * pages_head
        here = place[:, None] + dim[None, :]
        mask = kept[:, None] & (dim < DIM)[None, :]
        k = tl.load(pages + here, mask=mask, other=0.0)
        v = tl.load(pages + pages_kind + here, mask=mask, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        allowed = token[None, :] <= position[:, None]
        if WINDOW:
            allowed &= token[None, :] > position[:, None] - WINDOW
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(allowed, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a window may begin after this tile for some rows
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    place = token_row * out_row + head[:, None] * out_head + dim[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real)
