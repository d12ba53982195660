"""KV memory: torch tensors over one buffer that both phases, in whatever process, read and write in place."""

from __future__ import annotations

from dataclasses import dataclass
from mmap import mmap

import torch

from smpart.errors import UsageError
from smpart.kvcache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class KVMemory:
    """The KV of every layer, as views of one buffer.

    Attributes:
        layers: one tensor a decoder layer, each of ``layout.layer_shape(blocks)``: ``layer[0]`` keys,
            ``layer[1]`` values.
        buffer: uint8[bytes], the whole memory.
    """

    layout: KVLayout
    blocks: int
    layers: tuple[torch.Tensor, ...]
    buffer: torch.Tensor

    @classmethod
    def over(cls, buffer: mmap | bytearray | memoryview | torch.Tensor, layout: KVLayout, blocks: int) -> KVMemory:
        """Lay `blocks` blocks over a buffer from its first byte on. Copies nothing.

        Args:
            buffer: writable bytes (a mapped memfd is shared with other processes), or a contiguous uint8 tensor on
                any device. It must be zeroed: a NaN left behind would reach the output even where it is masked.
            layout: shape and element type.
            blocks: number of blocks.

        Raises:
            UsageError: the buffer is too small, read-only, or a tensor of another kind.
        """
        size = layout.total_bytes(blocks)
        flat = _bytes_of(buffer, size)
        layers = flat.view(getattr(torch, layout.dtype)).view(layout.layers, *layout.layer_shape(blocks))
        return cls(layout, blocks, tuple(layers.unbind()), flat)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers together."""
        return self.buffer.numel()

    @property
    def data_ptr(self) -> int:
        """Address of the first byte in this process."""
        return self.buffer.data_ptr()

    def offset(self, view: torch.Tensor) -> int:
        """Byte at which a tensor begins in this memory: equal in every process that maps the same buffer.

        Raises:
            UsageError: the tensor lies elsewhere; it is a copy.
        """
        offset = view.data_ptr() - self.data_ptr
        if view.device != self.buffer.device or not 0 <= offset < self.nbytes:
            raise UsageError(f"a tensor of shape {tuple(view.shape)} lies outside the KV memory: it is a copy")
        return offset


def _bytes_of(buffer: mmap | bytearray | memoryview | torch.Tensor, size: int) -> torch.Tensor:
    """The first `size` bytes of a buffer as a tensor over the same memory."""
    if isinstance(buffer, torch.Tensor):
        if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
            raise UsageError(f"KV memory over {buffer.dtype}{list(buffer.shape)}: must be contiguous uint8[bytes]")
        available = buffer.numel()
    else:
        view = memoryview(buffer)
        if view.readonly:
            raise UsageError("KV memory over a read-only buffer: map it writable")
        available = view.nbytes
    if available < size:
        raise UsageError(f"KV memory needs {size} bytes, the buffer has {available}")
    return (
        buffer[:size] if isinstance(buffer, torch.Tensor) else torch.frombuffer(buffer, dtype=torch.uint8, count=size)
    )
