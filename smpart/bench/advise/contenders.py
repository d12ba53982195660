"""Who is compared: one lane tuned as an expert would, and three ways of using two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from smpart.bench.advise.table import Row
from smpart.partition import Split
from smpart.scheduler.pair import proper

CHUNKED, SMPART, STATIC, PDMUX = "chunked", "smpart", "static", "pdmux"

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 8192)
"""Tokens a step: from the smallest that anybody runs to vLLM's default on large GPUs."""

_SPLITS = 7


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
    def of(cls, splits: Iterable[Split], rows: Sequence[Row]) -> Contenders:
        """Those of a device."""
        shared = spread(proper(splits), _SPLITS)
        table = "+".join(f"{row.split}@{row.batch}" for row in rows)
        return cls(
            tuple(f"chunked:{budget}" for budget in BUDGETS),
            tuple(f"static:{split}" for split in shared),
            f"pdmux:{table}" if table else None,
        )

    @property
    def policies(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.budgets, SMPART, *self.fixed, *((self.table,) if self.table else ()))


def spread(splits: Sequence[Split], most: int) -> list[Split]:
    """At most `most` of them, evenly spaced, the first and the last included.

    >>> [str(split) for split in spread([Split(p, 9 - p) for p in range(1, 9)], 3)]
    ['1/8', '5/4', '8/1']
    """
    if len(splits) <= most:
        return list(splits)
    return [splits[round(i * (len(splits) - 1) / (most - 1))] for i in range(most)]
