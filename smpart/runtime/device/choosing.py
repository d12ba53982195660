"""Which attention a model gets on a device: the best that works there, tried out before it is relied on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch

from smpart.errors import BackendUnavailable, UsageError
from smpart.runtime.device import flashinfer
from smpart.runtime.device.attention import Attended, Attention, AttentionMaker, AttentionShape, Bucket, Scratch
from smpart.runtime.device.gather import GatherAttention

logger = logging.getLogger(__name__)

NAMES = ("flashinfer", "triton", "gather")
"""In order of preference."""


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention a model gets on one device.

    Attributes:
        name: one of `NAMES`.
        reason: why this one, for logs and reports.
    """

    name: str
    reason: str
    shape: AttentionShape
    maker: AttentionMaker

    def make(self, scratch: Scratch, units: int, bucket: Bucket | None = None) -> Attention:
        """One for a lane of `units` SMs, with that lane's scratch memory and its stream current; see `Attention`."""
        return self.maker(self.shape, scratch, units, bucket)


def choose_attention(device: torch.device, shape: AttentionShape, name: str = "auto") -> AttentionChoice:
    """The first of FlashInfer, Triton and gather that works here, or the one asked for by name.

    Those that are installed are tried on a few rows, which compiles their kernels, and checked against plain torch.

    Raises:
        UsageError: there is none of that name.
        BackendUnavailable: the one asked for cannot be used; the message says why.
    """
    if name != "auto" and name not in NAMES:
        raise UsageError(f"attention {name!r} is not known: use auto, {', '.join(NAMES)}")
    passed_over: list[str] = []
    for candidate in NAMES if name == "auto" else (name,):
        why_not = _UNUSABLE[candidate](device, shape) or _tried(candidate, device, shape)
        if why_not is None:
            reason = "; ".join(passed_over) if name == "auto" else "asked for"
            choice = AttentionChoice(candidate, reason or "the first choice", shape, _maker(candidate))
            log = logger.warning if candidate == "gather" and name == "auto" else logger.info
            log("attention on %s: %s (%s)", device, choice.name, choice.reason)
            return choice
        passed_over.append(f"{candidate} not: {why_not}")
    raise BackendUnavailable(f"attention on {device}: {'; '.join(passed_over)}")


def _triton_unusable(device: torch.device, shape: AttentionShape) -> str | None:
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type!r}"
    if find_spec("triton") is None:
        return "it is not installed: pip install triton"
    if shape.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it has no {str(shape.dtype).removeprefix('torch.')} kernels"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "its kernels need compute capability 8.0"
    return None


_UNUSABLE: dict[str, Callable[[torch.device, AttentionShape], str | None]] = {
    "flashinfer": flashinfer.unusable,
    "triton": _triton_unusable,
    "gather": lambda device, shape: None,
}


def _maker(name: str) -> AttentionMaker:
    if name == "flashinfer":
        return flashinfer.FlashInferAttention
    if name == "triton":
        from smpart.runtime.device.triton_attention import TritonAttention

        return TritonAttention
    return GatherAttention


def _tried(name: str, device: torch.device, shape: AttentionShape) -> str | None:
    """What went wrong when it was tried on a few rows; None: its results are right."""
    try:
        error = _error(_maker(name), device, shape)
    except Exception as exception:
        line = (str(exception).splitlines() or [""])[0]
        return f"it failed when tried: {type(exception).__name__}: {line}"
    tolerance = 1e-4 if shape.dtype == torch.float32 else 3e-2
    return None if error <= tolerance else f"its results were wrong by {error:.1g} when tried"


def _error(maker: AttentionMaker, device: torch.device, shape: AttentionShape) -> float:
    """Largest difference from gather in float32, over decode rows and chunks of every window."""
    size = shape.block_tokens
    random = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=random)
    starts, offsets = np.array([0, size + 1], np.int32), np.array([0, 2, 7], np.int32)
    lengths, tables = np.array([0, 1, 4 * size - 1], np.int32), np.array([[0] * 4, [1] * 4, [4, 2, 0, 3]], np.int32)
    attended = Attended(lengths, tables, offsets, starts, np.ascontiguousarray(tables[1:, ::-1]))
    pages = draw(2, 5, size, shape.kv_heads, shape.head_dim).to(shape.dtype)
    query = draw(int(offsets[-1]), shape.heads, shape.head_dim).to(shape.dtype)
    on_host = _Trial(attended, query.float(), pages.float(), GatherAttention(shape, Scratch(pages.device), 1))
    here = _Trial(attended, query.to(device), pages.to(device), maker(shape, Scratch(device), 1))
    errors = [
        (mine.float().cpu() - right).abs().max().item()
        for window in shape.windows
        for mine, right in zip(here.run(window, shape.scale), on_host.run(window, shape.scale), strict=True)
    ]
    return float(np.max(errors))  # NaN stays NaN, and is no small error


@dataclass(frozen=True, slots=True)
class _Trial:
    """One attention with inputs to try it on."""

    attended: Attended
    query: torch.Tensor
    pages: torch.Tensor
    attention: Attention

    def run(self, window: int | None, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Results of decode rows and of chunks."""
        on_device = partial(torch.as_tensor, device=self.query.device)
        attended, query, pages = self.attended, self.query, self.pages
        self.attention.prepare(attended)
        rows = self.attention.decode(
            query[: len(attended.lengths)],
            pages,
            on_device(attended.tables),
            on_device(attended.lengths),
            window,
            scale,
        )
        chunks = self.attention.prefill(
            query,
            pages,
            on_device(attended.chunk_tables),
            on_device(attended.offsets),
            on_device(attended.starts),
            window,
            scale,
        )
        return rows, chunks
