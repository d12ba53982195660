"""Asks the driver what a share really comes to, in a process of its own that lives for that question only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict

from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.mps_client import affinity_context, look
from smpart.partition.cuda.mps_shares import Seen


def read_back(environment: Mapping[str, str], affinity: int | None = None, timeout_s: float = 60.0) -> Seen:
    """What a process sees that is started with this environment.

    Args:
        affinity: SMs of the execution affinity it makes its context with; None: the primary context.

    Raises:
        BackendUnavailable: it got no context, or did not answer in time.
    """
    command = [sys.executable, "-P", "-m", __name__, *([] if affinity is None else [str(affinity)])]
    try:
        done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BackendUnavailable(f"a process under MPS said nothing for {timeout_s:g} s, and was ended") from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise BackendUnavailable(f"a process under MPS ended with status {done.returncode}: {last}") from None
    if "error" in answer:
        raise BackendUnavailable(f"a process under MPS got no context: {answer['error']}")
    return Seen(**answer)


def main(arguments: list[str]) -> None:
    """Print as JSON what this process sees, or why it sees nothing."""
    try:
        print(json.dumps(asdict(_see(int(arguments[0]) if arguments else None))))
    except SmpartError as error:
        print(json.dumps({"error": str(error)}))


def _see(affinity: int | None) -> Seen:
    api = driver()
    device = api("cuDeviceGet", 0)
    if affinity is not None:
        context = affinity_context(api, device, affinity)
        try:
            return look(api, device)
        finally:
            api("cuCtxDestroy", context)
    with api.current(api("cuDevicePrimaryCtxRetain", device)):
        seen = look(api, device)
    api("cuDevicePrimaryCtxRelease", device)
    return seen


if __name__ == "__main__":
    main(sys.argv[1:])
