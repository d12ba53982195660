"""Forwards that pause at layers: every interleaving is bit-exact, one can be dropped, exceptions come out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smpart.runtime.pause import PausableForward, pause_hook

LAYERS = 4


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    made = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
    for layer in made:
        layer.register_forward_pre_hook(pause_hook)
    return made


NETWORK = network()


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, None])), max_size=20))
def test_interleaved_forwards_are_bit_exact(schedule):
    inputs = [torch.full((1, 8), float(i + 1)) for i in range(3)]
    with torch.inference_mode():
        expected = [NETWORK(x) for x in inputs]
        forwards = [PausableForward(lambda x=x: NETWORK(x)) for x in inputs]
        results: dict[int, torch.Tensor] = {}
        layers = [0, 0, 0]
        for index, grant in [*schedule, (0, None), (1, None), (2, None)]:
            if index in results:
                continue
            result = forwards[index].advance(grant)
            layers[index] += grant or LAYERS
            assert (result is not None) == (layers[index] >= LAYERS)
            if result is not None:
                results[index] = result
    assert all(torch.equal(results[i], expected[i]) for i in range(3))


def test_an_ordinary_forward_runs_through_while_others_are_paused():
    x = torch.ones(1, 8)
    expected = NETWORK(x)
    paused = PausableForward(lambda: NETWORK(x))
    assert paused.advance(2) is None
    assert torch.equal(NETWORK(x), expected)
    assert torch.equal(paused.advance(None), expected)


def test_abandoning_unwinds_the_forward_and_can_be_repeated():
    unwound = []

    def compute() -> torch.Tensor:
        try:
            return NETWORK(torch.ones(1, 8))
        finally:
            unwound.append(True)

    forward = PausableForward(compute)
    assert forward.advance(1) is None
    forward.abandon()
    forward.abandon()
    assert unwound == [True]


def test_an_exception_comes_out_of_the_segment_it_happened_in():
    def compute() -> torch.Tensor:
        NETWORK(torch.ones(1, 8))
        raise ValueError("broken")

    forward = PausableForward(compute)
    assert forward.advance(3) is None
    with pytest.raises(ValueError, match="broken"):
        forward.advance(None)
