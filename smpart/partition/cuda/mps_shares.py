"""Shares of a device under MPS: which there are, how a worker gets one, and whether it really has it.

A share is fixed when a process first uses CUDA. Nothing changes it afterwards, so each share has a worker of its own,
and a lane is resized by giving its next work to another worker.

Sources: NVIDIA's MPS guide, "Volta MPS execution resource provisioning" and "Static SM partitioning"; ``cuda.h`` on
execution affinity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.cuda.mps_control import CLIENT_VARIABLES
from smpart.partition.feasible import feasible_splits
from smpart.partition.split import Side, Split

CLIENTS_PER_DEVICE = 48
"""Client contexts that an MPS server takes on one device of Volta or later; the lowest of the documented numbers."""

_GRANULE = 2
"""SMs that the hardware hands out together (a TPC), from Volta to Blackwell."""


class Mode(StrEnum):
    """How a worker gets its share."""

    PERCENTAGE = "percentage"
    """``CUDA_MPS_ACTIVE_THREAD_PERCENTAGE``: a cap on the number of SMs, any of them."""

    AFFINITY = "affinity"
    """The same cap, in SMs: the worker makes its context with `cuCtxCreate_v4` and `CU_EXEC_AFFINITY_TYPE_SM_COUNT`."""

    PARTITION = "partition"
    """``CUDA_MPS_SM_PARTITION``: SMs of its own, one static partition a side (driver 13.1 and later)."""

    @property
    def disjoint(self) -> bool:
        """Whether two lanes cannot meet on an SM. Caps may: each is a number of SMs and not a choice of them."""
        return self is Mode.PARTITION

    @property
    def guarantee(self) -> str:
        """What the mode promises, for `doctor`."""
        if self.disjoint:
            return "each lane has SMs of its own; L2 and memory bandwidth are shared"
        return "a lane uses no more SMs than its share, but any of them: both lanes may meet on one SM"

    @property
    def resize(self) -> str:
        """What it takes to go from one split to another, for `doctor`."""
        if self is Mode.PARTITION:
            return "both workers start anew: partitions are fixed while they have clients, and may not overlap"
        return "the next work goes to another worker of the pool"


def sms_at(percentage: float, whole: int) -> int:
    """SMs that a percentage of a device comes to, rounded down as documented to what the hardware hands out.

    >>> sms_at(73, 132), sms_at(50, 132), sms_at(100, 133)
    (96, 66, 133)
    """
    return int(whole * percentage / 100) // _GRANULE * _GRANULE if percentage < 100 else whole


@dataclass(frozen=True, slots=True)
class Share:
    """SMs for one side: the worker that serves it, and every split that gives the side so many.

    Attributes:
        units: SMs asked for.
        whole: SMs of the device.
    """

    side: Side
    units: int
    whole: int
    mode: Mode

    @property
    def percentage(self) -> int:
        """Smallest whole percentage of the device that allows so many SMs.

        >>> Share(Side.PREFILL, 96, 132, Mode.PERCENTAGE).percentage
        73
        """
        return -(-100 * self.units // self.whole)

    def variables(self, partition: str | None = None) -> dict[str, str | None]:
        """What a worker's environment needs before its first CUDA call; None: the variable must not be set.

        Args:
            partition: id of the static partition, in that mode.
        """
        found: dict[str, str | None] = dict.fromkeys(CLIENT_VARIABLES)
        if self.mode is Mode.PARTITION:
            found["CUDA_MPS_SM_PARTITION"] = partition
        elif self.mode is Mode.PERCENTAGE:
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(self.percentage)
        return found


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker reads about itself once it has a context.

    Attributes:
        mps: device attribute ``MPS_ENABLED``; None where the driver lacks it.
        sms: device attribute ``MULTIPROCESSOR_COUNT``; MPS lowers it to the share.
        affinity: SMs by `cuCtxGetExecAffinity`; None where the context has no affinity.
    """

    mps: bool | None
    sms: int
    affinity: int | None = None


def check(seen: Seen, share: Share) -> int:
    """The SMs that a worker really has, if they are its share.

    MPS rounds: percentages down to what the hardware supports, affinity up. Anything beyond that rounding is refused,
    most of all the whole device where less was asked for: without a daemon, CUDA ignores every share and says nothing.

    Raises:
        BackendUnavailable: the worker is no MPS client, or its share is not what was asked for.
    """
    asked = f"the {share.side} worker asked for {share.units} of {share.whole} SMs"
    if seen.mps is False:
        raise BackendUnavailable(
            f"{asked} but runs outside MPS, where a share is ignored: it found no daemon by CUDA_MPS_PIPE_DIRECTORY"
        )
    got = seen.affinity if share.mode is Mode.AFFINITY else seen.sms
    if got is None:
        raise BackendUnavailable(f"{asked} but its context has no execution affinity: use mps")
    if got == share.whole != share.units:
        raise BackendUnavailable(
            f"{asked} and has them all: MPS ignored its share. Does the daemon run, and was the "
            "environment set before the first CUDA call?"
        )
    step = 1 if share.mode is Mode.PARTITION else _GRANULE
    if abs(got - share.units) >= step:
        raise BackendUnavailable(f"{asked} and has {got}: this device rounds shares differently; choose another split")
    return got


def chunk_sms(capability: tuple[int, int]) -> int:
    """SMs in a chunk of static partitions: 8 on Hopper and later, 4 before."""
    return 8 if capability >= (9, 0) else 4


def partition_splits(sms: int, capability: tuple[int, int]) -> tuple[Split, ...]:
    """Every split that static partitions can realise. They are made of whole chunks, so some SMs may be left over.

    >>> [str(split) for split in partition_splits(132, (9, 0))][:2], str(partition_splits(132, (9, 0))[-1])
    (['0/128', '8/120'], '128/0')
    """
    chunk = chunk_sms(capability)
    return feasible_splits(sms - sms % chunk, chunk, chunk)


def shares_of(splits: Iterable[Split], whole: int, mode: Mode) -> tuple[Share, ...]:
    """The shares that splits need, one each although several splits may use it; prefill's first, by size."""
    needed = {(side, split.units(side)) for split in splits for side in Side if split.units(side)}
    return tuple(Share(side, units, whole, mode) for side in Side for owner, units in sorted(needed) if owner is side)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The workers that serve some splits: one a share. Start them up front, or each when its share is first needed.

    Attributes:
        splits: in order of `Split.prefill`.
        shares: one worker each.
    """

    splits: tuple[Split, ...]
    shares: tuple[Share, ...]

    @property
    def workers(self) -> int:
        """How many there are when all have started."""
        return len(self.shares)

    def worker(self, side: Side, split: Split) -> int | None:
        """Index into `shares` of the one that serves a side of a split; None if the split gives it nothing.

        Raises:
            UsageError: the split is not one of the plan's.
        """
        if split not in self.splits:
            raise UsageError(f"split {split} has no workers; there are {', '.join(map(str, self.splits))}")
        units = split.units(side)
        found = (i for i, share in enumerate(self.shares) if (share.side, share.units) == (side, units))
        return next(found, None)

    def memory_bytes(self, contexts: Mapping[Share, int]) -> int:
        """Device memory of the workers' contexts, from what each was measured to take.

        Weights and KV are not in it: one process owns them and the workers map them. Contexts of small shares are
        smaller, as their storage scales with the threads they may use.
        """
        return sum(contexts[share] for share in self.shares)


def plan(splits: Iterable[Split], whole: int, mode: Mode, reserved: int = 1) -> PoolPlan:
    """The pool for these splits.

    Args:
        whole: SMs of the device.
        reserved: clients besides the workers; the process that owns weights and KV is one.

    Raises:
        UsageError: no split, more clients than a device takes, or more than one pair of static partitions.
    """
    chosen = tuple(sorted(set(splits)))
    if not chosen:
        raise UsageError("a pool of MPS workers needs at least one split")
    if mode is Mode.PARTITION and len(chosen) > 1:
        raise UsageError(
            f"{len(chosen)} splits at once cannot be had with static partitions: they may not overlap, and are fixed "
            "while they have clients. Choose one split, or mps, or green"
        )
    shares = shares_of(chosen, whole, mode)
    if len(shares) + reserved > CLIENTS_PER_DEVICE:
        raise UsageError(
            f"{len(chosen)} splits need {len(shares)} MPS workers, and a device takes {CLIENTS_PER_DEVICE} clients "
            f"({reserved} reserved): choose fewer splits"
        )
    return PoolPlan(chosen, shares)


def ladder(splits: Iterable[Split], workers: int) -> tuple[Split, ...]:
    """As many splits as a number of workers serves: both exclusive ones, and others evenly spaced between.

    Raises:
        UsageError: fewer than four workers, which serve no shared split beside the exclusive ones.

    >>> [str(split) for split in ladder(feasible_splits(132, 2, 2), workers=8)]
    ['0/132', '32/100', '66/66', '98/34', '132/0']
    """
    if workers < 4:
        raise UsageError(f"{workers} workers: two serve the exclusive splits, and each shared one needs two more")
    first, *shared, last = sorted(set(splits))
    count = min(len(shared), (workers - 2) // 2)
    spaced = [shared[(i + 1) * (len(shared) + 1) // (count + 1) - 1] for i in range(count)]
    return (first, *spaced, last)
