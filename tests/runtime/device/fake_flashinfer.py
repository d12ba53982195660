"""FlashInfer's two paged wrappers as its documentation describes them, computed by the oracle, strict about use.

Stands in for the package `flashinfer`: signatures and rules follow https://docs.flashinfer.ai/api/attention.html.
"""

from __future__ import annotations

from typing import Any

import torch
from paged_oracle import attend
from torch import Tensor


class _Wrapper:
    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= 128 << 20
        assert workspace.data_ptr() % 16 == 0
        assert layout == "NHD"
        self.planned = False

    def check_pages(self, indptr: Tensor, indices: Tensor, last: Tensor, page_size: int) -> None:
        for tensor in (indptr, indices, last):
            assert tensor.dtype == torch.int32
            assert tensor.dim() == 1
            assert tensor.is_contiguous()
        assert indptr.device.type == last.device.type == "cpu", "planning would wait for the device"
        counts = indptr.diff()
        assert indptr[0] == 0
        assert len(indptr) == len(last) + 1
        assert int(indptr[-1]) == len(indices)
        assert (counts >= 0).all()
        assert ((last >= 1) & (last <= page_size))[counts > 0].all()
        assert (last[counts == 0] == 0).all(), "the planner takes these for tokens"

    def settle(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str,
        window_left: int,
        logits_soft_cap: float | None,
        sm_scale: float | None,
        q_data_type: Any,
        kv_data_type: Any,
    ) -> None:
        assert heads % kv_heads == 0
        assert head_dim in (64, 128, 256)
        assert pos_encoding_mode == "NONE"
        assert window_left >= -1
        assert logits_soft_cap is None
        assert q_data_type in (torch.float16, torch.bfloat16)
        assert kv_data_type == q_data_type
        self.heads, self.kv_heads, self.head_dim, self.page_size = heads, kv_heads, head_dim, page_size
        self.window = None if window_left < 0 else window_left + 1
        self.scale = head_dim**-0.5 if sm_scale is None else sm_scale
        self.dtype = q_data_type
        self.planned = True

    def check_run(self, rows: int, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], out: Tensor | None) -> Tensor:
        assert self.planned, "run before plan"
        assert q.shape == (rows, self.heads, self.head_dim)
        assert q.dtype == self.dtype
        assert q.is_contiguous()
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (self.page_size, self.kv_heads, self.head_dim)
            assert cache.dtype == self.dtype
            assert cache.is_contiguous()
        if out is not None:
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            assert out.stride(-1) == 1
        return torch.empty_like(q) if out is None else out

    def answer(self, q: Tensor, pages: tuple[Tensor, Tensor], indices: Tensor, end: int) -> Tensor:
        first = 0 if self.window is None else max(0, end - self.window)
        return attend(q, torch.stack(pages), indices.tolist(), first, end, self.scale)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        self.use_tensor_cores = use_tensor_cores
        self.fixed = None
        if use_cuda_graph:
            assert paged_kv_indptr_buffer is not None
            assert paged_kv_indices_buffer is not None
            assert paged_kv_last_page_len_buffer is not None
            self.fixed = len(paged_kv_last_page_len_buffer)
            assert len(paged_kv_indptr_buffer) == self.fixed + 1
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        self.check_pages(indptr, indices, last_page_len, page_size)
        self.settle(
            num_qo_heads,
            num_kv_heads,
            head_dim,
            page_size,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
            kv_data_type,
        )
        if self.fixed is None:
            self.indptr, self.indices, self.last = indptr, indices, last_page_len
            return
        assert len(last_page_len) == self.fixed, "the batch size is fixed in CUDA graph mode"
        assert len(indices) <= len(self.indices), "more pages than the buffer for a CUDA graph holds"
        self.indptr.copy_(indptr)
        self.last.copy_(last_page_len)
        self.indices[: len(indices)].copy_(indices)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        """Reads the buffers, as a replayed graph does."""
        out = self.check_run(len(self.last), q, paged_kv_cache, out)
        for row in range(len(q)):
            pages = self.indices[self.indptr[row] : self.indptr[row + 1]]
            end = (len(pages) - 1) * self.page_size + int(self.last[row]) if len(pages) else 0
            out[row] = self.answer(q[row], paged_kv_cache, pages, end)
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD") -> None:
        super().__init__(float_workspace_buffer, kv_layout)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        assert causal
        assert qo_indptr.dtype == torch.int32
        assert qo_indptr.device.type == "cpu"
        assert qo_indptr[0] == 0
        assert (qo_indptr.diff() > 0).all()
        assert len(qo_indptr) == len(paged_kv_indptr)
        self.check_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        self.settle(
            num_qo_heads,
            num_kv_heads,
            head_dim_qk,
            page_size,
            pos_encoding_mode,
            window_left,
            logits_soft_cap,
            sm_scale,
            q_data_type,
            kv_data_type,
        )
        self.qo_indptr, self.indptr = qo_indptr, paged_kv_indptr
        self.indices, self.last = paged_kv_indices, paged_kv_last_page_len

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor | None = None) -> Tensor:
        """A causal mask that is aligned at the end: a chunk's last row attends to all of its sequence."""
        out = self.check_run(int(self.qo_indptr[-1]), q, paged_kv_cache, out)
        for chunk in range(len(self.last)):
            pages = self.indices[self.indptr[chunk] : self.indptr[chunk + 1]]
            first, stop = self.qo_indptr[chunk : chunk + 2].tolist()
            end = (len(pages) - 1) * self.page_size + int(self.last[chunk])
            for row in range(first, stop):
                out[row] = self.answer(q[row], paged_kv_cache, pages, end - (stop - 1 - row))
        return out
