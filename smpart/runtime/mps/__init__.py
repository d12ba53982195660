"""The runtime of backend `mps`: one process holds weights and KV memory, one worker a share computes on them."""
