"""What a policy answers: the line between the lanes, and what to launch on each side of it now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from smpart.partition import Split
from smpart.scheduler.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens of one request to compute: `length` known tokens from its `computed` on (admits a waiting row)."""

    row: int
    length: int


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """Start one forward over packed pieces on the prefill lane; run `layers` layers, then pause (None: to the end)."""

    pieces: tuple[Piece, ...]
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class ResumePrefill:
    """Run `layers` more layers of a started forward (None: to the end)."""

    forward: int
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One decode step of `rows` on the decode lane; with `pieces` a hybrid step (the target must be exclusive)."""

    rows: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockMove:
    """Move KV blocks of a request between memory tiers. No tier exists yet; policies leave `Plan.moves` empty."""

    row: int
    blocks: tuple[int, ...]
    tier: str


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision.

    Attributes:
        split: the new target. The engine applies it at the lanes' next boundaries (`Line`).
        prefill: at most one launch on the prefill lane, if it has room.
        step: at most one launch on the decode lane, if it has room.
        preempt: rows that give their blocks back and are recomputed later, before anything is launched.
        abandon: started forwards to drop (their rows return to `prefilling`, nothing computed).
        refuse: waiting rows to refuse, with the reason each.
        moves: block moves.
        pull: rows whose KV is to cross to the device that decodes, where each lane has its own (`AcrossDevices`).
        valid_until: when to decide anew even if nothing has happened; None: at the next event.
        steady: the step, which must be a plain one of rows that all find their blocks, may follow itself without the
            policy being asked: until a request arrives or ends, a row comes or leaves, reaches its output limit or
            finds no block. Only for whoever would answer the same and remembers nothing of each decision.
        onward: beside the step under way the only started forward, resumed by this plan, may go on in groups of as
            many layers without the policy being asked: until that step ends, a request arrives or ends, or a row
            comes or leaves.
        reason: one line for people.
    """

    split: Split
    prefill: StartPrefill | ResumePrefill | None = None
    step: Step | None = None
    preempt: tuple[int, ...] = ()
    abandon: tuple[int, ...] = ()
    refuse: tuple[tuple[int, str], ...] = ()
    moves: tuple[BlockMove, ...] = ()
    pull: tuple[int, ...] = ()
    valid_until: float | None = None
    steady: bool = False
    onward: bool = False
    reason: str = ""


def only_decodes(snapshot: Snapshot, rows: int, full: bool = False) -> bool:
    """Whether there is no prefill to go on with, and a step of `rows` rows leaves out none that could take it.

    Args:
        full: nobody who waits can start before somebody ends.
    """
    prefills = (snapshot.waiting.size and not full) or snapshot.prefilling.size or snapshot.forwards
    return not prefills and rows == len(snapshot.running)


class Policy(Protocol):
    """Decides. Pure but for what it remembers of its own decisions: no clock, no threads, no torch."""

    name: str

    def plan(self, snapshot: Snapshot) -> Plan:
        """The next plan. Called after every event, and again while the last plan launched something.

        Not called while the last plan holds (`Plan.steady`, `Plan.onward`).
        """


@runtime_checkable
class AcrossDevices(Policy, Protocol):
    """A policy that needs a device for each lane. Its snapshots tell the free blocks of both (`decode_blocks`).

    Attributes:
        link_gbps: gigabits a second from the one to the other; None: what such devices have.
    """

    link_gbps: float | None
