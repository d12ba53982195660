"""Clients of a daemon that does not exist: `Glue` over the fake driver, kernels on torch's CPU when queued.

Each process writes down, when it ends in good order, what it misused and left, for `reports` to read.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from functools import partial
from pathlib import Path

import fake_cuda
import torch
from device_rig import CpuQueue
from fake_cuda import Fake

from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.mps_shares import sms_at
from smpart.runtime.mps.client import Glue

PARTITIONS = {"A": 96, "B": 32}
"""SMs of the fake control program's first two partitions, by the first letter of their names."""


def open_glue() -> Glue:
    """An H200 of which MPS leaves this process what its environment asks for."""
    return _glue(_share())


def open_unlimited() -> Glue:
    """A client whose share is silently ignored."""
    return _glue({"mps": 1})


def open_without_ipc() -> Glue:
    """A device whose memory goes by file descriptor."""
    return _glue(_share(), refused="cuIpcGetMemHandle")


def open_none() -> Glue:
    """A device that nobody can open."""
    raise RuntimeError("no device today")


def reports(zygote: int) -> list[str]:
    """What the processes forked from a zygote had to say, and forget it."""
    found = []
    for path in sorted(_folder(zygote).glob("*")):
        found.append(path.read_text())
        path.unlink()
    return found


def _glue(options: dict[str, int], refused: str | None = None) -> Glue:
    fake = fake_cuda.load(os.environ.get("FAKE_DRIVER", "13.0"))
    fake.reset(**options)
    if refused is not None:
        fake.fail(refused, code=801, times=None)
    return Glue(driver(), torch.device("cpu"), lambda units: CpuQueue(), _view, partial(_report, fake))


def _share() -> dict[str, int]:
    if os.environ["CUDA_MPS_PIPE_DIRECTORY"].endswith("/nobody"):
        return {}
    if "CUDA_MPS_SM_PARTITION" in os.environ:
        return {"mps": 1, "mps_sms": PARTITIONS[os.environ["CUDA_MPS_SM_PARTITION"].partition("/")[2][0]]}
    return {"mps": 1, "mps_sms": sms_at(float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100)), 132)}


def _view(pointer: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)


def _report(fake: Fake) -> None:
    folder = _folder(os.getppid())
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).write_text(f"{fake.misuse()} {fake.live()}")


def _folder(zygote: int) -> Path:
    return Path(tempfile.gettempdir()) / f"fake-clients-{zygote}"
