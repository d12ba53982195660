"""Who is compared: one lane tuned as an expert would, and three ways of using two."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from smpart.bench.advise.table import Row
from smpart.partition import Split
from smpart.scheduler.pair import proper

CHUNKED, ORDER, SMPART, STATIC, PDMUX = "chunked", "chunked+slack", "smpart", "static", "pdmux"
ONE_LANE = (CHUNKED, ORDER)
"""They have no neighbour whose cost could be swept. `ORDER` is smpart's order and deadlines in one lane: what smpart
holds beyond it is what the split is worth."""

BUDGETS = tuple(1 << k for k in range(5, 15))
"""32 to 16,384 tokens a step."""

_FIXED, _QUICK_FIXED = 7, 4
_AROUND, _QUICK_AROUND = 2, 1
"""Budgets on each side of the one whose step just fits."""


@dataclass(frozen=True, slots=True)
class Contenders:
    """Policies, as they are named to the engine.

    Attributes:
        budgets: chunked prefill, of which the best is compared.
        fixed: fixed splits, of which the best is compared; none where the device cannot be split.
        table: SGLang's rule with the table that is advised; None: there is no table.
    """

    budgets: tuple[str, ...]
    fixed: tuple[str, ...]
    table: str | None

    @classmethod
    def of(cls, splits: Iterable[Split], rows: Sequence[Row], fits: Callable[[int], bool], quick: bool) -> Self:
        """Those of a device.

        Args:
            rows: the table that is advised.
            fits: whether a step with so many prompt tokens holds TPOT. Budgets around the largest that fits are tried:
                prompts queue behind smaller ones, larger ones break TPOT or ITL where they are filled.
            quick: fewer.
        """
        shared = spread(proper(splits), _QUICK_FIXED if quick else _FIXED)
        middle = max((i for i, budget in enumerate(BUDGETS) if fits(budget)), default=0)
        around = _QUICK_AROUND if quick else _AROUND
        table = "+".join(f"{row.split}@{row.batch}" for row in rows)
        return cls(
            tuple(f"chunked:{budget}" for budget in BUDGETS[max(0, middle - around) : middle + around + 1]),
            tuple(f"static:{split}" for split in shared),
            f"pdmux:{table}" if table else None,
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.budgets, ORDER, SMPART, *self.fixed, *((self.table,) if self.table else ()))


def spread(splits: Sequence[Split], most: int) -> list[Split]:
    """At most `most` of them, evenly spaced, the first and the last included.

    >>> [str(split) for split in spread([Split(p, 9 - p) for p in range(1, 9)], 3)]
    ['1/8', '5/4', '8/1']
    """
    if len(splits) <= most:
        return list(splits)
    return [splits[round(i * (len(splits) - 1) / (most - 1))] for i in range(most)]
