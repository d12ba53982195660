"""Works of the profiler's own, and what is measured with them: alone, side by side, in a steady state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from toy_sweep import SPLITS, Troubled, completion, cost, sim_lanes, thread_lanes, works

from smpart.engine.ghost import GhostBoard
from smpart.errors import UsageError
from smpart.partition import Shape, Side, Split
from smpart.profiler.experiment import Experiment
from smpart.profiler.sample import Pressure
from smpart.profiler.timer import ForwardError, Timer, WorkerLostError, steady
from smpart.profiler.visit import Visitor
from smpart.profiler.works import Works
from smpart.runtime.board import Board
from smpart.runtime.contender import Contender, Pressed

HALF, WHOLE = Split(2, 2), Split(0, 4)
PAIR = Experiment(HALF, ((100, 20),), rows=3, context=50)


def board(slots: int, max_len: int) -> Board:
    return Board.over(bytearray(Board.size(slots, max_len, 16)), slots, max_len, 16)


def test_an_experiment_tells_its_points() -> None:
    prefill, decode = PAIR.points()
    assert prefill.shape == Shape.prefill([(100, 20)]) == decode.neighbour
    assert decode.shape == Shape.decode(3, 150) == prefill.neighbour
    assert (prefill.units, prefill.neighbour_units) == (decode.units, decode.neighbour_units) == (2, 2)
    hybrid = Experiment(WHOLE, ((100, 20),), rows=3, context=50)
    (point,) = hybrid.points()
    assert hybrid.hybrid and point.alone and point.units == 4
    assert point.shape == Shape.decode(3, 150).join(Shape.prefill([(100, 20)]))
    pressed = Experiment(HALF, (), 3, 50, "dram")
    (point,) = pressed.points(Pressure("dram", 1e9, 0.0))
    assert not point.alone and point.contender.bytes_s == 1e9 and not point.neighbour.tokens
    assert pressed.side is Side.DECODE and PAIR.side is Side.PREFILL


def test_equal_units_are_the_same_experiment_on_any_split() -> None:
    assert Experiment(Split(1, 3), ((8, 0),)).key == Experiment(Split(1, 2), ((8, 0),)).key
    assert Experiment(HALF, ((8, 0),), contender="dram").key != Experiment(HALF, ((8, 0),), contender="l2").key


@given(
    st.lists(st.tuples(st.integers(1, 90), st.integers(0, 90)), min_size=1, max_size=4),
    st.integers(1, 8),
    st.integers(1, 180),
)
def test_forwards_read_and_write_what_is_theirs(chunks: list[tuple[int, int]], rows: int, context: int) -> None:
    shared = board(20, 200)
    made = Works(shared, 400, 16)
    assume(sum(map(sum, chunks)) <= made.chunk_tokens)
    prefill = made.prefill(HALF, tuple(chunks)).payload.batch
    decode = made.decode(HALF, rows, context).payload.batch
    assert [(chunk.length, chunk.start) for chunk in prefill.chunks] == chunks
    assert decode.decode_positions.tolist() == [context - 1] * rows
    ends = {chunk.slot: chunk.start + chunk.length for chunk in prefill.chunks}
    ends.update(dict.fromkeys(decode.decode_slots.tolist(), context))
    assert len(ends) == len(chunks) + rows
    tables = {slot: shared.tables[slot, : end // 16 + 1].tolist() for slot, end in ends.items()}
    owned = [block for table in tables.values() for block in table]
    assert len(owned) == len(set(owned)) and set(owned) < set(range(400))
    assert all((shared.tokens[slot, : end + 1] >= 3).all() for slot, end in ends.items())


@given(st.integers(1, 40), st.integers(1, 12), st.integers(20, 300))
def test_works_know_how_many_rows_fit(blocks: int, rows: int, max_len: int) -> None:
    shared = board(16, max_len)
    made = Works(shared, blocks, 16)
    context = made.row_tokens(min(rows, len(made.row_slots)))
    if context < 1:
        return
    rows = min(rows, len(made.row_slots))
    made.decode(HALF, rows, context)
    made.prefill(HALF, ((made.longest, 0),))
    tables = shared.tables[list(made.row_slots[:rows]), : context // 16 + 1]
    assert len(np.unique(tables)) == tables.size
    assert set(tables.ravel().tolist()) <= set(range(blocks))


def test_any_small_board_will_do() -> None:
    for slots, blocks in ((1, 1), (2, 1), (3, 2)):
        made = Works(board(slots, 16), blocks, 16)
        made.hybrid(WHOLE, ((made.longest, 0),), len(made.row_slots), made.longest)


@pytest.mark.parametrize(
    ("chunks", "rows", "context", "why"),
    [
        (((600, 0),), 0, 0, "a sequence of 600 tokens: there is room for 511"),
        (((1, 511),), 0, 0, "a sequence of 512 tokens"),
        ((), 20, 5, "20 rows: there are slots for 8 and 16"),
        (((1, 0),) * 9, 0, 0, "9 chunks"),
        ((), 0, 0, "a forward needs chunks"),
        ((), 1, 0, "a context of at least one"),
        (((0, 4),), 0, 0, "at least one token"),
    ],
)
def test_what_does_not_fit_is_refused(chunks: tuple[tuple[int, int], ...], rows: int, context: int, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        works().hybrid(WHOLE, chunks, rows, context)


@pytest.mark.parametrize("split", [split for split in SPLITS if not split.exclusive], ids=str)
@pytest.mark.parametrize(("tokens", "rows"), [(200, 1), (4, 8), (60, 60 // 8)])
def test_side_by_side_both_are_measured_beside_each_other(split: Split, tokens: int, rows: int) -> None:
    """In virtual time the truth is exact: a sample that was not beside its neighbour all the while would differ."""
    made = works()
    visitor = Visitor(Timer(sim_lanes(), made), made)
    experiment = Experiment(split, ((tokens, 0),), rows, 300)
    for point, seconds in zip(experiment.points(), visitor.visit(experiment, 1e-3), strict=True):
        expected = cost(point.shape, point.units, point.neighbour, point.neighbour_units)
        assert len(seconds) >= 2
        assert seconds == pytest.approx([expected] * len(seconds), rel=1e-9)


def test_alone_nothing_is_beside_and_a_long_forward_runs_once() -> None:
    made, lanes = works(), sim_lanes()
    visitor = Visitor(Timer(lanes, made), made)
    short, long = Experiment(HALF, ((8, 0),)), Experiment(Split(1, 3), ((500, 0),), 0, 0)
    (seconds,) = visitor.visit(short, 1e-3)
    assert seconds == pytest.approx([cost(short.prefill, 2, Shape(), 0)] * 6, rel=1e-9)
    (seconds,) = visitor.visit(long, 0.6)
    assert seconds == pytest.approx([cost(long.prefill, 1, Shape(), 0)], rel=1e-9)


def test_a_neighbour_that_ran_only_for_a_while_does_not_count() -> None:
    def at(side: Side, *spans: tuple[float, float]) -> list[object]:
        return [completion(PAIR, side, *span) for span in spans]

    steps = at(Side.DECODE, (0, 10), (12, 20), (20.1, 30), (31, 40))
    whole, early, late = at(Side.PREFILL, (1, 20), (-2, 9), (35, 42))
    assert steady([whole, early, late], steps) == []  # 2 s of 19 without a step, and the others stick out
    steps = at(Side.DECODE, (0, 10), (10.0005, 20), (20.0005, 30))
    assert steady([whole, early, late], steps) == [whole]
    assert steady(steps, []) == []


class Pressing:
    """A body that takes contenders as well."""

    def __init__(self, side: Side) -> None:
        pass

    def run(self, payload: object) -> object:
        return Pressed(100.0 * payload.bursts, 0.0) if isinstance(payload, Contender) else None

    def close(self) -> None:
        pass


def test_a_contender_is_a_neighbour_whose_pressure_is_measured() -> None:
    from smpart.partition.sim import SimLanes

    lanes = SimLanes(sim_lanes().device, SPLITS, lambda shape, *rest: 5e-3 if not shape.tokens else 2e-2, Pressing)
    made = works()
    visitor = Visitor(Timer(lanes, made), made)
    experiment = Experiment(HALF, ((8, 0),), contender="dram")
    (seconds,) = visitor.visit(experiment, 2e-2)
    assert seconds == pytest.approx([2e-2] * len(seconds))
    pressure = visitor.pressure(experiment)
    assert pressure.kind == "dram" and pressure.flops_s == 0.0
    assert pressure.bytes_s == pytest.approx(100.0 * 4 / 5e-3)  # four bursts make about 20 ms of 5 ms each
    assert visitor.pressure(PAIR).kind == ""


def test_lanes_are_idle_again_after_a_failure() -> None:
    class Failing:
        def __init__(self, side: Side) -> None:
            self.left = 5 if side is Side.DECODE else 10**9

        def run(self, payload: object) -> object:
            self.left -= 1
            if self.left == 0:
                raise MemoryError("no room")
            return None

        def close(self) -> None:
            pass

    from smpart.partition.sim import SimLanes

    lanes, made = SimLanes(sim_lanes().device, SPLITS, cost, Failing), works()
    timer = Timer(lanes, made)
    prefill, decode = made.prefill(HALF, ((300, 0),)), made.decode(HALF, 2, 40)
    with pytest.raises(ForwardError, match="no room"):
        timer.beside(prefill, decode, 2)
    assert timer.one(prefill).seconds > 0 and timer.one(decode).seconds > 0

    troubled = Troubled(sim_lanes())
    troubled.lose = {3}
    with pytest.raises(WorkerLostError, match="the worker ended"):
        Timer(troubled, made).beside(prefill, decode, 2)  # type: ignore[arg-type]
    assert Timer(troubled, made).one(prefill).fault is None  # type: ignore[arg-type]


def test_thread_lanes_are_kept_busy_on_both_sides() -> None:
    made, lanes = works(), thread_lanes()
    try:
        prefills, steps = Timer(lanes, made).beside(made.prefill(HALF, ((64, 0),)), made.decode(HALF, 4, 50), 6)
        assert len(prefills) == 6
        assert min(s.started for s in steps) < prefills[0].started and steps[-1].finished >= prefills[-1].finished
    finally:
        lanes.close()


def test_a_virtual_board_serves_too() -> None:
    made = Works(GhostBoard(40, 100_000), 20_000, 16)
    assert made.longest == 99_999 and made.chunk_tokens >= 99_999 // 2
