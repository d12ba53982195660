"""What policies with two lanes share: decode steps beside layer groups of packed prompts, on a split of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple

from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.predictor.estimate import NOTHING
from smpart.scheduler import memory
from smpart.scheduler.memory import Fit
from smpart.scheduler.plan import Piece, Plan, ResumePrefill, StartPrefill, Step, only_decodes
from smpart.scheduler.snapshot import ForwardView, Rows, Snapshot

PACK_TOKENS = 2048
GROUP_TOKENS = 65536
"""A layer group takes ``GROUP_TOKENS // new tokens`` layers, at least one (SGLang pdmux's token budget)."""


class Work(NamedTuple):
    """The prefill that is next, or, if there is nothing to launch, the one in flight.

    Attributes:
        shape: all its tokens; the empty shape: none.
        left: layers it has to go; 0: all are launched.
        forward: the started forward it belongs to; None: it would start anew.
        pieces: what it would start with.
        preempt: rows that have to give way first.
    """

    shape: Shape = NOTHING
    left: int = 0
    forward: ForwardView | None = None
    pieces: tuple[Piece, ...] = ()
    preempt: tuple[int, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """The requests in it."""
        return self.forward.rows if self.forward else tuple(piece.row for piece in self.pieces)

    def batch(self, snapshot: Snapshot) -> tuple[int, ...]:
        """Which batch it is, whether started or not: the arrival numbers of its requests."""
        return tuple(snapshot.table.seq[list(self.rows)].tolist())


class TwoLanes(ABC):
    """Steps and layer groups side by side.

    Without more from a subclass: prompts first come, first served, packed up to `pack_tokens` (a longer one goes
    alone), one forward after the other. Where blocks run out, vLLM's preemption decides who gives way.

    Attributes:
        ahead: start the next forward while the last group of the one before is in flight.
        steady: whether its steps may follow themselves while there is nothing else to do (`Plan.steady`).
    """

    name: str
    pack_tokens = PACK_TOKENS
    ahead = False
    steady = True

    def plan(self, snapshot: Snapshot) -> Plan:
        """A step and a layer group."""
        fit = memory.fit_decode(snapshot)
        step = step_shape(snapshot, fit.rows)
        work = self.work(snapshot, fit)
        both = work.shape.tokens and step.tokens
        split = self.split_for(snapshot, step, work) if both else self.alone(snapshot, step, work)
        prefill = self._launch(snapshot, step, work, split)
        steps = fit.rows.size and snapshot.decode_lane.room and split.decode
        reason = f"{split}: decode {fit.rows.size} rows, prefill {work.shape.prefill_tokens} tokens"
        return Plan(
            split,
            prefill,
            Step(tuple(fit.rows.tolist())) if steps else None,
            preempt=fit.preempt + work.preempt,
            steady=self.steady and only_decodes(snapshot, fit.rows.size),
            reason=reason,
        )

    @abstractmethod
    def split_for(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The split while both phases have work; `step` and `work` may be in flight only."""

    def alone(self, snapshot: Snapshot, step: Shape, work: Work) -> Split:
        """The split while one phase, or none, has work: it has the whole device."""
        return Split(snapshot.units, 0) if work.shape.tokens else Split(0, snapshot.units)

    def layers(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> int | None:
        """Layers of the next group; None: all that are left."""
        return group_layers(work.shape.prefill_tokens, work.left)

    def work(self, snapshot: Snapshot, fit: Fit) -> Work:
        """What prefill does next."""
        paused = [forward for forward in snapshot.forwards if forward.layers_left]
        if paused:
            return Work(paused[-1].shape, paused[-1].layers_left, paused[-1])
        last = snapshot.forwards[-1] if snapshot.forwards else None
        if last and not (self.ahead and len(snapshot.forwards) < snapshot.max_paused):
            return Work(last.shape, 0, last)
        fresh = self.pack(snapshot, fit)
        if last and not fresh.pieces:
            return Work(last.shape, 0, last, preempt=fresh.preempt)
        return fresh

    def pack(self, snapshot: Snapshot, fit: Fit) -> Work:
        """The next forward to start."""
        return pack(snapshot, fit, snapshot.waiting, self.pack_tokens)

    def _launch(self, snapshot: Snapshot, step: Shape, work: Work, split: Split) -> StartPrefill | ResumePrefill | None:
        if not (work.left and split.prefill and snapshot.prefill_lane.room):
            return None
        layers = self.layers(snapshot, step, work, split)
        return ResumePrefill(work.forward.id, layers) if work.forward else StartPrefill(work.pieces, layers)


def pack(snapshot: Snapshot, fit: Fit, waiting: Rows, limit: int) -> Work:
    """Whole prompts up to `limit` tokens, a longer one alone: those begun first, then `waiting` in the order given.

    The first one that does not fit ends it: nobody is passed over.
    """
    if fit.short:
        return Work()
    table, size = snapshot.table, snapshot.block_tokens
    pieces: list[Piece] = []
    chunks: list[tuple[int, int]] = []
    tokens, free = 0, fit.free
    for row in snapshot.prefilling.tolist():
        start, known = int(table.computed[row]), int(table.known[row])
        blocks = max(0, -(-known // size) - int(table.blocks[row]))
        if blocks > free:
            return started(snapshot, pieces, chunks) if pieces else Work(preempt=memory.unblock(snapshot, row))
        pieces.append(Piece(row, known - start))
        chunks.append((known - start, start))
        tokens, free = tokens + known - start, free - blocks
    heads = waiting[: snapshot.free_slots]
    for row, start in zip(heads.tolist(), memory.first_token(snapshot, heads).tolist(), strict=True):
        length, blocks = int(table.known[row]) - start, -(-int(table.known[row]) // size)
        if blocks > free or (pieces and tokens + length > limit):
            break
        pieces.append(Piece(row, length))
        chunks.append((length, start))
        tokens, free = tokens + length, free - blocks
    return started(snapshot, pieces, chunks)


def started(snapshot: Snapshot, pieces: Iterable[Piece], chunks: Iterable[tuple[int, int]]) -> Work:
    """A forward that starts with `pieces`, of (new tokens, context tokens) as in `chunks`."""
    pieces = tuple(pieces)
    return Work(Shape.prefill(chunks), snapshot.layers, pieces=pieces) if pieces else Work()


def step_shape(snapshot: Snapshot, rows: Rows) -> Shape:
    """The next step of `rows`; the one in flight if there are none."""
    if not rows.size:
        return snapshot.decode_lane.shape
    return Shape.decode(len(rows), int(snapshot.table.computed.take(rows).sum()) + len(rows))


def group_layers(tokens: int, left: int) -> int | None:
    """Layers of the next group of a forward over `tokens` new tokens with `left` layers to go (None: all).

    >>> group_layers(2048, 80), group_layers(8192, 80), group_layers(2048, 32)
    (32, 8, None)
    """
    layers = max(1, GROUP_TOKENS // max(1, tokens))
    return None if layers >= left else layers


def proper(splits: Iterable[Split]) -> tuple[Split, ...]:
    """Splits that give both sides units, most prefill first. Raises `UsageError` if there are none.

    >>> [str(split) for split in proper([Split(0, 3), Split(1, 2), Split(2, 1), Split(3, 0)])]
    ['2/1', '1/2']
    """
    found = tuple(sorted((split for split in splits if not split.exclusive), reverse=True))
    if not found:
        raise UsageError("this device cannot be split: use policy chunked, mixed or smpart")
    return found


def nearest(splits: Iterable[Split], wanted: float) -> Split:
    """The split whose decode side has most nearly the share `wanted` (0 to 1) of the units; ties: more decode.

    >>> str(nearest([Split(112, 20), Split(104, 28), Split(96, 36)], 28 / 132))
    '104/28'
    """
    return min(splits, key=lambda split: (abs(split.decode / split.total - wanted), -split.decode))
