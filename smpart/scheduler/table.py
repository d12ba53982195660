"""The state of every request in the system, in arrays, so that a decision costs microseconds."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """Where a request is."""

    FREE = 0
    """The row is unused."""
    WAITING = 1
    """Not admitted: no slot, no blocks. Also after a preemption."""
    PREFILL = 2
    """Admitted; some of its known tokens have no KV yet."""
    RUNNING = 3
    """Decoding."""
    LEAVING = 4
    """Finished, cancelled or preempted, while a launched work may still write its blocks."""
    CROSSING = 5
    """Prefilled on one device, to be decoded on another: its KV waits to be pulled, or (``flying``) is on the way."""


class RequestTable:
    """One row a request; columns are arrays of equal length that grow together.

    Columns (times in seconds on the engine's clock, lengths in tokens):

    * ``state`` int8: `State`.
    * ``seq`` int64: arrival number; smaller came first.
    * ``arrival`` f8; ``ttft_deadline`` f8: arrival + TTFT objective.
    * ``tpot``, ``itl`` f8: objectives in seconds.
    * ``best_effort`` bool: yields to interactive requests.
    * ``prompt`` i4; ``known`` i4: tokens known, prompt + outputs read back (the prefill target of a waiting row).
    * ``max_tokens`` i4: output limit.
    * ``cached`` i4: leading tokens a prefix hit would save (waiting rows; refreshed by the engine).
    * ``computed`` i4: tokens whose KV is written **or launched**.
    * ``outputs`` i4: output tokens read back; ``ahead`` i4: output tokens launched and not read back.
    * ``blocks`` i4: KV blocks owned.
    * ``first_token`` f8, ``last_token`` f8: when those were read back (NaN before).
    * ``slot`` i4: board slot, -1 if not admitted.
    * ``flying`` i4: works in flight that read or write this row's blocks.
    * ``forward`` i8: number of the prefill forward that this row is part of (launched or paused), -1 if none.
    * ``preemptions`` i4: times it lost its blocks.

    ``known``, ``outputs``, ``computed``, ``ahead`` and ``flying`` are what every step changes: they lie interleaved in
    one array, so that `add` changes several of them at once.

    ``arrivals``: rows taken so far; as long as it stays, no row has become another request's.
    """

    _COLUMNS: tuple[tuple[str, type, float], ...] = (
        ("state", np.int8, 0), ("seq", np.int64, 0), ("arrival", np.float64, 0), ("ttft_deadline", np.float64, 0),
        ("tpot", np.float64, 0), ("itl", np.float64, 0), ("best_effort", np.bool_, 0), ("prompt", np.int32, 0),
        ("known", np.int32, 0), ("max_tokens", np.int32, 0), ("cached", np.int32, 0), ("computed", np.int32, 0),
        ("outputs", np.int32, 0), ("ahead", np.int32, 0), ("blocks", np.int32, 0), ("first_token", np.float64, np.nan),
        ("last_token", np.float64, np.nan), ("slot", np.int32, -1), ("flying", np.int32, 0), ("forward", np.int64, -1),
        ("preemptions", np.int32, 0),
    )  # fmt: skip

    _STEPPED = ("known", "outputs", "computed", "ahead", "flying")

    state: NDArray[np.int8]
    seq: NDArray[np.int64]
    arrival: NDArray[np.float64]
    ttft_deadline: NDArray[np.float64]
    tpot: NDArray[np.float64]
    itl: NDArray[np.float64]
    best_effort: NDArray[np.bool_]
    prompt: NDArray[np.int32]
    known: NDArray[np.int32]
    max_tokens: NDArray[np.int32]
    cached: NDArray[np.int32]
    computed: NDArray[np.int32]
    outputs: NDArray[np.int32]
    ahead: NDArray[np.int32]
    blocks: NDArray[np.int32]
    first_token: NDArray[np.float64]
    last_token: NDArray[np.float64]
    slot: NDArray[np.int32]
    flying: NDArray[np.int32]
    forward: NDArray[np.int64]
    preemptions: NDArray[np.int32]

    def __init__(self, capacity: int = 64) -> None:
        self._free: list[int] = list(range(capacity - 1, -1, -1))
        self.arrivals = 0
        for name, kind, empty in self._COLUMNS:
            setattr(self, name, np.full(capacity, empty, dtype=kind))
        self._interleave(capacity)

    def __len__(self) -> int:
        return len(self.state) - len(self._free)

    def take(self) -> int:
        """A cleared row; grows the table if none is free."""
        if not self._free:
            self._grow()
        row = self._free.pop()
        self.arrivals += 1
        for name, _, empty in self._COLUMNS:
            getattr(self, name)[row] = empty
        return row

    def give_back(self, row: int) -> None:
        """End a row's use."""
        self.state[row] = State.FREE
        self._free.append(row)

    def rows(self, state: State) -> NDArray[np.intp]:
        """Rows in one state, in arrival order."""
        found = np.flatnonzero(self.state == state)
        return found[np.argsort(self.seq[found], kind="stable")]

    @classmethod
    def stepped(cls, *columns: str) -> NDArray[np.intp]:
        """Some of the columns that every step changes, as `places` takes them."""
        return np.array([cls._STEPPED.index(column) for column in columns], dtype=np.intp)

    def places(self, rows: NDArray[np.intp], columns: NDArray[np.intp]) -> NDArray[np.intp]:
        """Where `add` finds columns (`stepped`) of rows: intp[rows, columns]; good for ever."""
        found: NDArray[np.intp] = rows[:, None] * len(self._STEPPED) + columns
        return found

    def add(self, places: NDArray[np.intp], amounts: NDArray[np.int32]) -> None:
        """Add an amount a column, int32[columns], in places of which none is there twice."""
        self._together[places] += amounts

    def _interleave(self, capacity: int) -> None:
        """Move what steps change into one array, of which the columns become views."""
        together = np.zeros((capacity, len(self._STEPPED)), dtype=np.int32)
        for place, name in enumerate(self._STEPPED):
            together[:, place] = getattr(self, name)
            setattr(self, name, together[:, place])
        self._together = together.reshape(-1)

    def _grow(self) -> None:
        old = len(self.state)
        for name, kind, empty in self._COLUMNS:
            column: NDArray[Any] = np.full(2 * old, empty, dtype=kind)
            column[:old] = getattr(self, name)
            setattr(self, name, column)
        self._interleave(2 * old)
        self._free.extend(range(2 * old - 1, old - 1, -1))
