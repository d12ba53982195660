"""Lanes under MPS: whether a daemon of our own starts, and what shares its workers really get."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from smpart.bench.gpu_check.record import Figures, Record, Setting
from smpart.errors import SmpartError
from smpart.partition import Side, Split
from smpart.partition.cuda.mps_shares import Mode
from smpart.partition.mps import Mps


def measure(setting: Setting, record: Record) -> None:
    """Each mode: refused here, and why; or the shares that were asked for and found. Refusal is no fault."""
    for mode in Mode:
        try:
            found = _mode(Mps(mode), record)
        except SmpartError as error:
            found = {"refused_here": str(error)}
        record.put(**{mode.value: found})


def _mode(backend: Mps, record: Record) -> Figures:
    why = backend.why_unusable()
    if why is not None:
        return {"refused_here": why}
    began = perf_counter()
    with backend:
        started = perf_counter() - began
        shares: dict[str, object] = {}
        for split in _few(backend.splits()):
            shares[str(split)] = _split(backend, split)
            if record.left() < 8.0:
                break
        stopping = perf_counter()
    return {
        "daemon_start_s": round(started, 2),
        "daemon_stop_s": round(perf_counter() - stopping, 2),
        "guarantee": backend.mode.guarantee,
        "shares": shares,
    }


def _split(backend: Mps, split: Split) -> Figures:
    try:
        if backend.mode is Mode.PARTITION:
            backend.arrange(split)
        return {side.value: backend.realise(side, split) for side in Side if split.units(side)}
    except SmpartError as error:
        return {"error": str(error)}


def _few(splits: Sequence[Split]) -> list[Split]:
    """One split with two sides from each third."""
    shared = [split for split in splits if not split.exclusive]
    return [shared[len(shared) * part // 6] for part in (1, 3, 5)] if shared else []
