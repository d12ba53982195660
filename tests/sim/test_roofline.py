"""What virtual GPUs cost, against published measurements and physics that must hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.errors import UsageError
from smpart.partition import Shape, Side, Split, Work, open_backend
from smpart.partition.gpus import GPUS
from smpart.partition.sim import SimLanes
from smpart.sim import MODELS, PEAKS, RooflineCost, built_in

NOTHING = Shape()
A100 = RooflineCost(built_in("llama-3.1-8b"), "a100")
H100 = RooflineCost(built_in("llama-3.1-8b"), "h100")
PREFILL, STEP = Shape.prefill([(4096, 0)]), Shape.decode(32, 32 * 2048)


def share(gpu, percent):
    return GPUS[gpu].sms * percent / 100


def gain(shape, before, after):
    """Share of latency saved on an A100 by a growing share of the SMs."""
    return 1 - A100(shape, share("a100", after), NOTHING, 0) / A100(shape, share("a100", before), NOTHING, 0)


def test_published_scaling_of_prefill():
    """Prefill: 30 to 40 % of the SMs saves 25 %, 70 to 80 % saves 10 % (to within three points)."""
    assert gain(PREFILL, 30, 40) == pytest.approx(0.25, abs=0.03)
    assert gain(PREFILL, 70, 80) == pytest.approx(0.10, abs=0.03)


def test_published_scaling_of_decode():
    """Decode: 30 to 40 % of the SMs saves 10 %, and beyond half under 3 % for each tenth."""
    assert gain(STEP, 30, 40) == pytest.approx(0.10, abs=0.03)
    assert all(0 <= gain(STEP, p, p + 10) < 0.03 for p in (50, 60, 70, 80, 90))


def test_published_slowdown_of_decode_beside_prefill():
    """At worst 20 % on an A100 and 30 % on an H100 (MuxWise)."""
    for cost, gpu, limit in ((A100, "a100", 1.20), (H100, "h100", 1.30)):
        units = GPUS[gpu].sms
        for p in range(16, units - 15, 8):
            for tokens in (512, 2048, 8192, 32768):
                beside = cost(STEP, units - p, Shape.prefill([(tokens, 0)]), p)
                assert 1.0 <= beside / cost(STEP, units - p, NOTHING, 0) <= limit


@pytest.mark.parametrize(
    ("model", "gpu", "shape", "low", "high"),
    [
        # Weights once over the bandwidth is the floor of a step; serving stacks stay within twice that.
        ("llama-3.1-8b", "h100", Shape.decode(1, 1024), 4.5e-3, 9e-3),
        ("llama-3.1-8b", "a100", Shape.decode(1, 1024), 7.4e-3, 15e-3),
        ("qwen3-32b", "h200", Shape.decode(1, 1024), 13e-3, 26e-3),
        # Arithmetic at the peak rate is the floor of a long prefill; half of it is reached in practice.
        ("llama-3.1-8b", "h100", Shape.prefill([(8192, 0)]), 0.115, 0.26),
        ("llama-3.1-8b", "a100", Shape.prefill([(8192, 0)]), 0.36, 0.8),
    ],
)
def test_whole_device_times_are_plausible(model, gpu, shape, low, high):
    assert low <= RooflineCost(built_in(model), gpu)(shape, GPUS[gpu].sms, NOTHING, 0) <= high


shapes = st.one_of(
    st.tuples(st.integers(1, 512), st.integers(1, 4096)).map(lambda bc: Shape.decode(bc[0], bc[0] * bc[1])),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 32768)), min_size=1, max_size=4).map(Shape.prefill),
)


@given(shapes, shapes, st.integers(1, 131), st.sampled_from(["llama-3.1-8b", "qwen3-32b"]))
def test_physics(shape, neighbour, units, model):
    cost = RooflineCost(built_in(model), "h100")
    alone = cost(shape, units, NOTHING, 0)
    assert alone > cost(shape, units + 1, NOTHING, 0), "more units cannot be slower"
    assert cost(shape, units, neighbour, 132 - units) >= alone, "a neighbour cannot help"
    assert alone > MODELS[model].flops(shape) / PEAKS["h100"].flops, "nothing beats peak arithmetic"
    assert alone > MODELS[model].bytes(shape) / PEAKS["h100"].bandwidth, "nothing beats peak bandwidth"
    bigger = shape.join(Shape.decode(1, 64))
    assert cost(bigger, units, NOTHING, 0) >= alone, "more work cannot be faster"


@given(shapes, shapes, st.integers(1, 131))
def test_two_lanes_never_move_more_bytes_than_the_device_can(left, right, units):
    model = built_in("llama-3.1-8b")
    rates = [model.bytes(a) / H100(a, u, b, 132 - u) for a, b, u in ((left, right, units), (right, left, 132 - units))]
    assert sum(rates) <= PEAKS["h100"].bandwidth


def test_hybrid_is_cheaper_than_its_parts_in_turn():
    """One forward reads the weights once."""
    parts = A100(PREFILL, 108, NOTHING, 0) + A100(STEP, 108, NOTHING, 0)
    assert A100(PREFILL.join(STEP), 108, NOTHING, 0) < parts


def test_every_simulated_gpu_has_peaks():
    assert PEAKS.keys() == GPUS.keys()


def test_an_unknown_gpu():
    with pytest.raises(UsageError, match="h100"):
        RooflineCost(built_in("llama-3.1-8b"), "b300")


def test_published_parameter_counts():
    """Total parameters as the models' cards give them: matrices, both embeddings, norms."""
    norms = {"llama-3.1-8b": 65 * 4096, "llama-3.1-70b": 161 * 8192, "qwen3-32b": 129 * 5120 + 64 * 2 * 128}
    cards = {"llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "qwen3-32b": 32_762_123_264}
    totals = {name: m.linear_params + 2 * m.head_params + norms[name] for name, m in MODELS.items() if name in cards}
    assert totals == cards


def test_an_unknown_model():
    with pytest.raises(UsageError, match="qwen3-32b"):
        built_in("llama-9")


def test_lanes_priced_by_it_run():
    class Echo:
        def __init__(self, side):
            pass

        def run(self, payload):
            return payload

        def close(self):
            pass

    backend = open_backend("sim:h100")
    lanes = SimLanes(backend.device(), backend.splits(), H100, Echo)
    lanes.launch(Work(1, Side.DECODE, Split(96, 36), STEP, 1.0, "step"))
    lanes.launch(Work(2, Side.PREFILL, Split(96, 36), PREFILL, 1.0, "prompt"))
    first, second = lanes.wait(None) + lanes.wait(None)
    assert (first.result, second.result) == ("step", "prompt")
    assert first.finished == pytest.approx(H100(STEP, 36, PREFILL, 96), rel=1e-12)
    assert H100(PREFILL, 96, NOTHING, 0) < second.finished < H100(PREFILL, 96, STEP, 36)
