"""Cuts a device's SMs in two: which splits the driver can make, and the resources of both their sides.

Both sides always come out of one call on one resource. Two calls, one a side, give partitions that may overlap
(each starts from the whole device): that is the mistake this file exists to avoid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from smpart.partition.cuda.driver import CudaError, Driver
from smpart.partition.gpus import sm_group
from smpart.partition.split import Side, Split

_CANNOT = 915
"""CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION: this device cannot give SMs in this arrangement."""

_UNEQUAL_SINCE = (13, 1)
"""`cuDevSmResourceSplit` makes groups of unequal size in one call; before, there is one group and the remainder."""


@dataclass(frozen=True, slots=True)
class Granularity:
    """SMs of a device are handed out in groups of at least `minimum`, in steps of `step`."""

    units: int
    minimum: int
    step: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A split that the driver made.

    Attributes:
        sides: the resource (`CUdevResource`) of each side; good for one green context each.
        how: in words, for `doctor`.
    """

    split: Split
    sides: dict[Side, Any]
    how: str


def device_resource(driver: Driver, device: Any) -> Any:
    """All SMs of a device, fresh: the product of a split must not be split again."""
    return driver("cuDeviceGetDevResource", device, driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)


def granularity(driver: Driver, device: Any, capability: tuple[int, int]) -> Granularity:
    """What a device's groups of SMs look like; from the driver where it says so (13.0 and later)."""
    sm = device_resource(driver, device).sm
    minimum, step = int(sm.minSmPartitionSize), int(sm.smCoscheduledAlignment)
    if not minimum or not step:
        minimum, step = sm_group(capability)
    return Granularity(int(sm.smCount), minimum, step)


def cut(driver: Driver, device: Any, prefill: int, total: int) -> Cut | None:
    """Split a device's SMs once, `prefill` of `total` for prefill and all others for decode.

    Structured groups (whose SMs may form clusters) are tried first. Where the topology refuses them, the rule is
    relaxed; where even that gives other numbers than asked for, or loses SMs, the answer is None.

    Raises:
        CudaError: for any other reason than that the device cannot be cut so.
    """
    for how, attempt in _attempts(driver):
        try:
            one, other = attempt(device_resource(driver, device), prefill)
        except CudaError as error:
            if error.code != _CANNOT:
                raise
            continue
        if _count(driver, one) == prefill and _count(driver, other) == total - prefill:
            return Cut(Split(prefill, total - prefill), {Side.PREFILL: one, Side.DECODE: other}, how)
    return None


def _attempts(driver: Driver) -> Iterator[tuple[str, Callable[[Any, int], tuple[Any, Any]]]]:
    flags = driver.api.CUdevSmResourceSplitByCount_flags

    def by_count(flag: int) -> Callable[[Any, int], tuple[Any, Any]]:
        def attempt(resource: Any, prefill: int) -> tuple[Any, Any]:
            groups, made, rest = driver("cuDevSmResourceSplitByCount", 1, resource, flag, prefill)
            return (groups[0] if made else None), rest

        return attempt

    def groups(flag: int) -> Callable[[Any, int], tuple[Any, Any]]:
        def attempt(resource: Any, prefill: int) -> tuple[Any, Any]:
            # The second group takes all others: discovered (0), in pairs, and filled up with what is left over.
            wanted = [_group(driver, prefill, 0, flag), _group(driver, 0, 2, _backfill(driver))]
            (one, other), _rest = driver("cuDevSmResourceSplit", 2, resource, 0, wanted)
            return one, other

        return attempt

    if driver.has(_UNEQUAL_SINCE):
        yield "two groups in one split", groups(0)
        yield "two groups in one split, backfilled", groups(_backfill(driver))
    yield "one group by count, and the remainder", by_count(0)
    ignore = int(flags.CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING)
    yield "one group by count without co-scheduling, and the remainder", by_count(ignore)


def _backfill(driver: Driver) -> int:
    return int(driver.api.CUdevSmResourceGroup_flags.CU_DEV_SM_RESOURCE_GROUP_BACKFILL)


def _group(driver: Driver, count: int, coscheduled: int, flags: int) -> Any:
    group = driver.api.CU_DEV_SM_RESOURCE_GROUP_PARAMS()
    group.smCount, group.coscheduledSmCount, group.flags = count, coscheduled, flags
    return group


def _count(driver: Driver, resource: Any) -> int:
    """SMs in a resource, as the driver wrote them there (never as they were asked for)."""
    if resource is None or resource.type != driver.api.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM:
        return 0
    return int(resource.sm.smCount)
