"""A lane's worker process: pins itself, builds the injected body, and runs payloads one after another.

It blocks on its channel when there is nothing to do. All it shares with others are segments; it takes no lock there,
so it may be killed at any moment and leaves nothing locked.
"""

from __future__ import annotations

import pkgutil
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smpart.partition.affinity import pin_self
from smpart.partition.lanes import Body
from smpart.partition.split import Side
from smpart.runtime.channel import Channel
from smpart.runtime.messages import Done, Ready, one_line, refusal
from smpart.runtime.segments import SharedSegment

ProcessBodyFactory = Callable[[Side, Any, Mapping[str, SharedSegment]], Body]
"""What a body reference names: ``factory(side, args, segments)``, called in the worker."""


@dataclass(frozen=True, slots=True)
class Init:
    """First message to a worker.

    Attributes:
        body: ``module:function`` of a `ProcessBodyFactory`.
        args: passed to it.
        segments: names of the segments whose descriptors the worker was forked with, in that order.
        cpus: where to build the body.
        units: number of units those are: as many threads are used.
    """

    side: Side
    body: str
    args: Any
    segments: tuple[str, ...]
    cpus: frozenset[int]
    units: int


@dataclass(frozen=True, slots=True)
class Task:
    """One work to run on the given CPUs with one thread a unit."""

    id: int
    cpus: frozenset[int]
    units: int
    payload: Any


def main(fds: list[int]) -> None:
    """Run a worker: `fds` are its channel's socket and the segments that `Init` names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fds[0]), blocking=True)
    try:
        init: Init = channel.receive()
        segments = {name: SharedSegment.attach(fd) for name, fd in zip(init.segments, fds[1:], strict=True)}
        lane = _Place()
        try:
            lane.take(init.cpus, init.units)
            body: Body = pkgutil.resolve_name(init.body)(init.side, init.args, segments)
        except Exception as error:
            channel.send(refusal(error))
            return
        channel.send(Ready())
        _serve(channel, lane, body)
    except EOFError:
        return


def _serve(channel: Channel, lane: _Place, body: Body) -> None:
    try:
        while True:
            done = _run(channel.receive(), lane, body)
            try:
                channel.send(done)
            except Exception as error:  # a result that cannot be pickled
                channel.send(replace(done, result=None, error=one_line(error)))
    except EOFError:
        body.close()


def _run(task: Task, lane: _Place, body: Body) -> Done:
    result, fault = None, None
    started = time.monotonic()
    try:
        lane.take(task.cpus, task.units)
        started = time.monotonic()
        result = body.run(task.payload)
    except Exception as error:
        traceback.print_exc()
        fault = one_line(error)
    return Done(task.id, started, time.monotonic(), result, fault)


class _Place:
    """Where this process runs. Moves only when the CPUs change."""

    def __init__(self) -> None:
        self._cpus: frozenset[int] = frozenset()
        self._units = 0

    def take(self, cpus: frozenset[int], units: int) -> None:
        import torch  # the zygote has it; who only imports this module for its messages need not

        if units != self._units:
            torch.set_num_threads(units)
            self._units = units
        if cpus != self._cpus:
            pin_self(cpus)
            self._cpus = cpus
