"""What a captured CUDA graph is, on the CPU: the operators that ran, with the very tensors and numbers they ran with.

A replay runs no Python of the model or the body, so whatever they knew on the host at the time of capture is frozen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Tape(TorchDispatchMode):
    """Records what `run` does, which it also does once; its result is `output`, written anew by each replay."""

    def __init__(self, run: Callable[[], Tensor]) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []
        with self:
            self.output = run()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        known = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = [
            (at, leaf)
            for at, leaf in enumerate(tree_leaves(result))
            if isinstance(leaf, Tensor) and _storage(leaf) not in known
        ]
        if made or func._schema.is_mutable:  # else it is a view: that of the recorded tensor is still one
            self._calls.append((func, args, kwargs, made))
        return result

    def replay(self) -> None:
        """Do it all again, from tensors to tensors."""
        for func, args, kwargs, made in self._calls:
            again = tree_leaves(func(*args, **kwargs))
            for at, tensor in made:
                tensor.copy_(again[at])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
