"""`Crew` of a GPU under MPS: a holder of the memory, and a worker for every share of the pool.

All workers are started with the engine, so that a resize never waits for one. Each takes a CUDA context's memory; how
many there are and what they leave is in `notes`.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from smpart.errors import BackendUnavailable, SmpartError, UsageError
from smpart.partition.cuda.ipc import Exported
from smpart.partition.cuda.mps_shares import Mode, Share
from smpart.partition.mps import Mps
from smpart.partition.split import Side, Split, nested
from smpart.partition.work import Work
from smpart.runtime.crew import Seat
from smpart.runtime.device.machine import DeviceArgs
from smpart.runtime.device.worker import LOST, Task
from smpart.runtime.mps.holder import Held, Hold
from smpart.runtime.mps.share_worker import Serve, Serving

logger = logging.getLogger(__name__)

_HOLDER = 0
_CONTEXT_BYTES = 512 << 20
"""Device memory set aside for each worker's context, libraries and activations: an allowance, not a measurement."""
_MOST_FDS = 3


@dataclass(frozen=True, slots=True)
class Post:
    """What one worker is for.

    Attributes:
        splits: those under which it serves its side.
        limited: False: it is outside MPS and has the whole device, as an exclusive split beside static partitions.
    """

    share: Share
    splits: tuple[Split, ...]
    limited: bool = True


class MpsCrew:
    """See `Crew`. The backend is started already, and stopped by the caller after the lanes were closed.

    Static partitions cannot change while workers run, so there is one shared split then; works of an exclusive split
    go to workers outside MPS, which have the device while no other one works.

    Args:
        splits: those to serve, beside the exclusive ones; None: as many as `Mps.pool` takes. With static partitions
            one, made here; None: `Mps.split`, or the middle one.
        glue: ``module:function`` that gives each process's `Glue`.

    Attributes:
        seats: the holder, and the workers.
        notes: for `doctor` and reports.
    """

    def __init__(
        self,
        mps: Mps,
        args: DeviceArgs,
        splits: Sequence[Split] | None = None,
        glue: str = "smpart.runtime.mps.cuda:open_glue",
    ) -> None:
        self.device = mps.device()
        self._mps = mps
        self._glue = glue
        self._posts = _partitioned(mps, splits) if mps.mode is Mode.PARTITION else _capped(mps, splits)
        decoders = sum(post.share.side is Side.DECODE for post in self._posts)
        # Every decode worker captures graphs of its own.
        self._args = replace(args, graphs_fraction=args.graphs_fraction / decoders)
        self._splits = tuple(sorted({split for post in self._posts for split in post.splits}))
        self._seat = {
            (post.share.side, split): number for number, post in enumerate(self._posts, 1) for split in post.splits
        }
        self.seats: Sequence[Seat] = (
            Seat("the holder of the device's memory", "smpart.runtime.mps.holder:main"),
            *(Seat(_name(post), "smpart.runtime.mps.share_worker:main", follows=True) for post in self._posts),
        )
        self.notes: dict[str, object] = {
            "workers": len(self._posts),
            "guarantee": self.device.facts["guarantee"],
            "context_reserve_bytes": self._reserve,
        }
        self._held: Held | None = None
        self._serving: dict[int, Serving] = {}
        self._passing: tuple[socket.socket, socket.socket] | None = None
        self._fds: list[int] = []

    def close(self) -> None:
        """Give back the descriptors of the holder's memory. The lanes are closed."""
        self._forget_holder()

    @property
    def blocks(self) -> int:
        """KV blocks on the device."""
        return self._known().blocks

    def splits(self) -> tuple[Split, ...]:
        """See `Crew`."""
        return self._splits

    def overlapping(self) -> tuple[Split, ...]:
        """None: not built yet."""
        return ()

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Partitions do not meet. Caps may, on any SM; they are let run together when they add up to no more than the
        device has.
        """
        return self._mps.disjoint(prefill, decode) if self._mps.mode.disjoint else nested(prefill, decode)

    def seat(self, side: Side, split: Split) -> int:
        """The worker that has the side's share."""
        return self._seat[side, split]

    def fatal(self, seat: int, code: int) -> bool:
        """The memory dies with its holder; and where a worker lost the device, MPS lets nobody on until all are off."""
        return seat == _HOLDER or code == LOST

    def fds(self, seat: int) -> Sequence[int]:
        """The holder's end of a socket; for a worker, the memory that is known by file descriptor."""
        if seat != _HOLDER:
            return self._fds
        self._forget_holder()
        self._passing = socket.socketpair()
        return [self._passing[1].fileno()]

    def first_message(self, seat: int, segments: Sequence[str], last: Work | None) -> Hold | Serve:
        """See `Crew`. A new holder has as many blocks as the first: the engine counts on them."""
        names = tuple(segments)
        if seat == _HOLDER:
            return Hold(self._args, names, self._mps.holder_environment({}), self._glue, self._reserve)
        post, held = self._posts[seat - 1], self._known()
        environment = self._environment(post)
        return Serve(
            self._args, names, environment, self._glue, post.share, post.limited, post.splits, self.device, held
        )

    def ready(self, seat: int, info: Held | Serving) -> None:
        """See `Crew`."""
        if isinstance(info, Held):
            self._take(info)
            return
        self._serving[seat] = info
        if len(self._serving) == len(self._posts):
            self.notes |= {**info.notes, "free_bytes": min(each.free_bytes for each in self._serving.values())}
            logger.info("%d workers under %s on %s: %s", len(self._posts), self._mps.name, self.device.name, self.notes)

    def message(self, work: Work) -> Task:
        """See `Crew`."""
        return Task(work.id, work.side, work.split, work.payload)

    def before_kill(self, pid: int) -> None:
        """Have the server end its contexts: killed with work under way, it might take the others along."""
        try:
            self._mps.terminate(pid)
        except SmpartError as error:
            logger.warning("worker %d could not be ended through MPS: %s", pid, error)

    def realised(self, side: Side, pid: int, last: Work | None) -> frozenset[int]:
        """As many of the side's positions as the worker read back; which SMs they are, MPS does not say."""
        if last is None:
            return frozenset()
        serving, ids = self._serving[self.seat(side, last.split)], self.device.unit_ids
        count = min(serving.units, len(ids))
        return frozenset(ids[:count] if side is Side.PREFILL else ids[len(ids) - count :])

    @property
    def _reserve(self) -> int:
        return len(self._posts) * _CONTEXT_BYTES

    def _environment(self, post: Post) -> Mapping[str, str]:
        if not post.limited:
            return self._mps.holder_environment({})
        return self._mps.worker_environment(post.share.side, post.splits[0], {})

    def _take(self, held: Held) -> None:
        """The holder is ready: its descriptors wait in our end of its socket."""
        assert self._passing is not None
        ours, theirs = self._passing
        theirs.close()
        if any(each.fd is not None for each in _exports(held)):
            _, self._fds, _, _ = socket.recv_fds(ours, 16, _MOST_FDS)
        self._held = held
        self._args = replace(self._args, blocks=held.blocks)

    def _forget_holder(self) -> None:
        for end in self._passing or ():
            end.close()
        while self._fds:
            os.close(self._fds.pop())
        self._passing, self._held = None, None

    def _known(self) -> Held:
        assert self._held is not None, "the holder is not ready"
        return self._held


def _exports(held: Held) -> Sequence[Exported]:
    return held.weights, held.pages, held.tokens


def _name(post: Post) -> str:
    return f"the {post.share.side} worker of {post.share.units} SMs"


def _capped(mps: Mps, splits: Sequence[Split] | None) -> tuple[Post, ...]:
    """One worker a share, also for the exclusive splits. Raises `UsageError`; see `Mps.pool`."""
    whole = [split for split in mps.splits() if split.exclusive]
    pool = mps.pool(None if splits is None else [*splits, *whole])
    return tuple(
        Post(share, tuple(split for split in pool.splits if split.units(share.side) == share.units))
        for share in pool.shares
    )


def _partitioned(mps: Mps, splits: Sequence[Split] | None) -> tuple[Post, ...]:
    """Two workers in the partitions of a split, made here, and two outside MPS.

    Raises:
        UsageError: more than one split, or none that exists.
        BackendUnavailable: the partitions cannot be made.
    """
    every = mps.splits()
    shared = [split for split in every if not split.exclusive]
    if not shared:
        raise BackendUnavailable("this device has too few SMs for two static partitions: use mps")
    chosen = [mps.split or shared[len(shared) // 2]] if splits is None else list(splits)
    if len(chosen) != 1:
        raise UsageError(f"static partitions serve one split, not {len(chosen)}: choose one, or use mps")
    mps.arrange(chosen[0])
    inside = tuple(Post(share, tuple(chosen)) for share in mps.pool(chosen).shares)
    alone = {Side.PREFILL: every[-1], Side.DECODE: every[0]}
    outside = tuple(
        Post(replace(post.share, units=alone[post.share.side].total), (alone[post.share.side],), limited=False)
        for post in inside
    )
    return inside + outside
