"""The Triton kernels against the oracle: on Triton's interpreter, or on a GPU. Run by test_triton_kernels.py."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Problem

from smpart.errors import UsageError
from smpart.runtime.device.attention import Bucket, Scratch
from smpart.runtime.device.paged_decode import paged_decode, workspace_size
from smpart.runtime.device.triton_attention import TritonAttention

DEVICE = "cpu" if triton.knobs.runtime.interpret else "cuda"
SENTINEL = 7.5

on_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")


def triton_attention(problem: Problem, units: int = 4, bucket: Bucket | None = None) -> TritonAttention:
    return TritonAttention(problem.shape, Scratch(torch.device(DEVICE)), units, bucket)


def check(problem: Problem, units: int = 4) -> None:
    attention = triton_attention(problem, units)
    attention.prepare(problem.attended)
    if problem.lengths:
        problem.check_decode(attention.decode(*problem.decode))
    if problem.chunks:
        problem.check_prefill(attention.prefill(*problem.prefill))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (3, 1), (6, 2), (8, 2), (16, 2), (20, 1)])
def test_head_groups(heads, kv_heads):
    check(Problem([0, 1, 21], [(4, 3)], heads=heads, kv_heads=kv_heads, device=DEVICE))


@pytest.mark.parametrize("dim", [8, 64, 80, 96, 128, 256])
def test_head_dims(dim):
    check(Problem([19], [(14, 3)], dim=dim, device=DEVICE))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_block_sizes_and_lengths_at_block_edges(size):
    lengths = [0, 1, size - 1, size, size + 1, 3 * size]
    check(Problem(lengths, [(size, 1), (0, size + 1), (2 * size - 1, 2)], size=size, device=DEVICE))


@pytest.mark.parametrize("window", [1, 16, 33, 500])
def test_sliding_windows(window):
    check(Problem([0, 5, 16, 200], [(0, 9), (30, 7)], window=window, device=DEVICE))


def test_windows_that_begin_in_different_tiles_of_keys():
    check(Problem([], [(25, 16)], window=4, heads=1, dim=64, device=DEVICE))


def test_chunks_longer_than_a_tile_of_queries_beside_short_ones():
    check(Problem([], [(0, 13), (3, 1), (130, 6)], heads=3, kv_heads=1, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check(Problem([0, 3, 50], [(0, 5), (20, 9)], heads=4, kv_heads=2, dim=64, dtype=dtype, device=DEVICE))


@pytest.mark.parametrize(("splits", "window"), [(1, None), (3, None), (3, 100), (16, None)])
def test_any_number_of_splits_gives_the_same(splits, window):
    problem = Problem([0, 1, 300], heads=2, window=window, device=DEVICE)
    needed = workspace_size(3, 2, problem.shape.head_dim, splits)
    memory = torch.full((needed + 64,), 0xFF, dtype=torch.uint8, device=DEVICE)
    out = torch.empty_like(problem.rows)
    query, *rest, window, scale = problem.decode
    paged_decode(query, *rest, out, memory[:needed], splits=splits, window=window, scale=scale)
    problem.check_decode(out)
    assert (memory[needed:] == 0xFF).all()


def test_strided_queries_and_results_that_are_views():
    problem = Problem([7, 0, 20], [(2, 9)], heads=4, kv_heads=2, device=DEVICE)
    rows, tokens = 3, 9
    fused = torch.full((rows + tokens, 3, 4, 16), torch.nan, device=DEVICE)
    fused[:rows, 1], fused[rows:, 1] = problem.rows, problem.chunk_rows
    out = torch.full((rows + tokens + 1, 4, 16), SENTINEL, device=DEVICE)
    problem.rows, problem.chunk_rows = fused[:rows, 1], fused[rows:, 1]
    attention = triton_attention(problem)
    attention.prepare(problem.attended)
    assert attention.decode(*problem.decode, out[:rows]).data_ptr() == out.data_ptr()
    attention.prefill(*problem.prefill, out[rows:-1])
    problem.check_decode(out[:rows])
    problem.check_prefill(out[rows:-1])
    assert (out[-1] == SENTINEL).all()


def test_pages_of_any_layout():
    problem = Problem([40, 3], [(18, 4)], heads=4, kv_heads=2, device=DEVICE)
    stored = problem.pages.permute(1, 3, 0, 2, 4).contiguous()  # [blocks, kv_heads, 2, block_tokens, dim]
    problem.pages = stored.permute(2, 0, 3, 1, 4)
    check(problem)


def test_a_bucket_is_sized_once_and_serves_only_its_size():
    problem = Problem([300, 0, 5], device=DEVICE)
    rows, width = problem.attended.tables.shape
    attention = triton_attention(problem, 132, Bucket(rows, width))
    attention.prepare(problem.attended)
    problem.check_decode(attention.decode(*problem.decode))
    with pytest.raises(UsageError, match="do not fit a graph of 3 decode rows"):
        attention.prepare(Problem([5, 5]).attended)
    with pytest.raises(UsageError, match="1 chunks do not fit"):
        attention.prepare(Problem([300, 0, 5], [(0, 1)]).attended)


@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 70), max_size=3),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=2),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    dim=st.sampled_from([4, 16, 24]),
    size=st.sampled_from([2, 8, 16]),
    window=st.none() | st.integers(1, 40),
    units=st.integers(1, 132),
    seed=st.integers(0, 1000),
)
def test_any_shape(lengths, chunks, kv_heads, group, dim, size, window, units, seed):
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "dim": dim, "size": size}
    check(Problem(lengths, chunks, **sizes, window=window, seed=seed, device=DEVICE), units)


@on_gpu
def test_a_captured_step_follows_the_lengths_it_is_given():
    first = Problem([300, 0, 5, 17], heads=8, kv_heads=2, dim=64, device=DEVICE)
    rows, width = first.attended.tables.shape
    attention = triton_attention(first, 132, Bucket(rows, width))
    attention.prepare(first.attended)
    attention.decode(*first.decode)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(*first.decode)
    for lengths in ([300, 0, 5, 17], [0, 290, 16, 1], [1, 1, 304, 0]):
        problem = Problem(lengths, heads=8, kv_heads=2, dim=64, seed=len(lengths), device=DEVICE)
        count = problem.pages.shape[1]
        tables = torch.zeros_like(first.tables)
        tables[:, : problem.tables.shape[1]] = problem.tables
        first.pages[:, :count].copy_(problem.pages)
        first.rows.copy_(problem.rows)
        first.tables.copy_(tables)
        first.row_lengths.copy_(problem.row_lengths)
        graph.replay()
        torch.cuda.synchronize()
        problem.check_decode(out)
