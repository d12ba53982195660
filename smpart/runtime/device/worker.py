"""A device's worker process: one thread queues both lanes' work, another sends what has ended to the engine.

A lost device takes the process with it, on purpose: the engine starts another and recomputes what was under way.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass

from smpart.partition.shape import Shape
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, Work
from smpart.runtime.channel import Channel
from smpart.runtime.device.machine import DeviceArgs, Machine, build
from smpart.runtime.messages import Done, Ready, one_line, refusal
from smpart.runtime.segments import SharedSegment

logger = logging.getLogger(__name__)

_SWITCH_S = 1e-4
"""How long a thread that launches may keep the interpreter while a watcher has something to tell (Python: 5 ms)."""

LOST = 70
"""Exit code of a process whose device was lost."""


@dataclass(frozen=True, slots=True)
class Start:
    """First message: what to build, and the names of the segments whose descriptors came with the process."""

    args: DeviceArgs
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """One work."""

    id: int
    side: Side
    split: Split
    payload: object


def main(fds: list[int]) -> None:
    """Run a worker: `fds` are its channel's socket and the segments that `Start` names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fds[0]), blocking=True)
    try:
        start: Start = channel.receive()
        segments = {name: SharedSegment.attach(fd) for name, fd in zip(start.segments, fds[1:], strict=True)}
        try:
            machine = build(start.args, segments)
        except Exception as error:
            channel.send(refusal(error))
            return
        channel.send(Ready(info=machine.info))
    except EOFError:
        return
    serve(channel, machine)


def serve(channel: Channel, machine: Machine) -> None:
    """Run the works that come until the engine hangs up; then close the machine. A lost device ends the process."""
    sys.setswitchinterval(_SWITCH_S)
    sender = threading.Thread(target=_report, args=(channel, machine), name="smpart-report")
    sender.start()
    try:
        while True:
            task: Task = channel.receive()
            machine.lanes.launch(Work(task.id, task.side, task.split, Shape(), 1.0, task.payload))
    except EOFError:
        machine.lanes.close()
        sender.join()
        machine.parts.close()
    except Exception as error:
        _die(error)


def _report(channel: Channel, machine: Machine) -> None:
    """Send what ends until the lanes are closed."""
    while completions := machine.lanes.wait(None):
        for completion in completions:
            _send(channel, completion)


def _send(channel: Channel, completion: Completion) -> None:
    fault = completion.fault
    if fault is not None and fault.lost:
        _die(RuntimeError(fault.message))
    error = fault.message if fault is not None else None
    done = Done(completion.work.id, completion.started, completion.finished, completion.result, error)
    try:
        channel.send(done)
    except Exception as unsendable:  # a result that cannot be pickled
        channel.send(Done(done.id, done.started, done.finished, None, one_line(unsendable)))


def _die(error: Exception) -> None:
    """End at once: a lost device must not be waited for, and nothing may be written to what others see."""
    logger.error("the device's worker ends: %s", error)
    os._exit(LOST)
