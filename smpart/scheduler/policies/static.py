"""A fixed split while both phases have work; otherwise the busy phase has the whole device.

Source: the static mode of pegainfer (`green_ctx.rs`) and semi-PD. Prefill is launched in layer groups by SGLang
pdmux's rule. Simplified: first come, first served, short prompts packed up to `PACK_TOKENS`.
"""

from __future__ import annotations

from smpart.errors import UsageError
from smpart.partition import Split
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.plan import Piece, Plan, ResumePrefill, StartPrefill, Step
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot

PACK_TOKENS = 2048
GROUP_TOKENS = 65536
"""A layer group takes ``GROUP_TOKENS // new tokens`` layers, at least one."""


@register("static")
class Static:
    """``static:P/D``: `P` units for prefill, `D` for decode."""

    def __init__(self, setup: Setup) -> None:
        if not setup.argument:
            raise UsageError("policy static: name the split, for example static:1/1")
        self.split = Split.parse(setup.argument)
        if self.split.exclusive:
            raise UsageError(f"policy static:{self.split}: both sides need units")
        self.name = f"static:{self.split}"
        if setup.splits:
            self._check(setup.splits)

    def plan(self, snapshot: Snapshot) -> Plan:
        """A step and a layer group, side by side."""
        self._check(snapshot.splits)
        fit = memory.fit_decode(snapshot)
        prefill, tokens, preempt = self._prefill(snapshot, fit)
        waits = prefill is not None or bool(snapshot.forwards)
        whole = snapshot.units
        split = self.split
        if not waits:
            split = Split(0, whole)
        elif not fit.rows.size and not snapshot.decode_lane.inflight:
            split = Split(whole, 0)
        step = Step(tuple(fit.rows.tolist())) if fit.rows.size and snapshot.decode_lane.room else None
        launch = prefill if snapshot.prefill_lane.room else None
        reason = f"{split}: decode {fit.rows.size} rows, prefill {tokens} tokens"
        return Plan(split, launch, step, preempt=fit.preempt + preempt, reason=reason)

    def _check(self, splits: tuple[Split, ...]) -> None:
        if self.split not in splits:
            there = ", ".join(str(split) for split in splits if not split.exclusive) or "none on this device"
            raise UsageError(f"policy {self.name}: no such split; there are {there}")

    def _prefill(
        self, snapshot: Snapshot, fit: Fit
    ) -> tuple[StartPrefill | ResumePrefill | None, int, tuple[int, ...]]:
        for forward in snapshot.forwards:
            if forward.layers_left:
                layers = group_layers(forward.shape.prefill_tokens, forward.layers_left)
                return ResumePrefill(forward.id, layers), forward.shape.prefill_tokens, ()
        if len(snapshot.forwards) >= snapshot.max_paused:
            return None, 0, ()
        pieces, preempt = self._pack(snapshot, fit)
        tokens = sum(piece.length for piece in pieces)
        if not pieces:
            return None, 0, preempt
        return StartPrefill(tuple(pieces), group_layers(tokens, snapshot.layers)), tokens, preempt

    def _pack(self, snapshot: Snapshot, fit: Fit) -> tuple[list[Piece], tuple[int, ...]]:
        """Whole prompts in order of arrival until `PACK_TOKENS`; a longer one alone."""
        if fit.short:
            return [], ()
        table, size = snapshot.table, snapshot.block_tokens
        pieces: list[Piece] = []
        tokens, free = 0, fit.free
        for row in snapshot.prefilling.tolist():
            length = int(table.known[row] - table.computed[row])
            blocks = max(0, -(-int(table.known[row]) // size) - int(table.blocks[row]))
            if blocks > free:
                return pieces, () if pieces else memory.unblock(snapshot, row)
            pieces.append(Piece(row, length))
            tokens, free = tokens + length, free - blocks
        heads = snapshot.waiting[: snapshot.free_slots]
        for row, start in zip(heads.tolist(), memory.first_token(snapshot, heads).tolist(), strict=True):
            length, blocks = int(table.known[row]) - start, -(-int(table.known[row]) // size)
            if blocks > free or (pieces and tokens + length > PACK_TOKENS):
                break
            pieces.append(Piece(row, length))
            tokens, free = tokens + length, free - blocks
        return pieces, ()


def group_layers(tokens: int, left: int) -> int | None:
    """Layers of the next group of a forward over `tokens` new tokens with `left` layers to go (None: all).

    >>> group_layers(2048, 80), group_layers(8192, 80), group_layers(2048, 32)
    (32, 8, None)
    """
    layers = max(1, GROUP_TOKENS // max(1, tokens))
    return None if layers >= left else layers
