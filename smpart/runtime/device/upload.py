"""Brings a forward's index arrays to a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32] | NDArray[np.int64]

_ALIGNMENT = 16
"""Bytes: kernels compiled for aligned pointers may be given any part."""

_TYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


class Upload:
    """Room on a device for arrays of given shapes and types, one behind another.

    Attributes:
        parts: the arrays on the device; their addresses never change.
    """

    def __init__(self, device: torch.device, arrays: Sequence[Ints]) -> None:
        self._starts, end = [], 0
        for array in arrays:
            self._starts.append(end)
            end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        self._staged = np.zeros(end, dtype=np.uint8)
        self._buffer = torch.empty(end, dtype=torch.uint8, device=device)
        self.parts: list[Tensor] = [
            self._buffer[start : start + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
            for start, array in zip(self._starts, arrays, strict=True)
        ]
        self.send(arrays)

    def send(self, arrays: Sequence[Ints]) -> None:
        """Queue a copy of new values on the current stream. The arrays are read before this returns."""
        for start, array in zip(self._starts, arrays, strict=True):
            self._staged[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        host = torch.from_numpy(self._staged)
        if self._buffer.is_cuda:
            host = host.pin_memory()  # torch uses this memory again only once the copy out of it is over
        self._buffer.copy_(host, non_blocking=True)
