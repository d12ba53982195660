"""`smpart doctor`: what this machine offers, and proof that splits are what they say."""

from __future__ import annotations

import importlib.util
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import median
from time import perf_counter_ns

from smpart.bench.host import host, versions
from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition import Side, Split
from smpart.partition.affinity import pin_self, threads_of
from smpart.partition.cores import Cores
from smpart.partition.cuda.nvml import device_facts, gpu_count, processes
from smpart.partition.registry import backends, open_backend

Facts = dict[str, object]

_SIM = "sim:h100"
_SWITCHES = 200
_PACKAGES = ("smpart", "torch", "transformers", "numpy", "greenlet", "scikit-learn", "cuda-python", "nvidia-ml-py")
_GPU_LINE = (
    "GPU {index}",
    "{name}",
    "driver {driver_version}",
    "CUDA {cuda_version}",
    "compute capability {compute_capability}",
    "{free:.1f} of {total:.1f} GiB free",
    "SMs at {sm_clock_mhz} of {sm_clock_max_mhz} MHz",
    "{temperature_c} C",
    "{power_draw_w:.0f} of {power_limit_w:.0f} W",
)


def examine() -> Facts:
    """Everything `doctor` reports, ready for JSON."""
    nvml = _nvml()  # first: looking at a backend may make this process a user of the GPU
    found = [_backend(name) for name in backends()]
    return {
        "host": host(),
        "versions": versions(_PACKAGES),
        "backends": found,
        "auto": _automatic(),
        "cuda": _cuda(),
        "nvml": nvml,
    }


def _automatic() -> Facts:
    try:
        return {"backend": open_backend("auto").name, "why_unusable": None}
    except SmpartError as error:
        return {"backend": None, "why_unusable": str(error)}


def _backend(name: str) -> Facts:
    try:
        backend = open_backend(_SIM if name == "sim" else name)
        why = backend.why_unusable()
    except SmpartError as error:
        return {"name": name, "usable": False, "why_unusable": str(error)}
    if why is not None:
        return {"name": backend.name, "usable": False, "why_unusable": why}
    device = backend.device()
    facts: Facts = {
        "name": backend.name,
        "usable": True,
        "why_unusable": None,
        "device": {
            "name": device.name,
            "kind": device.kind,
            "units": device.units,
            "unit_ids": list(device.unit_ids),
            "memory_gib": round(device.memory_bytes / 2**30, 2),
            **dict(device.facts),
        },
        "splits": [str(split) for split in backend.splits()],
    }
    return facts | (_realise(backend) if isinstance(backend, Cores) else {})


def _realise(backend: Cores) -> Facts:
    """Pin this process to each side of each split, read back where it may run, and time the re-pinning."""
    before, placement, pid = os.sched_getaffinity(0), backend.placement(), os.getpid()
    realised: list[Facts] = []
    microseconds: list[float] = []
    try:
        for split in backend.splits():
            sides = [side for side in Side if split.units(side)]
            got: dict[Side, list[int]] = {}
            for side in sides:
                placement.pin_self(side, split)
                got[side] = sorted(placement.read_back(pid))
            want = {side: sorted(_owned(backend, side, split)) for side in sides}
            realised.append(
                {"split": str(split), **{side.value: got.get(side, []) for side in Side}, "as_asked": got == want}
            )
        choices = [(side, split) for split in backend.splits() for side in Side if split.units(side)]
        for turn in range(_SWITCHES):
            begun = perf_counter_ns()
            placement.pin_self(*choices[turn % len(choices)])
            microseconds.append((perf_counter_ns() - begun) / 1e3)
    finally:
        pin_self(before)
    threads = len(threads_of(pid))
    return {"realised": realised, "switch_us": round(median(microseconds), 1), "switch_threads": threads}


def _owned(backend: Cores, side: Side, split: Split) -> set[int]:
    ids = backend.device().unit_ids
    return {ids[i] for i in split.indices(side, len(ids))}


def _cuda() -> Facts:
    """What the CUDA backends would need and this machine lacks."""
    missing = []
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg")):
        missing.append("no NVIDIA device is visible")
    if importlib.util.find_spec("cuda") is None:
        missing.append("cuda-python is missing: pip install 'smpart[cuda]'")
    if not backends("cuda"):
        missing.append("this version of smpart has no CUDA backend")
    return {"backends": list(backends("cuda")), "missing": missing}


def _nvml() -> Facts:
    """Facts and users of each GPU that NVML sees, or why it tells nothing."""
    try:
        return {"missing": None, "gpus": [_gpu(index) for index in range(gpu_count())]}
    except BackendUnavailable as error:
        return {"missing": str(error), "gpus": []}


def _gpu(index: int) -> Facts:
    facts: Facts = {"index": index, **device_facts(index)}
    try:
        return facts | {"processes": [asdict(process) for process in processes(index)]}
    except BackendUnavailable as error:
        unavailable = facts["unavailable"]
        assert isinstance(unavailable, dict)
        return facts | {"unavailable": unavailable | {"processes": str(error)}}


def require_realised(facts: Facts) -> None:
    """Raise `SmpartError` if a split that was read back is not what was asked for."""
    for backend in _listed(facts["backends"]):
        wrong = [str(each["split"]) for each in _listed(backend.get("realised", [])) if not each["as_asked"]]
        if wrong:
            raise SmpartError(f"backend {backend['name']}: splits {', '.join(wrong)} were not realised as asked")


def lines(facts: Facts) -> list[str]:
    """The same for people."""
    about = facts["host"]
    assert isinstance(about, dict)
    text = [
        f"host      {about['cpu']}, {about['cores']} usable cores, {about['memory_gib']} GiB free",
        f"python    {about['python']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"smpart {about['smpart']}",
    ]
    for backend in _listed(facts["backends"]):
        text.append(f"backend   {backend['name']}: {backend['why_unusable'] or 'usable'}")
        device = backend.get("device")
        if isinstance(device, dict):
            text.append(f"          {device['name']}: {device['units']} units, {device['memory_gib']} GiB")
            text.append(f"          splits (prefill/decode): {_short([str(s) for s in _items(backend['splits'])])}")
        for each in _listed(backend.get("realised", [])):
            word = "as asked" if each["as_asked"] else "NOT AS ASKED"
            text.append(f"          {each['split']}: prefill on {each['prefill']}, decode on {each['decode']}, {word}")
        if "switch_us" in backend:
            text.append(f"          switch: {backend['switch_us']} us to re-pin {backend['switch_threads']} thread(s)")
    auto, cuda = facts["auto"], facts["cuda"]
    assert isinstance(auto, dict) and isinstance(cuda, dict)
    text.append(f"auto      {auto['backend'] or auto['why_unusable']}")
    text.append(f"cuda      {'; '.join(cuda['missing']) or 'nothing is missing'}")
    return text + _nvml_lines(facts["nvml"])


def _nvml_lines(section: object) -> list[str]:
    assert isinstance(section, dict)
    text = [line for gpu in _listed(section["gpus"]) for line in _gpu_lines(gpu)]
    return text or [f"nvml      {section['missing'] or 'no GPU is visible'}"]


def _gpu_lines(gpu: Facts) -> list[str]:
    """Whatever is known of one GPU, what to beware of, and what could not be read."""
    gib = {
        name: value / 2**30 for name in ("free", "total") if isinstance(value := gpu.get(f"memory_{name}_bytes"), int)
    }
    parts = []
    for part in _GPU_LINE:
        with suppress(KeyError):
            parts.append(part.format_map(gpu | gib))
    text = [f"nvml      {', '.join(parts)}"]
    others = [each for each in _listed(gpu.get("processes", [])) if each["pid"] != os.getpid()]
    if others:
        text.append(
            f"          others use it, so measurements are disturbed: {_short([_user(each) for each in others])}"
        )
    if gpu.get("throttled"):
        text.append(f"          its clocks are held down: {', '.join(str(each) for each in _items(gpu['throttled']))}")
    if gpu.get("mig"):
        text.append("          MIG mode is on")
    unavailable = gpu["unavailable"]
    assert isinstance(unavailable, dict)
    for why in dict.fromkeys(unavailable.values()):
        names = ", ".join(name for name, each in unavailable.items() if each == why)
        text.append(f"          not known: {names} ({why})")
    return text


def _user(process: Facts) -> str:
    held = process["memory_bytes"]
    return f"pid {process['pid']}" + (f" with {held / 2**30:.1f} GiB" if isinstance(held, int) else "")


def _short(names: list[str], most: int = 9) -> str:
    return ", ".join(names if len(names) <= most else [*names[: most - 2], "...", names[-1]])


def _items(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def _listed(value: object) -> list[Facts]:
    return [item for item in _items(value) if isinstance(item, dict)]
