"""Wraps an unmodified transformers causal language model so that it runs packed forwards over paged KV memory."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from transformers import PreTrainedModel

from smpart import partition
from smpart.partition import ModelShape
from smpart.runtime import attention
from smpart.runtime.attention import PagedCache
from smpart.runtime.facts import ModelFacts, check_structure, decoder_layers, find_facts, unsupported
from smpart.runtime.packing import Packed
from smpart.runtime.pause import pause_hook

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class ModelAdapter:
    """A transformers causal LM made to run packed forwards; its own ``forward`` and ``generate`` work as before.

    Args:
        model: any causal LM of transformers that uses its attention interface. It is put in evaluation mode.
        facts: of the same model, from another process's adapter; None finds and verifies them, with a few short
            forwards through the plain and the paged path.

    Raises:
        UnsupportedModel: it cannot be served correctly; the message says why. The model is left as it was.
    """

    def __init__(self, model: PreTrainedModel, facts: ModelFacts | None = None) -> None:
        check_structure(model)
        self.model = model
        self.layers = decoder_layers(model)
        self._cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self._training = model.training
        chosen = model.config._attn_implementation
        original = attention.original_of(chosen)
        if original is None:
            raise unsupported(model, f"its attention is {chosen!r}; load it with attn_implementation='sdpa'")
        self._original = original
        try:
            self._attach()
            self.facts = facts if facts is not None else find_facts(model, self._cache_name, self.run)
        except BaseException:
            self.detach()
            raise

    def forward(self, memory: Sequence[Tensor], packing: Packed) -> Tensor:
        """Run one packed forward. Returns logits [m, vocab] of the rows in ``packing.sampled``.

        Args:
            memory: one tensor a layer, [2, blocks, block_tokens, kv_heads, head_dim].
        """
        return self.run(PagedCache(memory, packing, self.facts.windows))

    def run(self, cache: PagedCache) -> Tensor:
        """Run the packed forward that `cache` describes; see `forward`."""
        token = attention.current.set(cache)
        try:
            output = self.model(
                input_ids=cache.packing.tokens,
                position_ids=cache.packing.positions,
                use_cache=True,
                logits_to_keep=cache.packing.sampled,
                **{self._cache_name: cache},
            )
        finally:
            attention.current.reset(token)
        logits: Tensor = output.logits[0]
        return logits

    def detach(self) -> None:
        """Give the model back as it was before."""
        for layer in self.layers:
            for key, hook in list(layer._forward_pre_hooks.items()):
                if hook is pause_hook:
                    del layer._forward_pre_hooks[key]
        self.model.set_attn_implementation(self._original)
        self.model.train(self._training)

    def _attach(self) -> None:
        self.model.train(False)
        self.model.set_attn_implementation(attention.register(self._original))
        for layer in self.layers:
            if pause_hook not in layer._forward_pre_hooks.values():  # an unpickled model brings its own
                layer.register_forward_pre_hook(pause_hook)


def model_shape(model: PreTrainedModel) -> ModelShape:
    """Dimensions of a model, its weights counted from its modules (they may be on the ``meta`` device).

    Raises:
        UnsupportedModel, UsageError: it is no decoder-only model with keys and values for each token.
    """
    head = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
    config = model.config.get_text_config(decoder=True)
    dimensions = partition.model_shape(config.to_dict(), weight_bytes=head.itemsize, kv_bytes=head.itemsize)
    layers = decoder_layers(model)
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
    active = getattr(config, "num_experts_per_tok", None) or 0
    linear = 0
    for name, weight in layers.named_parameters():
        # Experts are one tensor [experts, out, in], or modules of a list; a token is multiplied with its active ones.
        routed = weight.dim() == 3 or re.search(r"\.experts\.\d+\.", name)
        if weight.dim() > 1:
            linear += weight.numel() * active // experts if routed and experts else weight.numel()
    return replace(
        dimensions,
        vocab=head.shape[0],
        linear_params=linear,
        head_params=head.numel(),
        weight_bytes=sum(weight.nbytes for weight in layers.parameters()) + head.nbytes,
    )
