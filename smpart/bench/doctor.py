"""`smpart doctor`: what this machine offers, and proof that splits are what they say."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path

import torch

from smpart.bench.doctor_lines import Facts, listed
from smpart.bench.host import host, versions
from smpart.bench.realise import realise
from smpart.engine.staff import why_no_model
from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition import Backend
from smpart.partition.cuda.nvml import device_facts, gpu_count, processes
from smpart.partition.registry import backends, open_backend

_SIM = "sim:h100"
_PACKAGES = ("smpart", "torch", "transformers", "numpy", "greenlet", "scikit-learn", "cuda-python", "nvidia-ml-py")


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
        return {"backend": open_backend("auto", why_no_model).name, "why_unusable": None}
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
    try:
        return _usable(backend)
    except SmpartError as error:
        return {"name": backend.name, "usable": False, "why_unusable": str(error), "failed": True}


def _usable(backend: Backend) -> Facts:
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
    return facts | realise(backend)


def _cuda() -> Facts:
    """What the CUDA backends would need and this machine lacks."""
    missing = []
    if not any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/dxg")):
        missing.append("no NVIDIA device is visible")
    if importlib.util.find_spec("cuda") is None:
        missing.append("cuda-python is missing: pip install 'smpart[cuda]'")
    if torch.version.cuda is None:
        missing.append("this torch is a build for CPUs")
    if importlib.util.find_spec("cupy") is None:
        missing.append("cupy is missing: pip install 'smpart[cuda]'")
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
    for backend in listed(facts["backends"]):
        if backend.get("failed"):
            raise SmpartError(f"backend {backend['name']} does not work: {backend['why_unusable']}")
        wrong = [str(each["split"]) for each in listed(backend.get("realised", [])) if not each["as_asked"]]
        if wrong:
            raise SmpartError(f"backend {backend['name']}: splits {', '.join(wrong)} were not realised as asked")
