"""GPU performance monitoring (GPM): how busy a GPU's SMs and memory were between two moments.

From Hopper on the GPU counts this itself, apart from the counters that profilers claim for themselves. Its counts are
refreshed every 100 ms (`nvml.h`, nvmlGpmSampleGet), so shorter spans cannot be measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Self

from smpart.errors import BackendUnavailable, UsageError
from smpart.partition.cuda.nvml import explained, find, memory_peak, reason, session

_SHORTEST_S = 0.1
_METRICS = {"sm_active": 2, "sm_occupancy": 3, "tensor_active": 5, "dram_bandwidth": 10}
"""`nvmlGpmMetricId_t` of each; all in percent. By number, as the C interface fixes them."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Means over one span of time, fractions of 1; None where NVML gave no value, with the reason in ``unavailable``.

    Attributes:
        seconds: length of the span.
        sm_active: SMs that had work.
        sm_occupancy: resident warps, of those that would fit.
        tensor_active: time in which the SMs' tensor cores worked.
        dram_bandwidth: of the memory's peak bandwidth.
        dram_bytes_per_s: the same times `memory_peak`; the peak is computed, not told by NVML.
    """

    seconds: float
    sm_active: float | None
    sm_occupancy: float | None
    tensor_active: float | None
    dram_bandwidth: float | None
    dram_bytes_per_s: float | None
    unavailable: Mapping[str, str]


class Gpm:
    """Measures one GPU between moments: entering marks the first, each `read` ends a span and begins the next.

    ::

        with Gpm("GPU-...") as gpm:
            ...                      # more than 100 ms of work
            busy = gpm.read()

    For one thread at a time.

    Args:
        device: as for `device_facts`. On a GPU in MIG mode name the instance; older drivers measure none.
        clock: seconds from an arbitrary start, never going back.

    Raises:
        BackendUnavailable: on entering: NVML does not work here, or this GPU or driver has no GPM.
    """

    def __init__(self, device: str | int, *, clock: Callable[[], float] = monotonic) -> None:
        self._device, self._clock = device, clock
        self._open: ExitStack | None = None

    def __enter__(self) -> Self:
        if self._open is not None:
            raise UsageError("Gpm: it is in use; make one for each `with`")
        with ExitStack() as stack:
            self._nvml = stack.enter_context(session())
            self._gpu = find(self._nvml, self._device)
            self._require_support()
            self._from, self._to = self._sample(stack), self._sample(stack)
            self._peak = self._memory_peak()
            self._begun = self._take(self._from)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stack, self._open = self._open, None
        if stack is not None:
            stack.close()

    def mark(self) -> None:
        """Begin the span anew, now.

        Raises:
            UsageError: this is not entered.
            BackendUnavailable: the counters cannot be read.
        """
        self._require_open()
        self._begun = self._take(self._from)

    def read(self) -> Activity:
        """Activity since the last `mark` or `read`, and begin the next span.

        Raises:
            UsageError: the span is not longer than 100 ms (it goes on), or this is not entered.
            BackendUnavailable: the counters cannot be read.
        """
        self._require_open()
        seconds = self._clock() - self._begun
        if seconds <= _SHORTEST_S:
            raise UsageError(f"Gpm.read after {seconds * 1e3:.0f} ms: the GPU counts every 100 ms, measure longer")
        ended = self._take(self._to)
        activity = self._activity(ended - self._begun)
        self._from, self._to, self._begun = self._to, self._from, ended
        return activity

    def _require_open(self) -> None:
        if self._open is None:
            raise UsageError("Gpm: use it inside `with Gpm(...) as gpm:`")

    def _require_support(self) -> None:
        with explained(self._nvml, f"GPU {self._device}: GPM is unavailable"):
            supported = self._nvml.nvmlGpmQueryDeviceSupport(self._gpu).isSupportedDevice
        if not supported:
            raise BackendUnavailable(f"GPU {self._device}: GPM is unavailable: it needs Hopper or a later generation")

    def _sample(self, stack: ExitStack) -> Any:
        with explained(self._nvml, "GPM: no sample buffer"):
            sample = self._nvml.nvmlGpmSampleAlloc()
        stack.callback(self._free, sample)
        return sample

    def _free(self, sample: Any) -> None:
        with explained(self._nvml, "GPM: a sample buffer was not freed"):
            self._nvml.nvmlGpmSampleFree(sample)

    def _take(self, sample: Any) -> float:
        with explained(self._nvml, f"GPU {self._device}: GPM counters cannot be read"):
            self._nvml.nvmlGpmSampleGet(self._gpu, sample)
        return self._clock()

    def _memory_peak(self) -> int | None:
        try:
            return memory_peak(self._nvml, self._gpu)
        except self._nvml.NVMLError:
            return None

    def _activity(self, seconds: float) -> Activity:
        request = self._nvml.c_nvmlGpmMetricsGet_t()
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(_METRICS)
        request.sample1, request.sample2 = self._from, self._to
        for i, metric in enumerate(_METRICS.values()):
            request.metrics[i].metricId = metric
        with explained(self._nvml, f"GPU {self._device}: GPM metrics cannot be computed"):
            self._nvml.nvmlGpmMetricsGet(request)
        values: dict[str, float | None] = {}
        unavailable: dict[str, str] = {}
        for i, name in enumerate(_METRICS):
            got = request.metrics[i]
            values[name] = None
            if got.nvmlReturn != self._nvml.NVML_SUCCESS:
                unavailable[name] = reason(self._nvml.NVMLError(got.nvmlReturn))
            elif not math.isfinite(got.value):
                unavailable[name] = "NVML gave no number"
            else:
                values[name] = got.value / 100
        busy = values["dram_bandwidth"]
        absolute = None if busy is None or self._peak is None else busy * self._peak
        return Activity(seconds=seconds, **values, dram_bytes_per_s=absolute, unavailable=unavailable)
