"""Triton kernels: attention of decode rows over paged KV memory.

Flash-decoding (Dao et al., 2023): the tokens of each row are cut into a fixed number of splits that run side by side,
each with an online softmax of its own; a second kernel weighs their results by their sums. All query heads that share
a KV head are one program, so that keys and values are read once.

How many splits there are depends only on what is known before a CUDA graph is captured; how many tokens each one
reads follows from the row's length on the device.
"""

# Triton kernels: constants are upper case by convention, arguments are pointers and integers without Python types.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS_PER_UNIT = 4
_TOKENS_PER_SPLIT = 128
_MAX_SPLITS = 64
_MAX_TILE = 128


def choose_splits(rows: int, kv_heads: int, units: int, tokens: int) -> int:
    """Splits a row: enough programs for a lane of `units` SMs, none meant for fewer than 128 of `tokens` tokens.

    Args:
        tokens: capacity of a row's table, in tokens.
    """
    wanted = -(-units * _PROGRAMS_PER_UNIT // (rows * kv_heads))
    return max(1, min(wanted, tokens // _TOKENS_PER_SPLIT, _MAX_SPLITS))


def workspace_size(rows: int, heads: int, head_dim: int, splits: int) -> int:
    """Bytes of scratch memory that `paged_decode` needs."""
    return 4 * rows * heads * splits * (head_dim + 1) if splits > 1 else 0


def paged_decode(
    query: Tensor,
    pages: Tensor,
    tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    workspace: Tensor,
    *,
    splits: int,
    window: int | None,
    scale: float,
) -> None:
    """Attention of each row to the last `window` of its own `lengths` tokens; see `Attention.decode`.

    Args:
        query: [rows, heads, head_dim], float32, bfloat16 or float16, its last dimension contiguous.
        pages: [2, blocks, block_tokens, kv_heads, head_dim], of the same type, the last dimension contiguous.
        tables: int32[rows, width].
        lengths: int32[rows]; 0 gives zeros.
        out: like `query`.
        workspace: uint8, at least `workspace_size` bytes.
    """
    rows, heads, dim = query.shape
    size, kv_heads = pages.shape[2:4]
    group, padded = heads // kv_heads, max(16, triton.next_power_of_2(dim))
    partial = workspace[: 4 * rows * heads * splits * dim].view(torch.float32)
    sums = workspace[4 * rows * heads * splits * dim :].view(torch.float32)
    constants = {"DIM": dim, "PADDED": padded}
    _decode[(rows, kv_heads, splits)](
        query,
        pages,
        tables,
        lengths,
        out,
        partial,
        sums,
        scale * math.log2(math.e),
        *query.stride()[:2],
        *pages.stride()[:4],
        tables.stride(0),
        *out.stride()[:2],
        GROUP=group,
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        SIZE=size,
        TILE=tile_tokens(padded, query.element_size()),
        WINDOW=window or 0,
        SPLIT=splits > 1,
        WIDEN=triton.knobs.runtime.interpret,
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=True,
        **constants,
    )
    if splits > 1:
        _combine[(rows, heads)](
            partial,
            sums,
            out,
            *out.stride()[:2],
            splits,
            SPLITS=triton.next_power_of_2(splits),
            num_warps=4,
            enable_fp_fusion=True,
            **constants,
        )


def tile_tokens(padded: int, element_size: int) -> int:
    """Tokens of one tile, for heads of `padded` dimensions: 16 KiB of keys and as much of values.

    Half of that in float32, which tensor cores do not multiply exactly: its products are unrolled into registers, and
    larger tiles spill (as ptxas reports for sm_90).
    """
    return max(16, min(_MAX_TILE, (16384 if element_size == 2 else 8192) // (padded * element_size)))


@triton.jit(
    do_not_specialize=["table_row"],
    do_not_specialize_on_alignment=["tables", "lengths"],
)
def _decode(
    query,
    pages,
    tables,
    lengths,
    out,
    partial,
    sums,
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
    PADDED_GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """One split of one row, for the heads of one KV head. `scale` includes log2(e): exponentials are powers of two."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(lengths + row)
    begin = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first_tile = begin // TILE
    tiles = tl.cdiv(tl.cdiv(length, TILE) - first_tile, splits)
    low = (first_tile + split * tiles) * TILE
    high = tl.minimum(low + tiles * TILE, length)

    member, dim = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED)
    head = kv_head * GROUP + member
    real = (member < GROUP)[:, None] & (dim < DIM)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + dim[None, :], mask=real, other=0.0)
    if WIDEN:  # Triton's interpreter computes bfloat16 wrongly
        q = q.to(tl.float32)
    top = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_GROUP], tl.float32)
    acc = tl.zeros([PADDED_GROUP, PADDED], tl.float32)
    for at in range(low, high, TILE):
        token = at + tl.arange(0, TILE)
        kept = (token >= begin) & (token < high)
        block = tl.load(tables + row * table_row + token // SIZE, mask=kept, other=0).to(tl.int64)
        place = block * pages_block + (token % SIZE) * pages_token + kv_head * pages_head
        here = place[:, None] + dim[None, :]
        mask = kept[:, None] & (dim < DIM)[None, :]
        k = tl.load(pages + here, mask=mask, other=0.0)
        v = tl.load(pages + pages_kind + here, mask=mask, other=0.0)
        if WIDEN:
            k, v = k.to(tl.float32), v.to(tl.float32)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(kept[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))  # finite: every tile holds a token that is kept
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(top - higher)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        top = higher
    total = tl.where(total == 0.0, 1.0, total)  # a split without tokens: zeros, with a sum of 2 ** -inf
    result = acc / total[:, None]
    if SPLIT:
        place = ((row * tl.num_programs(1) * GROUP + head) * splits + split).to(tl.int64)
        tl.store(partial + place[:, None] * DIM + dim[None, :], result, mask=real)
        tl.store(sums + place, top + tl.log2(total), mask=member < GROUP)
    else:
        place = row * out_row + head[:, None] * out_head + dim[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["splits"])
def _combine(
    partial,
    sums,
    out,
    out_row,
    out_head,
    splits,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One head of one row: the mean of its splits, weighed by their sums (given as base-2 logarithms)."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, dim = tl.arange(0, SPLITS), tl.arange(0, PADDED)
    place = (row * tl.num_programs(1) + head) * splits + split
    logs = tl.load(sums + place, mask=split < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total == 0.0, 1.0, total)
    mask = (split < splits)[:, None] & (dim < DIM)[None, :]
    values = tl.load(partial + place[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
    result = tl.sum(values * weights[:, None], 0)
    tl.store(out + row * out_row + head * out_head + dim, result.to(out.dtype.element_ty), mask=dim < DIM)
