"""A lane never waits for its device, and captured steps read nothing but tensors: shown without a device.

On torch's ``meta`` device no value exists that could be read. On the CPU, `tape.Tape` replays what a graph would.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from device_rig import device_feed, place
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from no_host_reads import HostWaitError, no_host_reads
from tape import Tape
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Board
from smpart.runtime.body import ModelBody
from smpart.runtime.families import FAMILIES, random_model
from smpart.runtime.sampler import Choice
from smpart.runtime.sampling import SamplingParams

REFUSED = {"gemma2", "gpt_oss", "qwen3_next", "deepseek_v3", "falcon", "bloom", "mpt", "mamba", "bart"}


def served(*fast: str) -> list[object]:
    """Every family that is served; only `fast` ones are not marked slow."""
    families = sorted(set(FAMILIES) - REFUSED)
    return [pytest.param(family, marks=[] if family in fast else pytest.mark.slow) for family in families]


WAITING = {"gpt2": r"index of the host.*modeling_utils\.py", "phimoe": r"tensor of the host.*modeling_phimoe\.py"}
"""Families whose forward waits in any type: GPT-2 looks for its padding token if it has one (the released ones have
none), PhiMoE makes its rotary frequencies on the host at every call."""

SAMPLERS = [
    {},
    {"logprobs": 3},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "min_p": 0.1},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.5, "frequency_penalty": -0.3},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1, "logprobs": 0},
]
SLOTS, MAX_LEN, BLOCK = 12, 600, 4
"""Room for tables of two widths."""


def int32(values) -> np.ndarray:
    return np.array(values, np.int32)


class Lane:
    """A device's body, its pages and tokens random, as if every request had been under way for long."""

    def __init__(self, adapter: ModelAdapter, where: str = "cpu", graphs: bool = True) -> None:
        facts, generator = adapter.facts, torch.Generator().manual_seed(1)
        self.board = Board.over(bytearray(Board.size(SLOTS, MAX_LEN, BLOCK)), SLOTS, MAX_LEN, BLOCK)
        each = MAX_LEN // BLOCK
        blocks = torch.randperm(SLOTS * each, generator=generator).view(SLOTS, each)
        for slot in range(SLOTS):
            self.board.write_tokens(slot, torch.randint(3, 500, (MAX_LEN,), generator=generator).tolist())
            self.board.append_blocks(slot, 0, blocks[slot].tolist())
        shape = (2, SLOTS * each + 1, BLOCK, facts.kv_heads, facts.head_dim)
        self.memory = [torch.randn(shape, generator=generator).to(where, facts.dtype) for _ in range(facts.layers)]
        self.feed, self.queue = device_feed(adapter, self.board, self.memory, graphs=graphs)
        self.feed.tokens[:-1, :-1].copy_(torch.from_numpy(self.board.tokens))
        self.body = ModelBody(self.feed)
        self.forward = 0

    def start(self, decode=None, chunks=(), layers=None, samplers=SAMPLERS):
        self.forward += 1
        batch = Batch(int32(list(decode or {})), int32(list((decode or {}).values())), tuple(chunks))
        params = [SamplingParams(**each) for each in samplers]
        segment = Segment(
            self.forward, batch, layers, samplers={slot: Sampler(p, 4, slot) for slot, p in enumerate(params)}
        )
        return self.body.enqueue(segment, place())

    def resume(self):
        return self.body.enqueue(Segment(self.forward), place())


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Lane]:
    """Makes a lane that has shapes alone. Results, which go to pinned memory of CUDA's, are left where they are."""

    def make(family: str) -> Lane:
        adapter = ModelAdapter(random_model(family, torch.bfloat16))
        return Lane(ModelAdapter(adapter.model.to("meta"), adapter.facts), "meta")

    monkeypatch.setattr(Choice, "fetch", lambda choice: None)
    return make


@pytest.fixture
def on_cpu() -> Callable[[str], Lane]:
    return lambda family: Lane(adapter_of(family))


@functools.cache
def adapter_of(family: str) -> ModelAdapter:
    return ModelAdapter(random_model(family))


@pytest.mark.parametrize("family", served("qwen3_moe", "gpt2"))
def test_no_step_of_any_kind_waits(family, on_meta):
    lane, rows = on_meta(family), range(len(SAMPLERS))
    if family in WAITING:
        with pytest.raises(HostWaitError, match=WAITING[family]), no_host_reads():
            lane.start(chunks=[Chunk(0, 0, 9, True)])
        return
    with no_host_reads():
        lane.start(chunks=[Chunk(slot, 0, 5 + slot, True) for slot in rows[:-1]])
        lane.start(chunks=[Chunk(8, 0, 20, False), Chunk(7, 3, 30, True)], layers=1)
        lane.resume()
        lane.start({slot: 5 + slot for slot in rows[:-1]}, [Chunk(8, 20, 5, True)])
        for step in (6, 7):
            lane.start({slot: step + slot for slot in rows})
    assert (len(lane.queue.captured), lane.queue.replays) == (1, 1)


@pytest.mark.parametrize("where", ["on_meta", "on_cpu"])
def test_no_sampler_waits_when_it_is_alone(where, request):
    lane = request.getfixturevalue(where)("llama")
    with no_host_reads():
        for position, params in enumerate(SAMPLERS, 30):
            lane.start({0: position}, samplers=[params])
    assert (len(lane.queue.captured), lane.queue.replays) == (1, len(SAMPLERS) - 1)


@pytest.mark.parametrize("family", served("llama", "qwen3_moe", "gpt2"))
def test_the_trial_tells_which_families_wait(family):
    found = ModelAdapter(random_model(family, torch.bfloat16)).facts.uncapturable
    if family in WAITING:
        assert re.search(WAITING[family], found)
    else:
        assert found is None


def test_experts_are_captured_in_bfloat16_alone():
    """torch's grouped products on CUDA ask the host for the groups' sizes in any other type."""
    assert "_grouped_mm" in ModelAdapter(random_model("qwen3_moe")).facts.uncapturable


def rotary(family: str, **parameters: object) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**FAMILIES[family], "rope_parameters": {"rope_theta": 1e4, **parameters}})
    )


LONG = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 512}


def test_rotary_positions_that_look_at_the_longest_sequence_are_not_captured():
    found = ModelAdapter(rotary("llama", rope_type="dynamic", factor=2.0)).facts.uncapturable
    assert re.search(r"reads values to the host \(modeling_rope_utils\.py", found)
    for model in (rotary("llama", rope_type="linear", factor=2.0), rotary("phi3", rope_type="longrope", **LONG)):
        assert ModelAdapter(model).facts.uncapturable is None


@pytest.mark.parametrize(
    ("read", "operator"),
    [
        (lambda hidden: bool(hidden.sum() > 0), "aten.is_nonzero"),
        (lambda hidden: hidden.nonzero(), "aten.nonzero"),
        (lambda hidden: hidden[hidden > 0], "aten.index.Tensor with a mask"),
        (lambda hidden: torch.ones(1).to(hidden.device), "aten._to_copy.default copies a tensor of the host"),
    ],
)
def test_the_trial_names_the_operator_and_the_line(read, operator):
    def hook(module, arguments):
        read(arguments[0])

    model = random_model("gemma3_text")  # whose second layer differs from the first
    model.model.layers[1].mlp.register_forward_pre_hook(hook)
    found = ModelAdapter(model).facts.uncapturable
    assert found.startswith(operator)
    assert "(test_capture_safety.py:" in found


def test_a_step_that_meta_cannot_run_is_left_to_the_device():
    def only_here(module, arguments):
        if arguments[0].is_meta:
            raise NotImplementedError("no kernel for meta")

    model = random_model("llama")
    model.model.layers[0].register_forward_pre_hook(only_here)
    assert ModelAdapter(model).facts.uncapturable is None


def test_the_trial_leaves_the_model_where_it_was():
    model = rotary("phi3", rope_type="longrope", **LONG)  # which keeps a tensor in a plain attribute
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ModelAdapter(model)
    kept = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    assert kept
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers(), *kept]} == {"cpu"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_tape_repeats_operators_and_asks_no_python():
    scale, x, rows = 2.0, torch.ones(3), torch.zeros(2, 3)
    tape = Tape(lambda: rows.index_add_(0, torch.tensor([1]), (x * scale)[None]).sum(0))
    assert tape.output.tolist() == [2, 2, 2]
    scale, x[0] = 100.0, 5.0
    tape.replay()
    assert tape.output.tolist() == [12, 4, 4]


@st.composite
def decode_steps(draw) -> list[dict[int, int]]:
    """Steps of one to six rows, ``slot: position``: few captured sizes, so that most steps are replayed."""
    steps = []
    for _ in range(draw(st.integers(3, 8))):
        slots = draw(st.lists(st.integers(0, SLOTS - 1), min_size=1, max_size=6, unique=True))
        last = draw(st.sampled_from((BLOCK * 38 - 1, MAX_LEN - 1)))  # the last positions of both table widths
        steps.append({slot: draw(st.integers(0, last)) for slot in slots})
    return steps


@pytest.mark.parametrize("family", served("gemma3_text", "qwen3_moe"))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=decode_steps())
def test_replayed_steps_follow_their_own_batch(family, steps):
    """Whatever batch a step was captured with: logits, pages and tokens are those of a step run as it is."""
    lanes = [Lane(adapter_of(family), graphs=graphs) for graphs in (False, True)]
    for step in steps:
        batch = Batch(int32(list(step)), int32(list(step.values())))
        chosen, answers = None, []
        for lane in lanes:
            with lane.feed.at(place()), torch.inference_mode():
                packing, logits = lane.feed.whole(batch)
                chosen = logits.argmax(-1).int() if chosen is None else chosen
                lane.feed.store(packing, chosen)
                answers.append(logits.clone())
            assert packing.slots.tolist() == list(step)
        torch.testing.assert_close(*answers, rtol=1e-4, atol=1e-4)
    plain, captured = lanes
    assert len(captured.queue.captured) + captured.queue.replays == len(steps)
    assert torch.equal(plain.feed.tokens[:-1], captured.feed.tokens[:-1])
    for a, b in zip(plain.memory, captured.memory, strict=True):
        torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=1e-4, atol=1e-4)
