"""Speaks to an MPS control daemon through NVIDIA's program ``nvidia-cuda-mps-control``.

Commands go in through its standard input, as its manual page describes. Its exit status alone proves nothing: some
refusals are text with status 0. So every reply must also have the form that the command promises.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.mps_errors import explain, find

PROGRAM = "nvidia-cuda-mps-control"
PID_FILE = "nvidia-cuda-mps-control.pid"
"""The daemon writes its process id there, in its pipe directory."""

PIPE_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"
LOG_VARIABLE = "CUDA_MPS_LOG_DIRECTORY"
CLIENT_VARIABLES = (
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
    "CUDA_MPS_SM_PARTITION",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "CUDA_MPS_CLIENT_PRIORITY",
)
"""Meant for one client. In a daemon's environment they become every client's limits."""

Parsed = TypeVar("Parsed")


class NoDaemon(BackendUnavailable):
    """No MPS control daemon answers in the pipe directory."""


@dataclass(frozen=True, slots=True)
class Client:
    """A process that uses a device through MPS, as ``ps`` lists it; `device` is the beginning of a UUID."""

    pid: int
    server: int
    device: str
    command: str


@dataclass(frozen=True, slots=True)
class Partition:
    """A static SM partition, as ``lspart`` lists it.

    Attributes:
        name: without the device's UUID before the slash, and possibly cut short.
        sms: SMs in all its chunks.
        in_use: whether a client runs in it; None where the daemon does not say.
    """

    name: str
    chunks: int
    sms: int
    in_use: bool | None


class Control:
    """The commands of one control daemon, found by its pipe directory.

    Every method raises `NoDaemon` when none answers there, and `BackendUnavailable` when the program is missing, does
    not answer in time, refuses, or answers something else than it should.

    Args:
        pipe: directory of the daemon's pipes and sockets.
        log: directory of its logs; only `launch` needs it.
        program: name or path of the control program.
        timeout_s: longest wait for a reply.
    """

    def __init__(self, pipe: Path, log: Path | None = None, *, program: str = PROGRAM, timeout_s: float = 10.0) -> None:
        self.pipe = pipe
        self._log = log
        self._program = program
        self._timeout_s = timeout_s

    def launch(self, device: str, *, static: bool = False) -> None:
        """Start a daemon here, for one device (a UUID). With `static`, clients run in SM partitions only."""
        what = f"{self._program} -d -S" if static else f"{self._program} -d"
        code, reply = self._run(what.split()[1:], "", self._timeout_s, {"CUDA_VISIBLE_DEVICES": device})
        if code:
            raise self._refused(what, code, reply)

    def servers(self) -> tuple[int, ...]:
        """Process ids of the MPS servers."""
        return self._ask("get_server_list", _pids)

    def start_server(self, uid: int) -> None:
        """Start a server for a user now, so that what keeps it from running shows here and not in the first client."""
        self._ask(f"start_server -uid {uid}", str)

    def server_status(self, server: int) -> str:
        """``INITIALIZING``, ``ACTIVE``, or ``FAULT`` until every client has ended after one had a fatal fault."""
        return self._ask(f"get_server_status {server}", _status)

    def clients(self, server: int) -> tuple[int, ...]:
        """Process ids of a server's clients."""
        return self._ask(f"get_client_list {server}", _pids)

    def processes(self) -> tuple[Client, ...]:
        """Every client of every server."""
        return self._ask("ps", _clients)

    def default_percentage(self) -> float:
        """Percentage of a device that servers started from now on let one client use."""
        return self._ask("get_default_active_thread_percentage", _percentage)

    def percentage(self, server: int) -> float:
        """Percentage of a device that a server lets one client use. What a client asks for can only lower it."""
        return self._ask(f"get_active_thread_percentage {server}", _percentage)

    def terminate_client(self, server: int, client: int) -> None:
        """End a client's contexts whatever they are doing; then its process may be killed.

        Killing a client with work under way instead may take the server and all its clients along.
        """
        self._ask(f"terminate_client {server} {client}", _success)

    def add_partition(self, device: str, chunks: int) -> str:
        """Reserve SMs for a static partition; the answer is for a client's ``CUDA_MPS_SM_PARTITION``."""
        return self._ask(f"sm_partition add {device} {chunks}", _partition_id)

    def remove_partition(self, device: str, partition: str) -> None:
        """Give a partition's SMs back. It must have no clients."""
        name = partition.partition("/")[2]
        reply = self._ask(f"sm_partition rm {device} {name}", str)
        if any(same_partition(partition, each) for each in self.partitions()):
            raise self._refused(f"sm_partition rm {device} {name}", 0, reply)

    def partitions(self) -> tuple[Partition, ...]:
        """All static partitions."""
        return self._ask("lspart", _partitions)

    def quit(self, grace_s: float) -> None:
        """End the daemon and its servers; clients that still run after `grace_s` seconds lose them."""
        self._ask(f"quit -t {max(1, round(grace_s))}", str, self._timeout_s + grace_s)

    def _ask(self, command: str, parse: Callable[[str], Parsed | None], timeout_s: float | None = None) -> Parsed:
        code, reply = self._run([], f"{command}\n", timeout_s or self._timeout_s, {})
        parsed = None if code else parse(reply)
        if parsed is None:
            raise self._refused(command, code, reply)
        return parsed

    def _run(self, arguments: list[str], text: str, timeout_s: float, more: dict[str, str]) -> tuple[int, str]:
        program = shutil.which(self._program)
        if program is None:
            raise BackendUnavailable(
                f"{self._program} was not found or may not be run: it comes with the NVIDIA driver (Debian and Ubuntu: "
                "nvidia-compute-utils), and must be on PATH"
            )
        # Replies go to a file: a daemon that keeps its launcher's pipe open would hold up whoever reads it to its end.
        with tempfile.TemporaryFile() as replies:
            try:
                child = subprocess.Popen(
                    [program, *arguments],
                    stdin=subprocess.PIPE,
                    stdout=replies,
                    stderr=subprocess.STDOUT,
                    env=self._environment() | more,
                    start_new_session=True,
                )
            except OSError as error:
                raise BackendUnavailable(f"{program} cannot be run: {error.strerror or error}") from None
            with child:
                try:
                    child.communicate(text.encode(), timeout=timeout_s)
                except subprocess.TimeoutExpired:
                    child.kill()
                    what = text.strip() or " ".join([self._program, *arguments])
                    raise BackendUnavailable(
                        f"the MPS control program did not answer `{what}` within {timeout_s:g} s: "
                        f"look into control.log of the daemon in {self.pipe}"
                    ) from None
            replies.seek(0)
            return child.returncode, replies.read().decode(errors="replace").strip()

    def _environment(self) -> dict[str, str]:
        mine = {k: v for k, v in os.environ.items() if k not in (*CLIENT_VARIABLES, LOG_VARIABLE)}
        log = {} if self._log is None else {LOG_VARIABLE: str(self._log)}
        return mine | log | {PIPE_VARIABLE: str(self.pipe)}

    def _refused(self, command: str, code: int, reply: str) -> BackendUnavailable:
        said = f"MPS refused `{command}` ({' '.join(reply.split())[:300] or f'exit status {code}, no reply'})"
        if re.search("cannot find mps control daemon", reply, re.IGNORECASE):
            return NoDaemon(f"no MPS daemon answers in {self.pipe}: start one there, or name the right directory")
        if re.search("permission denied|not permitted|permissions", reply, re.IGNORECASE):
            return BackendUnavailable(f"{said}: the daemon in {self.pipe} must belong to this user (uid {os.getuid()})")
        if re.search("(unknown|invalid|unrecognized|bad) (command|option)|command not", reply, re.IGNORECASE):
            return BackendUnavailable(f"{said}: this NVIDIA driver is too old for it, or the daemon runs without it")
        if re.search("already running", reply, re.IGNORECASE):
            return BackendUnavailable(f"{said}: another daemon has {self.pipe}")
        error = find(reply)
        return BackendUnavailable(said if error is None else f"{said}: {explain(error)}")


def same_partition(partition: str, listed: Partition) -> bool:
    """Whether an id from `Control.add_partition` is the one in a row of ``lspart``, which may cut names short."""
    return partition.partition("/")[2].startswith(listed.name)


def _pids(reply: str) -> tuple[int, ...] | None:
    words = reply.split()
    return tuple(map(int, words)) if all(word.isdecimal() for word in words) else None


def _status(reply: str) -> str | None:
    found = re.search(r"\b(INITIALIZING|ACTIVE|FAULT)\b", reply)
    return None if found is None else found[1]


def _percentage(reply: str) -> float | None:
    return float(reply) if re.fullmatch(r"\d{1,3}(\.\d+)?", reply) and float(reply) <= 100 else None


def _success(reply: str) -> bool | None:
    return True if reply in ("0", "CUDA_SUCCESS") else None


def _partition_id(reply: str) -> str | None:
    # As documented the id is the whole reply; drivers were seen to wrap it: "Partition GPU-.../... created".
    found = re.search(r"GPU-[0-9a-fA-F-]+/[^\s/]+", reply)
    return None if found is None else found[0]


def _clients(reply: str) -> tuple[Client, ...] | None:
    """Rows of: PID, ID, SERVER, DEVICE, NAMESPACE, COMMAND."""
    header, *rows = reply.splitlines() or ["PID"]
    cells = [row.split(maxsplit=5) for row in rows if row.strip()]
    if not header.startswith("PID") or any(len(row) < 5 or not (row[0] + row[2]).isdecimal() for row in cells):
        return None
    return tuple(Client(int(row[0]), int(row[2]), row[3], " ".join(row[5:])) for row in cells)


def _partitions(reply: str) -> tuple[Partition, ...] | None:
    """Rows of: GPU, partition, free chunks, used chunks, free SMs, used SMs, clients; a device's own row has ``-``."""
    rows = [row.split() for row in reply.splitlines()]
    if not rows or rows[0][:2] != ["GPU", "Partition"]:
        return None
    cells = [row for row in rows if row and row[0].startswith("GPU-") and row[1:2] != ["-"]]
    if any(len(row) < 7 or not (row[3] + row[5]).isdecimal() for row in cells):
        return None
    used = {"yes": True, "no": False}
    return tuple(Partition(row[1], int(row[3]), int(row[5]), used.get(row[6].lower())) for row in cells)
