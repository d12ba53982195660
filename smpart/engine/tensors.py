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

_UNSERVED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (), "begin_suppress_tokens": (), "diversity_penalty": (0.0,), "dola_layers": (),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,), "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,), "exponential_decay_length_penalty": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "guidance_scale": (1.0,), "min_length": (0,), "min_new_tokens": (0,), "no_repeat_ngram_size": (0,),
    "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0.0,), "remove_invalid_values": (False,),
    "sequence_bias": (),
    "stop_strings": (), "suppress_tokens": (), "top_h": (), "typical_p": (1.0,), "watermarking_config": (),
}  # fmt: skip
"""Settings of transformers' ``generate`` that change the answer and are not served, with values that do nothing."""


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
    _refuse_unserved(defaults)
    settings = dict(options)
    pad = settings.pop("pad_token_id", defaults.get("pad_token_id"))
    params = _params(settings, defaults, input_ids.shape[1])
    keep = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    prompts = [row[mask.bool()].tolist() for row, mask in zip(input_ids, keep, strict=True)]
    answers = [handle.result().token_ids for handle in engine.submit_all(prompts, [params] * len(prompts))]
    width = max(len(answer) for answer in answers)
    if pad is None:  # as transformers does
        pad = next(iter(params.stop_token_ids or _token_ids(defaults.get("eos_token_id"))), 0)
    grown = [[*answer, *[pad] * (width - len(answer))] for answer in answers]
    return torch.cat([input_ids, torch.tensor(grown, dtype=input_ids.dtype, device=input_ids.device)], dim=1)


def _refuse_unserved(defaults: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the model's own generation settings ask for what is not done here."""
    for name, harmless in _UNSERVED.items():
        value = defaults.get(name)
        if value is not None and value not in harmless:
            raise UsageError(
                f"the model's generation_config sets {name}={value!r}, which smpart does not do: "
                "unset it there before wrapping the model, or use model.generate"
            )


def _token_ids(value: Any) -> tuple[int, ...]:
    """One token id or several, as plain numbers; tensors too."""
    if value is None:
        return ()
    plain = value.tolist() if hasattr(value, "tolist") else value
    return tuple(plain) if isinstance(plain, list | tuple | set) else (plain,)


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
        chosen["stop_token_ids"] = _token_ids(stop_ids)
        chosen["ignore_eos"] = True
    if settings:
        raise UsageError(
            f"generate does not know {', '.join(sorted(settings))}; it takes max_new_tokens, max_length, "
            "do_sample, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_id, pad_token_id, seed"
        )
    return SamplingParams(**chosen)
