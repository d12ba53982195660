"""Hugging Face's shape of ``generate``: a tensor in, a tensor out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from smpart.errors import UsageError
from smpart.runtime.sampling import SamplingParams

if TYPE_CHECKING:
    import torch

    from smpart.engine.handle import Handle


class Submitter(Protocol):
    """What serves the rows."""

    def submit_all(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams | None]) -> list[Handle]:
        """Queue several prompts, all or none."""


_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


def generate_tensor(
    engine: Submitter,
    defaults: Mapping[str, Any],
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> torch.Tensor:
    """Answer each row of `input_ids`, int64[batch, length], as transformers' ``generate`` would.

    Args:
        defaults: the model's own generation settings, used where `options` are silent.
        attention_mask: int[batch, length], 0 where a row is padded.

    Returns:
        int64[batch, length + new tokens], rows that ended early filled with the padding token.
    """
    import torch

    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if value is not None and (not isinstance(value, torch.Tensor) or value.device.type == "meta"):
            raise UsageError(f"{name} must be a tensor with values, not {type(value).__name__}")
    if input_ids.dim() != 2 or input_ids.shape[0] == 0:
        raise UsageError(f"input_ids of shape {tuple(input_ids.shape)}: must be [batch, length] with at least one row")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise UsageError(f"attention_mask {tuple(attention_mask.shape)} and input_ids {tuple(input_ids.shape)} differ")
    settings = dict(options)
    pad = settings.pop("pad_token_id", defaults.get("pad_token_id"))
    params = _params(settings, defaults, input_ids.shape[1])
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, keep, strict=True)]
    answers = [handle.result().token_ids for handle in engine.submit_all(prompts, [params] * len(prompts))]
    width = max(len(answer) for answer in answers)
    if pad is None and any(len(answer) < width for answer in answers):
        pad = next(iter(params.stop_token_ids), 0)
    grown = [[*answer, *[pad] * (width - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(grown, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def _params(settings: dict[str, Any], defaults: Mapping[str, Any], length: int) -> SamplingParams:
    new = settings.pop("max_new_tokens", None)
    total = settings.pop("max_length", None)
    if new is None and total is not None:
        new = total - length
    elif new is None:
        new = defaults.get("max_new_tokens") or 20
    sample = settings.pop("do_sample", defaults.get("do_sample", False))
    stop_ids = settings.pop("eos_token_id", None)
    chosen: dict[str, Any] = {
        "max_tokens": new,
        "seed": settings.pop("seed", None),
        "repetition_penalty": settings.pop("repetition_penalty", defaults.get("repetition_penalty") or 1.0),
    }
    given = {name: settings.pop(name) for name in _SAMPLING if name in settings}
    if sample:
        chosen.update({name: defaults[name] for name in _SAMPLING if defaults.get(name) is not None})
        chosen.update(given)
        chosen.setdefault("temperature", 1.0)
    if stop_ids is not None:
        chosen["stop_token_ids"] = (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
        chosen["ignore_eos"] = True
    if settings:
        raise UsageError(
            f"generate does not know {', '.join(sorted(settings))}; it takes max_new_tokens, max_length, "
            "do_sample, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, pad_token_id, seed"
        )
    return SamplingParams(**chosen)
