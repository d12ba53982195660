"""Matrix products of a prefill on each split, with torch told how many SMs to leave alone and without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from smpart.bench.gpu_check.record import Figures, Record, Setting, spread
from smpart.errors import BackendUnavailable
from smpart.partition import Side
from smpart.partition.cuda.places import Place
from smpart.partition.green import Green, GreenPlaces
from smpart.runtime.device.carveout import Carveout

SHAPES = ((2048, 4096, 14336), (8192, 2048, 8192), (32, 4096, 14336))
"""(m, k, n): a prefill of an 8B and of a 1B model, and a decode step of 32 rows."""
_REPEATS, _WARM = 15, 4


def measure(setting: Setting, record: Record) -> None:
    """Every prefill side, each shape, both ways in turns."""
    if not torch.cuda.is_available():
        raise BackendUnavailable("this torch sees no GPU: install a CUDA build of torch")
    setter = getattr(torch._C, "_set_sm_carveout_experimental", None)
    record.put(knob="torch._C._set_sm_carveout_experimental" if setter is not None else "this torch has none")
    where, carveout = torch.device("cuda", 0), Carveout(setter)
    torch.manual_seed(setting.seed)
    with torch.inference_mode(), Green().open() as places:
        _all(places, where, carveout, record)
        torch.cuda.synchronize()


def _all(places: GreenPlaces, where: torch.device, carveout: Carveout, record: Record) -> None:
    rows: list[Figures] = []
    for m, k, n in SHAPES:
        a, b = (torch.randn(shape, device=where, dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        out = torch.empty((m, n), device=where, dtype=torch.bfloat16)
        torch.cuda.synchronize()
        for (side, _), place in places.all().items():
            if side is Side.PREFILL:
                rows.append(_row(place, places.gpu.units, carveout, partial(torch.mm, a, b, out=out), (m, k, n)))
        record.put(rows=rows)
        if record.left() < 4.0:
            return


def _row(place: Place, units: int, carveout: Carveout, run: Callable[[], Any], shape: tuple[int, int, int]) -> Figures:
    stream = torch.cuda.ExternalStream(place.handle, device=torch.device("cuda", 0))  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        ways: dict[str, list[float]] = {"plain": [], "carved": []}
        for turn in range(_WARM + _REPEATS):
            for way, taken in ways.items():
                carveout.leave(0 if way == "plain" else units - place.units)
                took = _time(run)
                if turn >= _WARM:
                    taken.append(took)
        carveout.leave(0)
    flops = 2.0 * shape[0] * shape[1] * shape[2]
    plain, carved = spread(ways["plain"]), spread(ways["carved"])
    return {
        "units": place.units,
        "mkn": list(shape),
        "plain_ms": plain,
        "carved_ms": carved,
        "plain_tflops": round(flops / float(str(plain["median"])) / 1e9, 1),
        "carved_over_plain": round(float(str(carved["median"])) / float(str(plain["median"])), 4),
    }


def _time(run: Callable[[], Any]) -> float:
    """Milliseconds on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
