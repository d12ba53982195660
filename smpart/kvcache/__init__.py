"""Block pool, block tables, prefix keys and sizes of KV memory: storage and movement, no decisions.

Imports no torch; the tensors themselves are in `smpart.kvcache.memory`.
"""

from smpart.kvcache.layout import KVLayout
from smpart.kvcache.pool import BlockPool, OutOfBlocks
from smpart.kvcache.prefix import HashChain, block_hashes
from smpart.kvcache.sizing import KVConfig, blocks_that_fit, default_budget, pool_blocks
from smpart.kvcache.table import BlockTable

__all__ = [
    "BlockPool",
    "BlockTable",
    "HashChain",
    "KVConfig",
    "KVLayout",
    "OutOfBlocks",
    "block_hashes",
    "blocks_that_fit",
    "default_budget",
    "pool_blocks",
]
