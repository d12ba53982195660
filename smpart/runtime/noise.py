"""Noise for sampling: a function of (seed, output index, token id) alone, on every device.

The bits come from Philox4x32-10, a counter-based generator (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011), in torch integer operations, so that they are the same wherever they are computed and in
whatever batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10

_BELOW_ONE = 1.0 - 2.0**-24
_AT_ONCE = 2**22
"""Values drawn at once: they take about 100 MB on the way."""


def gumbel(seeds: Tensor, indexes: Tensor, count: int) -> Tensor:
    """Standard Gumbel noise of tokens ``0 ... count - 1``; a longer draw begins with the same values.

    Args:
        seeds: int64[rows], all 64 bits count.
        indexes: int64[rows], output index of each row, 0 <= index < 2**32.

    Returns:
        float32[rows, count]. It is ``-log(-log(1 - u))`` with u of 32 bits: the large values, which decide, come from
        small u, where float32 keeps every one of those bits. So float64 would gain nothing, and is slow on most GPUs.
    """
    rows = max(1, _AT_ONCE // count)
    parts = [_gumbel(s, i, count) for s, i in zip(torch.split(seeds, rows), torch.split(indexes, rows), strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Ten rounds of Philox4x32.

    Args:
        counter: int64[4, ...], each a 32-bit word.
        key: int64[2, ...], each a 32-bit word; its other dimensions broadcast to the counter's.

    Returns:
        int64[4, ...], each a 32-bit word.
    """
    # Words 0 and 2 are multiplied, 1 and 3 mixed in. A wrapped int64 product has all bits of the unsigned one. Bits
    # above a word may stay in what is mixed in: they are cut off before the next product.
    multiplied, mixed = torch.stack((counter[0], counter[2])), torch.stack((counter[1], counter[3]))
    products = torch.empty_like(mixed)
    steps = torch.arange(_ROUNDS, device=key.device).view(-1, *[1] * (key.dim() - 1))
    for round_key in torch.stack([word + weyl * steps for word, weyl in zip(key, _WEYL, strict=True)], 1):
        torch.mul(multiplied[1], _MULTIPLIERS[1], out=products[0])
        torch.mul(multiplied[0], _MULTIPLIERS[0], out=products[1])
        torch.bitwise_right_shift(products, 32, out=multiplied)
        multiplied.bitwise_xor_(mixed).bitwise_xor_(round_key).bitwise_and_(_WORD)
        mixed, products = products, mixed
    return torch.stack((multiplied, mixed.bitwise_and_(_WORD)), 1).flatten(0, 1)


def _gumbel(seeds: Tensor, indexes: Tensor, count: int) -> Tensor:
    blocks = torch.arange(-(-count // 4), device=seeds.device)
    counter = blocks.new_zeros(4, len(seeds), len(blocks))
    counter[0] = blocks
    counter[2] = indexes[:, None]
    key = torch.stack((seeds & _WORD, seeds >> 32 & _WORD))[:, :, None]
    words = philox4x32(counter, key).permute(1, 2, 0).flatten(1)[:, :count]
    # In (0, 1): words near 2**32 would round to 1.
    uniform = words.float().add_(0.5).mul_(2.0**-32).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
