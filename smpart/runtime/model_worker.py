"""What a lane's worker process runs for a model: a `ModelBody` over the shared weights, KV memory and board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedModel

from smpart.kvcache.layout import KVLayout
from smpart.kvcache.memory import KVMemory
from smpart.partition.lanes import Body
from smpart.partition.split import Side
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.board import Board
from smpart.runtime.body import ModelBody
from smpart.runtime.facts import ModelFacts
from smpart.runtime.feed import HostFeed
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import bytes_of, load

MODEL_BODY = "smpart.runtime.model_worker:make_body"
"""`ProcessLanes`'s `body` for a model; its `args` are `ModelArgs`, its `segments` ``weights``, ``kv`` and ``board``."""


@dataclass(frozen=True, slots=True)
class ModelArgs:
    """What a worker needs beside the segments.

    Attributes:
        model: from `SharedModel.dump`.
        facts: as the engine's own adapter found them; the worker does not try the model again.
        layout: of the segment ``kv``, which holds `blocks` blocks.
        slots: requests on the segment ``board``, each of up to `max_len` tokens.
    """

    model: bytes
    facts: ModelFacts
    layout: KVLayout
    blocks: int
    slots: int
    max_len: int


def make_body(side: Side, args: ModelArgs, segments: Mapping[str, SharedSegment]) -> Body:
    """Build the body. Copies neither weights nor KV."""
    model = cast(PreTrainedModel, load(args.model, bytes_of(segments["weights"])))
    memory = KVMemory.over(segments["kv"].buffer, args.layout, args.blocks)
    board = Board.over(segments["board"].buffer, args.slots, args.max_len, args.layout.block_tokens)
    return ModelBody(HostFeed(ModelAdapter(model, args.facts), memory.layers, board))
