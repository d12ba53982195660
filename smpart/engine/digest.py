"""What the end of a piece of work changes: tokens read, blocks published, rows moved on, faults undone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smpart.engine.flight import Flight, LaneTrack, Part
from smpart.engine.log import Span
from smpart.engine.request import FinishReason
from smpart.engine.state import LEAVING, PREFILL, RUNNING, EngineState
from smpart.partition import Completion, LaneFault, Shape, Side
from smpart.predictor.estimate import NOTHING
from smpart.runtime.batch import StepResult


class Digest:
    """Applies completions to an `EngineState`."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def take(self, completions: list[Completion]) -> None:
        """Apply completions in the order they happened."""
        for completion in completions:
            side = completion.work.side
            track = self._state.tracks[side]
            number = completion.work.id
            for flight in track.flights:
                if flight.work.id == number:
                    break
            else:  # its lane was lost and everything on it undone
                continue
            if completion.fault is not None and completion.fault.lost:
                self._lose_lane(side)
                continue
            track.flights.remove(flight)
            self._state.line.completed(number)
            self._log(completion, flight, track)
            if completion.fault is not None:
                self._fail(flight, completion.fault)
            elif flight.forward is None:
                self._step_done(flight, completion)
            else:
                self._group_done(flight, completion)

    def _log(self, completion: Completion, flight: Flight, track: LaneTrack) -> None:
        state, work, shape = self._state, completion.work, completion.work.shape
        started, finished = completion.started, completion.finished
        since = track.last_finished if flight.follows else flight.ready
        kind = "hybrid" if shape.hybrid else "decode" if shape.decode_batch else "prefill"
        span = Span(work.side, started, finished, kind, shape.tokens, len(flight.cohort), work.split)
        state.log.ran(span, started - since if since is not None else 0.0)
        neighbour: Shape | None = NOTHING
        if state.crossing is None:
            neighbour = state.tracks[work.side.other].neighbour_of(started, finished)
        if neighbour != NOTHING and work.split in state.shared:
            neighbour = None  # lanes that shared units tell nothing of lanes that do not
        track.landed(completion)
        track.ready_since = finished if not track.flights else None
        if neighbour is not None and completion.fault is None:
            state.predictor.observe(shape, work.units, neighbour, work.fraction, finished - started)

    def _step_done(self, flight: Flight, completion: Completion) -> None:
        state, result, cohort = self._state, completion.result, flight.cohort
        table, when = state.table, completion.finished
        cohort.landed()
        table.last_token[cohort.rows] = when
        tokens = result.tokens.tolist()
        if flight.plain and cohort.none_leaves() and not (result.failures or result.logprobs):
            for request, token in zip(cohort.readers or (), tokens, strict=True):
                request.times.append(when)
                request.token_ids.append(token)
            return
        self._read_all(cohort.rows, tokens, when, result)
        sampled = iter(tokens[len(cohort) :])
        for part in flight.parts:
            table.flying[part.row] -= 1
            self._written(part)
            if part.sample:
                table.ahead[part.row] -= 1
                self._read_first(part.row, next(sampled), when, result)
            else:
                state.settle(part.row)

    def _group_done(self, flight: Flight, completion: Completion) -> None:
        state, forward = self._state, flight.forward
        assert forward is not None
        forward.inflight -= 1
        if forward.id not in state.forwards:  # a group before it failed, and all of it was undone
            return
        if not flight.last:
            state.drop_dead_forward(forward.id)
            return
        state.forwards.pop(forward.id)
        sampled = iter(completion.result.tokens.tolist())
        for part in forward.parts:
            state.table.flying[part.row] -= 1
            state.table.forward[part.row] = -1
            self._written(part)
            if part.sample:
                if state.table.state[part.row] == PREFILL:
                    state.table.state[part.row] = state.prefilled
                self._read_first(part.row, next(sampled), completion.finished, completion.result)
            else:
                state.settle(part.row)

    def _written(self, part: Part) -> None:
        request = self._state.requests.get(part.row)
        if request is not None:
            self._state.residency.wrote(part.row, part.start + part.length, request)

    def _read_first(self, row: int, token: int, when: float, result: StepResult) -> None:
        """The token sampled at the end of a row's prefill: its first one, unless the row was recomputed."""
        table = self._state.table
        if not table.outputs[row]:
            table.first_token[row] = when
        table.last_token[row] = when
        table.outputs[row] += 1
        table.known[row] += 1
        self._read_all(np.array([row], dtype=np.intp), [token], when, result)

    def _read_all(self, rows: NDArray[np.intp], tokens: list[int], when: float, result: StepResult) -> None:
        """Give each row's request the token that the table counts already, unless it has ended."""
        state, table, requests = self._state, self._state.table, self._state.requests
        filled = (table.known[rows] % state.pool.block_tokens == 1).tolist()  # the token before filled its block
        leaving = (table.state[rows] == LEAVING).tolist()
        more = (table.outputs[rows] < table.max_tokens[rows]).tolist()
        plain = not (result.failures or result.logprobs)
        for row, token, full, leaves, on in zip(rows.tolist(), tokens, filled, leaving, more, strict=False):
            request = requests.get(row)
            if plain and on and request is not None and request.unwatched:
                request.times.append(when)
                request.token_ids.append(token)
                if full:
                    state.residency.wrote(row, int(table.known[row]) - 1, request)
            elif request is not None and result.failures and (slot := int(table.slot[row])) in result.failures:
                state.end(row, FinishReason.ERROR, result.failures[slot])
            elif request is not None:
                logprobs = result.logprobs.get(int(table.slot[row])) if result.logprobs else None
                request.accept(token, when, logprobs, state.eos)
                if request.finish_reason is not None:
                    state.end(row, request.finish_reason)
                    continue
                if full:
                    state.residency.wrote(row, int(table.known[row]) - 1, request)
            if leaves:
                state.settle(row)

    def _fail(self, flight: Flight, fault: LaneFault) -> None:
        """The body raised: the requests of this forward end with an error, others go on."""
        state, table = self._state, self._state.table
        rows = flight.cohort.rows.tolist()
        for row in rows:
            table.flying[row] -= 1
            table.ahead[row] -= 1
        if flight.forward is not None:
            flight.forward.inflight -= 1
            if flight.forward.id not in state.forwards:  # a group before it failed: its rows may be others' by now
                return
            state.drop(flight.forward)
        else:
            for part in flight.parts:
                table.flying[part.row] -= 1
                table.ahead[part.row] -= part.sample
        for row in (*rows, *(part.row for part in flight.parts)):
            if row in state.requests:
                state.end(row, FinishReason.ERROR, fault.message)
            else:
                state.settle(row)

    def _lose_lane(self, side: Side) -> None:
        """The worker died: undo everything it had not finished, newest first; it is launched again.

        The KV memory and the board belong to the engine and outlive the worker, and a lost work writes only
        positions that are computed again, so nothing before it is lost (each request finishes with the same tokens).
        """
        state, table = self._state, self._state.table
        track = state.tracks[side]
        for flight in reversed(track.flights):
            state.line.completed(flight.work.id)
            state.log.lost_works += 1
            for row in flight.cohort.rows.tolist():
                table.computed[row] -= 1
                table.ahead[row] -= 1
                table.flying[row] -= 1
                state.settle(row)
            if flight.forward is None:
                for part in flight.parts:
                    self._undo(part)
        track.flights.clear()
        track.ready_since = None
        if side is Side.PREFILL:
            for forward in list(state.forwards.values()):
                state.drop(forward)

    def _undo(self, part: Part) -> None:
        table = self._state.table
        table.flying[part.row] -= 1
        table.computed[part.row] = part.start
        if part.sample:
            table.ahead[part.row] -= 1
            if table.state[part.row] == RUNNING:
                table.state[part.row] = PREFILL
        self._state.settle(part.row)
