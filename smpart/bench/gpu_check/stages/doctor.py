"""Both proofs for every split: what the driver says, the SMs a kernel saw, and blocks of both lanes that met.

See csrc/handshake.cu for what the three meetings of a split prove.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from smpart.bench.gpu_check.record import Figures, Record, Setting
from smpart.errors import SmpartError
from smpart.partition import Side, Split
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.places import Place
from smpart.partition.cuda.program import Program, int32, pointer, uint64
from smpart.partition.cuda.sm_probe import read_sms
from smpart.partition.green import Green, GreenPlaces
from smpart.partition.split import nested

_TIMEOUT_NS = 50_000_000
_HOLD_NS = 1_000_000
_MISSED = 1 << 32

Sms = Mapping[tuple[Side, Split], frozenset[int]]


@dataclass(frozen=True, slots=True)
class Meeting:
    """How a meeting of blocks ended.

    Attributes:
        counted: blocks of each lane that were there at once.
        gap_ns: the longest time that one of them was off its SM, at most.
    """

    met: bool
    counted: tuple[int, int]
    gap_ns: int

    @classmethod
    def of(cls, word: int, gap_ns: int) -> Meeting:
        """As the kernel left its word.

        >>> Meeting.of(1 << 32 | 3 << 16 | 5, 0)
        Meeting(met=False, counted=(5, 3), gap_ns=0)
        """
        return cls(not word & _MISSED, (word & 0xFFFF, word >> 16 & 0xFFFF), gap_ns)


def measure(setting: Setting, record: Record) -> None:
    """Every split: read back, looked at, met."""
    api = driver()
    with Green().open() as places:
        record.put(
            contexts=str(places),
            refused={str(split): why for split, why in places.refused.items()},
            splits={str(split): read_back(places, split) for split in places.splits()},
        )
        wrong = [str(split) for split in places.splits() if not read_back(places, split)["as_asked"]]
        record.require(not wrong, f"the driver gave other SMs than asked for: {', '.join(wrong)}")
        try:
            look(places, record)
        except SmpartError as error:
            record.fault(f"the SMs could not be looked at: {error}")
        with Program(api, places.gpu, places.primary) as program:
            meet_all(program, places, record)


def read_back(places: GreenPlaces, split: Split) -> Figures:
    """SMs of both sides as the driver says now."""
    found = {side: places.read_back(places.all()[side, split]) for side in Side if split.units(side)}
    right = all(count == split.units(side) for side, count in found.items())
    return {"how": places.how[split], **{side.value: count for side, count in found.items()}, "as_asked": right}


def look(places: GreenPlaces, record: Record) -> None:
    """The hardware's own numbers of each side's SMs: as many as promised, none on both sides; which sets nest."""
    sms = read_sms(driver(), places.gpu, places)
    record.put(sms={f"{split} {side.value}": ranges(found) for (side, split), found in sms.items()})
    try:
        places.learn(sms)
        record.put(looked_at="every side has its SMs and shares none")
    except SmpartError as error:
        record.fault(str(error))
    record.put(**nesting(places, sms))


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as runs.

    >>> ranges({4, 0, 1, 2, 7, 8})
    '0-2,4,7-8'
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)


def nesting(places: GreenPlaces, sms: Sms) -> Figures:
    """Whether a side's smaller partitions lie inside its larger ones: then the line can move without a pause."""
    shared = [split for split in places.splits() if not split.exclusive]
    pairs = list(itertools.pairwise(shared))
    wanted = [(p, d) for p in shared for d in shared if p != d and nested(p, d)]
    return {
        "nested_prefill": all(sms[Side.PREFILL, a] <= sms[Side.PREFILL, b] for a, b in pairs),
        "nested_decode": all(sms[Side.DECODE, b] <= sms[Side.DECODE, a] for a, b in pairs),
        "disjoint_across_splits": sum(not sms[Side.PREFILL, p] & sms[Side.DECODE, d] for p, d in wanted),
        "disjoint_across_splits_if_nested": len(wanted),
    }


def meet_all(program: Program, places: GreenPlaces, record: Record) -> None:
    """The meetings of every split."""
    meet(program, _both(places, places.splits()[0]), (1, 1))  # loads the kernel; how it ends means nothing
    proofs: dict[str, Figures] = {}
    for split in places.splits():
        proofs[str(split)] = proof(program, places, split)
        record.put(met=proofs, proved=sum(bool(each["proved"]) for each in proofs.values()), of=len(places.splits()))
    failed = [name for name, each in proofs.items() if not each["proved"]]
    record.require(not failed, f"the meeting of blocks does not prove {', '.join(failed)}")


def proof(program: Program, places: GreenPlaces, split: Split) -> Figures:
    """The meetings that handshake.cu asks for; of an exclusive split, that its one side is as large as promised."""
    both, wanted = _both(places, split), (split.prefill, split.decode)
    together = meet(program, both, wanted)
    more = {side: meet(program, both, _one_more(side, split)) for side in Side if split.units(side)}
    bounded = all(not m.met and sum(m.counted) == split.units(side) for side, m in more.items())
    steady = together.gap_ns * 10 <= _HOLD_NS
    return {
        "proved": together.met and together.counted == wanted and bounded and steady,
        "together": list(together.counted),
        "one_more": {side.value: sum(m.counted) for side, m in more.items()},
        "longest_gap_us": round(together.gap_ns / 1e3, 1),
    }


def meet(program: Program, places: Mapping[Side, Place], wanted: tuple[int, int]) -> Meeting:
    """Launch blocks on both sides (on one, where only one is wanted) and see whether all were there at once."""
    kernel = program.kernel("handshake", "meet", program.most_shared)
    memory = program.memory(8 + 12 * sum(wanted) + 8)
    gaps, numbers = memory + 8, memory + 8 + 8 * sum(wanted)
    numbers_of = (int32(wanted[0]), int32(wanted[1]), uint64(_TIMEOUT_NS), uint64(_HOLD_NS))
    first = 0
    for index, side in enumerate(Side):
        if wanted[index]:
            arrays = pointer(numbers + 4 * first), pointer(gaps + 8 * first)
            arguments = (pointer(memory), int32(index), *numbers_of, *arrays)
            program.launch(kernel, places[side], wanted[index], 32, arguments, program.most_shared)
        first += wanted[index]
    program.wait(*places.values())
    word = int(program.read(memory, np.zeros(1, np.uint64))[0])
    return Meeting.of(word, int(program.read(gaps, np.zeros(sum(wanted), np.uint64)).max(initial=0)))


def _both(places: GreenPlaces, split: Split) -> dict[Side, Place]:
    """Both sides' places; of an exclusive split the one there is, twice."""
    found = {side: places.all().get((side, split)) for side in Side}
    one = next(place for place in found.values() if place is not None)
    return {side: place or one for side, place in found.items()}


def _one_more(side: Side, split: Split) -> tuple[int, int]:
    return (split.prefill + 1, 0) if side is Side.PREFILL else (0, split.decode + 1)
