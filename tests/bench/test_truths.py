"""Published data as truths: against the files read in another way, and sums made by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from smpart.bench import truths
from smpart.bench.truths import DATA_VARIABLE, Truth, data_folder
from smpart.bench.truths import aiconfigurator as load_ops
from smpart.bench.truths.aiconfigurator import DEPLOYMENTS, GPUS, Deployment
from smpart.bench.truths.models import rank_of
from smpart.errors import BackendUnavailable, UsageError
from smpart.partition import Shape
from smpart.predictor.estimators.base import COLUMNS, column
from smpart.predictor.estimators.published import PUBLISHED
from smpart.profiler.sample import Point, matrix


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return data_folder()
    except UsageError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def scaling(folder: Path) -> dict[str, Truth]:
    return {truth.name: truth for truth in truths.sm_scaling()}


@pytest.fixture(scope="module")
def rtx4090(folder: Path) -> dict[str, Truth]:
    return {truth.family: truth for truth in truths.rtx4090()}


@pytest.fixture(scope="module")
def ops() -> dict[str, Truth]:
    pytest.importorskip("pyarrow")
    try:
        return {truth.name: truth for truth in load_ops(["h100_sxm"], ["vllm"])}
    except BackendUnavailable as error:
        pytest.skip(str(error))


def seconds_of(truth: Truth, point: Point) -> float:
    (row,) = np.flatnonzero((matrix([point]) == truth.X).all(axis=1))
    return float(truth.y[row])


def sound(truth: Truth) -> None:
    assert truth.X.shape == (len(truth.y), len(COLUMNS))
    assert len(np.unique(truth.X, axis=0)) == len(truth.y), "a point is there once"
    assert (truth.y > 0).all()
    assert column(truth.X, "units").max() <= truth.units
    assert not column(truth.X, "neighbour_units").any()
    assert truth.source and truth.licence in {"Apache-2.0", "MIT"} and truth.notes


# ---- the folder


def test_an_absent_folder_is_told_with_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UsageError, match="set SMPART_DATA"):
        truths.sm_scaling()


def test_an_absent_file_is_told_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    with pytest.raises(UsageError, match=r"no measured_rtx4090/attention\.csv .* SMPART_DATA"):
        truths.rtx4090()


# ---- SM scaling


def test_sm_scaling_has_every_row_of_every_gpu_and_phase(scaling: dict[str, Truth]) -> None:
    assert len(scaling) == 8
    assert sum(len(truth.y) for truth in scaling.values()) == 3020
    for truth in scaling.values():
        sound(truth)


def test_sm_scaling_as_its_first_row_says(scaling: dict[str, Truth]) -> None:
    """``H800,prefill,8,512,4096,1,351.198``; contexts of decode are those of whole batches."""
    prefill = seconds_of(scaling["sm_scaling/H800/prefill"], Point(Shape.prefill([(512, 4096)]), 8))
    assert prefill == pytest.approx(0.351198)
    decode = scaling["sm_scaling/H800/decode"]
    assert set(column(decode.X, "decode_context")) == {4096.0, 16384.0, 65536.0, 131072.0, 262144.0}


# ---- RTX 4090


def test_attention_of_mixed_batches_is_all_there(rtx4090: dict[str, Truth]) -> None:
    attention = rtx4090["rtx4090-attention"]
    sound(attention)
    assert len(attention.y) == 8643
    assert attention.model.layers == 1
    hybrid = (column(attention.X, "prefill_tokens") > 0) & (column(attention.X, "decode_batch") > 0)
    assert hybrid.sum() > 7000
    assert attention.model.weight_bytes == attention.model.linear_params == 0


def test_a_forward_is_the_sum_of_its_ops(folder: Path, rtx4090: dict[str, Truth]) -> None:
    """A decode step of 16 sequences of 1,024 tokens, added up from the files with a reader of their own."""
    pandas = pytest.importorskip("pandas")
    attention = pandas.read_csv(folder / "measured_rtx4090/attention.csv")
    dense = (
        pandas.read_csv(folder / "measured_rtx4090/dense.csv").pivot(index="tokens", columns="layer").loc[16]["time_us"]
    )
    heads = pandas.read_csv(folder / "measured_rtx4090/per_sequence.csv").set_index(["layer", "sequences"])
    row = attention.query("prefill_chunk == 0 and n_decode == 16 and kv_decode == 1024")
    layer = row.time_us.item() + dense.drop(["embedding", "final_layernorm"]).sum() + dense["layernorm"]
    whole = 32 * layer + dense["embedding"] + dense["final_layernorm"] + heads.loc["lm_head", 16].item()
    forward = rtx4090["rtx4090-forward"]
    sound(forward)
    assert seconds_of(forward, Point(Shape.decode(16, 16 * 1024), 128)) == pytest.approx(whole / 1e6)


# ---- aiconfigurator


def test_ops_make_attention_linears_and_forwards(ops: dict[str, Truth]) -> None:
    assert {truth.family.removeprefix("aiconfigurator-") for truth in ops.values()} == {
        "attention",
        "linears",
        "forward",
    }
    for truth in ops.values():
        sound(truth)
        assert truth.units == GPUS["h100_sxm"]


def test_a_forward_of_ops_is_attention_and_four_matmuls_of_each_layer(ops: dict[str, Truth]) -> None:
    """Llama-3.1-8B over four ranks: 8 query heads and 2 KV heads, 3,584 wide; a prompt of 1,024 tokens."""
    import pyarrow.parquet as parquet

    package = Path(pytest.importorskip("aiconfigurator_core").__file__).parent / "systems/data/h100_sxm"
    gemms = parquet.read_table(package / "gemm/vllm/0.24.0/gemm_perf.parquet").to_pandas()
    gemms = gemms.query("gemm_dtype == 'bfloat16' and m == 1024").set_index(["n", "k"]).latency
    sizes = [(1536, 4096), (4096, 1024), (7168, 4096), (4096, 3584)]
    attention = parquet.read_table(package / "attention/vllm/0.24.0/context_attention_perf.parquet").to_pandas()
    attention = attention.query(
        "num_heads == 8 and num_key_value_heads == 2 and head_dim == 128 and window_size == 0 and batch_size == 1"
        " and isl == 1024 and kv_cache_dtype == 'bfloat16' and attn_dtype == 'bfloat16'"
    )
    expected = 32 * (sum(gemms[size] for size in sizes) + attention.latency.item()) / 1e3
    truth = ops["aiconfigurator-forward/h100_sxm/vllm/llama-3.1-8b-tp4"]
    assert seconds_of(truth, Point(Shape.prefill([(1024, 0)]), 132)) == pytest.approx(expected)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=str)
def test_the_matmuls_of_a_deployment_hold_the_weights_of_its_rank(deployment: Deployment) -> None:
    layer = sum(outputs * inputs for outputs, inputs in deployment.matmuls)
    rank = rank_of(deployment.model, deployment.ranks)
    assert rank.layers * layer == rank.linear_params


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(BackendUnavailable, match=r"smpart\[sim\]"):
        load_ops(["h100_sxm"], ["vllm"])


def test_kv_heads_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(UsageError, match="8 KV heads"):
        rank_of("llama-3.1-8b", 3)


# ---- the published forms take them all


@pytest.mark.parametrize("form", PUBLISHED)
def test_every_form_can_be_fitted_to_every_kind_of_truth(
    form: str, scaling: dict[str, Truth], rtx4090: dict[str, Truth], ops: dict[str, Truth]
) -> None:
    kinds = {truth.family: truth for truth in (*scaling.values(), *rtx4090.values(), *ops.values())}
    for truth in kinds.values():
        few = np.random.default_rng(0).permutation(len(truth.y))[:40]
        estimator = PUBLISHED[form](truth.model, truth.units).fit(truth.X[few], truth.y[few])
        times = estimator.predict(truth.X)
        assert np.isfinite(times).all(), truth.name
        assert (times > 0).all(), truth.name
