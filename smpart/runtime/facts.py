"""What serving a model needs to know of it, and whether it can be served: by looking at it, then by trying.

The trial runs one short random sequence through the model's ordinary forward and through the paged path (two prefill
chunks, then decode steps, beside a neighbour, on scattered pages). Whatever a family does that the paged path does
not reproduce shows as different logits, and the model is refused. One more step, which computes nothing, shows what
keeps its decode steps out of CUDA graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn import ModuleList
from transformers import DynamicCache, PreTrainedModel

from smpart.errors import UnsupportedModel
from smpart.runtime.attention import PagedCache
from smpart.runtime.batch import Batch, Chunk
from smpart.runtime.board import Board
from smpart.runtime.capturable import why_uncapturable
from smpart.runtime.packing import Packing

_LAYER_PATHS = ("layers", "h", "decoder.layers")
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}
_TOKENS, _BLOCK = 24, 4
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
_LOW_PRECISION_TOLERANCE = 0.15
_LONGEST = 1 << 20
"""Longest sequence over which masks are examined, whatever length a model claims."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about one model. Plain data: another process's adapter of the same model can be given them.

    Attributes:
        layers: decoder layers, each with keys and values of its own.
        vocab: logits at one position.
        max_positions: longest sequence the model can serve exactly.
        windows: sliding window of each layer in tokens, None where attention is full.
        dtype: of keys and values.
        heads: query heads of a layer.
        scale: factor of attention scores; None: layers differ.
        uncapturable: why CUDA graphs cannot hold its decode steps, as far as can be told without a device; None: they
            can.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_positions: int
    windows: tuple[int | None, ...]
    dtype: torch.dtype
    heads: int
    scale: float | None
    uncapturable: str | None = None


def unsupported(model: PreTrainedModel, reason: str) -> UnsupportedModel:
    """The error that refuses a model."""
    return UnsupportedModel(f"{type(model).__name__} cannot be served: {reason}")


def check_structure(model: PreTrainedModel) -> None:
    """Refuse, with `UnsupportedModel`, what can be seen without running the model."""
    config = model.config.get_text_config(decoder=True)
    if getattr(model.config, "is_encoder_decoder", False):
        raise unsupported(model, "it is an encoder-decoder model")
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        raise unsupported(model, "it has no language-model head")
    odd = set(getattr(config, "layer_types", None) or ()) - _PLAIN_LAYERS
    if odd:
        raise unsupported(model, f"it has layers that are not plain attention ({', '.join(sorted(odd))})")
    if not model._can_set_attn_implementation():
        raise unsupported(model, "it does not use transformers' attention interface")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise unsupported(model, "its forward cannot select positions (no logits_to_keep)")


def decoder_layers(model: PreTrainedModel) -> ModuleList:
    """The model's decoder layers, in order."""
    for path in _LAYER_PATHS:
        try:
            found = model.base_model.get_submodule(path)
        except AttributeError:
            continue
        if isinstance(found, ModuleList) and len(found):
            return found
    raise unsupported(model, f"its base model has no decoder layers at {', '.join(_LAYER_PATHS)}")


def max_positions(model: PreTrainedModel) -> int:
    """Longest sequence that comes out the same whatever else is in the forward."""
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int):
        raise unsupported(model, "its config states no max_position_embeddings")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        # These stretch positions by the longest sequence in the forward: a neighbour's length would change ours.
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            for source in (parameters.get, vars(config).get):
                longest = min(longest, source("original_max_position_embeddings") or longest)
    return longest


@torch.inference_mode()
def find_facts(model: PreTrainedModel, cache_name: str, run: Callable[[PagedCache], Tensor]) -> ModelFacts:
    """Try the model: its facts, or `UnsupportedModel`.

    Args:
        cache_name: what its forward calls the KV cache.
        run: runs a packed forward; logits [sampled rows, vocab].
    """
    if model.device.type != "cpu":
        raise unsupported(model, f"it is on {model.device}; move it to the CPU first (model.to('cpu'))")
    positions = max_positions(model)
    vocab = int(model.config.get_text_config(decoder=True).vocab_size)
    tokens = torch.randint(vocab, (min(_TOKENS, positions),), generator=torch.Generator().manual_seed(0))
    try:
        plain, keys = _plain(model, cache_name, tokens)
        where, paged, windows, (heads, scale) = _paged(run, tokens, keys, min(positions, _LONGEST))
        _compare(plain[where], paged)
    except UnsupportedModel as error:
        raise unsupported(model, str(error)) from None
    except Exception as error:
        line = " ".join(str(error).split())[:200]
        raise unsupported(model, f"a trial forward failed ({type(error).__name__}: {line})") from error
    facts = ModelFacts(
        layers=len(keys),
        kv_heads=keys[0].shape[1],
        head_dim=keys[0].shape[3],
        vocab=plain.shape[-1],
        max_positions=positions,
        windows=windows,
        dtype=keys[0].dtype,
        heads=heads,
        scale=scale,
    )
    return replace(facts, uncapturable=why_uncapturable(model, list(decoder_layers(model)), facts, run))


def _plain(model: PreTrainedModel, cache_name: str, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [n, vocab] of an ordinary forward, and each layer's keys, [1, kv_heads, n, head_dim]."""
    output = model(input_ids=tokens[None], use_cache=True)
    cache = output.get(cache_name) or output.get("past_key_values")
    if not isinstance(cache, DynamicCache):
        raise UnsupportedModel(f"it keeps its state in a {type(cache).__name__}, not in a plain KV cache")
    pairs = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in cache.layers]
    keys = [key for key, _ in pairs if isinstance(key, Tensor) and key.dim() == 4]
    values = [value for _, value in pairs if isinstance(value, Tensor)]
    if not len(keys) == len(values) == len(pairs) == len(decoder_layers(model)):
        raise UnsupportedModel("not every decoder layer keeps keys and values of its own")
    if any(k.shape != v.shape for k, v in zip(keys, values, strict=True)):
        raise UnsupportedModel("its keys and values differ in size (latent attention)")
    if len({(k.shape[1], k.shape[3]) for k in keys}) > 1:
        raise UnsupportedModel("its layers differ in KV heads or head dimension")
    return output.logits[0], keys


def _paged(
    run: Callable[[PagedCache], Tensor], tokens: Tensor, keys: list[Tensor], horizon: int
) -> tuple[list[int], Tensor, tuple[int | None, ...], tuple[int, float | None]]:
    """The same sequence in pieces: positions, logits [positions, vocab] at them, each layer's window, heads, scale."""
    count = len(tokens)
    blocks = -(-count // _BLOCK)
    board = Board.over(bytearray(Board.size(2, count, _BLOCK)), 2, count, _BLOCK)
    for slot, known in enumerate((tokens, tokens.flip(0))):
        board.write_tokens(slot, known.tolist())
        board.append_blocks(slot, 0, range(2 * blocks - 1 - slot, -1, -2))
    shape = (2, 2 * blocks, _BLOCK, keys[0].shape[1], keys[0].shape[3])
    memory = [torch.full(shape, torch.nan, dtype=k.dtype) for k in keys]
    first, second = count // 3, count - 2
    none, neighbour = np.zeros(0, np.int32), np.array([1], np.int32)
    steps = [
        (first - 1, Batch(none, none, (Chunk(0, 0, first, True), Chunk(1, 0, 5, False)))),
        (second - 1, Batch(neighbour, neighbour * 5, (Chunk(0, first, second - first, True),))),
        (second, Batch(np.array([1, 0], np.int32), np.array([6, second], np.int32))),
        (second + 1, Batch(np.array([1, 0], np.int32), np.array([7, second + 1], np.int32))),
    ]
    windows: tuple[int | None, ...] | None = None
    queries: set[tuple[int, float]] = set()
    logits = []
    for _, batch in steps:
        cache = PagedCache(memory, Packing(batch, board, keys[0].dtype), windows, horizon)
        found = run(cache)
        if cache.order != list(range(len(keys))):
            raise UnsupportedModel("its layers do not each store keys and values once, in order")
        if len(cache.learned) != len(keys) and windows is None:
            raise UnsupportedModel("its attention does not go through transformers' attention interface")
        queries |= cache.queries
        windows = windows or tuple(cache.learned[i] for i in range(len(keys)))
        logits.append(found[cache.packing.slots.tolist().index(0)])
    assert windows is not None
    heads, scales = zip(*queries, strict=True)
    if len(set(heads)) != 1:
        raise UnsupportedModel("its layers differ in query heads")
    scale = scales[0] if len(set(scales)) == 1 else None
    return [position for position, _ in steps], torch.stack(logits), windows, (heads[0], scale)


def _compare(plain: Tensor, paged: Tensor) -> None:
    if not bool(plain.isfinite().all()):
        raise UnsupportedModel("its own logits are not finite")
    limit = _TOLERANCE.get(plain.dtype, _LOW_PRECISION_TOLERANCE)
    plain, paged = plain.double(), paged.double()
    spread = (plain - plain.mean(-1, keepdim=True)).norm(dim=-1).clamp_min(1e-12)
    error = float(((plain - paged).norm(dim=-1) / spread).max())
    if not error <= limit:
        raise UnsupportedModel(
            f"paged logits differ from its own by {error:.1e} of their spread (limit {limit:g}): "
            "it does something to attention or positions that the paged path does not reproduce"
        )
