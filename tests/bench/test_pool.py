"""Pools: workers that end with whoever began them, and results as they come."""

from __future__ import annotations

import operator
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import smpart
from smpart.bench.pool import as_done, in_order, processes, threads
from smpart.errors import SmpartError

PATIENCE_MS = 30_000
"""Far beyond what ending takes; the works themselves never end."""

SCRIPT = """
import os, signal, threading
from smpart.bench.pool import processes

def work():
    os.write(1, f"{os.getpid()}\\n".encode())
    threading.Event().wait()

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell runs in the background
    with processes(2) as pool:
        for each in [pool.submit(work) for _ in range(2)]:
            each.result()
"""


@contextmanager
def handle(pid: int) -> Iterator[int]:
    """A descriptor that becomes readable when the process ends."""
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def has_ended(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(PATIENCE_MS))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_end_when_their_parent_does(tmp_path: Path, number: signal.Signals) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command, here = [sys.executable, str(script)], {"PYTHONPATH": str(Path(smpart.__file__).parents[1])}
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **here}) as parent,
        ExitStack() as stack,
    ):
        assert parent.stdout is not None
        workers = [stack.enter_context(handle(int(parent.stdout.readline()))) for _ in range(2)]
        parent.send_signal(number)
        ends = [has_ended(worker) for worker in workers]
        parent.kill()
        assert all(ends)


def test_an_error_does_not_wait_for_works_that_run() -> None:
    with pytest.raises(ZeroDivisionError), processes(1) as pool:
        stuck = pool.submit(signal.pause)
        pool.submit(os.getpid)
        raise ZeroDivisionError
    assert isinstance(stuck.exception(), Exception)


def test_results_come_as_they_are_done_with_what_was_asked() -> None:
    with processes(1) as pool:
        assert dict(as_done(pool, operator.neg, [1, 2, 3])) == {1: -1, 2: -2, 3: -3}
        with pytest.raises(TypeError):
            list(as_done(pool, operator.neg, ["text"]))


def test_a_process_that_dies_is_one_line() -> None:
    with pytest.raises(SmpartError, match="a process of the pool died"), processes(1) as pool:
        list(as_done(pool, os._exit, [1]))


def test_an_error_ends_threads_that_wait_for_works_that_never_end() -> None:
    """Ctrl-C in a search that several threads make: one work runs, one waits for a process, nobody waits for either."""
    with pytest.raises(KeyboardInterrupt), processes(1) as pool, threads(2, pool.abandon) as several:
        stuck = [several.submit(lambda: list(in_order(pool, signal.pause, [()], "the test"))) for _ in range(2)]
        raise KeyboardInterrupt
    assert all(isinstance(each.exception(), SmpartError) or each.cancelled() for each in stuck)


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    with processes(1) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() is signal.SIG_IGN
