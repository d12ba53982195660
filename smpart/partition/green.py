"""Backend `green`: lanes in CUDA green contexts, each with SMs of its own.

All splits are made once, at start: for every split two green contexts out of one cut of the device, and a stream in
each. A switch then only picks another stream. What is guaranteed and what is not (L2 and memory bandwidth are shared)
is told in docs/cuda.md.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.backend import Backend
from smpart.partition.cuda.driver import CudaError, Driver, driver, why_no_driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.resources import Cut, cut
from smpart.partition.device import Device
from smpart.partition.registry import register
from smpart.partition.split import Side, Split

logger = logging.getLogger(__name__)

_SINCE = (12, 4)
_STREAMS_SINCE = (12, 5)
_WORKQUEUES_SINCE = (13, 1)


class GreenPlaces:
    """`Places` of one device in green contexts. Close it when no lanes use it any more.

    The exclusive splits need no partition: they are streams of the primary context. Decode's streams have the
    device's highest priority. Not every split that the granularity allows may exist on this very chip: `refused`
    says which do not, and why.

    Args:
        step: make only splits whose prefill side is a multiple of this.

    Raises:
        BackendUnavailable: the driver gave other SMs than it was asked for.
        CudaError: a call failed. Either way nothing is left behind.
    """

    def __init__(self, api: Driver, gpu: Gpu, step: int) -> None:
        self.gpu = gpu
        self.refused: dict[Split, str] = {}
        self.how: dict[Split, str] = {}
        self._api = api
        self._places: dict[tuple[Side, Split], Place] = {}
        self._sms: dict[tuple[Side, Split], frozenset[int]] = {}
        self._one_at_a_time = threading.Lock()  # a green context's handle is for one thread at a time
        with contextlib.ExitStack() as undo:
            self.primary = api("cuDevicePrimaryCtxRetain", gpu.handle)
            undo.callback(self._give_back, "cuDevicePrimaryCtxRelease", gpu.handle)
            with api.current(self.primary):
                free = api("cuMemGetInfo")[0]
                self._priorities = api("cuCtxGetStreamPriorityRange")
                for split in gpu.splits(step):
                    self._make(split, undo)
                self.memory_bytes = max(0, free - api("cuMemGetInfo")[0])
            self._undo = undo.pop_all()
        logger.info("green contexts: %s", self)

    def __str__(self) -> str:
        contexts = sum(place.green is not None for place in self._places.values())
        refused = f", {len(self.refused)} splits refused by the device" if self.refused else ""
        return f"{len(self.splits())} splits, {contexts} contexts, {self.memory_bytes >> 20} MiB{refused}"

    def all(self) -> Mapping[tuple[Side, Split], Place]:
        """By side and split."""
        return self._places

    def splits(self) -> tuple[Split, ...]:
        """Those that were made, in order of `Split.prefill`."""
        return tuple(sorted({split for _, split in self._places}))

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Both sides of one split always. Sides of two splits only once `learn` was told that their SMs differ.

        The driver does not promise that a smaller partition lies inside a larger one.
        """
        if prefill.exclusive or decode.exclusive:
            return False
        if prefill == decode:
            return True
        one, other = self._sms.get((Side.PREFILL, prefill)), self._sms.get((Side.DECODE, decode))
        return bool(one and other and not one & other)

    def learn(self, sms: Mapping[tuple[Side, Split], frozenset[int]]) -> None:
        """Take the hardware's own SM numbers of each place, as a kernel read them there.

        Raises:
            BackendUnavailable: both sides of a split share SMs, or one has other SMs than it should: nothing here
                may be trusted then.
        """
        for (side, split), found in sms.items():
            if len(found) != split.units(side):
                raise BackendUnavailable(
                    f"split {split}: kernels of the {side} lane ran on {len(found)} SMs, not on {split.units(side)}"
                )
            shared = found & sms.get((side.other, split), frozenset())
            if shared and not split.exclusive:
                raise BackendUnavailable(f"split {split}: both lanes ran on SMs {sorted(shared)}")
        self._sms = dict(sms)

    def read_back(self, place: Place) -> int:
        """SMs of a place, asked of the driver now. Raises `CudaError`."""
        kind = self._api.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        if place.green is None:
            return int(self._api("cuCtxGetDevResource", self.primary, kind).sm.smCount)
        with self._one_at_a_time:
            return int(self._api("cuGreenCtxGetDevResource", place.green, kind).sm.smCount)

    def close(self) -> None:
        """Drain every stream, then destroy streams, contexts and the primary context's hold. Idempotent."""
        for place in self._places.values():
            with contextlib.suppress(CudaError):  # of a lost device nothing is left to drain
                self._api("cuStreamSynchronize", place.stream)
        self._places = {}
        self._undo.close()

    def __enter__(self) -> GreenPlaces:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _make(self, split: Split, undo: contextlib.ExitStack) -> None:
        if split.exclusive:
            side = Side.PREFILL if split.prefill else Side.DECODE
            stream = self._api("cuStreamCreateWithPriority", self._non_blocking(), self._priority(side))
            undo.callback(self._give_back, "cuStreamDestroy", stream)
            self._add(Place(side, split, split.units(side), stream, self.primary))
            self.how[split] = "the primary context"
            return
        made = cut(self._api, self.gpu.handle, split.prefill, split.total)
        if made is None:
            self.refused[split] = "this chip's topology gives no such partition"
            logger.info("split %s: %s", split, self.refused[split])
            return
        self.how[split] = made.how
        for side in Side:
            self._add(self._side(made, side, undo))

    def _side(self, made: Cut, side: Side, undo: contextlib.ExitStack) -> Place:
        resources = [made.sides[side], *self._workqueue()]
        description = self._api("cuDevResourceGenerateDesc", resources, len(resources))
        flags = int(self._api.api.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)  # older drivers insist on it
        green = self._api("cuGreenCtxCreate", description, self.gpu.handle, flags)
        undo.callback(self._give_back, "cuGreenCtxDestroy", green)
        context = self._api("cuCtxFromGreenCtx", green)
        stream = self._stream(green, context, self._priority(side))
        undo.callback(self._give_back, "cuStreamDestroy", stream)
        return Place(side, made.split, made.split.units(side), stream, context, green)

    def _stream(self, green: Any, context: Any, priority: int) -> Any:
        if self._api.has(_STREAMS_SINCE):
            return self._api("cuGreenCtxStreamCreate", green, self._non_blocking(), priority)
        with self._api.current(context):
            return self._api("cuStreamCreateWithPriority", self._non_blocking(), priority)

    def _add(self, place: Place) -> None:
        """Keep a place, if the driver says that it has the SMs it should."""
        units = self.read_back(place)
        if units != place.units:
            raise BackendUnavailable(
                f"split {place.split}: the driver gave {place.side} {units} SMs instead of {place.units}"
            )
        self._places[place.side, place.split] = place

    def _workqueue(self) -> list[Any]:
        """A hardware queue of its own, where the driver has them: else one lane's launches may block the other's."""
        if not self._api.has(_WORKQUEUES_SINCE):
            return []
        kind = self._api.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_WORKQUEUE_CONFIG
        queue = self._api("cuDeviceGetDevResource", self.gpu.handle, kind)
        scope = self._api.api.CUdevWorkqueueConfigScope.CU_WORKQUEUE_SCOPE_GREEN_CTX_BALANCED
        queue.wqConfig.sharingScope, queue.wqConfig.wqConcurrencyLimit = scope, 1
        return [queue]

    def _non_blocking(self) -> int:
        return int(self._api.api.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def _priority(self, side: Side) -> int:
        least, greatest = self._priorities
        return int(greatest if side is Side.DECODE else least)

    def _give_back(self, call: str, handle: Any) -> None:
        """Destroy something. A failure is said, and the rest is destroyed all the same."""
        try:
            self._api(call, handle)
        except CudaError as error:
            logger.warning("while giving back the device: %s", error)


class Green:
    """The `Backend`, for the first visible device."""

    name = "green"

    def device(self) -> Device:
        """The GPU. Raises `BackendUnavailable`, `CudaError`."""
        return Gpu.find(driver()).device(driver())

    def splits(self) -> tuple[Split, ...]:
        """What the granularity allows; `open` finds out which of them this very chip makes."""
        return Gpu.find(driver()).splits()

    def why_unusable(self) -> str | None:
        """None if green contexts can be made here."""
        why = why_no_driver()
        if why is not None:
            return why
        major, minor = driver().version
        if (major, minor) < _SINCE:
            return f"green contexts need a driver of CUDA 12.4 or later; this one is of {major}.{minor}: update it"
        gpu = Gpu.find(driver())
        if gpu.units < 2 * gpu.minimum:
            return f"{gpu.name} has {gpu.units} SMs: too few to split (groups of {gpu.minimum} or more)"
        return None

    def open(self, step: int | None = None) -> GreenPlaces:
        """Make the splits, in steps of `step` SMs if that is given.

        Raises:
            UsageError: the device hands out SMs in other steps.
            BackendUnavailable, CudaError: see `GreenPlaces`.
        """
        gpu = Gpu.find(driver())
        if step is not None and (step < gpu.step or step % gpu.step):
            raise UsageError(f"step {step}: {gpu.name} hands out SMs in steps of {gpu.step}; use a multiple")
        return GreenPlaces(driver(), gpu, step or gpu.lane_step)


@register("green", kind="cuda", rank=30)
def open_green(argument: str) -> Backend:
    """Green contexts on the first visible device."""
    return Green()
