"""What every pair of lanes must do, as checks over a case: how to make the lanes, and how to talk to their bodies.

A test module imports `checks` and runs each on each of its cases::

    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    def test_conformance(check, case): check(case)

A case's bodies must behave as `ToyBody` does, in whatever process they live.
"""

from __future__ import annotations

import random
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from smpart.errors import EngineClosed, UsageError
from smpart.partition import Completion, Lanes, Shape, Side, Split, Work

PATIENCE = 60.0
"""Seconds after which something that must happen is taken never to happen."""


class ToyBody:
    """A body that the checks can steer through its payloads; `Gate` is the other end of ``("gate", path)``."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def run(self, payload: Any) -> Any:
        verb, argument = payload
        if verb == "raise":
            raise ValueError(argument)
        if verb == "gate":
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gate:
                gate.settimeout(PATIENCE)
                gate.connect(argument)
                if gate.recv(1) != b"!":
                    raise RuntimeError("the gate was torn down")
            return "passed"
        return (self.side.value, argument)

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Case:
    """A way of making lanes.

    Attributes:
        make: fresh lanes with a `ToyBody` on each side.
        virtual: whether the clock moves only in `wait` and bodies run at their completion.
    """

    name: str
    make: Callable[[], Lanes]
    virtual: bool


class Gate:
    """Holds every body that comes to it until it is opened for so many of them at once."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name) / "gate")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(8)
        self._listener.settimeout(PATIENCE)
        self._held: list[socket.socket] = []

    def gather(self, count: int) -> None:
        """Wait until `count` bodies stand at the gate. Raises `TimeoutError`."""
        while len(self._held) < count:
            self._held.append(self._listener.accept()[0])

    def open(self) -> None:
        """Let those that are held pass."""
        for body in self._held:
            body.sendall(b"!")
            body.close()
        self._held.clear()

    def open_when_they_come(self, count: int) -> threading.Thread:
        """Open for the next `count` bodies, in the background."""

        def usher() -> None:
            self.gather(count)
            self.open()

        thread = threading.Thread(target=usher)
        thread.start()
        return thread

    def close(self) -> None:
        for body in self._held:
            body.close()
        self._listener.close()
        self._folder.cleanup()


@contextmanager
def opened(case: Case):
    """Lanes and a gate, both closed in the end (the gate first: nobody may be left standing at it)."""
    lanes, gate = case.make(), Gate()
    try:
        yield lanes, gate
    finally:
        gate.close()
        lanes.close()


def work(id: int, side: Side, split: Split, payload: Any = ("echo", None)) -> Work:
    shape = Shape.prefill([(64, 0)]) if side is Side.PREFILL else Shape.decode(4, 256)
    return Work(id, side, split, shape, 1.0, payload)


def collect(lanes: Lanes, count: int) -> list[Completion]:
    """Exactly `count` completions, in the order they came."""
    done: list[Completion] = []
    deadline = lanes.now() + PATIENCE
    while len(done) < count:
        assert lanes.now() < deadline, f"{count - len(done)} of {count} completions never came"
        done += lanes.wait(deadline)
    assert len(done) == count
    return done


def exclusive(lanes: Lanes, side: Side) -> Split:
    return next(split for split in lanes.splits() if split.units(side.other) == 0)


def shared(lanes: Lanes) -> Split:
    split = next((split for split in lanes.splits() if not split.exclusive), None)
    if split is None:
        pytest.skip("this machine has one usable core: there is no split with two sides")
    return split


def check_splits_cover_the_device(case: Case) -> None:
    with opened(case) as (lanes, _):
        splits, device = lanes.splits(), lanes.device
        assert list(splits) == sorted(set(splits))
        assert {s.total for s in splits} == {device.units}
        assert {Split(device.units, 0), Split(0, device.units)} <= set(splits)
        assert len(set(device.unit_ids)) == device.units == len(device.unit_ids)
        assert device.memory_bytes > 0


def check_order_within_a_side(case: Case) -> None:
    with opened(case) as (lanes, _):
        for side in Side:
            split, done, launched = exclusive(lanes, side), [], 0
            while len(done) < 7:
                while launched < 7 and launched - len(done) < lanes.depth:
                    lanes.launch(work(launched, side, split, ("echo", launched)))
                    launched += 1
                done += collect(lanes, 1) if case.virtual else lanes.wait(lanes.now() + PATIENCE)
            assert [c.result for c in done] == [(side.value, i) for i in range(7)]
            assert all(c.fault is None and c.started <= c.finished for c in done)
            assert all(a.finished <= b.started for a, b in pairwise(done))


def check_both_sides_run_at_once(case: Case) -> None:
    with opened(case) as (lanes, gate):
        split = shared(lanes)
        # In virtual time bodies run one after the other, each at its own completion: only the times can show it.
        payload = ("echo", None) if case.virtual else ("gate", gate.path)
        for side in Side:
            lanes.launch(work(len(side), side, split, payload))
        if not case.virtual:
            gate.gather(2)
            gate.open()
        done = collect(lanes, 2)
        assert [c.fault for c in done] == [None, None]
        assert max(c.started for c in done) < min(c.finished for c in done)


def check_overlap_is_refused(case: Case) -> None:
    with opened(case) as (lanes, gate):
        usher = gate.open_when_they_come(1)
        lanes.launch(work(1, Side.PREFILL, exclusive(lanes, Side.PREFILL), ("gate", gate.path)))
        with pytest.raises(UsageError, match="overlap"):
            lanes.launch(work(2, Side.DECODE, exclusive(lanes, Side.DECODE)))
        collect(lanes, 1)
        usher.join()
        lanes.launch(work(3, Side.DECODE, exclusive(lanes, Side.DECODE)))
        collect(lanes, 1)


def check_units_are_shared_only_where_that_was_asked_for(case: Case) -> None:
    with opened(case) as (lanes, gate):
        total, apart = lanes.device.units, set(lanes.splits())
        overlapping = lanes.overlapping()
        assert not apart & set(overlapping) and all(split.overlaps(total) for split in overlapping)
        if not overlapping:
            with pytest.raises(UsageError, match="does not exist"):
                lanes.launch(work(1, Side.DECODE, Split(total, total)))
            return
        both = Split(total, total)
        assert both in overlapping
        payload = ("echo", None) if case.virtual else ("gate", gate.path)
        for side in Side:
            lanes.launch(work(len(side), side, both, payload))
        if not case.virtual:
            gate.gather(2)
            gate.open()
        done = collect(lanes, 2)
        assert max(c.started for c in done) < min(c.finished for c in done)
        assert all(lanes.realised(side) == set(lanes.device.unit_ids) for side in Side)
        lanes.launch(work(1, Side.PREFILL, both, payload))
        with pytest.raises(UsageError, match="overlap"):
            lanes.launch(work(2, Side.DECODE, exclusive(lanes, Side.DECODE)))
        if not case.virtual:
            gate.gather(1)
            gate.open()
        collect(lanes, 1)


def check_depth_is_respected(case: Case) -> None:
    with opened(case) as (lanes, gate):
        split = exclusive(lanes, Side.DECODE)
        lanes.launch(work(0, Side.DECODE, split, ("gate", gate.path)))
        for i in range(1, lanes.depth):
            lanes.launch(work(i, Side.DECODE, split))
        with pytest.raises(UsageError, match="in flight"):
            lanes.launch(work(99, Side.DECODE, split))
        usher = gate.open_when_they_come(1)
        assert [c.work.id for c in collect(lanes, lanes.depth)] == list(range(lanes.depth))
        usher.join()


def check_bad_works_are_refused(case: Case) -> None:
    with opened(case) as (lanes, _):
        whole = exclusive(lanes, Side.DECODE)
        bad = [
            work(1, Side.DECODE, Split(0, lanes.device.units + 1)),
            work(2, Side.PREFILL, whole),
            Work(3, Side.DECODE, whole, Shape.decode(1, 1), 0.0, ("echo", 0)),
            Work(4, Side.DECODE, whole, Shape.decode(1, 1), 1.5, ("echo", 0)),
        ]
        for each in bad:
            with pytest.raises(UsageError):
                lanes.launch(each)
        lanes.launch(work(5, Side.DECODE, whole, ("echo", "fine")))
        assert collect(lanes, 1)[0].result == ("decode", "fine")


def check_an_exception_fails_one_work_only(case: Case) -> None:
    with opened(case) as (lanes, _):
        split = exclusive(lanes, Side.PREFILL)
        lanes.launch(work(1, Side.PREFILL, split, ("raise", "no such block")))
        lanes.launch(work(2, Side.PREFILL, split, ("echo", "next")))
        bad, good = collect(lanes, 2)
        assert bad.fault is not None and not bad.fault.lost and "no such block" in bad.fault.message
        assert bad.result is None and good.fault is None and good.result == ("prefill", "next")


def check_wait_returns_at_the_time(case: Case) -> None:
    with opened(case) as (lanes, _):
        until = lanes.now() + 0.02
        assert lanes.wait(until) == []
        assert lanes.now() >= until
        assert lanes.wait(lanes.now() - 1.0) == []
        assert not case.virtual or lanes.now() == until


def check_wake_ends_a_wait(case: Case) -> None:
    with opened(case) as (lanes, _):
        before = lanes.now()
        thread = threading.Thread(target=lanes.wake)
        thread.start()
        if case.virtual:
            thread.join()
        assert lanes.wait(before + PATIENCE) == []
        thread.join()
        assert lanes.now() < before + PATIENCE
        until = lanes.now() + 0.01
        lanes.wait(until)
        assert lanes.now() >= until, "one wake ended two waits"


def check_realised_units_follow_the_split(case: Case) -> None:
    with opened(case) as (lanes, _):
        ids, total, rng = lanes.device.unit_ids, lanes.device.units, random.Random(7)
        for step in range(12):
            split = rng.choice(lanes.splits())
            sides = [side for side in Side if split.units(side)]
            for side in sides:
                lanes.launch(work(2 * step + len(side) % 2, side, split))
            assert all(c.fault is None for c in collect(lanes, len(sides)))
            realised = [lanes.realised(side) for side in sides]
            assert realised == [frozenset(ids[i] for i in split.indices(side, total)) for side in sides]
            assert len(frozenset().union(*realised)) == sum(map(len, realised)) == split.total


def check_close_is_idempotent(case: Case) -> None:
    with opened(case) as (lanes, _):
        lanes.close()
        lanes.close()
        with pytest.raises(EngineClosed):
            lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE)))
        assert lanes.wait(None) == []


def check_close_drops_queued_work(case: Case) -> None:
    with opened(case) as (lanes, gate):
        split = exclusive(lanes, Side.DECODE)
        lanes.launch(work(1, Side.DECODE, split, ("gate", gate.path)))
        lanes.launch(work(2, Side.DECODE, split, ("echo", "never")))
        if not case.virtual:
            gate.gather(1)
        closing = threading.Thread(target=lanes.close)
        closing.start()
        # The running body may end only once the lanes are closed, or the queued one could get its turn.
        while not case.virtual and not _refuses(lanes, split):
            pass
        gate.open()
        closing.join()
        assert all(c.work.id != 2 for c in lanes.wait(lanes.now()))


def _refuses(lanes: Lanes, split: Split) -> bool:
    try:
        lanes.launch(work(3, Side.DECODE, split))
    except EngineClosed:
        return True
    except UsageError:
        return False
    raise AssertionError("a third work was taken")


def check_no_thread_is_left(case: Case) -> None:
    before = set(threading.enumerate())
    with opened(case) as (lanes, _):
        lanes.launch(work(1, Side.DECODE, exclusive(lanes, Side.DECODE)))
        collect(lanes, 1)
    assert set(threading.enumerate()) <= before


checks = [value for name, value in list(globals().items()) if name.startswith("check_")]
