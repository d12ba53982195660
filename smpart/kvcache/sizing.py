"""How many blocks a pool gets: from the user's `KVConfig`, or from the memory the process may really use."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.errors import UsageError
from smpart.kvcache.layout import DTYPE_BYTES, KVLayout

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class KVConfig:
    """What a user may say about KV memory.

    Attributes:
        block_tokens: tokens in one block.
        memory_bytes: bytes for KV; or
        blocks: number of blocks. Neither: a share of the memory the process may use.
        max_len: longest prompt and answer together, in tokens; None: the model's context length.
        max_requests: requests admitted at once.
        prefix_cache: reuse the KV of equal prefixes.
        dtype: torch's name of the element type; ``auto``: the model's.

    Raises:
        UsageError: a value out of range, or both `memory_bytes` and `blocks`.

    >>> KVConfig(blocks=512).prefix_cache
    True
    """

    block_tokens: int = 16
    memory_bytes: int | None = None
    blocks: int | None = None
    max_len: int | None = None
    max_requests: int = 256
    prefix_cache: bool = True
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name in ("block_tokens", "max_requests"):
            _require_count(name, getattr(self, name))
        for name in ("memory_bytes", "blocks", "max_len"):
            if getattr(self, name) is not None:
                _require_count(name, getattr(self, name))
        if self.memory_bytes is not None and self.blocks is not None:
            raise UsageError("KV memory_bytes and blocks both given: one follows from the other, give one")
        if not isinstance(self.prefix_cache, bool):
            raise UsageError(f"KV prefix_cache={self.prefix_cache!r}: must be True or False")
        if self.dtype != "auto" and self.dtype not in DTYPE_BYTES:
            raise UsageError(f"KV dtype={self.dtype!r}: must be auto or one of {', '.join(DTYPE_BYTES)}")


def blocks_that_fit(layout: KVLayout, budget_bytes: int) -> int:
    """Blocks of every layer that fit into `budget_bytes`."""
    return max(budget_bytes, 0) // layout.block_bytes


def default_budget(available_bytes: int, weights_bytes: int, fraction: float = 0.5) -> int:
    """Bytes for KV when the user names none: a fraction of what the weights leave.

    Args:
        available_bytes: memory the process may still use, container limits included.
        weights_bytes: weights that are still to be placed there (0: already loaded).
        fraction: share for KV, in (0, 1]; the rest is for activations and for others on the machine.

    Raises:
        UsageError: `fraction` out of range.
    """
    if not 0.0 < fraction <= 1.0:
        raise UsageError(f"KV memory fraction {fraction}: must be above 0 and at most 1")
    return int(max(available_bytes - weights_bytes, 0) * fraction)


def pool_blocks(
    config: KVConfig,
    layout: KVLayout,
    max_len: int,
    available_bytes: int,
    weights_bytes: int = 0,
    *,
    fraction: float = 0.5,
) -> int:
    """Number of blocks for a pool: what the user asked for, or what fits, as far as admitted requests can use it.

    Args:
        config: `blocks` and `memory_bytes` are taken as given; with neither, `default_budget` is shared out, up to
            `max_requests` requests of `max_len` tokens.
        layout: what a block is.
        max_len: longest prompt and answer together, in tokens.
        available_bytes: memory the process may still use, container limits included.
        weights_bytes: weights that are still to be placed there.
        fraction: see `default_budget`.

    Raises:
        UsageError: not even one request of `max_len` tokens fits, or what was asked for exceeds the memory.
    """
    longest = -(-max_len // layout.block_tokens)
    if config.blocks is not None:
        blocks = config.blocks
    elif config.memory_bytes is not None:
        blocks = blocks_that_fit(layout, config.memory_bytes)
    else:
        budget = default_budget(available_bytes, weights_bytes, fraction)
        blocks = min(blocks_that_fit(layout, budget), config.max_requests * longest)
    wanted, left = layout.total_bytes(blocks), max(available_bytes - weights_bytes, 0)
    if wanted > left:
        raise UsageError(
            f"KV memory of {blocks} blocks takes {_mib(wanted)}, this process may use {_mib(left)}: "
            f"ask for at most {blocks_that_fit(layout, left)} blocks"
        )
    if blocks < longest:
        raise UsageError(
            f"one request of max_len={max_len} tokens takes {longest} KV blocks ({_mib(layout.total_bytes(longest))}), "
            f"the pool has {blocks} ({_mib(wanted)}): set KVConfig(max_len={max(blocks, 1) * layout.block_tokens}) "
            f"or less, or give it more memory (memory_bytes or blocks; {_mib(left)} may be used)"
        )
    return blocks


def _require_count(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"KV {name}={value!r}: must be a whole number of at least 1")


def _mib(size: int) -> str:
    return f"{size / _MIB:.1f} MiB"
