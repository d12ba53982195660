"""Clients of a daemon that does not exist: `Glue` over the fake driver, kernels on torch's CPU when queued.

Each process writes down, when it ends in good order, what it misused and left, for `reports` to read.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import fake_cuda
import torch
from device_rig import CpuQueue
from fake_cuda import Fake

from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.mps_shares import sms_at
from smpart.partition.cuda.places import Place
from smpart.runtime.mps.client import Glue

PARTITIONS = {"A": 96, "B": 32}
"""SMs of the fake control program's first two partitions, by the first letter of their names."""

FAULT = Path(tempfile.gettempdir()) / f"fake-clients-fault-{os.getuid()}"


def open_glue() -> Glue:
    """An H200 of which MPS leaves this process what its environment asks for."""
    return _glue(_fake(_share()))


def open_unlimited() -> Glue:
    """A client whose share is silently ignored."""
    return _glue(_fake({"mps": 1}))


def open_without_ipc() -> Glue:
    """A device whose memory goes by file descriptor."""
    fake = _fake(_share())
    fake.fail("cuIpcGetMemHandle", code=801, times=None)
    return _glue(fake)


def open_faulty() -> Glue:
    """A device that is lost in whichever process queues something first once there is a file FAULT.

    Afterwards the server lets nobody on for a while, as it does until all clients have ended.
    """
    fake = _fake(_share())
    fake.fail("cuDevicePrimaryCtxRetain", code=807, times=2)
    return _glue(fake, Faulty(fake))


class Faulty(CpuQueue):
    """See `open_faulty`."""

    def __init__(self, fake: Fake) -> None:
        super().__init__()
        self._fake = fake

    def at(self, place: Place) -> AbstractContextManager[None]:
        if FAULT.exists():
            FAULT.unlink()
            self._fake.fail_async(719)
        return super().at(place)


def open_none() -> Glue:
    """A device that nobody can open."""
    raise RuntimeError("no device today")


def reports(zygote: int) -> list[str]:
    """What the processes forked from a zygote had to say, and forget it."""
    found = [path.read_text() for path in _folder(zygote).glob("*")]
    shutil.rmtree(_folder(zygote), ignore_errors=True)
    return found


def _fake(options: dict[str, int]) -> Fake:
    fake = fake_cuda.load(os.environ.get("FAKE_DRIVER", "13.0"))
    fake.reset(**options)
    return fake


def _glue(fake: Fake, queue: CpuQueue | None = None) -> Glue:
    return Glue(driver(), torch.device("cpu"), lambda units: queue or CpuQueue(), _view, partial(_report, fake))


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
