"""Makes every split of a backend for real and looks what came of it, for `smpart doctor`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter_ns

from smpart.bench.doctor_lines import Facts
from smpart.errors import BackendUnavailable
from smpart.partition import Backend, Side, Split
from smpart.partition.affinity import pin_self, threads_of
from smpart.partition.cores import Cores
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.sm_probe import read_sms
from smpart.partition.green import Green, GreenPlaces

_SWITCHES = 200

Sms = Mapping[tuple[Side, Split], frozenset[int]]


def realise(backend: Backend) -> Facts:
    """Which units each side of each split really has (``realised``), what a switch costs, and ``notes`` for people.

    Nothing for a backend whose lanes are not made in this process.
    """
    if isinstance(backend, Cores):
        return _cores(backend)
    return _green(backend) if isinstance(backend, Green) else {}


def _cores(backend: Cores) -> Facts:
    """Pin this process to each side of each split, read back where it may run, and time the re-pinning."""
    before, placement, pid = os.sched_getaffinity(0), backend.placement(), os.getpid()
    choices = [(side, split) for split in backend.splits() for side in Side if split.units(side)]
    ids = backend.device().unit_ids
    realised: list[Facts] = []
    try:
        for split in backend.splits():
            got: dict[Side, list[int]] = {side: [] for side in Side}
            want = {side: sorted(ids[i] for i in split.indices(side, len(ids))) for side in Side}
            for side in Side:
                if split.units(side):
                    placement.pin_self(side, split)
                    got[side] = sorted(placement.read_back(pid))
            realised.append({"split": str(split), **_by_side(got), "as_asked": got == want})
        cost = _median_us(lambda turn: placement.pin_self(*choices[turn % len(choices)]))
    finally:
        pin_self(before)
    threads = len(threads_of(pid))
    notes = [
        f"switch: {cost} us to re-pin {threads} thread(s)",
        f"sharing: only for a policy whose point it is (such as overlap): both lanes on any of the {len(ids)} core(s)",
    ]
    return {"realised": realised, "switch_us": cost, "switch_threads": threads, "notes": notes}


def _green(backend: Green) -> Facts:
    """Make all contexts, read their SMs back from the driver, look at them with a kernel, and time a switch."""
    with backend.open() as places:
        sms, looked = _look(places)
        realised = [_split(places, split, sms) for split in places.splits()]
        cost = _switch_us(places)
        refused = {str(split): why for split, why in places.refused.items()}
        return {
            "realised": realised,
            "refused": refused,
            "made": {str(split): how for split, how in places.how.items()},
            "contexts_mib": places.memory_bytes >> 20,
            "sms_looked_at": looked,
            "nested": _nested(places, sms),
            "switch_us": cost,
            "notes": [
                f"made: {places}",
                f"SMs looked at by a kernel: {looked}",
                f"switch: {cost} us on the host",
                *(f"{split}: refused, {why}" for split, why in refused.items()),
            ],
        }


def _look(places: GreenPlaces) -> tuple[Sms, str]:
    try:
        return read_sms(driver(), places.gpu, places), "yes"
    except BackendUnavailable as error:
        return {}, f"no, {error}"


def _split(places: GreenPlaces, split: Split, sms: Sms) -> Facts:
    """One split: SMs by the driver, by the hardware, and whether both are what was asked for."""
    sides = [side for side in Side if split.units(side)]
    units = {side: places.read_back(places.all()[side, split]) for side in sides}
    seen = {side: sorted(sms.get((side, split), ())) for side in Side}
    right = all(units[side] == split.units(side) for side in sides)
    if sms:
        right = right and all(len(seen[side]) == split.units(side) for side in sides)
        right = right and not set(seen[Side.PREFILL]) & set(seen[Side.DECODE])
    return {"split": str(split), **_by_side(seen), "units": _by_side(units), "as_asked": right}


def _by_side(values: Mapping[Side, object]) -> Facts:
    return {side.value: value for side, value in values.items()}


def _nested(places: GreenPlaces, sms: Sms) -> bool | None:
    """Whether a side's smaller partitions lie inside its larger ones; None: nobody looked."""
    if not sms:
        return None
    shared = [split for split in places.splits() if not split.exclusive]
    pairs = list(itertools.pairwise(shared))
    grows = all(sms[Side.PREFILL, a] <= sms[Side.PREFILL, b] for a, b in pairs)
    return grows and all(sms[Side.DECODE, b] <= sms[Side.DECODE, a] for a, b in pairs)


def _switch_us(places: GreenPlaces) -> float | None:
    """What moving a lane to another split costs the host: an event recorded on one stream, a wait on another."""
    ours = [place for (side, split), place in places.all().items() if side is Side.DECODE and not split.exclusive]
    if len(ours) < 2:
        return None
    api = driver()
    record, wait = api.function("cuEventRecord"), api.function("cuStreamWaitEvent")
    events = {}
    for place in ours:
        with api.current(place.context):
            events[place] = api("cuEventCreate", int(api.api.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def switch(turn: int) -> None:
        before, after = ours[turn % len(ours)], ours[(turn + 1) % len(ours)]
        record(events[before], before.stream)
        wait(after.stream, events[before], 0)

    try:
        return _median_us(switch)
    finally:
        _drain(ours)
        for event in events.values():
            api("cuEventDestroy", event)


def _drain(places: list[Place]) -> None:
    for place in places:
        driver()("cuStreamSynchronize", place.stream)


def _median_us(step: Callable[[int], object]) -> float:
    microseconds = []
    for turn in range(_SWITCHES):
        begun = perf_counter_ns()
        step(turn)
        microseconds.append((perf_counter_ns() - begun) / 1e3)
    return round(median(microseconds), 1)
