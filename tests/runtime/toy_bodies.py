"""Bodies that the process tests have their workers import."""

import os
import signal
import socket
import time
from pathlib import Path

import numpy as np
import torch


class Toy:
    """Does what the payload says: ``(verb, argument)``."""

    def __init__(self, side, args, segments):
        self.side, self.args, self.segments = side, args, segments

    def run(self, payload):
        verb, argument = payload
        return getattr(self, {"raise": "fail"}.get(verb, verb))(argument)

    def echo(self, argument):
        return self.side.value, argument

    def gate(self, path):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gate:
            gate.settimeout(60)
            gate.connect(path)
            if gate.recv(1) != b"!":
                raise RuntimeError("the gate was torn down")

    def where(self, _):
        return os.getpid(), sorted(os.sched_getaffinity(0)), torch.get_num_threads()

    def compute(self, _):
        """Runs an OpenMP region and says where each thread of this process may run."""
        x = torch.rand(512, 512)
        (x @ x).sum().item()
        return [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]

    def fail(self, message):
        raise ValueError(message)

    def meet(self, indices):
        """Raises the first flag and spins until the second is up."""
        mine, other = indices
        cells = self._bytes()
        cells[mine] = 1
        deadline = time.monotonic() + 60
        while not cells[other]:
            if time.monotonic() > deadline:
                raise TimeoutError("the other one never came")
        return True

    def sum(self, name):
        return int(np.frombuffer(self.segments[name].buffer, dtype=np.uint8).sum())

    def exit(self, code):
        os._exit(code)

    def crash(self, _):
        os.kill(os.getpid(), signal.SIGSEGV)

    def unpicklable(self, _):
        return lambda: None

    def _bytes(self):
        return np.frombuffer(self.segments["flags"].buffer, dtype=np.uint8)

    def close(self):
        if self.args and "closed" in self.args:
            Path(self.args["closed"], self.side.value).touch()


def make(side, args, segments):
    return Toy(side, args, segments)


def broken(side, args, segments):
    raise RuntimeError("no body today")


def dies(side, args, segments):
    os._exit(3)
