"""A context in which whatever makes the host wait for a device raises: on the CPU too, where nothing else shows it.

Caught are values read to the host, shapes that depend on values, and blocking copies to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense,
    _aten.allclose,
    _aten.bincount,
    _aten.equal,
    _aten.histc,
    _aten.is_nonzero,
    _aten.masked_select,
    _aten.nonzero,
    _aten._unique,
    _aten._unique2,
    _aten.unique_consecutive,
    _aten.unique_dim,
    _aten.unique_dim_consecutive,
}
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._unsafe_index, _aten._unsafe_index_put}
_METHODS = {Tensor.__array__, Tensor.__dlpack__, Tensor.__repr__, Tensor.cpu, Tensor.numpy, Tensor.tolist}
_CPU = torch.device("cpu")


class HostWaitError(AssertionError):
    """Something would have made the host wait for a device."""


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Raise `HostWaitError` at whatever would wait for a device in this thread.

    What a method of a tensor does in C++ on the CPU without any operator (``tolist``, ``numpy``) is caught where it
    is called, the rest where an operator runs.
    """
    with _Calls(), _Operators():
        yield


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = func.overloadpacket
        if operator in _READS:
            raise HostWaitError(f"{func} reads values to the host")
        if operator in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            raise HostWaitError(f"{func} with a mask: its shape depends on values; use torch.where or masked_fill")
        if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            raise HostWaitError(f"{func} without output_size: its shape depends on values")
        if operator is _aten.copy_:
            _check_copy(func, args[1].device, args[0].device, args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if operator is _aten._to_copy:
            source = args[0].device
            _check_copy(func, source, torch.device(kwargs.get("device") or source), kwargs.get("non_blocking"))
        return func(*args, **kwargs)


class _Calls(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if func in _METHODS:
            raise HostWaitError(f"Tensor.{name} reads values to the host")
        if func is Tensor.to and not kwargs.get("non_blocking") and _CPU in map(_device, (*args[1:], *kwargs.values())):
            raise HostWaitError("Tensor.to reads values to the host")
        if func is torch.tensor or (func is torch.as_tensor and not isinstance(args[0], Tensor)):
            raise HostWaitError(f"torch.{name} copies Python values to the device and waits for it")
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list | np.ndarray) for i in index):
                raise HostWaitError(f"Tensor.{name} copies an index of the host to the device and waits for it")
        return func(*args, **kwargs)


def _check_copy(func: Any, source: torch.device, target: torch.device, non_blocking: bool | None) -> None:
    if source.type != target.type and not non_blocking:
        raise HostWaitError(f"{func} from {source} to {target} blocks; give it non_blocking=True and pinned memory")


def _device(argument: Any) -> torch.device | None:
    return torch.device(argument) if isinstance(argument, str | torch.device) else None
