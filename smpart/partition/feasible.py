"""Which splits a device can realise."""

from __future__ import annotations

from collections.abc import Iterable

from smpart.partition.split import Split


def feasible_splits(units: int, minimum: int = 1, step: int = 1) -> tuple[Split, ...]:
    """Every split of `units`, in order of prefill units, the two exclusive ones included.

    The hardware hands out groups of `minimum` units or more in steps of `step`. Prefill is such a group; decode has
    the remainder, as long as that is a group at all.

    >>> [str(split) for split in feasible_splits(3)]
    ['0/3', '1/2', '2/1', '3/0']
    >>> [str(split) for split in feasible_splits(26, minimum=8, step=8)]
    ['0/26', '8/18', '16/10', '26/0']
    """
    shared = [Split(p, units - p) for p in range(minimum, units - minimum + 1, step)]
    return (Split(0, units), *shared, Split(units, 0))


def overlapping_splits(splits: Iterable[Split]) -> tuple[Split, ...]:
    """Every pair of sides of `splits` (of one device) that have units in common, in order of prefill units.

    >>> [str(split) for split in overlapping_splits(feasible_splits(2))]
    ['1/2', '2/1', '2/2']
    """
    splits = tuple(splits)
    units = max(split.total for split in splits)
    prefill, decode = {split.prefill for split in splits} - {0}, {split.decode for split in splits} - {0}
    return tuple(sorted(Split(p, d) for p in prefill for d in decode if p + d > units))
