"""What a run leaves behind for reports: every span of work, and where time was lost."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from smpart.partition import Side, Split


class Span(NamedTuple):
    """One piece of work on one lane. Times are seconds on the core's clock.

    Attributes:
        kind: ``prefill``, ``decode`` or ``hybrid``.
        tokens: tokens the forward computes (a layer group carries its forward's count).
        batch: decode rows.
    """

    side: Side
    started: float
    finished: float
    kind: str
    tokens: int
    batch: int
    split: Split


@dataclass(slots=True)
class RunLog:
    """Counters and spans of one `EngineCore`.

    Attributes:
        decision_seconds: host seconds of each decision, the snapshot included; where the last plan still holds
            (`Plan.steady`, `Plan.onward`), those of finding that out.
        idle: seconds in which a lane that owned units had work waiting and ran nothing.
        busy: seconds in which a lane ran.
        resizes: how often the target split changed.
        reasons: ``(time, split, reason)`` of each plan that moved the line.
    """

    spans: list[Span] = field(default_factory=list)
    decision_seconds: array[float] = field(default_factory=lambda: array("d"))
    busy: dict[Side, float] = field(default_factory=lambda: dict.fromkeys(Side, 0.0))
    idle: dict[Side, float] = field(default_factory=lambda: dict.fromkeys(Side, 0.0))
    resizes: int = 0
    preemptions: int = 0
    steps: int = 0
    lost_works: int = 0
    reasons: list[tuple[float, Split, str]] = field(default_factory=list)

    def ran(self, span: Span, idle_before: float) -> None:
        """Record a completed span and the bubble just before it."""
        self.spans.append(span)
        self.busy[span.side] += span.finished - span.started
        self.idle[span.side] += max(0.0, idle_before)
        self.steps += span.side is Side.DECODE

    @property
    def bubble(self) -> dict[str, float]:
        """Share of each lane's working time that was bubble, by side."""
        return {
            side.value: self.idle[side] / total if (total := self.idle[side] + self.busy[side]) else 0.0
            for side in Side
        }
