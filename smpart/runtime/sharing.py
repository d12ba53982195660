"""A model's weights once for all processes, and the model around them as bytes that a worker rebuilds it from.

`share_weights` moves the tensors of the user's own model into a segment, in place: same values, shapes and strides,
and the model works as before. The bytes of `SharedModel.dump` name those tensors by their place in the segment, so
that a worker's model is made of views of it, and nothing is copied.

Dump a model before something attaches hooks to it that cannot be pickled. smpart's own hooks can, and transformers'
output-capturing hooks (which only observe) are left out.
"""

from __future__ import annotations

import io
import itertools
import pickle
import weakref
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from smpart.errors import UnsupportedModel
from smpart.runtime.segments import SharedSegment

_ALIGN = 64
_OBSERVERS = "transformers.utils.output_capturing"
_OBSERVED = "_output_capturing_hooks_installed"


class SharedModel:
    """A model whose weights lie in a segment. Made by `share_weights`.

    Attributes:
        segment: the weights. It lives as long as this object; the model's tensors stay valid beyond.
    """

    def __init__(self, model: nn.Module, segment: SharedSegment) -> None:
        self.segment = segment
        self._model = weakref.ref(model)

    def dump(self) -> bytes:
        """The model without its weights, for `load` in another process.

        Raises:
            UnsupportedModel: it cannot be pickled; the message says what would work.
        """
        model = self._model()
        assert model is not None, "the model is gone"
        data = io.BytesIO()
        try:
            _Pickler(data, self.segment).dump(model)
        except UnsupportedModel:
            raise
        except Exception as error:  # pickling runs the model's own code: anything may come out
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be sent to worker processes ({_line(error)}): define its classes and "
                "hooks at the top level of a module that can be imported, and remove lambdas and local functions"
            ) from error
        return data.getvalue()

    def modules(self) -> tuple[str, ...]:
        """Names of the Python modules that define the model's classes."""
        model = self._model()
        return tuple(sorted({type(module).__module__ for module in model.modules()})) if model is not None else ()

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in the segment."""
        return _place(self.segment, tensor) is not None


_shared: weakref.WeakKeyDictionary[nn.Module, SharedModel] = weakref.WeakKeyDictionary()


def share_weights(model: nn.Module) -> SharedModel:
    """Move all parameters and buffers of a model into one segment, in place. A second call finds them there.

    Tensors that overlap (tied weights, views of one another) still do afterwards; parts of storages that no tensor
    uses are left behind.

    Raises:
        UnsupportedModel: a tensor is not on the CPU, or of a kind that has no plain memory.
        SmpartError: not enough memory.
    """
    known = _shared.get(model)
    tensors = [tensor for tensor in _tensors(model) if tensor.numel()]
    if known is not None and all(known.holds(tensor) for tensor in tensors):
        return known
    spans = list(_spans(tensors))
    offsets = list(_offsets(spans))
    size = max(1, offsets[-1] + spans[-1].stop - spans[-1].start) if spans else 1
    segment = SharedSegment.create(size, "weights", frees=size)
    memory = bytes_of(segment)
    for span, offset in zip(spans, offsets, strict=True):
        memory[offset : offset + span.stop - span.start] = span.bytes()
        for tensor, start in span.tensors:
            with torch.inference_mode(tensor.is_inference()):  # one made there takes only one made there
                place = offset + start - span.start
                tensor.data = _view(memory, place, tensor.dtype, tensor.shape, tensor.stride())
        span.tensors.clear()
    shared = _shared[model] = SharedModel(model, segment)
    return shared


def load(data: bytes, weights: Tensor) -> nn.Module:
    """Rebuild a model from `SharedModel.dump`, its weights being views of the given ones: do not write to them.

    Args:
        weights: uint8[bytes], what the segment holds, on any device, from its storage's first byte on.
    """
    model: nn.Module = _Unpickler(io.BytesIO(data), weights).load()
    return model


def bytes_of(segment: SharedSegment) -> Tensor:
    """uint8[bytes], the segment's memory itself."""
    return torch.frombuffer(segment.buffer, dtype=torch.uint8)


class _Span:
    """Overlapping tensors of one storage: the bytes ``start .. stop`` that they cover together."""

    def __init__(self, start: int, stop: int, tensor: Tensor) -> None:
        self.start, self.stop = start, stop
        self.tensors = [(tensor, start)]

    def bytes(self) -> Tensor:
        """uint8[stop - start], the memory itself."""
        storage = self.tensors[0][0].untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)[self.start : self.stop]


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    """Every parameter and buffer once, tied ones as well."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            where = f"on {tensor.device}" if tensor.device.type != "cpu" else f"of layout {tensor.layout}"
            raise UnsupportedModel(f"{name} is {where}: move the whole model to the CPU first (model.to('cpu'))")
        if type(tensor) not in (Tensor, nn.Parameter) or type(tensor.data) is not Tensor:
            raise UnsupportedModel(
                f"{name} is a {type(tensor).__name__}, which has no plain memory to share: "
                "load the model without quantization (or dequantize it)"
            )
        yield tensor


def _spans(tensors: list[Tensor]) -> Iterator[_Span]:
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[tensor.untyped_storage().data_ptr()].append(tensor)
    for group in by_storage.values():
        span: _Span | None = None
        for start, stop, tensor in sorted(((*_extent(tensor), tensor) for tensor in group), key=lambda e: e[:2]):
            if span is not None and start < span.stop:
                span.stop = max(span.stop, stop)
                span.tensors.append((tensor, start))
                continue
            if span is not None:
                yield span
            span = _Span(start, stop, tensor)
        if span is not None:
            yield span


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Bytes of its storage between which a tensor's elements lie."""
    first = int(tensor.storage_offset())
    last = first + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first * tensor.element_size(), (last + 1) * tensor.element_size()


def _offsets(spans: list[_Span]) -> Iterator[int]:
    """Where each span begins in the segment. Alignment within the storage is kept, whatever the element types."""
    end = 0
    for span in spans:
        end += (span.start - end) % _ALIGN
        yield end
        end += span.stop - span.start


def _view(memory: Tensor, offset: int, dtype: torch.dtype, shape: Any, stride: Any) -> Tensor:
    """A tensor over the bytes of `memory` from `offset` on."""
    empty = torch.empty(0, dtype=dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), offset // dtype.itemsize, shape, stride)


def _place(segment: SharedSegment, tensor: Tensor) -> int | None:
    """The byte of the segment at which a tensor begins, None if it lies elsewhere."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return None
    base = torch.frombuffer(segment.buffer, dtype=torch.uint8, count=1).data_ptr()
    offset = tensor.data_ptr() - base
    return offset if 0 <= offset < segment.size else None


class _Pickler(pickle.Pickler):
    """Writes tensors of the segment as their place, and refuses what a worker could not import."""

    def __init__(self, file: io.BytesIO, segment: SharedSegment) -> None:
        super().__init__(file, protocol=5)
        self._segment = segment
        self._keep: list[Tensor] = []

    def persistent_id(self, obj: Any) -> Any:
        """Place of a tensor, and what tells it from another at the same place (tied parameters stay one object)."""
        if not isinstance(obj, Tensor) or (offset := _place(self._segment, obj)) is None:
            return None
        self._keep.append(obj)  # its id must not be reused while pickling
        parameter = isinstance(obj, nn.Parameter)
        return id(obj), offset, obj.dtype, tuple(obj.shape), obj.stride(), parameter, obj.requires_grad

    def reducer_override(self, obj: Any) -> Any:
        """Modules go without hooks that only observe; what is defined in a script does not go."""
        if isinstance(obj, nn.Module):
            return _without_observers(obj.__reduce_ex__(5))
        if getattr(obj, "__module__", None) == "__main__" and getattr(obj, "__qualname__", None):
            raise UnsupportedModel(
                f"{obj.__qualname__} is defined in the script itself, which worker processes do not run: "
                "move it to a module that the script imports"
            )
        return NotImplemented


def _without_observers(reduced: Any) -> Any:
    if not isinstance(reduced, tuple) or len(reduced) < 3 or not isinstance(reduced[2], dict):
        return reduced
    state = {
        name: type(value)((key, hook) for key, hook in value.items() if not _observes(hook))
        if name.endswith("_hooks") and isinstance(value, dict)
        else value
        for name, value in reduced[2].items()
        if name != _OBSERVED
    }
    return (*reduced[:2], state, *reduced[3:])


def _observes(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _OBSERVERS


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, weights: Tensor) -> None:
        super().__init__(file)
        self._memory = weights
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Any) -> Tensor:
        """The tensor at a place; the same object for the same one."""
        key, offset, dtype, shape, stride, parameter, requires_grad = pid
        if key not in self._made:
            tensor = _view(self._memory, offset, dtype, shape, stride)
            self._made[key] = nn.Parameter(tensor, requires_grad) if parameter else tensor
        return self._made[key]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
