"""What MPS says when it refuses, in words.

Numbers and meanings: `CUresult` in ``cuda.h``; causes: NVIDIA's MPS guide, chapters "Memory protection and error
containment" and "Troubleshooting".
"""

from __future__ import annotations

import re

MPS_ERRORS: dict[int, tuple[str, str]] = {
    805: (
        "CUDA_ERROR_MPS_CONNECTION_FAILED",
        "the client reached no MPS daemon or server: check that the daemon runs, as the same user, and that "
        "CUDA_MPS_PIPE_DIRECTORY names its pipe directory",
    ),
    806: (
        "CUDA_ERROR_MPS_RPC_FAILURE",
        "the client lost its MPS server in the middle of a call: look into server.log, and start the client again",
    ),
    807: (
        "CUDA_ERROR_MPS_SERVER_NOT_READY",
        "the MPS server takes no clients now, while it starts or until every client has ended after one had a fatal "
        "fault: end them, then try again",
    ),
    808: (
        "CUDA_ERROR_MPS_MAX_CLIENTS_REACHED",
        "the device has as many MPS clients as it takes: use fewer workers, or end other clients",
    ),
    809: (
        "CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED",
        "the device has no work queues left for another MPS client: use fewer workers, or a smaller "
        "CUDA_DEVICE_MAX_CONNECTIONS",
    ),
    810: (
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "the MPS server ended this client: the process can use the device no more and must be started again",
    ),
    915: (
        "CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION",
        "the MPS server has no SMs for this: too few chunks are free, or under static partitions the client did not "
        "name one in CUDA_MPS_SM_PARTITION",
    ),
}
"""Driver error to its name, and to what happened and what to do."""

_BY_NAME = {name: code for code, (name, _) in MPS_ERRORS.items()}


def explain(code: int) -> str:
    """One line for an error that MPS gives a client.

    >>> explain(807)[:51]
    'CUDA_ERROR_MPS_SERVER_NOT_READY (807): the MPS serv'
    """
    name, meaning = MPS_ERRORS[code]
    return f"{name} ({code}): {meaning}"


def find(text: str) -> int | None:
    """The MPS error that a reply or a log names, if it names one.

    >>> find("Failed, error CUDA_ERROR_MPS_RPC_FAILURE"), find("error 808"), find("101 clients")
    (806, 808, None)
    """
    named = re.search(r"CUDA_ERROR_[A-Z_]+", text)
    if named is not None:
        return _BY_NAME.get(named[0])
    numbered = re.search(r"\berror:? \(?(\d{3})\b", text, re.IGNORECASE)
    return int(numbered[1]) if numbered is not None and int(numbered[1]) in MPS_ERRORS else None
