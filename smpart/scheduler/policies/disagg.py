"""A device for prefill and another for decode; the KV of each prompt crosses a link between them (DistServe).

Source: DistServe (arXiv 2401.09670), sections 3 and 4: first come, first served, prompts batched up to the length that
saturates the device, longer ones alone, KV pulled by decode and kept by prefill until then, nobody preempted for
another. Memory is set aside for answers as in SGLang's `disaggregation/decode.py`. Simplified: one device of each kind
(1P1D) where DistServe searches for numbers and parallel shapes of both; KV crosses when its prefill is done, not layer
by layer, beside whatever both devices compute, one request after the other. Chosen where both are silent: a request is
pulled without regard to what is set aside if decode is empty; if decode runs out of blocks all the same, the latest
arrival is recomputed.

Two devices serve: goodput counts per GPU.
"""

from __future__ import annotations

from dataclasses import replace

from smpart.errors import UsageError
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.pair import pack
from smpart.scheduler.plan import Plan, StartPrefill, Step
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot
from smpart.scheduler.table import State

SATURATION_TOKENS = 512
"""Prompt tokens that keep a device busy (`L_m`: DistServe's 13B model on an A100)."""
RESERVED_TOKENS = 512
"""Set aside on the decode side for each request that runs there, is on its way, or was pulled (SGLang)."""


@register("disagg")
class Disagg:
    """``disagg[:LINK_GBPS]``: gigabits a second of the link; without, what joins two GPUs of the kind."""

    def __init__(self, setup: Setup) -> None:
        self.link_gbps = _rate(setup.argument) if setup.argument else None
        self.name = f"disagg:{setup.argument}" if setup.argument else "disagg"

    def plan(self, snapshot: Snapshot) -> Plan:
        """A prompt batch for the one device, a step for the other, and whose KV crosses."""
        if snapshot.decode_blocks is None:
            raise UsageError(f"policy {self.name}: these lanes are one device, and it needs two")
        nobody = snapshot.running[:0]
        there = replace(snapshot, free_blocks=snapshot.decode_blocks, prefilling=nobody, forwards=())
        fit = memory.fit_decode(there)
        pull = () if fit.short else self._pull(snapshot, fit.free)
        work = pack(snapshot, Fit(nobody, (), snapshot.free_blocks, False), snapshot.waiting, SATURATION_TOKENS)
        begins = work.pieces and snapshot.prefill_lane.room and len(snapshot.forwards) < snapshot.max_paused
        steps = fit.rows.size and snapshot.decode_lane.room
        return Plan(
            snapshot.splits[0],
            StartPrefill(work.pieces) if begins else None,
            Step(tuple(fit.rows.tolist())) if steps else None,
            preempt=fit.preempt + work.preempt,
            pull=pull,
            reason=f"decode {fit.rows.size} rows, prefill {work.shape.prefill_tokens} tokens, pull {len(pull)}",
        )

    def _pull(self, snapshot: Snapshot, free: int) -> tuple[int, ...]:
        """First come, first served, as long as what decode has set aside stays free."""
        table = snapshot.table
        crossing = table.rows(State.CROSSING)
        waiting = crossing[table.flying[crossing] == 0]
        if not waiting.size:
            return ()
        there = len(snapshot.running) + len(crossing) - len(waiting)
        pulled: list[int] = []
        for row in waiting.tolist():
            blocks = -(-int(table.computed[row]) // snapshot.block_tokens)
            aside = -(-RESERVED_TOKENS * (there + 1) // snapshot.block_tokens)
            if blocks > free or (there and blocks + aside > free):
                break
            free, there = free - blocks, there + 1
            pulled.append(row)
        return tuple(pulled)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise UsageError(f"policy disagg:{text}: write the link's gigabits a second, for example disagg:400")
    return rate
