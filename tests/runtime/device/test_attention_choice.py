import logging

import pytest
import torch

from smpart.errors import BackendUnavailable, UsageError
from smpart.runtime.device import choosing
from smpart.runtime.device.attention import AttentionShape, Bucket, Scratch
from smpart.runtime.device.choosing import choose_attention
from smpart.runtime.device.flashinfer import FlashInferAttention
from smpart.runtime.device.gather import GatherAttention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def shape(**changes):
    return AttentionShape(
        **{"heads": 4, "kv_heads": 2, "head_dim": 64, "block_tokens": 16, "dtype": torch.float16, "scale": 0.125}
        | changes
    )


@pytest.fixture
def modern_gpu(monkeypatch):
    """As far as its capability goes; nothing can run on it."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))


@pytest.fixture
def anywhere(monkeypatch):
    """FlashInfer's stand-in runs on a CPU."""
    monkeypatch.setitem(choosing._UNUSABLE, "flashinfer", lambda device, shape: None)


def test_a_cpu_gets_gather_and_the_log_says_why(caplog):
    with caplog.at_level(logging.INFO, "smpart"):
        choice = choose_attention(CPU, shape(dtype=torch.float32, windows=(None, 8)))
    assert choice.name == "gather"
    assert isinstance(choice.make(Scratch(CPU), 1, Bucket(2, 2)), GatherAttention)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING  # a last resort is no detail
    assert "attention on cpu: gather (flashinfer not: it needs a CUDA device" in record.message
    assert "triton not: it needs a CUDA device, not 'cpu'" in record.message


def test_gather_by_name_is_no_warning(caplog):
    with caplog.at_level(logging.INFO, "smpart"):
        assert choose_attention(CPU, shape(), "gather").reason == "asked for"
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_flashinfer_comes_first_where_it_works(flashinfer, anywhere):
    choice = choose_attention(CPU, shape(windows=(None, 8)))
    assert (choice.name, choice.reason) == ("flashinfer", "the first choice")
    assert isinstance(choice.make(Scratch(CPU), 1), FlashInferAttention)


def test_wrong_results_are_noticed(flashinfer, anywhere, monkeypatch):
    monkeypatch.setattr(flashinfer._Wrapper, "answer", lambda self, q, *rest: torch.full_like(q, torch.nan))
    choice = choose_attention(CPU, shape())
    assert choice.name == "gather"
    assert "flashinfer not: its results were wrong by nan when tried" in choice.reason
    with pytest.raises(BackendUnavailable, match="attention on cpu: flashinfer not: its results were wrong"):
        choose_attention(CPU, shape(), "flashinfer")


def test_what_fails_when_tried_is_passed_over(flashinfer, anywhere, monkeypatch):
    def plan(self, *args, **kwargs):
        raise RuntimeError("nvcc: not found\nand a long log")

    monkeypatch.setattr(flashinfer.BatchDecodeWithPagedKVCacheWrapper, "plan", plan)
    choice = choose_attention(CPU, shape())
    assert choice.reason.startswith("flashinfer not: it failed when tried: RuntimeError: nvcc: not found; triton not")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("flashinfer", {"dtype": torch.float32}, "it has no float32 kernels"),
        ("flashinfer", {"head_dim": 80}, "it has no kernels for heads of 80 dimensions"),
        ("triton", {"dtype": torch.float64}, "it has no float64 kernels"),
    ],
)
def test_shapes_that_cannot_be_served_by_the_one_asked_for(flashinfer, modern_gpu, name, changes, reason):
    with pytest.raises(BackendUnavailable, match=f"attention on cuda: {name} not: {reason}"):
        choose_attention(CUDA, shape(**changes), name)


@pytest.mark.parametrize("name", ["flashinfer", "triton"])
def test_old_gpus_are_refused(flashinfer, monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(BackendUnavailable, match=r"compute capability 8\.0"):
        choose_attention(CUDA, shape(), name)


@pytest.mark.parametrize(("name", "package"), [("flashinfer", "flashinfer-python"), ("triton", "triton")])
def test_a_missing_package_is_named(monkeypatch, modern_gpu, name, package):
    for module in (choosing, choosing.flashinfer):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=f"it is not installed: pip install {package}"):
        choose_attention(CUDA, shape(), name)


def test_an_unknown_name():
    with pytest.raises(UsageError, match="attention 'flash' is not known: use auto, flashinfer, triton, gather"):
        choose_attention(CPU, shape(), "flash")


@pytest.mark.gpu
def test_a_gpu_gets_kernels_that_read_pages_in_place():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert choose_attention(CUDA, shape(dtype=dtype, windows=(None, 8))).name in ("flashinfer", "triton")
