"""The FlashInfer adaptor against a strict stand-in of the package: what it is told is what its documentation says."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_oracle import Problem

from smpart.errors import UnsupportedModel, UsageError
from smpart.runtime.device.attention import Bucket, Scratch
from smpart.runtime.device.flashinfer import FlashInferAttention

HALF = {"dtype": torch.float16, "dim": 64}


def adaptor(problem, bucket=None):
    return FlashInferAttention(problem.shape, Scratch(torch.device("cpu")), 1, bucket)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 40), max_size=3),
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=2),
    group=st.integers(1, 4),
    size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 40),
)
def test_any_shape(flashinfer, lengths, chunks, group, size, window):
    problem = Problem(lengths, chunks, heads=2 * group, kv_heads=2, size=size, window=window, **HALF)
    attention = adaptor(problem)
    attention.prepare(problem.attended)
    if lengths:
        problem.check_decode(attention.decode(*problem.decode))
    if chunks:
        problem.check_prefill(attention.prefill(*problem.prefill))


def test_a_captured_step_follows_its_plans(flashinfer):
    first = Problem([40, 0, 5], **HALF)
    rows, width = first.attended.tables.shape
    attention = adaptor(first, Bucket(rows, width))
    wrapper = attention._decoders[None]
    addresses = [buffer.data_ptr() for buffer in (wrapper.indptr, wrapper.indices, wrapper.last)]
    for lengths in ([40, 0, 5], [0, 48, 48], [48, 33, 1]):
        problem = Problem(lengths, seed=len(lengths), **HALF)
        attention.prepare(problem.attended)
        problem.check_decode(attention.decode(*problem.decode))
        assert [buffer.data_ptr() for buffer in (wrapper.indptr, wrapper.indices, wrapper.last)] == addresses
    with pytest.raises(UsageError, match="do not fit a graph"):
        attention.prepare(Problem([40, 0], **HALF).attended)


def test_each_window_has_plans_of_its_own(flashinfer):
    plain, windowed = Problem([40], [(20, 3)], **HALF), Problem([40], [(20, 3)], window=9, **HALF)
    shape = type(plain.shape)(2, 1, 64, 16, torch.float16, plain.shape.scale, (None, 9))
    attention = FlashInferAttention(shape, Scratch(torch.device("cpu")), 1)
    attention.prepare(plain.attended)
    for problem in (plain, windowed):
        problem.check_decode(attention.decode(*problem.decode))
        problem.check_prefill(attention.prefill(*problem.prefill))


def test_what_was_not_planned_for_is_refused(flashinfer):
    problem = Problem([4], **HALF)
    attention = adaptor(problem)
    attention.prepare(problem.attended)
    *others, window, scale = problem.decode
    with pytest.raises(UnsupportedModel, match=r"window 7 and scale 0\.125, but FlashInfer planned for windows"):
        attention.decode(*others, 7, scale)
    with pytest.raises(UnsupportedModel, match=r"scale 0\.5, but FlashInfer planned .* and scale 0\.125"):
        attention.decode(*others, window, 0.5)


def test_queries_that_are_not_contiguous(flashinfer):
    problem = Problem([7, 0, 20], [(2, 5)], heads=4, kv_heads=2, **HALF)
    problem.rows = problem.rows.transpose(0, 1).contiguous().transpose(0, 1)
    out = torch.zeros(8, 4, 64, dtype=torch.float16)
    attention = adaptor(problem)
    attention.prepare(problem.attended)
    attention.decode(*problem.decode, out[:3])
    attention.prefill(*problem.prefill, out[3:])
    problem.check_decode(out[:3])
    problem.check_prefill(out[3:])


@pytest.mark.parametrize(("heads", "wanted"), [(2, False), (6, False), (8, True), (16, True)])
def test_tensor_cores_serve_large_groups(flashinfer, heads, wanted):
    wrapper = adaptor(Problem([4], heads=heads, kv_heads=2, **HALF))._decoders[None]
    assert wrapper.use_tensor_cores is wanted
