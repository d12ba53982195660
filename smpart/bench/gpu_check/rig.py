"""A model on a device, and both lanes over it in this process: what a device's process holds, where it can be seen."""

from __future__ import annotations

import pkgutil
from dataclasses import dataclass, replace
from types import TracebackType

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from smpart.bench.gpu_check.record import Setting
from smpart.engine.deployment import Deployment
from smpart.kvcache import KVConfig, KVLayout
from smpart.predictor import OnlinePredictor, RooflinePrior
from smpart.runtime.adapter import model_shape
from smpart.runtime.board import Board
from smpart.runtime.device.machine import DeviceArgs, Machine, Parts, assemble
from smpart.runtime.facts import ModelFacts

LEAD_S = 0.01
"""As `smpart.engine.real` has it."""


@dataclass(frozen=True, slots=True)
class Scale:
    """A Llama of some size, with grouped queries as the models of that size have them."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int = 32000

    def config(self) -> LlamaConfig:
        """For transformers."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocab,
            max_position_embeddings=32768,
            tie_word_embeddings=False,
            bos_token_id=1,
            eos_token_id=2,
        )


SCALES = {
    "1b": Scale(2048, 8192, 16, 32, 8),  # 1.1 billion weights
    "8b": Scale(4096, 14336, 32, 32, 8),  # 7.2 billion: Llama 3 8B with a smaller vocabulary
    "tiny": Scale(64, 128, 2, 4, 2, vocab=512),
}


def chosen(setting: Setting, scale: str) -> str:
    """The scale that a setting allows."""
    return "tiny" if setting.tiny else scale


def random_llama(scale: str, dtype: torch.dtype, where: torch.device, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, made where it is to be: on a GPU billions take a second."""
    torch.manual_seed(seed)
    with torch.device(where):
        model = AutoModelForCausalLM.from_config(SCALES[scale].config(), dtype=dtype)  # type: ignore[no-untyped-call]
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    if model.generation_config is not None:
        model.generation_config.eos_token_id = None
    return model


def llama_facts(scale: str, dtype: torch.dtype) -> ModelFacts:
    """What an adapter would find out by trying, which it does on the CPU only."""
    size, config = SCALES[scale], SCALES[scale].config()
    head_dim = size.hidden // size.heads
    return ModelFacts(
        layers=size.layers,
        kv_heads=size.kv_heads,
        head_dim=head_dim,
        vocab=size.vocab,
        max_positions=int(config.max_position_embeddings),
        windows=(None,) * size.layers,
        dtype=dtype,
        heads=size.heads,
        scale=head_dim**-0.5,
    )


class Rig:
    """A device that is open and a model on it. Machines may be made over it, one after the other.

    Args:
        kv: with `blocks` and `max_len`.

    Raises:
        BackendUnavailable, CudaError: the device cannot be opened.
    """

    def __init__(self, setting: Setting, scale: str, kv: KVConfig, dtype: torch.dtype = torch.bfloat16) -> None:
        assert kv.blocks is not None and kv.max_len is not None
        self.scale = chosen(setting, scale)
        facts = llama_facts(self.scale, dtype)
        layout = KVLayout(
            facts.layers, facts.kv_heads, facts.head_dim, str(dtype).removeprefix("torch."), kv.block_tokens
        )
        self.kv = kv
        self._args = DeviceArgs(b"", facts, layout, kv, kv.max_len, kv.blocks, parts=setting.parts)
        self.parts: Parts = pkgutil.resolve_name(setting.parts)(self._args)
        try:
            self.model = random_llama(self.scale, dtype, self.parts.where, setting.seed)
            size = Board.size(kv.max_requests, kv.max_len, kv.block_tokens)
            self.board = Board.over(bytearray(size), kv.max_requests, kv.max_len, kv.block_tokens)
        except BaseException:
            self.parts.close()
            raise

    def machine(self, *, graphs: bool = True) -> Machine:
        """Both lanes over the model and a KV memory of random numbers. Close its `lanes` before making another."""
        machine = assemble(self.parts, replace(self._args, graphs=graphs), self.model, self.board)
        with torch.inference_mode():
            for pages in machine.pages:
                pages.normal_()
        self.settle()
        return machine

    def deployment(self, machine: Machine) -> Deployment:
        """What a policy can serve requests on, in this process."""
        shape = model_shape(self.model)
        return Deployment(
            name=f"random llama {self.scale}",
            backend="green",
            virtual=False,
            lanes=machine.lanes,
            board=self.board,
            kv=self.kv,
            blocks=machine.info.blocks,
            model_shape=shape,
            dtype=self._args.layout.dtype,
            predictor=OnlinePredictor(RooflinePrior(shape, self.parts.device)),
            lead_s=LEAD_S,
        )

    def settle(self) -> None:
        """Wait for the device: what torch queued outside the lanes must be over before they begin."""
        if self.parts.where.type == "cuda":
            torch.cuda.synchronize(self.parts.where)

    def close(self) -> None:
        """Give the device back; the machines' lanes are closed."""
        self.settle()
        self.parts.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
