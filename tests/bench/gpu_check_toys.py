"""Stages that go wrong in every way, for the runner's tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from smpart.bench.gpu_check.record import Record, Setting


def fine(setting: Setting, record: Record) -> None:
    record.put(answer=42, seed=setting.seed, tiny=setting.tiny)


def faulty(setting: Setting, record: Record) -> None:
    record.put(before=1)
    record.require(False, "two lanes\nshare an SM")
    record.put(after=2)


def raises(setting: Setting, record: Record) -> None:
    record.put(before=1)
    raise ValueError("no such lane")


def needs(setting: Setting, record: Record) -> None:
    raise ModuleNotFoundError("No module named 'greenlet'", name="greenlet")


def hangs(setting: Setting, record: Record) -> None:
    record.put(before=1)
    print("about to hang")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    record.put(child=child.pid)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(60)


def crashes(setting: Setting, record: Record) -> None:
    record.put(before=1)
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(setting: Setting, record: Record) -> None:
    os._exit(3)


def garbles(setting: Setting, record: Record) -> None:
    os.write(1, b"\xff\xfe{]" * 100)
    assert record._path is not None
    record._path.write_bytes(b'{"finished": tr\xff')
    os._exit(0)


def swells(setting: Setting, record: Record) -> None:
    record.put(before=1)
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 16)


def stops_politely(setting: Setting, record: Record) -> None:
    """What it started elsewhere is stopped when its time is over."""
    mark = Path(os.environ["GPU_CHECK_MARK"])
    try:
        time.sleep(600)
    finally:
        mark.write_text("stopped")
