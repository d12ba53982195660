"""Reads a profiler's record (the trace that `torch.profiler` exports): copies, waits of the host, gaps on a stream.

Times are microseconds on the record's own clock.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

_ON_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_CALLS = frozenset({"cuda_runtime", "cuda_driver"})
_BLOCKING_CALLS = frozenset({"cudaMemcpy", "cudaMemcpy2D", "cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaMallocHost"})
"""They wait for the device, or may."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the record.

    Attributes:
        stream: of work on the device; -1: a call of the host.
        thread: of a call.
        bytes: that a copy moves.
    """

    kind: str
    name: str
    start: float
    end: float
    stream: int = -1
    thread: str = ""
    bytes: int = 0

    def within(self, start: float, end: float) -> bool:
        """Whether it begins in a window."""
        return start <= self.start <= end


class Trace:
    """A record in order of time."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events = sorted(events, key=lambda event: event.start)
        self.device = [event for event in self.events if event.kind in _ON_DEVICE]

    @classmethod
    def of(cls, profile: Any) -> Trace:
        """What a `torch.profiler.profile` saw."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            return cls.read(json.loads(path.read_text()))

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Trace:
        """A trace as JSON."""
        found = []
        for line in document["traceEvents"]:
            if line.get("ph") == "X" and "cat" in line:
                args = line.get("args", {})
                start = float(line["ts"])
                stream = int(args.get("stream", -1)) if line["cat"] in _ON_DEVICE else -1
                end, thread, size = start + float(line.get("dur", 0)), str(line.get("tid")), int(args.get("bytes", 0))
                found.append(Event(line["cat"], line["name"], start, end, stream, thread, size))
        return cls(found)

    def mark(self, name: str) -> Event:
        """The `record_function` of this name. Raises `LookupError`."""
        for event in self.events:
            if event.name == name and event.kind in ("user_annotation", "cpu_op"):
                return event
        raise LookupError(f"the record has no {name}")

    def copied(self, start: float = -inf, end: float = inf) -> dict[str, int]:
        """Bytes copied by kind (DtoD, HtoD, DtoH) in a window."""
        total = Counter({"DtoD": 0, "HtoD": 0, "DtoH": 0})
        for event in self.device:
            if event.kind == "gpu_memcpy" and event.within(start, end):
                total[_direction(event.name)] += event.bytes
        return dict(total)

    def hand_off(self) -> tuple[float, float]:
        """The window in which a request goes from the prefill lane to the decode lane, if it is alone.

        It begins with the end of the first stream's last work, and ends when the first step's answer was copied to
        the host.

        Raises:
            LookupError: the record does not show two streams one after the other.
        """
        if not self.device:
            raise LookupError("the record shows no work on a device")
        first, last = self.device[0].stream, self.device[-1].stream
        start = max(event.end for event in self.device if event.stream == first)
        for event in self.device:
            if event.stream == last != first and event.start >= start and _direction(event.name) == "DtoH":
                return start, event.end
        raise LookupError("the record shows no step on another stream after the prefill")

    def waits(self, window: Event) -> dict[str, int]:
        """Calls with which the window's own thread waited for the device, and copies that block, by name."""
        inside = [event for event in self.events if event.within(window.start, window.end)]
        calls = (e.name for e in inside if e.kind in _CALLS and e.thread == window.thread and _waits(e.name))
        copies = (e.name for e in inside if e.kind == "gpu_memcpy" and "Pageable" in e.name)
        return dict(Counter([*calls, *copies]))

    def idle(self, window: Event) -> tuple[float, float]:
        """Microseconds in which a window's busiest stream ran nothing between its works; and from first to last."""
        inside = [event for event in self.device if event.within(window.start, window.end)]
        if not inside:
            return 0.0, 0.0
        busiest, _ = Counter(event.stream for event in inside).most_common(1)[0]
        works = [event for event in inside if event.stream == busiest]
        ends, latest = [], -inf
        for work in works:
            latest = max(latest, work.end)
            ends.append(latest)
        gaps = sum(max(0.0, after.start - end) for (_, after), end in zip(pairwise(works), ends, strict=False))
        return gaps, ends[-1] - works[0].start


def _direction(name: str) -> str:
    return name.split()[1] if name.startswith("Memcpy ") else ""


def _waits(name: str) -> bool:
    return "Synchronize" in name or name in _BLOCKING_CALLS
