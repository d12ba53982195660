"""One copy of a model's weights: the user's model over it, and what a worker rebuilds from a dump."""

import functools
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from smpart.errors import UnsupportedModel
from smpart.kvcache.layout import KVLayout
from smpart.kvcache.memory import KVMemory
from smpart.partition import Shape, Side, Work, open_backend
from smpart.partition.cores import Cores
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment
from smpart.runtime.board import Board
from smpart.runtime.crew import CoreCrew
from smpart.runtime.model_worker import MODEL_BODY, ModelArgs
from smpart.runtime.models import load_model
from smpart.runtime.processes import ProcessLanes
from smpart.runtime.sampling import SamplingParams
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import bytes_of, load, share_weights

PROMPT = torch.randint(0, 128, (1, 11), generator=torch.Generator().manual_seed(3))


def llama(tied: bool = False, dtype: torch.dtype = torch.float32, hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=128, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    return GPT2LMHeadModel(config).eval()


@torch.inference_mode()
def logits(model: nn.Module) -> torch.Tensor:
    return model(PROMPT).logits


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), lambda: llama(dtype=torch.bfloat16), gpt2])
def test_same_model_before_and_after_here_and_rebuilt(make):
    model = make()
    values = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    strides = {name: tensor.stride() for name, tensor in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    expected = logits(model)

    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))

    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    for each in (model, rebuilt):
        assert torch.equal(logits(each), expected)
        state = each.state_dict()
        assert state.keys() == values.keys()
        assert all(torch.equal(state[name], value) for name, value in values.items())
        assert {name: tensor.stride() for name, tensor in state.items()} == strides
        assert not each.training


def test_nothing_is_there_twice():
    model = llama(tied=True)
    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))
    tensors = [*model.parameters(), *model.buffers()]
    assert all(shared.holds(tensor) for tensor in tensors)
    assert all(shared.holds(tensor) for tensor in [*rebuilt.parameters(), *rebuilt.buffers()])
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert size <= shared.segment.size <= size + 64 * len(tensors)
    assert len(shared.dump()) < size / 4
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    assert rebuilt.model.norm.weight.tolist() == [3.0] * 32


def test_non_persistent_buffers_come_back():
    model = llama()
    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))
    assert "model.rotary_emb.inv_freq" not in model.state_dict()
    assert torch.equal(rebuilt.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)


def test_tied_weights_stay_one_tensor():
    model = llama(tied=True)
    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))
    for each in (model, rebuilt):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert isinstance(each.lm_head.weight, nn.Parameter)


class Odd(nn.Module):
    """Views of one another, holes, odd strides and types, an empty tensor, one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.arange(1000, dtype=torch.float32)
        self.left = nn.Parameter(base[10:40])
        self.right = nn.Parameter(base[30:60])
        self.far = nn.Parameter(base[900:].view(10, 10).t())
        self.again = self.left
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("wide", torch.ones(3, 1).expand(3, 5), persistent=False)
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("scalar", torch.tensor(7, dtype=torch.int64))
        self.loose = torch.arange(3)


def test_views_holes_and_odd_tensors():
    model = Odd()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))
    assert shared.segment.size < 1000 * 4, "the hole in the middle came along"
    for each in (model, rebuilt):
        assert all(torch.equal(value, expected[name]) for name, value in each.state_dict().items())
        assert each.far.stride() == (1, 10) and each.wide.stride() == (1, 0)
        assert each.again is each.left and torch.equal(each.loose, torch.arange(3))
        with torch.no_grad():
            each.left[20] += 1
            assert each.left[20] == each.right[0], "overlapping views came apart"
            each.left[20] -= 1


def test_sharing_again_finds_it_done_and_a_changed_model_is_shared_anew():
    model = llama()
    first = share_weights(model)
    assert share_weights(model) is first
    model.to(torch.bfloat16)
    expected = logits(model)
    second = share_weights(model)
    assert second is not first
    assert torch.equal(logits(load(second.dump(), bytes_of(second.segment))), expected)


def test_memory_goes_with_the_model():
    before = len(list(Path("/proc/self/fd").iterdir()))
    model = llama()
    share_weights(model)
    del model
    import gc

    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_hooks_of_smpart_and_observers_of_transformers_do_not_matter():
    model = llama()
    with torch.inference_mode():
        expected = model(PROMPT, output_hidden_states=True).logits  # transformers installs its capturing hooks here
    adapter = ModelAdapter(model)
    shared = share_weights(model)
    rebuilt = load(shared.dump(), bytes_of(shared.segment))
    ModelAdapter(rebuilt, adapter.facts).detach()
    adapter.detach()
    assert torch.equal(logits(rebuilt), expected)
    with torch.inference_mode():
        assert len(rebuilt(PROMPT, output_hidden_states=True).hidden_states) == 3


def local_class(model):
    class Local(nn.Linear):
        pass

    model.lm_head = Local(32, 128)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: m.register_forward_hook(lambda *_: None), "lambda"),
        (local_class, "Local"),
        (lambda m: setattr(m, "lock", __import__("threading").Lock()), "lock"),
    ],
)
def test_what_cannot_be_pickled_is_refused_with_what_works(spoil, why):
    model = llama()
    spoil(model)
    with pytest.raises(UnsupportedModel, match=rf"LlamaForCausalLM.*{why}.*top level of a module") as caught:
        share_weights(model).dump()
    assert "\n" not in str(caught.value)


def test_a_class_of_the_script_itself_is_refused(monkeypatch):
    model = llama()
    scripted = type("Scripted", (nn.Linear,), {"__module__": "__main__", "__qualname__": "Scripted"})
    monkeypatch.setattr(sys.modules["__main__"], "Scripted", scripted, raising=False)
    model.lm_head = scripted(32, 128, bias=False)
    with pytest.raises(UnsupportedModel, match="Scripted is defined in the script itself"):
        share_weights(model).dump()


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(2, 2, device="meta"), "on meta"),
        (torch.eye(2).to_sparse(), "layout"),
        (type("Packed", (nn.Parameter,), {})(torch.ones(2)), "Packed"),
    ],
)
def test_tensors_without_plain_memory_are_refused(tensor, why):
    model = llama()
    if isinstance(tensor, nn.Parameter):
        model.extra = tensor
    else:
        model.register_buffer("extra", tensor)
    with pytest.raises(UnsupportedModel, match=f"extra is .*{why}"):
        share_weights(model)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        model = llama()
    expected = logits(model)
    shared = share_weights(model)
    assert torch.equal(logits(load(shared.dump(), bytes_of(shared.segment))), expected)
    assert torch.equal(logits(model), expected)


class Served:
    """A model on two worker processes, without an engine."""

    def __init__(self, model: LlamaForCausalLM, blocks: int = 8, slots: int = 2, max_len: int = 64) -> None:
        weights = share_weights(model)
        dump = weights.dump()
        adapter = ModelAdapter(model)
        facts = adapter.facts
        adapter.detach()
        layout = KVLayout(facts.layers, facts.kv_heads, facts.head_dim, str(facts.dtype).removeprefix("torch."))
        self.kv = SharedSegment.create(layout.total_bytes(blocks), "kv")
        self.memory = KVMemory.over(self.kv.buffer, layout, blocks)
        seen = SharedSegment.create(Board.size(slots, max_len, layout.block_tokens), "board")
        self.board = Board.over(seen.buffer, slots, max_len, layout.block_tokens)
        backend = open_backend("cores")
        assert isinstance(backend, Cores)
        args = ModelArgs(dump, facts, layout, blocks, slots, max_len)
        self.lanes = ProcessLanes(
            CoreCrew(backend.device(), backend.splits(), MODEL_BODY, backend.placement(), args),
            {"weights": weights.segment, "kv": self.kv, "board": seen},
            preload=weights.modules(),
        )
        self._forwards = 0

    def run(self, side: Side, batch: Batch, samplers: dict[int, Sampler] | None = None):
        self._forwards += 1
        split = next(split for split in self.lanes.splits() if split.units(side.other) == 0)
        segment = Segment(self._forwards, batch, samplers=samplers or {})
        self.lanes.launch(Work(self._forwards, side, split, Shape.decode(1, 1), 1.0, segment))
        (completion,) = self.lanes.wait(self.lanes.now() + 60)
        assert completion.fault is None, completion.fault
        return completion.result


NO_ROWS = np.zeros(0, np.int32)


@functools.cache
def generated(dtype: torch.dtype) -> list[int]:
    model = llama(dtype=dtype)
    output = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, min_new_tokens=8, do_sample=False
    )
    return output[0, PROMPT.shape[1] :].tolist()


def test_prefill_in_one_process_and_decode_in_another_over_one_memory():
    served = Served(llama())
    try:
        prompt, length = PROMPT[0].tolist(), PROMPT.shape[1]
        served.board.write_tokens(0, prompt)
        served.board.append_blocks(0, 0, [5, 2])
        greedy = {0: Sampler(SamplingParams(), length, 0)}
        served.run(Side.PREFILL, Batch(NO_ROWS, NO_ROWS, (Chunk(0, 0, length, True),)), greedy)
        written = served.memory.buffer.clone()
        for position in range(length, length + 7):
            served.run(Side.DECODE, Batch(np.array([0], np.int32), np.array([position], np.int32)), greedy)
        assert served.board.tokens[0, length : length + 8].tolist() == generated(torch.float32)
        # The prompt's KV was read where prefill had put it: nobody wrote it again, anywhere.
        after = [layer[:, 5, :length] for layer in served.memory.layers]
        before = KVMemory.over(written, served.memory.layout, served.memory.blocks)
        assert all(torch.equal(a, layer[:, 5, :length]) for a, layer in zip(after, before.layers, strict=True))
        touched = {b for layer in served.memory.layers for b in range(8) if layer[:, b].any()}
        assert touched == {5, 2}
    finally:
        served.lanes.close()


def test_workers_have_no_weights_of_their_own():
    served = Served(llama(hidden=1024), blocks=4)  # 54 MB of weights
    try:
        served.board.write_tokens(0, PROMPT[0].tolist())
        served.board.append_blocks(0, 0, [0])
        greedy = {0: Sampler(SamplingParams(), 11, 0)}
        for side in Side:
            served.run(side, Batch(NO_ROWS, NO_ROWS, (Chunk(0, 0, 11, True),)), greedy)
        own = [psutil.Process(served.lanes.pid(side)).memory_full_info().uss for side in Side]
        assert max(own) <= 40 << 20
    finally:
        served.lanes.close()


@pytest.mark.slow
@pytest.mark.smollm2
def test_workers_of_a_real_model_take_little_memory_of_their_own():
    model, _ = load_model("smollm2")
    served = Served(model, blocks=20, max_len=320)
    try:
        served.board.write_tokens(0, [1 + i for i in range(256)])
        served.board.append_blocks(0, 0, range(20))
        greedy = {0: Sampler(SamplingParams(), 256, 0)}
        served.run(Side.PREFILL, Batch(NO_ROWS, NO_ROWS, (Chunk(0, 0, 256, True),)), greedy)
        served.run(Side.DECODE, Batch(np.array([0], np.int32), np.array([256], np.int32)), greedy)
        own = {side: psutil.Process(served.lanes.pid(side)).memory_full_info().uss >> 20 for side in Side}
        assert own[Side.DECODE] <= 40, own
    finally:
        served.lanes.close()
