"""Paged attention by FlashInfer (https://docs.flashinfer.ai), where that package is installed.

Its wrappers plan on the host and run on the device. A wrapper's plan holds one window, so there is one wrapper a
distinct window and kind of row. It divides work by the whole device's SM count: a lane cannot tell it its own.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from smpart.errors import UnsupportedModel
from smpart.runtime.device.attention import Attended, AttentionShape, Bucket, Ints, Scratch

_WORKSPACE = 128 << 20
"""Bytes its documentation recommends, zeroed."""
_HEAD_DIMS = (64, 128, 256)


def unusable(device: torch.device, shape: AttentionShape) -> str | None:
    """Why FlashInfer cannot serve this shape on this device; None: nothing speaks against it."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type!r}"
    if find_spec("flashinfer") is None:
        return "it is not installed: pip install flashinfer-python"
    if shape.dtype not in (torch.float16, torch.bfloat16):
        return f"it has no {str(shape.dtype).removeprefix('torch.')} kernels"
    if shape.head_dim not in _HEAD_DIMS:
        return f"it has no kernels for heads of {shape.head_dim} dimensions"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


class FlashInferAttention:
    """See `Attention`.

    What a forward attends to is fixed by `prepare`; `decode` and `prefill` take the same numbers as tensors and do
    not look at them. Rows without tokens have no pages, which FlashInfer's kernels answer with zeros.
    """

    name = "flashinfer"

    def __init__(self, shape: AttentionShape, scratch: Scratch, units: int, bucket: Bucket | None = None) -> None:
        self._shape = shape
        self._bucket = bucket
        self._device = scratch.device
        self._workspace = scratch.take(_WORKSPACE)
        self._decoders = {window: self._decoder() for window in shape.windows}
        self._prefillers = {window: self._prefiller() for window in shape.windows} if bucket is None else {}
        self._planned = torch.Event(self._device) if self._device.type == "cuda" else None

    def prepare(self, attended: Attended) -> None:
        """See `Attention.prepare`."""
        if self._bucket is not None:
            self._bucket.check(attended)
        if self._planned is not None:
            # A wrapper writes each plan to one pinned buffer: the copy of the last one has to have left it. One step
            # ahead it has, as it ran before the step that runs now.
            self._planned.synchronize()
        if len(attended.lengths):
            pages = self._pages(attended.lengths, attended.tables)
            for window, decoder in self._decoders.items():
                decoder.plan(*pages, *self._numbers(), **self._settings(window))
        if len(attended.starts):
            lengths = attended.starts + np.diff(attended.offsets)
            pages = self._pages(lengths, attended.chunk_tables)
            for window, prefiller in self._prefillers.items():
                settings = self._settings(window)
                prefiller.plan(self._host(attended.offsets), *pages, *self._numbers(), causal=True, **settings)
        if self._planned is not None:
            self._planned.record()

    def decode(
        self,
        query: Tensor,
        pages: Tensor,
        tables: Tensor,
        lengths: Tensor,
        window: int | None,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Attention.decode`."""
        return self._run(self._decoders, query, pages, window, scale, out)

    def prefill(
        self,
        query: Tensor,
        pages: Tensor,
        tables: Tensor,
        offsets: Tensor,
        starts: Tensor,
        window: int | None,
        scale: float,
        out: Tensor | None = None,
    ) -> Tensor:
        """See `Attention.prefill`."""
        return self._run(self._prefillers, query, pages, window, scale, out)

    def _run(
        self,
        wrappers: dict[int | None, Any],
        query: Tensor,
        pages: Tensor,
        window: int | None,
        scale: float,
        out: Tensor | None,
    ) -> Tensor:
        if window not in wrappers or scale != self._shape.scale:
            raise UnsupportedModel(
                f"an attention layer has window {window} and scale {scale:g}, but FlashInfer planned for "
                f"windows {self._shape.windows} and scale {self._shape.scale:g}: use attention 'triton'"
            )
        result: Tensor = wrappers[window].run(query.contiguous(), (pages[0], pages[1]), out=out)
        return result

    def _decoder(self) -> Any:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        # FlashInfer's tensor-core decode pays from groups of four on (the rule of SGLang).
        settings: dict[str, Any] = {"use_tensor_cores": self._shape.heads >= 4 * self._shape.kv_heads}
        if self._bucket is not None:
            rows, width = self._bucket.rows, self._bucket.width
            settings |= {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": self._ints(rows + 1),
                "paged_kv_indices_buffer": self._ints(rows * width),
                "paged_kv_last_page_len_buffer": self._ints(rows),
            }
        return BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", **settings)

    def _prefiller(self) -> Any:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        return BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")

    def _ints(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def _numbers(self) -> tuple[int, int, int, int]:
        shape = self._shape
        return shape.heads, shape.kv_heads, shape.head_dim, shape.block_tokens

    def _settings(self, window: int | None) -> dict[str, Any]:
        """Keywords of a plan. FlashInfer's window does not count the row's own token."""
        dtype = self._shape.dtype
        return {
            "window_left": -1 if window is None else window - 1,
            "sm_scale": self._shape.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def _pages(self, lengths: Ints, tables: Ints) -> tuple[Tensor, Tensor, Tensor]:
        """Block tables in compressed rows: where each row's blocks start, all blocks, tokens in each last one.

        The blocks, much the largest, are sent ahead: a wrapper's own copy of them from host memory would wait.
        """
        size = self._shape.block_tokens
        counts = -(-lengths // size)
        starts = np.zeros(len(lengths) + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        blocks = tables[np.arange(tables.shape[1]) < counts[:, None]]
        last = (lengths - np.maximum(counts - 1, 0) * size).astype(np.int32)
        return self._host(starts), self._host(blocks).to(self._device, non_blocking=True), self._host(last)

    def _host(self, values: Ints) -> Tensor:
        """A tensor on the host that can be copied to the device without waiting."""
        tensor = torch.from_numpy(np.ascontiguousarray(values, np.int32))
        return tensor.pin_memory() if self._device.type == "cuda" else tensor
