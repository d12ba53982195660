"""The context that the capture-safety tests rely on: it catches what makes a host wait, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch


@pytest.fixture
def guard(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import no_host_reads

    return no_host_reads


X = torch.arange(6.0).view(2, 3)
MASK = X > 2
ENDS = torch.tensor([2], dtype=torch.int32)
WAITS = {
    "item": lambda: X[0, 0].item(),
    "int": lambda: int(X[0, 0]),
    "if": lambda: 1 if X[0, 0] else 2,
    "index of a list": lambda: [1, 2][X[0, 0].long()],
    "format": lambda: f"{X[0, 0]:.2f}",
    "repr": lambda: repr(X),
    "contains": lambda: 3 in X,
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "asarray": lambda: np.asarray(X),
    "dlpack": lambda: np.from_dlpack(X),
    "cpu": lambda: X.cpu(),
    "to cpu": lambda: X.to("cpu", torch.float64),
    "to a device": lambda: X.to("meta"),
    "copy to a device": lambda: torch.empty(2, 3, device="meta").copy_(X),
    "nonzero": lambda: MASK.nonzero(),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "mask": lambda: X[MASK],
    "set by mask": lambda: X.clone().__setitem__(MASK, X[0, 0]),
    "masked_select": lambda: X.masked_select(MASK),
    "equal": lambda: torch.equal(X, X),
    "allclose": lambda: torch.allclose(X, X),
    "unique": lambda: X.unique(),
    "unique_consecutive": lambda: X.unique_consecutive(),
    "bincount": lambda: torch.bincount(X[0].long()),
    "one_hot": lambda: torch.nn.functional.one_hot(X.long()),
    "repeat_interleave": lambda: X[0].repeat_interleave(X[0].long()),
    "arange": lambda: torch.arange(X[0, 2]),
    "slice": lambda: X[: X[0, 1].long()],
    "tensor": lambda: torch.tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "index by a list": lambda: X[[0, 1]],
    "index by an array": lambda: X[:, np.array([0, 1])],
    "set by a list": lambda: X.clone().__setitem__([0], 1.0),
    "scalar to a device": lambda: torch.tensor(1.5, device="cpu"),
    "histogram": lambda: torch.histc(X),
    "grouped products": lambda: torch.nn.functional.grouped_mm(X[:, :2], X.view(1, 2, 3), offs=ENDS),
    "grouped products of transformers": lambda: torch.ops.transformers.grouped_mm_fallback(X, X.view(1, 3, 2), ENDS),
}
FREE = {
    "arithmetic": lambda: (X * 2 + X.softmax(-1)).masked_fill(MASK, 0).argmax(-1),
    "select": lambda: (X[0, 1:], X[:, -1:], X[None], X.flatten()),
    "fill": lambda: X.clone().__setitem__((..., slice(-1, None)), 0),
    "index by a tensor": lambda: X[torch.arange(2)],
    "known counts": lambda: X[0].repeat_interleave(X[0].long(), output_size=3),
    "sorting": lambda: (X.sort(-1), X.topk(2), X.cumsum(-1)),
    "to another type": lambda: X.to(torch.float64).to(torch.float32),
    "copy that does not block": lambda: X.to("meta", non_blocking=True),
    "from an array": lambda: torch.from_numpy(np.zeros(2)),
    "to where it is": lambda: X.to(X.device),
    "scalar": lambda: X * torch.tensor(1.5),
    "histogram over a range": lambda: torch.histc(X, bins=2, min=0, max=6),
    "grouped products in bfloat16": lambda: torch.nn.functional.grouped_mm(
        torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(1, 8, 8, dtype=torch.bfloat16), offs=ENDS * 4
    ),
}


@pytest.fixture(params=[False, True], ids=["autograd", "inference"])
def inference(request):
    """Operators made of others arrive whole in inference mode."""
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("name", WAITS)
def test_what_makes_the_host_wait_raises(guard, inference, name):
    with pytest.raises(guard.HostWaitError, match=r"\(test_no_host_reads.py:\d+\)"), guard.no_host_reads():
        WAITS[name]()


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_is_let_through(guard, inference, name):
    with guard.no_host_reads():
        FREE[name]()
    assert X.tolist() == [[0, 1, 2], [3, 4, 5]]
