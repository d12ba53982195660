"""Sampling noise: the published answers of the generator, the distribution, and that all of a key matters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from smpart.runtime import noise
from smpart.runtime.noise import gumbel, philox4x32

# Lines "philox4x32 10" of tests/kat_vectors in Random123 1.14, the authors' own library: counter, key, answer.
KNOWN_ANSWERS = """
00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8
ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd
243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1
"""


def int64(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, np.uint64).view(np.int64))


def draw(seed: int, index: int, count: int = 64) -> torch.Tensor:
    return gumbel(int64(seed), int64(index), count)[0]


def test_published_answers():
    words = torch.tensor([[int(word, 16) for word in line.split()] for line in KNOWN_ANSWERS.strip().splitlines()]).T
    assert philox4x32(words[:4], words[4:6]).tolist() == words[6:].tolist()


def test_inputs_stay_as_they_are_and_keys_broadcast():
    counter = torch.arange(24).view(4, 2, 3)
    key = torch.tensor([[[5], [6]], [[7], [8]]])
    words = philox4x32(counter, key)
    assert torch.equal(counter, torch.arange(24).view(4, 2, 3)) and key.tolist() == [[[5], [6]], [[7], [8]]]
    assert torch.equal(words, philox4x32(counter, key.expand(2, 2, 3).contiguous()))


def test_noise_is_gumbel():
    values = draw(5, 3, 20_000).numpy()
    assert stats.kstest(values, stats.gumbel_r.cdf).pvalue > 1e-4


def test_a_shorter_draw_is_a_prefix_and_neighbours_change_nothing():
    seeds, indexes = int64(9, 5, 7, 5), int64(0, 3, 1, 4)
    together = gumbel(seeds, indexes, 1001)
    for row in range(4):
        assert torch.equal(together[row], gumbel(seeds[row : row + 1], indexes[row : row + 1], 1603)[0, :1001])


def test_many_rows_are_drawn_in_parts(monkeypatch):
    seeds, indexes = torch.arange(7), torch.arange(7)
    expected = gumbel(seeds, indexes, 40)
    monkeypatch.setattr(noise, "_AT_ONCE", 100)
    assert torch.equal(gumbel(seeds, indexes, 40), expected)


def test_every_bit_of_a_seed_and_of_an_index_matters():
    draws = [draw(0, 0), *(draw(1 << bit, 0) for bit in range(64)), *(draw(0, 1 << bit) for bit in range(32))]
    assert len({tuple(values.tolist()) for values in draws}) == 97
    # A changed bit leaves nothing of the old values, not merely some of them.
    assert all((values == draws[0]).sum() == 0 for values in draws[1:])


def test_draws_of_different_keys_are_uncorrelated():
    draws = gumbel(torch.arange(30) // 6, torch.arange(30) % 6, 4000).numpy()
    correlations = np.corrcoef(draws)[np.triu_indices(30, 1)]
    assert np.abs(correlations).max() < 5.5 / np.sqrt(4000)


@pytest.mark.parametrize("word", [0, 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1])
def test_the_rarest_bits_give_finite_noise_exact_where_it_decides(monkeypatch, word):
    monkeypatch.setattr(noise, "philox4x32", lambda counter, key: torch.full_like(counter, word))
    value = draw(0, 0, 4)
    assert value.isfinite().all()
    exact = -np.log(-np.log1p(-(word + 0.5) * 2.0**-32))
    # Near u = 1 float32 is coarse: there the noise is about -3, and never wins against another token's.
    assert value.double().numpy() == pytest.approx(exact, abs=1e-6 if word <= 2**31 else 0.4)
