"""Tells what would make the host wait for a device: on the CPU too, where nothing else shows it.

Such a step stalls both lanes, and a CUDA graph cannot hold it. Told are values read to the host, shapes that depend on
values, and copies from the host that block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
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
_TORCH = str(Path(torch.__file__).parent)


@contextmanager
def host_reads(report: Callable[[str], None]) -> Iterator[None]:
    """Report whatever would make the host wait for a device, in this thread, while the context is open.

    What a method of a tensor does in C++ on the CPU without any operator (``tolist``, ``numpy``) is noticed where it
    is called, the rest where an operator runs.

    Args:
        report: called with what would wait, and the line that asked for it. What it raises goes to that line.
    """

    def noticed(what: str) -> None:
        report(f"{what} ({_caller()})")

    with _Calls(noticed), _Operators(noticed):
        yield


class _Operators(TorchDispatchMode):
    def __init__(self, noticed: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._noticed = noticed

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        what = _wait_of(func, args, kwargs)
        if what is not None:
            self._noticed(what)
            return func(*args, **kwargs)
        with self:  # in inference mode operators made of others arrive whole
            result = func.decompose(*args, **kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


class _Calls(TorchFunctionMode):
    def __init__(self, noticed: Callable[[str], None]) -> None:
        super().__init__()
        self._noticed = noticed

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        what = _wait_of_call(func, args, kwargs)
        if what is not None:
            self._noticed(what)
        return func(*args, **kwargs)


def _wait_of_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why a call would make the host wait on CUDA, where no operator tells; None: it would not."""
    name = getattr(func, "__name__", str(func))
    if func in _METHODS:
        return f"Tensor.{name} reads values to the host"
    # Only where it is written out: `x.to(y.device)` goes nowhere if the CPU plays the device.
    if (
        func is Tensor.to
        and not kwargs.get("non_blocking")
        and any(isinstance(to, str) and to == "cpu" for to in (*args[1:], *kwargs.values()))
    ):
        return "Tensor.to reads values to the host"
    if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], Tensor):
        # A scalar without a device stays on the host, and goes along with a kernel.
        if kwargs.get("device") is None and not isinstance(args[0], Sequence | np.ndarray):
            return None
        return f"torch.{name} copies Python values to the device and waits for it"
    if func in (Tensor.__getitem__, Tensor.__setitem__):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(i, list | np.ndarray) for i in index):
            return f"Tensor.{name} copies an index of the host to the device and waits for it"
    return None


def _wait_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why an operator would make the host wait on CUDA; None: it would not."""
    operator = func.overloadpacket
    if operator in _READS or func.name() == "transformers::grouped_mm_fallback":
        return f"{func} reads values to the host"
    if operator in _INDEXING and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
        return f"{func} with a mask has a shape that depends on values (torch.where and masked_fill do not)"
    if func is _aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
        return f"{func} without output_size has a shape that depends on values"
    if operator is _aten.histc and _argument(func, args, kwargs, "min") == _argument(func, args, kwargs, "max"):
        return f"{func} without a range reads values to the host"
    if operator is _aten._grouped_mm and args[0].dtype is not torch.bfloat16:
        # torch's ATen/native/cuda/GroupedBlas.cpp; and in bfloat16 too, but for compute capability 9 and 10.
        return f"{func} in {args[0].dtype} reads group sizes to the host (in bfloat16 it need not)"
    if operator is _aten.copy_:
        return _copy(func, args[1].device, args[0].device, _argument(func, args, kwargs, "non_blocking"))
    if operator is _aten._to_copy:
        source = args[0].device
        return _copy(func, source, torch.device(kwargs.get("device") or source), kwargs.get("non_blocking"))
    return None


def _copy(func: Any, source: torch.device, target: torch.device, non_blocking: bool | None) -> str | None:
    if source.type == target.type or non_blocking:
        return None
    if target.type == "cpu":
        return f"{func} reads values to the host"
    return f"{func} copies a tensor of the host to the device and waits for it (with non_blocking it need not)"


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name:
            return args[position] if position < len(args) else kwargs.get(name, argument.default_value)
    return None


def _caller() -> str:
    """The innermost line outside torch and this file, as ``name:line``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else "unknown line"
