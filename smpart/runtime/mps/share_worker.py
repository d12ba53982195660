"""A worker with one share of the device: maps the holder's memory, and runs the works of its side on a stream.

Its share was fixed when it first used CUDA; it reads back what it got, and serves nothing else.
"""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from transformers import PreTrainedModel

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.ipc import Exported, open_exported
from smpart.partition.cuda.mps_client import look
from smpart.partition.cuda.mps_shares import Mode, Seen, Share, check
from smpart.partition.cuda.places import Place
from smpart.partition.device import Device
from smpart.partition.split import Side, Split
from smpart.runtime.board import Board
from smpart.runtime.channel import Channel
from smpart.runtime.device.machine import DeviceArgs, Machine, Memory, Parts, assemble
from smpart.runtime.device.worker import serve
from smpart.runtime.messages import Ready, refusal
from smpart.runtime.mps.client import context, enter
from smpart.runtime.mps.holder import Held
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import load

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""


@dataclass(frozen=True, slots=True)
class Serve:
    """First message to a worker.

    Attributes:
        args: `blocks` is known.
        segments: names of the segments whose descriptors came with the process.
        environment, glue: see `enter`.
        share: what it should have.
        limited: False: it runs outside MPS and has the whole device, or should.
        splits: those under which it serves.
        device: as the engine knows it.
        held: what to map; the numbers of file descriptors are those among the last that came with the process.
    """

    args: DeviceArgs
    segments: tuple[str, ...]
    environment: Mapping[str, str]
    glue: str
    share: Share
    limited: bool
    splits: tuple[Split, ...]
    device: Device
    held: Held


@dataclass(frozen=True, slots=True)
class Serving:
    """What a worker says when it is ready.

    Attributes:
        units: SMs it has, read back.
        free_bytes: memory that was free on the device then.
        notes: for `doctor` and reports.
    """

    units: int
    free_bytes: int
    notes: Mapping[str, object]


def main(fds: list[int]) -> None:
    """Run a worker: `fds` are its channel's socket, the segments, and descriptors of the holder's memory."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=fds[0]), blocking=True)
    with contextlib.suppress(EOFError):
        start: Serve = channel.receive()
        count = len(start.segments)
        segments = {n: SharedSegment.attach(fd) for n, fd in zip(start.segments, fds[1 : 1 + count], strict=True)}
        with contextlib.ExitStack() as undo:
            try:
                machine, serving = _open(start, segments, fds[1 + count :], undo)
            except Exception as error:
                channel.send(refusal(error))
                return
            channel.send(Ready(info=serving))
            serve(channel, machine)


def _open(
    start: Serve, segments: Mapping[str, SharedSegment], fds: Sequence[int], undo: contextlib.ExitStack
) -> tuple[Machine, Serving]:
    glue, args = enter(start.environment, start.glue), start.args
    undo.callback(glue.close)
    api, device = glue.api, glue.api("cuDeviceGet", 0)
    affinity = start.share.units if start.limited and start.share.mode is Mode.AFFINITY else None
    primary = undo.enter_context(context(api, device, affinity))
    seen = look(api, device)
    units = check(seen, start.share) if start.limited else _whole(seen, start.share)
    weights, pages, tokens = (
        glue.view(_map(api, exported, fds, undo), size) for exported, size in _memory(start, segments["weights"])
    )
    stream = api("cuStreamCreate", _NON_BLOCKING)
    undo.callback(api, "cuStreamDestroy", stream)
    places = SharePlaces(primary, stream, start.share.side, start.splits, units)
    parts = Parts(
        api,
        start.device,
        places,
        glue.where,
        # A percentage lowers the number of SMs that libraries see; execution affinity does not.
        lambda side: glue.queue(seen.sms),
        free_bytes=lambda: int(api("cuMemGetInfo")[0]),
        close=lambda: None,
    )
    model = cast(PreTrainedModel, load(args.model, weights))
    board = Board.over(segments["board"].buffer, args.kv.max_requests, args.max_len, args.layout.block_tokens)
    machine = assemble(parts, args, model, board, Memory.over(args, start.held.blocks, pages, tokens))
    return machine, Serving(units, parts.free_bytes(), machine.info.notes)


def _memory(start: Serve, weights: SharedSegment) -> Sequence[tuple[Exported, int]]:
    """What to map, and the bytes of it that are used: allocations are rounded up."""
    held = start.held
    pages, tokens = Memory.sizes(start.args, held.blocks)
    return (held.weights, weights.size), (held.pages, pages), (held.tokens, tokens)


def _map(api: Driver, exported: Exported, fds: Sequence[int], undo: contextlib.ExitStack) -> int:
    """Map one allocation of the holder's; its address here."""
    mine = exported if exported.fd is None else replace(exported, fd=fds[exported.fd])
    mapped = open_exported(api, mine)
    mine.close()
    undo.callback(mapped.close)
    return mapped.pointer


def _whole(seen: Seen, share: Share) -> int:
    """SMs of a worker that should have them all. Raises `BackendUnavailable` if it has not."""
    if seen.sms != share.whole:
        raise BackendUnavailable(f"the {share.side} worker should have all {share.whole} SMs and has {seen.sms}")
    return seen.sms


@dataclass(frozen=True, slots=True)
class SharePlaces:
    """`Places` of one side in a process that has one share: the same stream under every split.

    Attributes:
        primary: the process's own `CUcontext`.
        stream: in it.
        units: SMs it has.
    """

    primary: Any
    stream: Any
    side: Side
    served: tuple[Split, ...]
    units: int
    _places: dict[tuple[Side, Split], Place] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for split in self.served:
            self._places[self.side, split] = Place(self.side, split, self.units, self.stream, self.primary)

    def all(self) -> Mapping[tuple[Side, Split], Place]:
        """By side and split."""
        return self._places

    def splits(self) -> tuple[Split, ...]:
        """Those it serves."""
        return self.served

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """The other side is in other processes: the engine sees to it."""
        return True

    def read_back(self, place: Place) -> int:
        """SMs, as they were read back at the start: they cannot change."""
        return self.units
