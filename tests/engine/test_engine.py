"""The user's engine on real lanes: ways in, ways out, bad input, and ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import smpart
from smpart.kvcache import KVConfig
from smpart.runtime.children import Zygote
from smpart.runtime.models import load_model


@pytest.fixture(scope="module")
def model():
    return load_model("random:llama")[0]


@pytest.fixture(scope="module")
def engine(model):
    with smpart.wrap(model, kv=KVConfig(blocks=64, max_len=256, max_requests=8)) as engine:
        yield engine


def plain(model, prompt: list[int], **options) -> list[int]:
    with torch.inference_mode():
        return model.generate(torch.tensor([prompt]), pad_token_id=0, do_sample=False, **options)[0].tolist()


def greedy(tokens: int, **rest) -> smpart.SamplingParams:
    return smpart.SamplingParams(max_tokens=tokens, ignore_eos=True, **rest)


def test_generate_takes_a_list_and_gives_a_list(engine, model) -> None:
    outputs = engine.generate([[5, 9, 11], list(range(3, 60))], greedy(6))
    for output, prompt in zip(outputs, ([5, 9, 11], list(range(3, 60))), strict=True):
        assert output.finish_reason == "length"
        assert [*output.prompt_token_ids, *output.token_ids] == plain(
            model, prompt, max_new_tokens=6, eos_token_id=None
        )
        assert output.times.ttft > 0 and output.times.tpot > 0


def test_generate_takes_one_prompt_of_ids(engine) -> None:
    (output,) = engine.generate([5, 9, 11], greedy(2))
    assert len(output.token_ids) == 2


def test_generate_in_the_shape_of_transformers(engine, model) -> None:
    ids = torch.tensor([[0, 0, 7, 8, 9], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with torch.inference_mode():
        expected = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(engine.generate(input_ids=ids, attention_mask=mask, **options), expected)


def test_a_batch_that_ends_early_is_padded_as_transformers_pads_it(engine, model) -> None:
    ids = torch.tensor([[5, 9, 11], [7, 8, 200]])
    eos = plain(model, ids[0].tolist(), max_new_tokens=3)[-1]
    with torch.inference_mode():
        expected = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=eos, pad_token_id=None)
    options = {"max_new_tokens": 8, "eos_token_id": torch.tensor(eos), "pad_token_id": None}
    assert torch.equal(engine.generate(input_ids=ids, **options), expected)


def test_settings_of_the_model_that_are_not_served_are_refused(engine) -> None:
    defaults = engine.deployment.generation_defaults
    defaults["no_repeat_ngram_size"] = 2
    try:
        with pytest.raises(smpart.UsageError, match="no_repeat_ngram_size=2"):
            engine.generate(input_ids=torch.tensor([[5]]), max_new_tokens=2)
    finally:
        defaults["no_repeat_ngram_size"] = 0


def test_prompts_of_tensors_are_not_taken_for_one_prompt(engine) -> None:
    with pytest.raises(smpart.UsageError, match="tolist"):
        engine.generate([torch.tensor([5]), torch.tensor([6])], greedy(1))


@pytest.mark.parametrize("value", [10**400, True, "1", float("nan")])
def test_what_no_float_holds_is_a_usage_error(value: object) -> None:
    with pytest.raises(smpart.UsageError, match="temperature"):
        smpart.SamplingParams(temperature=value)
    with pytest.raises(smpart.UsageError, match="ttft_ms"):
        smpart.SLO(ttft_ms=value)


def test_a_handle_gives_tokens_as_they_come(engine) -> None:
    handle = engine.submit([1, 5, 9], greedy(24))
    seen = list(handle)
    output = handle.result()
    assert seen == list(output.token_ids) and len(seen) == 24
    assert list(handle) == seen, "a second reader sees every token as well"


def test_cancel_ends_a_request_and_frees_its_blocks(engine) -> None:
    handle = engine.submit([1, 5, 9], greedy(200))
    next(iter(handle))
    handle.cancel()
    assert handle.result().finish_reason == "cancelled"
    engine.generate([[2, 3]], greedy(1))  # a full turn later nothing is held
    assert engine.core.state.pool.owned == 0


@pytest.mark.slow
def test_the_forking_process_may_die_too(engine, model) -> None:
    handle = engine.submit([1, 5, 9], greedy(150))
    next(iter(handle))
    os.kill(Zygote.shared().pid, signal.SIGKILL)
    expected = plain(model, [1, 5, 9], max_new_tokens=150, eos_token_id=None)
    assert [1, 5, 9, *handle.result(timeout=120).token_ids] == expected
    assert engine.generate([[2, 3]], greedy(1))[0].finish_reason == "length"


def test_async_twins(engine) -> None:
    async def both() -> tuple[list[int], tuple[int, ...]]:
        handle = await engine.asubmit([1, 5, 9], greedy(10))
        tokens = [token async for token in handle]
        other = await (await engine.asubmit([1, 5, 9], greedy(10))).aresult()
        return tokens, other.token_ids

    tokens, other = asyncio.run(both())
    assert tuple(tokens) == other


def test_many_threads_submit_at_once(engine, model) -> None:
    prompts = [[3 + i, 7, 11 * i % 500 + 3] for i in range(12)]
    answers: dict[int, list[int]] = {}

    def one(i: int) -> None:
        answers[i] = list(engine.submit(prompts[i], greedy(5)).result().token_ids)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, prompt in enumerate(prompts):
        assert prompt + answers[i] == plain(model, prompt, max_new_tokens=5, eos_token_id=None)


def test_a_seed_gives_the_same_text_whatever_runs_beside_it(engine) -> None:
    params = smpart.SamplingParams(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    alone = engine.generate([[4, 5, 6]], params)[0].token_ids
    crowd = [engine.submit(list(range(3, 90)), greedy(20)) for _ in range(4)]
    among = engine.submit([4, 5, 6], params).result().token_ids
    for handle in crowd:
        handle.result()
    assert alone == among
    other = engine.generate([[4, 5, 6]], smpart.SamplingParams(max_tokens=12, temperature=1.0, seed=8, ignore_eos=True))
    assert other[0].token_ids != alone


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ([], {}, "empty prompt"),
        ([1] * 300, {}, "over the limit"),
        ([1, 2], {"max_tokens": 0}, "max_tokens"),
        ([1, 2], {"max_tokens": -3}, "max_tokens"),
        ([1, 2], {"temperature": float("nan")}, "temperature"),
        ([1, 100_000], {}, "vocabulary"),
        ([1, -1], {}, "vocabulary"),
        ([1, 2.5], {}, "whole numbers"),
        ("text", {}, "tokenizer"),
        ([1, 2], {"stop": ["x"]}, "tokenizer"),
    ],
)
def test_bad_input_is_one_clear_line_and_costs_others_nothing(engine, prompt, params, word) -> None:
    other = engine.submit([9, 8, 7], greedy(10))
    with pytest.raises(smpart.UsageError, match=word) as caught:
        engine.submit(prompt, smpart.SamplingParams(**params))
    assert "\n" not in str(caught.value)
    assert len(other.result().token_ids) == 10


def test_unknown_names_are_refused(model) -> None:
    with pytest.raises(smpart.UsageError, match="no such policy"):
        smpart.wrap(model, policy="nonsense", kv=KVConfig(blocks=16, max_len=64, max_requests=2))
    with pytest.raises(smpart.UsageError, match="backend"):
        smpart.wrap(model, backend="nonsense")


def test_after_close_nothing_hangs(model) -> None:
    engine = smpart.wrap(model, kv=KVConfig(blocks=16, max_len=64, max_requests=2))
    handle = engine.submit([1, 2, 3], greedy(60))
    engine.close()
    engine.close()
    with pytest.raises((smpart.RequestFailed, smpart.EngineClosed), match="closed"):
        handle.result(timeout=5)
    handle.cancel()
    with pytest.raises(smpart.EngineClosed):
        engine.submit([1], greedy(1))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"salt": 7}, "salt"),
        ({"salt": "\ud800"}, "salt"),
        ({"slo": 5}, "slo"),
        ({"params": {"max_tokens": 3}}, "SamplingParams"),
        ({"prompt": None}, "prompt"),
        ({"prompt": b"abc"}, "prompt"),
        ({"prompt": 5}, "prompt"),
    ],
)
def test_arguments_of_the_wrong_kind_stop_at_the_caller(engine, options, word) -> None:
    arguments = {"prompt": [1, 2, 3], "params": greedy(2), **options}
    with pytest.raises(smpart.UsageError, match=word):
        engine.submit(arguments.pop("prompt"), arguments.pop("params"), **arguments)
    assert len(engine.generate([[1, 2, 3]], greedy(2))[0].token_ids) == 2


def test_a_tokenizer_that_fails_costs_its_own_request_only(model) -> None:
    class Moody:
        chat_template = None

        def encode(self, text: str) -> list[int]:
            return [5, 6, 7]

        def decode(self, ids, **options) -> str:
            raise RuntimeError("no mood")

    with smpart.wrap(model, Moody(), kv=KVConfig(blocks=16, max_len=64, max_requests=2)) as engine:
        for _ in range(2):  # the second shows that the loop lives
            with pytest.raises(smpart.RequestFailed, match="no mood"):
                engine.submit([1, 2, 3], greedy(4)).result(timeout=30)


def test_what_cannot_be_wrapped_is_refused(model) -> None:
    for wrong in (None, "x", torch.nn.Linear(2, 2)):
        with pytest.raises(smpart.UnsupportedModel):
            smpart.wrap(wrong)
    for options in ({"slo": "x"}, {"kv": 5}, {"backend": None}, {"tokenizer": "x"}):
        with pytest.raises(smpart.UsageError):
            smpart.wrap(model, **options)
    with pytest.raises(smpart.UsageError, match="policy"):
        smpart.wrap(model, policy=None, kv=KVConfig(blocks=16, max_len=64, max_requests=2))


def test_a_block_longer_than_the_context_serves(model) -> None:
    with smpart.wrap(model, kv=KVConfig(blocks=2, block_tokens=128, max_len=64, max_requests=2)) as engine:
        assert len(engine.generate([[1, 2, 3]], greedy(4))[0].token_ids) == 4


def test_a_script_that_ends_without_close_leaves_no_worker_and_no_noise() -> None:
    script = """
import smpart
from smpart.runtime.models import load_model
engine = smpart.wrap(load_model("random:llama")[0], kv=smpart.KVConfig(blocks=16, max_len=64, max_requests=2))
print(len(engine.generate([[1, 2, 3]], smpart.SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids))
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip(), ended.stderr) == (0, "2", "")
