"""Puts planned work into flight: blocks, slots and samplers first, then the launch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from smpart.engine.flight import Cohort, Flight, Forward, Part
from smpart.engine.request import Request
from smpart.engine.state import PREFILL, RUNNING, WAITING, EngineState
from smpart.partition import Shape, Side, Split, Work
from smpart.runtime.batch import NO_ROWS, Batch, Chunk, Sampler, Segment
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.plan import Piece, StartPrefill, Step

_GONE = Sampler(SamplingParams(), 1, 0)
_NOBODY = np.zeros(0, dtype=np.intp)
_KNOWN: dict[int, Sampler] = {}
"""What a body that has met all requests must learn."""


class Launcher:
    """Launches for one `EngineState`. What cannot be launched now is left; the policy is asked again.

    Args:
        layers: pieces that a prefill forward may be launched in: the model's decoder layers, or 1.
        lead_s: see `EngineCore`.
        max_paused: started and unfinished prefill forwards at once.

    Attributes:
        cohort: the rows of the last step, if it was a plain one and all that were asked for were in it.
    """

    def __init__(self, state: EngineState, layers: int, lead_s: float, max_paused: int) -> None:
        self.state = state
        self.layers = layers
        self.lead = lead_s
        self.max_paused = max_paused
        self.cohort: Cohort | None = None
        self._nobody = Cohort(state.table, _NOBODY)

    def room(self, side: Side) -> int:
        """Works that may be launched on a lane now: 1 if it is idle or about to be, otherwise 0."""
        lanes, flights = self.state.lanes, self.state.tracks[side].flights
        if not flights:
            return 1
        return int(len(flights) < lanes.depth and lanes.now() >= flights[-1].expected - self.lead)

    def step(self, step: Step) -> bool:
        """Launch a decode or hybrid step; whether it was launched."""
        self.cohort = None
        split = self._grant(Side.DECODE)
        if split is None or (step.pieces and (not split.exclusive or self.state.forwards)):
            return False
        table = self.state.table
        asked = np.asarray(step.rows, dtype=np.intp)
        rows = self.state.residency.grow(asked)
        parts = tuple(part for piece in step.pieces if (part := self._place(piece)) is not None)
        if not len(rows) and not parts:
            return False
        samplers = self._new_samplers(Side.DECODE, split, rows, parts)
        cohort = Cohort(table, rows, self.state.lanes.body(Side.DECODE, split))
        self._step(split, cohort, parts, samplers)
        if len(rows) == len(asked) and not parts:
            self.cohort = cohort
            cohort.left = int((table.max_tokens[rows] - table.outputs[rows] - table.ahead[rows]).min())
        for part in parts:
            table.flying[part.row] += 1
            if part.sample:  # the next step on this lane may already decode it: works of one lane run in order
                table.state[part.row] = RUNNING
                table.ahead[part.row] = 1
        return True

    def again(self) -> bool:
        """Launch the last step once more, on a lane that has room, of the same rows, which must all be there still.

        False, and nothing changed, where a row has reached its output limit or finds no block.
        """
        cohort, split = self.cohort, self.state.line.grant(Side.DECODE)
        if cohort is None or split is None or not cohort.left or not self.state.residency.grow_all(cohort.rows):
            return False
        body, samplers = self.state.lanes.body(Side.DECODE, split), _KNOWN
        if body != cohort.body:
            cohort.body, samplers = body, self._new_samplers(Side.DECODE, split, cohort.rows, ())
        if cohort.readers is None:
            cohort.readers = self._readers(cohort.rows)
        cohort.left -= 1
        self._step(split, cohort, (), samplers)
        return True

    def _readers(self, rows: NDArray[np.intp]) -> list[Request]:
        """The requests of rows if all are unwatched and none feeds the prefix cache, else nobody."""
        requests = [self.state.requests[row] for row in rows.tolist()]
        plain = all(request.unwatched for request in requests) and not self.state.residency.feeds(rows.tolist())
        return requests if plain else []

    def _step(self, split: Split, cohort: Cohort, parts: tuple[Part, ...], samplers: dict[int, Sampler]) -> None:
        """Launch a step of rows that have their blocks."""
        positions = self.state.table.computed[cohort.rows]
        shape = Shape.decode(len(cohort), int(np.add.reduce(positions)) + len(cohort))
        if parts:
            shape = shape.join(Shape.prefill((p.length, p.start) for p in parts))
        batch = Batch(cohort.slots, positions, self._chunks(parts))
        segment = Segment(next(self.state.numbers), batch, samplers=samplers)
        self._launch(Side.DECODE, split, shape, 1.0, segment, cohort, parts, None, last=True)
        cohort.launched()

    def start(self, start: StartPrefill) -> bool:
        """Start a prefill forward and launch its first layer group; whether it was launched."""
        split = self._grant(Side.PREFILL)
        if split is None or len(self.state.forwards) >= self.max_paused:
            return False
        parts = tuple(part for piece in start.pieces if (part := self._place(piece)) is not None)
        if not parts:
            return False
        shape = Shape.prefill((p.length, p.start) for p in parts)
        lanes = self.state.lanes
        body = lanes.body(Side.PREFILL, split)
        forward = Forward(next(self.state.numbers), parts, shape, self.layers, lanes.now(), split, body)
        self.state.forwards[forward.id] = forward
        for part in parts:
            self.state.table.forward[part.row] = forward.id
            self.state.table.flying[part.row] += 1
        return self.group(forward, start.layers, Batch(NO_ROWS, NO_ROWS, self._chunks(parts)))

    def group(self, forward: Forward, layers: int | None, batch: Batch | None = None) -> bool:
        """Launch a forward's next layer group (its first one with `batch`); whether it was launched."""
        split = self._grant(Side.PREFILL)
        if split is None or forward.layers_left == 0:
            return False
        count = forward.layers_left if layers is None else max(1, min(layers, forward.layers_left))
        last = count == forward.layers_left
        samplers = self._new_samplers(Side.PREFILL, split, _NOBODY, forward.parts) if last else {}
        segment = Segment(forward.id, batch, None if last else count, tuple(self.state.dropped), samplers)
        self.state.dropped.clear()
        forward.layers_left -= count
        forward.inflight += 1
        fraction = count / self.layers
        self._launch(
            Side.PREFILL, split, forward.shape, fraction, segment, self._nobody, forward.parts, forward, last=last
        )
        return True

    def _launch(
        self,
        side: Side,
        split: Split,
        shape: Shape,
        fraction: float,
        segment: Segment,
        cohort: Cohort,
        parts: tuple[Part, ...],
        forward: Forward | None,
        *,
        last: bool,
    ) -> None:
        state, track = self.state, self.state.tracks[side]
        work = Work(next(state.numbers), side, split, shape, fraction, segment)
        begins, follows = state.lanes.now(), bool(track.flights)
        if follows:
            begins = max(begins, track.flights[-1].expected)
        mean = state.predictor.predict(shape, split.units(side), state.beside(side)).mean * fraction
        plain = cohort.left > 0 and bool(cohort.readers)
        flight = Flight(work, cohort, parts, forward, last, begins + mean, track.ready_since, follows, plain)
        track.flights.append(flight)
        track.ready_since = None
        state.line.launched(work.id, side, split)
        state.lanes.launch(work)

    def _grant(self, side: Side) -> Split | None:
        return self.state.line.grant(side) if self.room(side) else None

    def _place(self, piece: Piece) -> Part | None:
        """Blocks (and a slot) for a piece; None if it cannot be launched now."""
        table, row = self.state.table, piece.row
        request = self.state.requests[row]
        if table.state[row] == WAITING:
            if not self.state.residency.free_slots:
                return None
            end = min(int(table.cached[row]) + piece.length, int(table.known[row]))
            self.state.residency.admit(row, request)
            end = max(end, int(table.computed[row]) + 1)
            if not self.state.residency.ensure(row, end):
                self.state.residency.release(row)
                return None
            table.state[row] = PREFILL
        else:
            end = min(int(table.computed[row]) + piece.length, int(table.known[row]))
            if table.forward[row] >= 0 or not self.state.residency.ensure(row, end):
                return None
        start = int(table.computed[row])
        table.computed[row] = end
        return Part(row, start, end - start, sample=end == int(table.known[row]))

    def _chunks(self, parts: tuple[Part, ...]) -> tuple[Chunk, ...]:
        return tuple(Chunk(int(self.state.table.slot[p.row]), p.start, p.length, p.sample) for p in parts)

    def _new_samplers(
        self, side: Side, split: Split, rows: NDArray[np.intp], parts: tuple[Part, ...]
    ) -> dict[int, Sampler]:
        """What the body must learn about requests it is to sample for the first time."""
        state, table = self.state, self.state.table
        body = state.lanes.body(side, split)
        met = state.known_samplers.get(body)
        if met is None:
            met = state.known_samplers[body] = np.full(state.residency.slots, -1, dtype=np.int64)
        asked = np.concatenate((rows, [p.row for p in parts if p.sample])).astype(np.intp) if parts else rows
        slots, numbers = table.slot.take(asked), table.seq.take(asked)
        fresh: dict[int, Sampler] = {}
        for place in (met.take(slots) != numbers).nonzero()[0].tolist():
            slot, request = int(slots[place]), state.requests.get(int(asked[place]))
            if request is None:  # it ended while its forward was under way; what is sampled for it goes nowhere
                fresh[slot] = _GONE
            else:
                fresh[slot] = Sampler(request.params, len(request.prompt), request.seed)
            met[slot] = numbers[place]
        return fresh
