"""A machine captures decode steps unless the model cannot be captured, or nobody wants it; it says which."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from fake_cuda import Fake
from fake_parts import PARTS, open_parts

from smpart.kvcache import KVConfig
from smpart.kvcache.layout import KVLayout
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.board import Board
from smpart.runtime.device.machine import DeviceArgs, assemble
from smpart.runtime.families import random_model

pytestmark = pytest.mark.drivers("13.0")

REASON = "aten.nonzero.default reads values to the host (modeling_llama.py:1)"


@pytest.mark.parametrize(
    ("reason", "wanted", "note", "said"),
    [
        (None, True, "decode steps", 0),
        (None, False, "none: not wanted", 0),
        (REASON, True, f"none: {REASON}", 1),
        (REASON, False, "none: not wanted", 0),
    ],
)
def test_what_is_captured(
    fake: Fake, caplog: pytest.LogCaptureFixture, reason: str | None, wanted: bool, note: str, said: int
) -> None:
    fake.excuse_live()  # the driver's primary context belongs to the process
    adapter = ModelAdapter(random_model("llama"))
    facts = replace(adapter.facts, uncapturable=reason)
    layout = KVLayout(facts.layers, facts.kv_heads, facts.head_dim, "float32")
    args = DeviceArgs(b"", facts, layout, KVConfig(max_len=32, max_requests=2), 32, graphs=wanted, parts=PARTS)
    board = Board.over(bytearray(Board.size(2, 32, 16)), 2, 32, 16)
    with caplog.at_level(logging.WARNING):
        machine = assemble(open_parts(args), args, adapter.model, board)
    machine.close()
    assert machine.info.notes["graphs"] == note
    assert (machine.graphs is not None) == (wanted and reason is None)
    assert caplog.text.count(f"not captured in CUDA graphs: {REASON}") == said
