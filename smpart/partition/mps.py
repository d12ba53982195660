"""Backend `mps`: lanes in worker processes that share a device through NVIDIA's Multi-Process Service.

A process's share of the device is fixed when it first uses CUDA, so there is a pool of workers, one a share, and
resizing is choosing a worker. Three ways to get a share, see `Mode`; only static partitions keep lanes apart.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping

from smpart.errors import BackendUnavailable, SmpartError, UsageError
from smpart.partition.backend import Backend
from smpart.partition.cuda.driver import Driver, driver, why_no_driver
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.cuda.mps_control import (
    CLIENT_VARIABLES,
    PIPE_VARIABLE,
    PROGRAM,
    same_partition,
)
from smpart.partition.cuda.mps_daemon import Daemon, ForeignDaemon, OwnDaemon, foreign_pipe, is_live
from smpart.partition.cuda.mps_probe import read_back
from smpart.partition.cuda.mps_shares import (
    CLIENTS_PER_DEVICE,
    Mode,
    PoolPlan,
    Seen,
    Share,
    check,
    chunk_sms,
    ladder,
    partition_splits,
    plan,
    shares_of,
)
from smpart.partition.device import Device
from smpart.partition.registry import register
from smpart.partition.split import Side, Split

_COMPUTE_MODES = {0: "default", 2: "prohibited", 3: "exclusive process"}
"""`CUcomputemode`."""

_SINCE = {Mode.PERCENTAGE: (11, 0), Mode.AFFINITY: (12, 5), Mode.PARTITION: (13, 1)}
"""CUDA version of the driver that brought what each mode needs: Volta's MPS and CUDA IPC beside it, `cuCtxCreate_v4`,
and ``nvidia-cuda-mps-control -S`` with ``sm_partition``.
"""

_WORKERS = 16
"""Workers in a pool that was not told its splits: each takes a context's memory."""


class Mps:
    """The `Backend`, for the first visible device.

    Opening it starts nothing. `start` has a daemon ready, `stop` is done with it; it is also a context manager.

    Args:
        mode: how workers get their shares.
        foreign: use the daemon that CUDA_MPS_PIPE_DIRECTORY or /tmp/nvidia-mps leads to, instead of one of our own.
            It is neither stopped nor configured.
        split: the one that an engine serves with static partitions, beside the exclusive ones; None: the middle one.
        api: this process's driver.
        program: the MPS control program.
    """

    def __init__(
        self,
        mode: Mode = Mode.PERCENTAGE,
        *,
        foreign: bool = False,
        split: Split | None = None,
        api: Callable[[], Driver] = driver,
        find: Callable[[Driver], Gpu] = Gpu.find,
        program: str = PROGRAM,
    ) -> None:
        if foreign and mode is Mode.PARTITION:
            raise UsageError(
                "a foreign MPS daemon is not configured, so it gets no static partitions: use mps:partition"
            )
        self.mode, self.split = mode, split
        self.name = "mps:foreign" if foreign else "mps" if mode is Mode.PERCENTAGE else f"mps:{mode}"
        self._foreign = foreign
        self._api, self._find, self._program = api, find, program
        self._daemon: Daemon | None = None
        self._partitions: dict[tuple[Side, Split], str] = {}

    def device(self) -> Device:
        """The GPU, with what this mode guarantees among its facts. Raises `BackendUnavailable`, `CudaError`."""
        gpu = self._gpu()
        plain = gpu.device(self._api())
        units = self.splits()[0].total
        facts = {
            **plain.facts,
            "mode": self.mode.value,
            "disjoint": self.mode.disjoint,
            "guarantee": self.mode.guarantee,
            "resize": self.mode.resize,
            "clients_per_device": CLIENTS_PER_DEVICE,
            "compute_mode": _COMPUTE_MODES.get(self._compute_mode(), "unknown"),
            "daemon": f"foreign, {foreign_pipe()}" if self._foreign else "our own, started at need",
        }
        if units != gpu.units:
            facts["unused_sms"] = gpu.units - units
        return Device(plain.name, plain.kind, units, tuple(range(units)), plain.memory_bytes, facts)

    def splits(self) -> tuple[Split, ...]:
        """Static partitions: all of whole chunks. Caps: those that `green` makes too."""
        gpu = self._gpu()
        return partition_splits(gpu.units, gpu.capability) if self.mode is Mode.PARTITION else gpu.splits()

    def why_unusable(self) -> str | None:
        """None if workers can be started here, as far as can be told without starting a daemon."""
        why = why_no_driver() if self._api is driver else None
        if why is not None:
            return why
        try:
            return next(
                filter(None, (why() for why in (self._why_environment, self._why_device, self._why_daemon))), None
            )
        except SmpartError as error:
            return str(error)

    def disjoint(self, prefill: Split, decode: Split) -> bool:
        """Whether the prefill side of one split and the decode side of another (or the same) cannot meet on an SM."""
        return self.mode.disjoint and prefill == decode and not prefill.exclusive

    def shares(self) -> tuple[Share, ...]:
        """The shares of all splits, one each."""
        return shares_of(self.splits(), self._gpu().units, self.mode)

    def pool(self, splits: Iterable[Split] | None = None) -> PoolPlan:
        """The workers for some splits.

        Args:
            splits: None: as many as sixteen workers serve, evenly spaced.

        Raises:
            UsageError: a split that is not one of `splits`, or more than fit; see `plan`. Static partitions serve one
                split at a time and must be told which.
        """
        known = self.splits()
        chosen = ladder(known, _WORKERS) if splits is None else tuple(splits)
        for split in chosen:
            if split not in known:
                raise UsageError(f"split {split}: {self.name} makes {known[0]}, {known[1]}, ..., {known[-1]}")
        return plan(chosen, self._gpu().units, self.mode)

    def start(self) -> None:
        """Have the daemon ready for workers.

        Raises:
            BackendUnavailable: it does not start, or the foreign one does not answer or limits its clients.
        """
        if self._daemon is None:
            daemon = self._make_daemon()
            daemon.start()
            self._daemon = daemon

    def stop(self) -> None:
        """End our own daemon, or leave the foreign one. All workers must have ended. Raises `BackendUnavailable`."""
        daemon, self._daemon = self._daemon, None
        self._partitions = {}
        if daemon is not None:
            daemon.stop()

    def __enter__(self) -> Mps:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def arrange(self, split: Split) -> None:
        """Make the static partitions of a split, after removing those of the one before. No worker may be running.

        Raises:
            UsageError: not in this mode, or no such split.
            BackendUnavailable: a partition is in use, and stays; or one was refused, and there are none.
        """
        if self.mode is not Mode.PARTITION:
            raise UsageError(f"{self.name} has no partitions to arrange: its workers take any share at any time")
        control, gpu = self._running().control, self._gpu()
        shares = self.pool([split]).shares
        for key in list(self._partitions):
            control.remove_partition(gpu.uuid, self._partitions[key])
            del self._partitions[key]
        made: dict[tuple[Side, Split], str] = {}
        try:
            for share in shares:
                made[share.side, split] = control.add_partition(gpu.uuid, share.units // chunk_sms(gpu.capability))
            self._read_back(shares, split, made)
        except SmpartError:
            for partition in made.values():
                with contextlib.suppress(SmpartError):
                    control.remove_partition(gpu.uuid, partition)
            raise
        self._partitions = made

    def worker_environment(self, side: Side, split: Split, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment in which the worker of one side of a split must first use CUDA.

        Args:
            base: what the rest of it is taken from.

        Raises:
            UsageError: no such split, it gives the side nothing, or its partitions were not made with `arrange`.
            BackendUnavailable: not started.
        """
        share = self._share(side, split)
        partition = self._partitions.get((side, split))
        if self.mode is Mode.PARTITION and partition is None:
            raise UsageError(f"split {split} has no partitions yet: arrange it first")
        return self._environment(base, share.variables(partition))

    def holder_environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """The environment of the process that owns the memory the workers map.

        It is a client without a limit. Among static partitions, where every client must have one, it stays outside
        MPS instead: CUDA IPC works across that border from Volta on.

        Raises:
            BackendUnavailable: not started.
        """
        environment = self._environment(base, dict.fromkeys(CLIENT_VARIABLES))
        if self.mode is Mode.PARTITION:
            environment[PIPE_VARIABLE] = str(self._running().control.pipe / "nobody")
        return environment

    def terminate(self, pid: int) -> None:
        """End a worker's contexts, whatever they are doing; then its process may be killed without harm to the others.

        Does nothing if the process is no client.

        Raises:
            BackendUnavailable: not started, or the server could not end them.
        """
        control = self._running().control
        for client in control.processes():
            if client.pid == pid:
                control.terminate_client(client.server, pid)

    def check(self, seen: Seen, side: Side, split: Split) -> int:
        """The SMs that a worker has, if they are its share. Raises `UsageError`, `BackendUnavailable`; see `check`."""
        return check(seen, self._share(side, split))

    def realise(self, side: Side, split: Split) -> int:
        """SMs that a worker of one side of a split gets, asked in a short-lived process. Start it first.

        Raises:
            UsageError: as `worker_environment` does.
            BackendUnavailable: it gets no context, or not its share; see `check`.
        """
        share = self._share(side, split)
        affinity = share.units if self.mode is Mode.AFFINITY else None
        return check(read_back(self.worker_environment(side, split), affinity), share)

    def _share(self, side: Side, split: Split) -> Share:
        if split not in self.splits() or split.units(side) == 0:
            raise UsageError(f"split {split} has no {side} worker in {self.name}")
        return Share(side, split.units(side), self._gpu().units, self.mode)

    def _read_back(self, shares: Iterable[Share], split: Split, made: Mapping[tuple[Side, Split], str]) -> None:
        listed = self._running().control.partitions()
        for share in shares:
            mine = [each.sms for each in listed if same_partition(made[share.side, split], each)]
            if mine != [share.units]:
                raise BackendUnavailable(
                    f"split {split}: the {share.side} partition should have {share.units} SMs, and lspart says "
                    f"{', '.join(map(str, mine)) or 'it is not there'}"
                )

    def _environment(self, base: Mapping[str, str], variables: Mapping[str, str | None]) -> dict[str, str]:
        ours = {PIPE_VARIABLE: str(self._running().control.pipe), "CUDA_VISIBLE_DEVICES": self._gpu().uuid}
        kept = {name: value for name, value in base.items() if name not in variables}
        return kept | ours | {name: value for name, value in variables.items() if value is not None}

    def _running(self) -> Daemon:
        if self._daemon is None:
            raise BackendUnavailable(f"backend {self.name} was not started: call start first")
        return self._daemon

    def _make_daemon(self) -> Daemon:
        if self._foreign:
            return ForeignDaemon(foreign_pipe(), program=self._program)
        return OwnDaemon(self._gpu().uuid, static=self.mode is Mode.PARTITION, program=self._program)

    def _gpu(self) -> Gpu:
        return self._find(self._api())

    def _compute_mode(self) -> int:
        attribute = self._api().api.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
        return int(self._api()("cuDeviceGetAttribute", attribute, self._gpu().handle))

    def _why_environment(self) -> str | None:
        """The driver would tell this process of a part of the device only."""
        present = [name for name in CLIENT_VARIABLES[:3] if name in os.environ]
        return f"{present[0]} is set for this process, and must be for the workers only: unset it" if present else None

    def _why_device(self) -> str | None:
        gpu, version = self._gpu(), self._api().version
        if gpu.capability < (7, 0):
            return f"{gpu.name}: shares under MPS need a Volta GPU (compute capability 7.0) or later"
        if self.mode is Mode.PARTITION and gpu.capability < (8, 0):
            return f"{gpu.name}: static partitions need an Ampere GPU (compute capability 8.0) or later"
        since = _SINCE[self.mode]
        if version < since:
            return (
                f"{self.name} needs a driver of CUDA {since[0]}.{since[1]} or later; this one is of "
                f"{version[0]}.{version[1]}: update it, or use mps"
            )
        compute_mode = _COMPUTE_MODES.get(self._compute_mode())
        if compute_mode == "prohibited":
            return f"{gpu.name} is in compute mode PROHIBITED: as root, nvidia-smi -c DEFAULT"
        if compute_mode == "exclusive process" and self.mode is Mode.PARTITION:
            return (
                f"{gpu.name} is in compute mode EXCLUSIVE_PROCESS, where the holder of the memory, which stays outside "
                "static partitions, has no place: as root, nvidia-smi -c DEFAULT"
            )
        return None

    def _why_daemon(self) -> str | None:
        if shutil.which(self._program) is None:
            return f"{self._program} is not on PATH: it comes with the NVIDIA driver (nvidia-compute-utils)"
        live = is_live(foreign_pipe())
        if self._foreign and not live:
            return f"no MPS daemon runs in {foreign_pipe()}: start one there, or let smpart start its own (mps)"
        if live and not self._foreign and _COMPUTE_MODES.get(self._compute_mode()) == "exclusive process":
            return (
                f"the device is in compute mode EXCLUSIVE_PROCESS and an MPS daemon in {foreign_pipe()} may have it: "
                "use that one with mps:foreign, or end it"
            )
        return None


@register("mps", kind="cuda", rank=20, arguments=("", "affinity", "partition", "partition:P/D", "foreign"))
def open_mps(argument: str) -> Backend:
    """Workers under MPS: by percentage (``mps``), ``mps:affinity``, ``mps:partition:96/32``; or ``mps:foreign``."""
    mode, _, split = argument.partition(":")
    if mode == "foreign":
        return Mps(foreign=True)
    return Mps(Mode(mode) if mode else Mode.PERCENTAGE, split=Split.parse(split) if split else None)
