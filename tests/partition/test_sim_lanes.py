"""Virtual lanes against hand-made arithmetic and an independent integrator that creeps through time."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smpart.errors import UsageError
from smpart.partition import Device, Shape, Side, Split, Work
from smpart.partition.sim import SimLanes

DEVICE = Device("toy", "sim", 4, (0, 1, 2, 3), 1)
SPLITS = tuple(Split(p, 4 - p) for p in range(5))
P, D = Side.PREFILL, Side.DECODE


class Nothing:
    def __init__(self, side):
        self.ran = []

    def run(self, payload):
        self.ran.append(payload)
        return payload

    def close(self):
        pass


def cost(shape, units, neighbour, neighbour_units):
    """Work over units, twice as long beside an equal neighbour."""
    seconds = shape.tokens / units
    return seconds * (1 + neighbour.tokens / (neighbour.tokens + shape.tokens) * neighbour_units / 4)


def lanes(price=cost):
    return SimLanes(DEVICE, SPLITS, price, Nothing)


def work(id, side, split, tokens, fraction=1.0):
    return Work(id, side, split, Shape(prefill_tokens=tokens), fraction, id)


def test_alone_a_work_takes_its_cost():
    sim = lanes()
    sim.launch(work(1, P, Split(4, 0), 12))
    (done,) = sim.wait(None)
    assert (done.started, done.finished, done.result, sim.now()) == (0.0, 3.0, 1, 3.0)


def test_a_fraction_takes_its_share():
    sim = lanes()
    sim.launch(work(1, P, Split(4, 0), 12, fraction=0.25))
    assert sim.wait(None)[0].seconds == 0.75


def test_a_neighbour_slows_only_while_it_runs():
    """Decode alone: 8 s. Beside prefill (4 s) its pace halves, so 2 of 8 s are done at 4, and 6 are left."""
    sim = lanes(lambda shape, units, neighbour, neighbour_units: shape.tokens * (2.0 if neighbour_units else 1.0))
    sim.launch(work(1, D, Split(2, 2), 8))
    sim.launch(work(2, P, Split(2, 2), 2))
    first, second = sim.wait(None) + sim.wait(None)
    assert (first.work.id, first.finished) == (2, 4.0)
    assert (second.work.id, second.finished) == (1, 10.0)


def test_a_neighbour_that_comes_in_the_middle():
    sim = lanes(lambda shape, units, neighbour, neighbour_units: shape.tokens * (2.0 if neighbour_units else 1.0))
    sim.launch(work(1, D, Split(2, 2), 8))
    assert sim.wait(6.0) == []
    sim.launch(work(2, P, Split(2, 2), 4))
    first, second = sim.wait(None) + sim.wait(None)
    assert (first.work.id, first.finished) == (1, 10.0)  # 2 s left at half pace
    assert (second.work.id, second.finished) == (2, 12.0)  # 4 of 8 s at half pace, then 2 alone


def test_sides_that_overlap_are_priced_with_what_both_have():
    """Six units asked of four: each side's price is told both counts, and is as ever once the neighbour has ended."""
    sim = lanes(lambda shape, units, _, others: shape.tokens * max(1.0, (units + others) / 4))
    sim.launch(work(1, P, Split(4, 2), 3))
    sim.launch(work(2, D, Split(4, 2), 6))
    assert [(c.work.id, c.finished) for _ in range(2) for c in sim.wait(None)] == [(1, 4.5), (2, 7.5)]


def test_a_resize_in_the_middle():
    sim = lanes(lambda shape, units, *_: shape.tokens / units)
    sim.launch(work(1, P, Split(1, 3), 12))
    sim.launch(work(2, D, Split(1, 3), 12))
    assert sim.wait(2.0) == []
    sim.resize(Split(2, 2))
    assert sim.realised(P) == {0, 1} and sim.realised(D) == {2, 3}
    first, second = sim.wait(None) + sim.wait(None)
    assert (first.work.id, first.finished) == (2, 5.0)  # 6 of 12 done in 2 s on three, 3 s more on two
    assert (second.work.id, second.finished) == (1, 7.0)  # 2 of 12 done, 5 s more on two


def test_a_side_resized_to_nothing_stands_still():
    sim = lanes(lambda shape, units, *_: shape.tokens / units)
    sim.launch(work(1, P, Split(2, 2), 8))
    sim.wait(1.0)
    sim.resize(Split(0, 4))
    assert sim.wait(None) == [] and sim.now() == 1.0
    assert sim.wait(9.0) == [] and sim.now() == 9.0
    sim.resize(Split(4, 0))
    assert sim.wait(None)[0].finished == 10.5


def test_a_resize_binds_queued_works_and_admission():
    sim = lanes(lambda shape, units, *_: shape.tokens / units)
    sim.launch(work(1, P, Split(4, 0), 4))
    sim.launch(work(2, P, Split(4, 0), 4))
    with pytest.raises(UsageError, match="overlap"):
        sim.launch(work(3, D, Split(2, 2), 4))
    sim.resize(Split(2, 2))
    sim.launch(work(3, D, Split(2, 2), 8))
    times = {c.work.id: c.finished for _ in range(3) for c in sim.wait(None)}
    assert times == {1: 2.0, 2: 4.0, 3: 4.0}
    with pytest.raises(UsageError, match="does not exist"):
        sim.resize(Split(2, 1))


def test_completions_of_one_moment_come_together():
    sim = lanes(lambda shape, units, *_: shape.tokens / units)
    sim.launch(work(1, P, Split(1, 3), 2))
    sim.launch(work(2, D, Split(1, 3), 6))
    assert [c.work.id for c in sim.wait(2.0)] == [1, 2]


def test_until_before_at_and_after_a_completion():
    sim = lanes()
    sim.launch(work(1, P, Split(4, 0), 12))
    assert sim.wait(2.999) == [] and sim.now() == 2.999
    assert len(sim.wait(3.0)) == 1 and sim.now() == 3.0
    assert sim.wait(None) == [] and sim.now() == 3.0
    assert sim.wait(8.0) == [] and sim.now() == 8.0
    assert sim.wait(1.0) == [] and sim.now() == 8.0


@pytest.mark.parametrize("price", [0.0, -1.0, float("nan")])
def test_a_price_that_cannot_be_is_an_error(price):
    sim = lanes(lambda *_: price)
    with pytest.raises(ValueError, match="cost function"):
        sim.launch(work(1, P, Split(4, 0), 12))


STEP = 1 / 256  # of a second; a program's times are multiples of 1/4, the integrator's error is at most a few steps


class Creeper:
    """The same lanes, simulated by moving in tiny equal time steps; shares nothing with `SimLanes` but the rules."""

    def __init__(self):
        self.tick = 0
        self.queues = {P: [], D: []}  # [id, tokens, units, forwards left, started]
        self.finished = {}

    def launch(self, id, side, units, tokens, fraction):
        self.queues[side].append([id, tokens, units, fraction])

    def resize(self, split):
        for side, queue in self.queues.items():
            for each in queue:
                each[2] = split.units(side)

    def run(self, until=inf):
        while self.tick * STEP < until and any(q and q[0][2] for q in self.queues.values()):
            heads = {side: queue[0] for side, queue in self.queues.items() if queue}
            pace = {}
            for side, (_, tokens, units, _) in heads.items():
                other = heads.get(side.other)
                shape = Shape(prefill_tokens=tokens)
                beside = (Shape(prefill_tokens=other[1]), other[2]) if other and other[2] else (Shape(), 0)
                pace[side] = 1 / cost(shape, units, *beside) if units else 0.0
            self.tick += 1
            for side, head in heads.items():
                head[3] -= STEP * pace[side]
                if head[3] <= 1e-12:
                    self.finished[head[0]] = self.tick * STEP
                    self.queues[side].pop(0)
        if until < inf:
            self.tick = max(self.tick, round(until / STEP))


def moves():
    launch = st.tuples(st.sampled_from([P, D]), st.integers(1, 12), st.sampled_from([0.25, 0.5, 1.0]))
    pause = st.integers(1, 12).map(lambda quarters: quarters / 4)
    return st.lists(st.one_of(launch, pause, st.sampled_from(SPLITS)), min_size=1, max_size=14)


@given(moves())
def test_against_a_tiny_step_integrator(program):
    sim, creeper, split, times, events = lanes(), Creeper(), Split(2, 2), {}, 0
    for id, move in enumerate(program):
        if isinstance(move, Split):
            sim.resize(move)
            creeper.resize(move)
            split = move
        elif isinstance(move, float):
            until = sim.now() + move
            while sim.now() < until:
                times |= {c.work.id: c.finished for c in sim.wait(until)}
            creeper.run(until)
        else:
            side, tokens, fraction = move
            try:
                sim.launch(work(id, side, split, tokens, fraction))
            except UsageError:
                continue
            creeper.launch(id, side, split.units(side), tokens, fraction)
        events += 1
    sim.resize(Split(2, 2))
    creeper.resize(Split(2, 2))
    while done := sim.wait(None):
        times |= {c.work.id: c.finished for c in done}
    creeper.run()
    assert times.keys() == creeper.finished.keys()
    # Each event may cost the integrator one step, and a wrong neighbour for a step about as much again; a side with
    # few units feels an error of the other at most four-fold.
    slack = 8 * STEP * (events + 2)
    assert times == pytest.approx(creeper.finished, abs=slack)


@given(moves())
def test_work_is_conserved_and_ordered(program):
    """Without contention, units times seconds is exactly the work done, however often the line moves."""
    sim, split, launched, done = lanes(lambda s, u, n, v: s.tokens / u), Split(2, 2), {P: [], D: []}, []
    area, demand = dict.fromkeys(Side, 0.0), dict.fromkeys(Side, 0.0)
    busy = dict.fromkeys(Side, 0)

    def advance(until):
        while True:
            before, working = sim.now(), {side: busy[side] > 0 for side in Side}
            got = sim.wait(until)
            for side in Side:
                area[side] += (sim.now() - before) * split.units(side) * working[side]
            for completion in got:
                busy[completion.work.side] -= 1
            done.extend(got)
            if not got:
                return

    for id, move in enumerate(program):
        if isinstance(move, Split):
            sim.resize(move)
            split = move
        elif isinstance(move, float):
            advance(sim.now() + move)
        else:
            side, tokens, fraction = move
            try:
                sim.launch(work(id, side, split, tokens, fraction))
            except UsageError:
                continue
            launched[side].append(id)
            busy[side] += 1
            demand[side] += tokens * fraction
    split = Split(3, 1)
    sim.resize(split)
    advance(None)
    assert {side: [c.work.id for c in done if c.work.side is side] for side in Side} == launched
    assert area == pytest.approx(demand, abs=1e-9)
    assert [c.finished for c in done] == sorted(c.finished for c in done)
