import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_oracle import Problem

from smpart.errors import UsageError
from smpart.runtime.device.attention import Bucket, Scratch
from smpart.runtime.device.gather import GatherAttention


def gather(problem, bucket=None):
    return GatherAttention(problem.shape, Scratch(torch.device("cpu")), 1, bucket)


def check(problem, bucket=None):
    attention = gather(problem, bucket)
    attention.prepare(problem.attended)
    if problem.lengths:
        problem.check_decode(attention.decode(*problem.decode))
    if problem.chunks:
        problem.check_prefill(attention.prefill(*problem.prefill))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 50), max_size=4),
    chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 8),
    dim=st.sampled_from([3, 16, 80]),
    size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_any_shape(lengths, chunks, kv_heads, group, dim, size, window, seed):
    sizes = {"heads": kv_heads * group, "kv_heads": kv_heads, "dim": dim, "size": size}
    check(Problem(lengths, chunks, **sizes, window=window, seed=seed))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    check(Problem([0, 3, 50], [(0, 5), (20, 9)], heads=4, kv_heads=2, dim=64, dtype=dtype))


def test_rows_that_are_all_padding():
    check(Problem([0, 0]))


def test_a_bucket_serves_only_its_size():
    problem = Problem([0, 1, 33])
    rows, width = problem.attended.tables.shape
    check(problem, Bucket(rows, width))
    with pytest.raises(UsageError, match=f"do not fit a graph of 3 decode rows with tables of {width + 1} entries"):
        check(problem, Bucket(rows, width + 1))
    with pytest.raises(UsageError, match="1 chunks do not fit"):
        check(Problem([0, 1, 33], [(0, 2)]), Bucket(rows, width))


def test_results_go_where_they_are_wanted():
    problem = Problem([7, 0, 20], [(2, 9)])
    out = torch.full((13, 2, 16), 7.5)
    attention = gather(problem)
    attention.prepare(problem.attended)
    assert attention.decode(*problem.decode, out[:3]).data_ptr() == out.data_ptr()
    attention.prefill(*problem.prefill, out[3:-1])
    problem.check_decode(out[:3])
    problem.check_prefill(out[3:-1])
    assert (out[-1] == 7.5).all()


def test_scratch_memory_is_shared_and_stays_with_whom_took_it():
    scratch = Scratch(torch.device("cpu"))
    small = scratch.take(100)
    assert scratch.take(60).data_ptr() == small.data_ptr()
    large = scratch.take(200)
    assert large.numel() == 200
    assert not large.any()
    small.fill_(3)
    assert scratch.take(100).data_ptr() == large.data_ptr()
    assert not large.any()
