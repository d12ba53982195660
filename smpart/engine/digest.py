"""What the end of a piece of work changes: tokens read, blocks published, rows moved on, faults undone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from smpart.engine.flight import Flight, LaneTrack, Part
from smpart.engine.log import Span
from smpart.engine.request import FinishReason
from smpart.partition import Completion, LaneFault, Side
from smpart.runtime.batch import StepResult
from smpart.scheduler.table import State

if TYPE_CHECKING:
    from smpart.engine.core import EngineCore

_LEAVING = int(State.LEAVING)


class Digest:
    """Applies completions to an `EngineCore`."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def take(self, completions: list[Completion]) -> None:
        """Apply completions in the order they happened."""
        for completion in completions:
            side = completion.work.side
            track = self._core.tracks[side]
            flight = next((f for f in track.flights if f.work.id == completion.work.id), None)
            if flight is None:  # its lane was lost and everything on it undone
                continue
            if completion.fault is not None and completion.fault.lost:
                self._lose_lane(side)
                continue
            track.flights.remove(flight)
            self._core.line.completed(completion.work.id)
            self._log(completion, flight, track)
            if completion.fault is not None:
                self._fail(flight, completion.fault)
            elif flight.forward is None:
                self._step_done(flight, completion)
            else:
                self._group_done(flight, completion)

    def _log(self, completion: Completion, flight: Flight, track: LaneTrack) -> None:
        core, work = self._core, completion.work
        since = track.last_finished if flight.follows else flight.ready
        kind = "hybrid" if work.shape.hybrid else "decode" if work.shape.decode_batch else "prefill"
        span = Span(
            work.side, completion.started, completion.finished, kind, work.shape.tokens, len(flight.rows), work.split
        )
        core.log.ran(span, completion.started - since if since is not None else 0.0)
        neighbour = core.tracks[work.side.other].neighbour_of(completion.started, completion.finished)
        track.landed(completion)
        track.ready_since = completion.finished if not track.flights else None
        if neighbour is not None and completion.fault is None:
            core.predictor.observe(work.shape, work.units, neighbour, work.fraction, completion.seconds)

    def _step_done(self, flight: Flight, completion: Completion) -> None:
        core, result = self._core, completion.result
        table = core.table
        rows = np.asarray(flight.rows, dtype=np.intp)
        table.flying[rows] -= 1
        table.ahead[rows] -= 1
        tokens = result.tokens.tolist()
        self._read_all(rows, tokens, completion.finished, result)
        sampled = iter(tokens[len(flight.rows) :])
        for part in flight.parts:
            table.flying[part.row] -= 1
            self._written(part)
            if part.sample:
                table.ahead[part.row] -= 1
                self._read_first(part.row, next(sampled), completion.finished, result)
            else:
                core.settle(part.row)

    def _group_done(self, flight: Flight, completion: Completion) -> None:
        core, forward = self._core, flight.forward
        assert forward is not None
        forward.inflight -= 1
        if not flight.last:
            core.drop_dead_forward(forward.id)
            return
        core.forwards.pop(forward.id)
        sampled = iter(completion.result.tokens.tolist())
        for part in forward.parts:
            core.table.flying[part.row] -= 1
            core.table.forward[part.row] = -1
            self._written(part)
            if part.sample:
                if core.table.state[part.row] == State.PREFILL:
                    core.table.state[part.row] = State.RUNNING
                self._read_first(part.row, next(sampled), completion.finished, completion.result)
            else:
                core.settle(part.row)

    def _written(self, part: Part) -> None:
        request = self._core.requests.get(part.row)
        if request is not None:
            self._core.residency.wrote(part.row, part.start + part.length, request)

    def _read_first(self, row: int, token: int, when: float, result: StepResult) -> None:
        """The token sampled at the end of a row's prefill: its first one, unless the row was recomputed."""
        if not self._core.table.outputs[row]:
            self._core.table.first_token[row] = when
        self._read_all(np.array([row], dtype=np.intp), [token], when, result)

    def _read_all(self, rows: NDArray[np.intp], tokens: list[int], when: float, result: StepResult) -> None:
        """Take one sampled token of each row, unless its request has ended (then the columns mean nothing)."""
        core, table, requests = self._core, self._core.table, self._core.requests
        table.last_token[rows] = when
        table.outputs[rows] += 1
        table.known[rows] += 1
        filled = (table.known[rows] % core.pool.block_tokens == 1).tolist()  # the token before filled its block
        leaving = (table.state[rows] == _LEAVING).tolist()
        for row, token, full, leaves in zip(rows.tolist(), tokens, filled, leaving, strict=False):
            request = requests.get(row)
            if request is not None and result.failures and (slot := int(table.slot[row])) in result.failures:
                core.end(row, FinishReason.ERROR, result.failures[slot])
            elif request is not None:
                logprobs = result.logprobs.get(int(table.slot[row])) if result.logprobs else None
                request.accept(token, when, logprobs, core.eos)
                if request.finish_reason is not None:
                    core.end(row, request.finish_reason)
                    continue
                if full:
                    core.residency.wrote(row, int(table.known[row]) - 1, request)
            if leaves:
                core.settle(row)

    def _fail(self, flight: Flight, fault: LaneFault) -> None:
        """The body raised: the requests of this forward end with an error, others go on."""
        core, table = self._core, self._core.table
        for row in flight.rows:
            table.flying[row] -= 1
            table.ahead[row] -= 1
        if flight.forward is not None:
            flight.forward.inflight -= 1
            core.drop(flight.forward)
        else:
            for part in flight.parts:
                table.flying[part.row] -= 1
                table.ahead[part.row] -= part.sample
        for row in (*flight.rows, *(part.row for part in flight.parts)):
            if row in core.requests:
                core.end(row, FinishReason.ERROR, fault.message)
            else:
                core.settle(row)

    def _lose_lane(self, side: Side) -> None:
        """The worker died: undo everything it had not finished, newest first; it is launched again.

        The KV memory and the board belong to the engine and outlive the worker, and a lost work writes only
        positions that are computed again, so nothing before it is lost (each request finishes with the same tokens).
        """
        core, table = self._core, self._core.table
        track = core.tracks[side]
        for flight in reversed(track.flights):
            core.line.completed(flight.work.id)
            core.log.lost_works += 1
            for row in flight.rows:
                table.computed[row] -= 1
                table.ahead[row] -= 1
                table.flying[row] -= 1
                core.settle(row)
            if flight.forward is None:
                for part in flight.parts:
                    self._undo(part)
        track.flights.clear()
        track.ready_since = None
        core.forget_samplers(side)
        if side is Side.PREFILL:
            for forward in list(core.forwards.values()):
                core.drop(forward)

    def _undo(self, part: Part) -> None:
        table = self._core.table
        table.flying[part.row] -= 1
        table.computed[part.row] = part.start
        if part.sample:
            table.ahead[part.row] -= 1
            if table.state[part.row] == State.RUNNING:
                table.state[part.row] = State.PREFILL
        self._core.settle(part.row)
