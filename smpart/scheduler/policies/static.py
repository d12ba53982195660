"""A fixed split while both phases have work; otherwise the busy phase has the whole device.

Source: the static mode of pegainfer (`green_ctx.rs`) and semi-PD. Prefill is launched in layer groups by SGLang
pdmux's rule. Simplified: first come, first served, short prompts packed up to `PACK_TOKENS`.
"""

from __future__ import annotations

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.scheduler.pair import TwoLanes, Work
from smpart.scheduler.registry import Setup, register
from smpart.scheduler.snapshot import Snapshot


@register("static")
class Static(TwoLanes):
    """``static:P/D``: `P` units for prefill, `D` for decode. Splits that do not exist are refused."""

    ahead = True

    def __init__(self, setup: Setup) -> None:
        if not setup.argument:
            raise UsageError("policy static: name the split, for example static:1/1")
        self.split = Split.parse(setup.argument)
        if self.split.exclusive:
            raise UsageError(f"policy static:{self.split}: both sides need units")
        self.name = f"static:{self.split}"
        if setup.splits:
            self._check(setup.splits)

    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """Always the same."""
        self._check(snapshot.splits)
        return self.split

    def _check(self, splits: tuple[Split, ...]) -> None:
        if self.split not in splits:
            there = ", ".join(str(split) for split in splits if not split.exclusive) or "none on this device"
            raise UsageError(f"policy {self.name}: no such split; there are {there}")
