"""What the zygote tests have children do. A report goes to the descriptor they were given."""

import os
import signal
import sys
from pathlib import Path


def report(fds, text):
    os.write(fds[0], str(text).encode())


def fine(fds):
    pass


def leaves(fds):
    os._exit(5)


def raises(fds):
    raise ValueError("as it should")


def killed(fds):
    os.kill(os.getpid(), signal.SIGKILL)


def waits(fds):
    signal.pause()


def parent(fds):
    report(fds, os.getppid())


def state(fds):
    report(
        fds,
        f"{'torch' in sys.modules}, {'transformers' in sys.modules}, {len(list(Path('/proc/self/task').iterdir()))}",
    )


def descriptors(fds):
    report(fds, " ".join(os.listdir("/proc/self/fd")))  # noqa: PTH208


def openmp(fds):
    import torch

    torch.set_num_threads(2)
    x = torch.rand(300, 300)
    assert (x @ x).sum() > 0
    report(fds, torch.get_num_threads())
