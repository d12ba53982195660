"""Block pool, block tables, prefix tree: storage and movement of KV, no decisions."""
