"""Simulated GPUs against what they are made from: op tables at their nodes, published runs, published SM curves."""

import csv
from collections import defaultdict
from dataclasses import replace
from statistics import median

import pyarrow.parquet as parquet
import pytest

from smpart.errors import BackendUnavailable, UnsupportedModel, UsageError
from smpart.partition import Shape
from smpart.partition.gpus import GPUS
from smpart.sim import DIMENSIONS, Host, SiliconCost, dimensions, op_tables
from smpart.sim.measured import measured
from smpart.sim.rtx4090 import Rtx4090

MODEL = DIMENSIONS["llama-3.1-8b"]
NOBODY = (Shape(), 0)
FREE = Host(step=0.0)


def rows(kind, file, gpu="h100", engine="vllm", **wanted):
    path = op_tables.newest(op_tables.FOLDERS[gpu], kind, engine, file)
    return parquet.read_table(path, filters=[(k, "=", v) for k, v in wanted.items()]).to_pylist()


def published_rows(folder, name):
    with (folder / name).open() as file:
        return list(csv.DictReader(file))


def test_matmuls_are_the_table_at_its_nodes():
    size = (4096, 4096)
    table = {
        row["m"]: row["latency"] / 1e3
        for row in rows("gemm", "gemm_perf.parquet", gemm_dtype="bfloat16", n=4096, k=4096)
    }
    ours = measured(MODEL, "h100", "vllm", pads=False)._matmul(size, "bfloat16")
    assert ours == pytest.approx(table)


def test_a_matmul_is_padded_where_one_of_more_tokens_was_quicker():
    model = DIMENSIONS["llama-3.1-70b-fp8"]
    plain, padded = (measured(model, "h200", "vllm", pads)._matmul((8192, 8192), "fp8") for pads in (False, True))
    assert plain[257] > 1.2 * plain[512]
    assert padded == {m: min(seconds for n, seconds in plain.items() if n >= m) for m in plain}
    cost = SiliconCost(model, "h200", host=FREE)
    times = [cost(Shape.prefill([(tokens, 0)]), 132, *NOBODY) for tokens in (200, 256, 257, 400, 512, 513, 1024)]
    assert times == sorted(times)


@pytest.mark.parametrize(("batch", "step"), [(1, 1023), (64, 1023), (256, 511)])
def test_decode_attention_is_the_table_at_its_nodes(batch, step):
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0, "kv_cache_dtype": "bfloat16"}
    (row,) = rows("attention", "generation_attention_perf.parquet", batch_size=batch, step=step, **heads)
    part = measured(MODEL, "h100", "vllm").attention(Shape.decode(batch, batch * (step + 1)))
    assert part.seconds == pytest.approx(32 * row["latency"] / 1e3)


@pytest.mark.parametrize(("batch", "isl"), [(1, 512), (1, 8192), (4, 1024)])
def test_prompt_attention_is_the_table_at_its_nodes(batch, isl):
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "window_size": 0, "kv_cache_dtype": "bfloat16"}
    (row,) = rows("attention", "context_attention_perf.parquet", batch_size=batch, isl=isl, **heads)
    part = measured(MODEL, "h100", "vllm").attention(Shape.prefill([(isl, 0)] * batch))
    assert part.seconds == pytest.approx(32 * row["latency"] / 1e3)


def test_mixed_attention_of_the_rtx4090_is_the_table_at_its_nodes(data):
    kernels = Rtx4090(MODEL)
    for row in published_rows(data, "measured_rtx4090/attention.csv")[::97]:
        chunk, before, batch, context = (int(v) for v in list(row.values())[:4])
        shape = Shape.prefill([(chunk, before)] if chunk else []).join(Shape.decode(batch, batch * context))
        assert kernels.attention(shape).seconds == pytest.approx(32 * float(row["time_us"]) / 1e6)


def test_layers_of_the_rtx4090_are_the_sum_of_its_ops(data):
    ops = {
        r["layer"]: float(r["time_us"]) / 1e6
        for r in published_rows(data, "measured_rtx4090/dense.csv")
        if r["tokens"] == "512"
    }
    once = ops.pop("embedding") + ops.pop("final_layernorm")
    layer = sum(ops.values()) + ops["layernorm"]
    (part,) = Rtx4090(MODEL).layers(512)
    assert part.seconds == pytest.approx(32 * layer + once)


@pytest.mark.parametrize(("ours", "theirs", "units"), [("h100", "H800", 132), ("a100", "A100_8B", 108)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_fewer_sms_cost_what_the_published_fits_say(data, ours, theirs, units, phase):
    """Within a fifth of the medians over the published shapes, from a quarter of the SMs on."""
    published = defaultdict(dict)
    for row in published_rows(data, "sm_scaling_published_fits.csv"):
        if (row["gpu"], row["phase"]) == (theirs, phase):
            shape = (row["new_tokens"], row["context_tokens"], row["batch_size"])
            published[shape][int(row["sms"])] = float(row["latency_ms"])
    shape = Shape.prefill([(8192, 0)]) if phase == "prefill" else Shape.decode(32, 32 * 1024)
    cost = SiliconCost(MODEL, ours, host=FREE)
    for sms in (32, 48, 64, 80, 96):
        ratio = cost(shape, sms, *NOBODY) / cost(shape, units, *NOBODY)
        expected = median(times[sms] / times[units] for times in published.values())
        assert ratio == pytest.approx(expected, rel=0.2)


def test_more_sms_are_never_slower_and_a_neighbour_never_helps():
    cost = SiliconCost(MODEL, "h100")
    other = Shape.prefill([(2048, 0)])
    for shape in (Shape.decode(32, 40_000), Shape.prefill([(700, 90)]), Shape.prefill([(2048, 0)])):
        assert cost(shape, 32, *NOBODY) > cost(shape, 64, *NOBODY) > cost(shape, 132, *NOBODY)
        assert cost(shape, 64, other, 68) > cost(shape, 64, *NOBODY)


def test_contention_and_host_are_what_was_asked_for():
    step, other = Shape.decode(8, 8_000), Shape.prefill([(4096, 0)])
    plain, worse = (SiliconCost(MODEL, "h100", host=FREE, contention=c) for c in (1.0, 1.3))
    assert worse(step, 64, other, 68) == pytest.approx(1.3 * plain(step, 64, other, 68))
    assert worse(step, 64, *NOBODY) == plain(step, 64, *NOBODY)
    slow = SiliconCost(MODEL, "h100", host=Host(step=1e-3, sequence=1e-5))
    assert slow(step, 132, *NOBODY) == pytest.approx(plain(step, 132, *NOBODY) + 1.08e-3)


def test_ranks_share_the_matmuls_and_pay_for_the_all_reduce():
    step = Shape.decode(64, 64_000)
    alone, shared = (SiliconCost(replace(MODEL, ranks=r), "h100", host=FREE)(step, 132, *NOBODY) for r in (1, 4))
    assert alone / 4 < shared < alone
    table = rows("comm", "custom_allreduce_perf.parquet", num_gpus=4, message_size=262144)
    *_, reduce = measured(replace(MODEL, ranks=4), "h100", "vllm").layers(64)
    assert reduce.seconds == pytest.approx(64 * min(row["latency"] for row in table) / 1e3)


def test_experts_are_the_table_at_its_nodes():
    config = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
    }  # fmt: skip
    model = dimensions(config)
    assert model.shape.linear_params == pytest.approx(3.0e9, rel=0.1)  # Qwen3-30B-A3B
    moe = rows("moe", "moe_perf.parquet", moe_dtype="bfloat16", hidden_size=2048, inter_size=768, topk=8,
               num_experts=128, moe_tp_size=1, moe_ep_size=1, num_tokens=64, distribution="balanced")  # fmt: skip
    kernels = measured(model, "h100", "vllm")
    router = kernels._matmul((128, 2048), "bfloat16")[64]
    assert kernels._experts is not None
    assert kernels._experts(64) == pytest.approx(48 * (min(r["latency"] for r in moe) / 1e3 + router))


def test_what_was_not_timed_is_refused(monkeypatch, tmp_path):
    with pytest.raises(UnsupportedModel, match="try sim:h100"):
        SiliconCost(DIMENSIONS["llama-3.1-8b-fp8"], "rtx4090")
    with pytest.raises(UnsupportedModel, match="no fp8 matmul"):
        SiliconCost(DIMENSIONS["llama-3.1-8b-fp8"], "a100")
    with pytest.raises(UsageError, match="no GPU"):
        SiliconCost(MODEL, "b300")
    monkeypatch.setattr(op_tables, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'smpart\[sim\]'"):
        op_tables.systems()


NEIGHBOURS = [
    (Shape.decode(batch, batch * context), Shape.prefill([(tokens, before)]))
    for batch, context in ((1, 1024), (32, 1024), (32, 4096), (128, 1024))
    for tokens, before in ((2048, 0), (8192, 0), (2048, 8192), (32768, 0))
]


@pytest.mark.parametrize(("gpu", "worst"), [("a100", 1.2), ("h100", 1.3)])
def test_neighbours_cost_between_the_least_and_the_worst_that_was_published(gpu, worst):
    """Least: +0.9 %. Worst: MuxWise's grid. At `contention` 1 no pair is worse than that; at the worst, none better."""
    mild, harsh = (SiliconCost(MODEL, gpu, host=FREE, contention=c) for c in (1.0, worst))
    for split in GPUS[gpu].splits():
        if split.exclusive:
            continue
        for step, prompt in NEIGHBOURS:
            alone = mild(step, split.decode, *NOBODY)
            assert 1.009 <= mild(step, split.decode, prompt, split.prefill) / alone <= worst
            assert worst <= harsh(step, split.decode, prompt, split.prefill) / alone <= 1.1 * worst
            solo = mild(prompt, split.prefill, *NOBODY)
            assert 1.009 <= mild(prompt, split.prefill, step, split.decode) / solo <= worst


def test_a_price_does_not_depend_on_what_was_asked_before():
    cost = SiliconCost(MODEL, "h100")
    steps = [Shape.decode(batch, batch * 700) for batch in (3, 40, 3, 90, 41, 3)]
    prompt = Shape.prefill([(900, 0)])
    prices = [cost(step, units, prompt, 132 - units) for step in steps for units in (36, 68, 36)]
    fresh = [SiliconCost(MODEL, "h100")(step, u, prompt, 132 - u) for step in steps for u in (36, 68, 36)]
    assert prices == fresh
