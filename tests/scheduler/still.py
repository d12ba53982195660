"""One moment, built by hand."""

from __future__ import annotations

import numpy as np

from smpart.partition import Shape, Split
from smpart.scheduler.snapshot import LaneView, Snapshot
from smpart.scheduler.table import RequestTable, State
from tests.scheduler.double import Oracle, gpu_cost

IDLE = LaneView(1, 0, 0.0, Shape())


def still(rows: list[dict], *, units: int = 132, step: int = 12, **rest) -> Snapshot:
    """A snapshot of rows given as columns; arrival order is the order given."""
    table = RequestTable(max(1, len(rows)))
    for number, columns in enumerate(rows, 1):
        row = table.take()
        defaults = {"seq": number, "arrival": 0.0, "ttft_deadline": 0.5, "tpot": 0.05, "itl": 0.1, "max_tokens": 100}
        for name, value in (defaults | columns).items():
            getattr(table, name)[row] = value
    prefilling = table.rows(State.PREFILL)
    fields = {
        "now": 1.0, "table": table, "waiting": table.rows(State.WAITING),
        "prefilling": prefilling[table.forward[prefilling] < 0], "running": table.rows(State.RUNNING), "forwards": (),
        "prefill_lane": IDLE, "decode_lane": IDLE, "split": Split(0, units),
        "splits": tuple(Split(p, units - p) for p in [0, *range(step, units - step + 1, step), units]),
        "free_blocks": 10_000, "block_tokens": 16, "free_slots": 256, "layers": 32, "max_paused": 4,
        "predictor": Oracle(gpu_cost),
    }  # fmt: skip
    return Snapshot(**(fields | rest))


def decoding(known: int, **rest) -> dict:
    """A running row whose KV is up to date, its blocks full up to the last token."""
    base = {"state": State.RUNNING, "prompt": known - 1, "known": known, "computed": known - 1, "outputs": 1}
    return base | {"first_token": 0.9, "last_token": 0.95, "blocks": -(-known // 16), "slot": 1} | rest


def waiting(known: int, **rest) -> dict:
    return {"state": State.WAITING, "prompt": known, "known": known} | rest


def begun(known: int, computed: int, **rest) -> dict:
    base = {"state": State.PREFILL, "prompt": known, "known": known, "computed": computed, "slot": 1}
    return base | {"blocks": -(-computed // 16)} | rest


def crowd(running: int, queued: int, seed: int = 0) -> list[dict]:
    rng = np.random.default_rng(seed)
    rows = [decoding(int(n), outputs=int(rng.integers(1, 50))) for n in rng.integers(20, 3000, running)]
    return rows + [waiting(int(n), arrival=0.9, ttft_deadline=1.4) for n in rng.integers(20, 3000, queued)]
