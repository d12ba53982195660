"""Splits and which of them a device can realise."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.errors import UsageError
from smpart.partition import Side, Split
from smpart.partition.feasible import feasible_splits, overlapping_splits
from smpart.partition.gpus import GPUS, sm_group


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 50))
def test_sides_are_disjoint_and_sized(prefill, decode, spare):
    if prefill + decode == 0:
        with pytest.raises(UsageError):
            Split(prefill, decode)
        return
    split, total = Split(prefill, decode), prefill + decode + spare
    mine, yours = (set(split.indices(side, total)) for side in Side)
    assert not mine & yours and (len(mine), len(yours)) == (prefill, decode)
    assert mine | yours <= set(range(total))
    assert Split.parse(str(split)) == split
    assert split.exclusive == (prefill == 0 or decode == 0)
    assert all(side.other.other is side and split.units(side) <= split.total for side in Side)


@pytest.mark.parametrize("text", ["", "3", "/", "1/", "/2", "-1/2", "1/2/3", "0/0", "a/b", "1.0/2", "²/1"])
def test_text_that_is_no_split(text):
    with pytest.raises(UsageError):
        Split.parse(text)


@given(st.integers(1, 200), st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 8)]))
def test_feasible_splits_keep_the_hardwares_rules(units, group):
    minimum, step = group
    splits = feasible_splits(units, minimum, step)
    assert list(splits) == sorted(set(splits))
    assert {split.total for split in splits} == {units}
    assert {Split(units, 0), Split(0, units)} <= set(splits)
    for split in splits:
        if not split.exclusive:
            assert split.prefill >= minimum and (split.prefill - minimum) % step == 0 and split.decode >= minimum
    wanted = [p for p in range(units + 1) if p >= minimum and not (p - minimum) % step and units - p >= minimum]
    assert len(splits) == len(wanted) + 2


@given(st.integers(1, 40), st.sampled_from([(1, 1), (2, 2), (4, 2), (8, 8)]))
def test_overlapping_splits_are_all_pairs_of_shares_with_a_unit_in_common(units, group):
    splits = feasible_splits(units, *group)
    overlapping = overlapping_splits(splits)
    assert list(overlapping) == sorted(set(overlapping)) and Split(units, units) in overlapping
    for p in {split.prefill for split in splits} - {0}:
        for d in {split.decode for split in splits} - {0}:
            split = Split(p, d)
            meet = set(split.indices(Side.PREFILL, units)) & set(split.indices(Side.DECODE, units))
            assert (split in overlapping) == split.overlaps(units) == bool(meet)


def test_pdmux_splits_of_an_a100_and_an_h100_exist():
    """The splits SGLang's pdmux uses on real devices (its code's tables) are among ours."""
    a100, h100 = ({str(split) for split in GPUS[gpu].splits()} for gpu in ("a100", "h100"))
    assert {"84/24", "78/30", "72/36", "66/42", "60/48", "54/54"} <= a100
    assert {"112/20", "104/28", "96/36", "88/44", "80/52", "72/60"} <= h100


def test_groups_by_compute_capability():
    assert [sm_group(c) for c in [(7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]] == [(2, 2), (4, 2), (4, 2), (8, 8), (8, 8)]
