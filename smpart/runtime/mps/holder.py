"""The holder: owns weights, KV memory and tokens on the device, says how to map them, and computes nothing.

It lives as long as the engine. With it ends everything that was computed.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace

from smpart.kvcache.sizing import pool_blocks
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.ipc import Exported
from smpart.runtime.channel import Channel
from smpart.runtime.device.machine import KV_FRACTION, DeviceArgs, Memory
from smpart.runtime.messages import Ready, refusal
from smpart.runtime.mps.client import Glue, context, enter
from smpart.runtime.mps.memory import Holding, allocate
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import bytes_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hold:
    """First message to the holder.

    Attributes:
        segments: names of the segments whose descriptors came with the process.
        environment, glue: see `enter`.
        reserve_bytes: device memory to leave for the workers' contexts.
    """

    args: DeviceArgs
    segments: tuple[str, ...]
    environment: Mapping[str, str]
    glue: str
    reserve_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What the holder says when it is ready.

    Attributes:
        weights, pages, tokens: how to map them. One that goes by file descriptor was sent over the holder's socket,
            and its `fd` is the number of the one among those sent.
        blocks: KV blocks in `pages`.
    """

    weights: Exported
    pages: Exported
    tokens: Exported
    blocks: int


def main(fds: list[int]) -> None:
    """Hold until the engine hangs up: `fds` are the channel's socket, the segments, and a socket for descriptors."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fds[0]), blocking=True)
    with socket.socket(fileno=fds[-1]) as passing, contextlib.suppress(EOFError):
        start: Hold = channel.receive()
        segments = {name: SharedSegment.attach(fd) for name, fd in zip(start.segments, fds[1:-1], strict=True)}
        with contextlib.ExitStack() as undo:
            try:
                held = _hold(start, segments, passing, undo)
            except Exception as error:
                channel.send(refusal(error))
                return
            channel.send(Ready(info=held))
            channel.receive()  # until the other end is gone: nothing more is ever said


def _hold(
    start: Hold, segments: Mapping[str, SharedSegment], passing: socket.socket, undo: contextlib.ExitStack
) -> Held:
    glue = enter(start.environment, start.glue)
    undo.callback(glue.close)
    undo.enter_context(context(glue.api, glue.api("cuDeviceGet", 0)))
    weights = _weights(glue, segments["weights"], undo)
    blocks = start.args.blocks or _blocks(glue.api, start)
    written = [allocate(glue.api, size, undo) for size in Memory.sizes(start.args, blocks)]
    weights_by, pages_by, tokens_by = _pass_on([weights, *written], passing)
    return Held(weights_by, pages_by, tokens_by, blocks)


def _weights(glue: Glue, segment: SharedSegment, undo: contextlib.ExitStack) -> Holding:
    holding = allocate(glue.api, segment.size, undo)
    glue.api("cuMemcpyHtoD", holding.pointer, bytes_of(segment).data_ptr(), segment.size)
    return holding


def _blocks(api: Driver, start: Hold) -> int:
    free, _ = api("cuMemGetInfo")
    args, left = start.args, int(free) - start.reserve_bytes
    return pool_blocks(args.kv, args.layout, args.max_len, left, fraction=KV_FRACTION)


def _pass_on(holdings: list[Holding], passing: socket.socket) -> list[Exported]:
    """Send file descriptors, if there are any; what is known by them gets their number."""
    fds = [holding.exported.fd for holding in holdings if holding.exported.fd is not None]
    if fds:
        socket.send_fds(passing, [b"memory"], fds)
    numbers = iter(range(len(fds)))
    return [
        holding.exported if holding.exported.fd is None else replace(holding.exported, fd=next(numbers))
        for holding in holdings
    ]
