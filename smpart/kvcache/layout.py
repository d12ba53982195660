"""How keys and values lie in memory, and how many bytes they take."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.errors import UnsupportedModel, UsageError

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Element types that KV can be stored in (torch's names), and their bytes."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One layer is ``[2, blocks, block_tokens, kv_heads, head_dim]``: FlashInfer's NHD pages, keys then values.

    Layers follow one another in one buffer.

    Attributes:
        dtype: torch's name of the element type, a key of `DTYPE_BYTES`.
        head_dim_v: size of a value head; None: as `head_dim`.

    Raises:
        UnsupportedModel: value heads differ in size from key heads.
        UsageError: an unknown dtype, or a dimension below 1.

    >>> KVLayout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16").block_bytes
    368640
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    block_tokens: int = 16
    head_dim_v: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"KV layout {name}={getattr(self, name)}: must be at least 1")
        if self.dtype not in DTYPE_BYTES:
            raise UsageError(f"KV dtype {self.dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
        if self.head_dim_v not in (None, self.head_dim):
            raise UnsupportedModel(
                f"key heads of {self.head_dim} and value heads of {self.head_dim_v} elements: KV pages need equal sizes"
            )

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        elements = 2 * self.layers * self.block_tokens * self.kv_heads * self.head_dim
        return elements * DTYPE_BYTES[self.dtype]

    def layer_shape(self, blocks: int) -> tuple[int, int, int, int, int]:
        """Shape of one layer's tensor: ``(2, blocks, block_tokens, kv_heads, head_dim)``."""
        return (2, blocks, self.block_tokens, self.kv_heads, self.head_dim)

    def total_bytes(self, blocks: int) -> int:
        """Bytes of the buffer that holds `blocks` blocks of every layer."""
        return blocks * self.block_bytes
