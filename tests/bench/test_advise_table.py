"""Which split at which decode batch, against trying every split at every batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.advise.table import Row, Table, divide
from smpart.partition import Split
from smpart.partition.gpus import GPUS

SPLITS = {name: gpu.splits() for name, gpu in GPUS.items()}


def in_force(rows: tuple[Row, ...], batch: int) -> Split:
    """The last row whose threshold is reached."""
    return [row.split for row in rows if row.batch <= batch][-1]


@given(
    st.sampled_from(sorted(SPLITS)), st.floats(1e-4, 1e-2), st.floats(1e-4, 0.5), st.floats(0.001, 0.2),
    st.integers(1, 200), st.integers(1, 8),
)  # fmt: skip
def test_every_batch_gets_a_split_that_holds(
    gpu: str, fixed: float, row: float, limit: float, most: int, rows: int
) -> None:
    def step_s(batch: int, split: Split) -> float:
        return fixed + row * batch / split.decode

    table = divide(step_s, SPLITS[gpu], limit, most, rows)
    shared = [split for split in SPLITS[gpu] if not split.exclusive]
    able = [batch for batch in range(1, most + 1) if any(step_s(batch, split) <= limit for split in shared)]
    assert table.holds == len(able)
    assert len(table.rows) <= rows and bool(table.rows) == bool(able)
    if not able:
        return
    assert table.rows[0].batch == 1
    shares, batches = [r.split.decode for r in table.rows], [r.batch for r in table.rows]
    assert shares == sorted(set(shares)) and batches == sorted(set(batches))
    for batch in able:
        assert step_s(batch, in_force(table.rows, batch)) <= limit


def test_the_smallest_share_that_holds_while_rows_are_enough() -> None:
    splits = SPLITS["h100"]
    table = divide(lambda batch, split: batch / split.decode, splits, 1.0, 60)
    for batch in range(1, 61):
        least = min(s.decode for s in splits if s.prefill and s.decode >= batch)
        assert in_force(table.rows, batch).decode == least


@pytest.mark.parametrize("limit", [0.5, 0.999])
def test_no_split_holds(limit: float) -> None:
    assert divide(lambda batch, split: 1.0, SPLITS["a100"], limit, 8) == Table((), 0)
