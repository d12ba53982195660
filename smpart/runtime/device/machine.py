"""Everything that a device's process holds: the model, KV memory, tokens, and both lanes over them."""

from __future__ import annotations

import logging
import math
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from smpart.kvcache.layout import KVLayout
from smpart.kvcache.memory import KVMemory
from smpart.kvcache.sizing import KVConfig, pool_blocks
from smpart.partition.cuda.driver import Driver
from smpart.partition.cuda.places import Places
from smpart.partition.cuda.streams import StreamBody, StreamLanes
from smpart.partition.device import Device
from smpart.partition.split import Side, Split
from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.board import Board
from smpart.runtime.body import ModelBody
from smpart.runtime.device.attention import Attention, AttentionShape, Bucket, Scratch
from smpart.runtime.device.choosing import choose_attention
from smpart.runtime.device.contenders import Contending
from smpart.runtime.device.feed import DeviceFeed
from smpart.runtime.device.graphs import DecodeGraphs
from smpart.runtime.device.queue import Queue
from smpart.runtime.facts import ModelFacts
from smpart.runtime.segments import SharedSegment
from smpart.runtime.sharing import bytes_of, load

logger = logging.getLogger(__name__)

KV_FRACTION = 0.85
"""Of the memory that weights and contexts leave; the rest is for activations, graphs and libraries."""


@dataclass(frozen=True, slots=True)
class DeviceArgs:
    """What a device's process needs beside the segments ``weights`` and ``board``.

    Attributes:
        model: from `SharedModel.dump`.
        facts: as the engine's own adapter found them; the model is not tried again.
        layout: of the KV memory.
        kv: the user's wishes for it.
        max_len: longest prompt and answer together.
        blocks: KV blocks; None: as many as fit. A process that replaces another must have as many as that one.
        attention: see `choose_attention`.
        graphs: whether decode steps are captured.
        graphs_fraction: most of the device's memory that they may take; MuxWise spends this (arXiv 2504.14489).
        parts: ``module:function`` that opens the device: `Parts` from a `DeviceArgs`.
    """

    model: bytes
    facts: ModelFacts
    layout: KVLayout
    kv: KVConfig
    max_len: int
    blocks: int | None = None
    attention: str = "auto"
    graphs: bool = True
    graphs_fraction: float = 0.06
    parts: str = "smpart.runtime.device.cuda:open_parts"


@dataclass(frozen=True, slots=True)
class Parts:
    """A device that is open, and the little about it that is not the same everywhere.

    Attributes:
        where: torch's name of it.
        queue: makes each lane's queue.
        free_bytes: memory that is free on it now.
        close: gives it back.
        notes: for `doctor` and reports.
    """

    api: Driver
    device: Device
    places: Places
    where: torch.device
    queue: Callable[[Side], Queue]
    free_bytes: Callable[[], int]
    close: Callable[[], None]
    notes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Memory:
    """What all lanes of a device write to. It has one block, slot and column more than anybody may own: there padded
    rows and steps too far write.

    Attributes:
        blocks: KV blocks, without that one.
        pages: KV, one tensor a layer, [2, blocks + 1, block_tokens, kv_heads, head_dim].
        tokens: int32[slots + 1, max_len + 1].
    """

    blocks: int
    pages: Sequence[Tensor]
    tokens: Tensor

    @staticmethod
    def sizes(args: DeviceArgs, blocks: int) -> tuple[int, int]:
        """Bytes of the KV pages and of the tokens."""
        return args.layout.total_bytes(blocks + 1), 4 * (args.kv.max_requests + 1) * (args.max_len + 1)

    @classmethod
    def over(cls, args: DeviceArgs, blocks: int, pages: Tensor, tokens: Tensor) -> Memory:
        """Lay it over two zeroed uint8 tensors of these `sizes`."""
        shape = args.kv.max_requests + 1, args.max_len + 1
        return cls(blocks, KVMemory.over(pages, args.layout, blocks + 1).layers, tokens.view(torch.int32).view(shape))


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What the engine learns of a device's process that is ready.

    Attributes:
        splits: every split that was made.
        disjoint: pairs of a prefill and a decode split whose sides may run at once.
        units: SMs of each side of each split, read back.
        blocks: KV blocks.
    """

    splits: tuple[Split, ...]
    disjoint: frozenset[tuple[Split, Split]]
    units: Mapping[tuple[Side, Split], int]
    blocks: int
    notes: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Machine:
    """A device at work.

    Attributes:
        pages: the KV memory of both lanes, one tensor a layer.
        graphs: the decode lane's; None: steps are not captured.
    """

    lanes: StreamLanes
    info: DeviceInfo
    parts: Parts
    pages: Sequence[Tensor]
    graphs: DecodeGraphs | None

    def close(self) -> None:
        """Let the device finish, and give everything back."""
        self.lanes.close()
        self.parts.close()


def build(args: DeviceArgs, segments: Mapping[str, SharedSegment]) -> Machine:
    """Open the device and put the model on it.

    Raises:
        BackendUnavailable, CudaError: the device cannot be opened.
        UsageError: KV memory of that size does not fit.
    """
    parts: Parts = pkgutil.resolve_name(args.parts)(args)
    try:
        # One copy for all weights; the model is then made of views of it.
        weights = bytes_of(segments["weights"]).to(parts.where)
        model = cast(PreTrainedModel, load(args.model, weights))
        board = Board.over(segments["board"].buffer, args.kv.max_requests, args.max_len, args.layout.block_tokens)
        return assemble(parts, args, model, board)
    except BaseException:
        parts.close()
        raise


def assemble(
    parts: Parts, args: DeviceArgs, model: PreTrainedModel, board: Board, memory: Memory | None = None
) -> Machine:
    """Make the lanes over a model that is on the device already; `args.model` is not looked at.

    Args:
        memory: KV memory and tokens, if they are there already too.

    Raises:
        UsageError: KV memory of that size does not fit.
        CudaError: the driver refuses something.
    """
    adapter = ModelAdapter(model, args.facts)
    if memory is None:
        free = parts.free_bytes()
        blocks = args.blocks or pool_blocks(args.kv, args.layout, args.max_len, free, fraction=KV_FRACTION)
        sizes = Memory.sizes(args, blocks)
        memory = Memory.over(args, blocks, *(torch.zeros(n, dtype=torch.uint8, device=parts.where) for n in sizes))
    pages, tokens, blocks = memory.pages, memory.tokens, memory.blocks
    choice = choose_attention(parts.where, _attention_shape(args), args.attention)
    queues = {side: parts.queue(side) for side in Side}
    budget = int(parts.device.memory_bytes * args.graphs_fraction)
    uncaptured = args.facts.uncapturable if args.graphs else "not wanted"
    if args.graphs and uncaptured is not None:
        logger.warning("decode steps are not captured in CUDA graphs: %s", uncaptured)
    graphs = DecodeGraphs(queues[Side.DECODE], board.tables.shape[1], budget) if uncaptured is None else None

    def body(side: Side) -> StreamBody:
        scratch = Scratch(parts.where)

        def attention(units: int, bucket: Bucket | None) -> Attention:
            return choice.make(scratch, units, bucket)

        captured = graphs if side is Side.DECODE else None
        model_body = ModelBody(DeviceFeed(adapter, pages, tokens, board, queues[side], attention, captured))
        return Contending(model_body, parts.api, parts.places.primary)

    lanes = StreamLanes(parts.api, parts.device, parts.places, body)
    if parts.where.type == "cuda":  # what was queued so far lies on torch's default stream, which no lane waits for
        torch.cuda.synchronize(parts.where)
    notes = {
        **parts.notes,
        "attention": f"{choice.name} ({choice.reason})",
        "graphs": "decode steps" if uncaptured is None else f"none: {uncaptured}",
        "kv_blocks": blocks,
    }
    return Machine(lanes, _info(parts.places, blocks, notes), parts, pages, graphs)


def _attention_shape(args: DeviceArgs) -> AttentionShape:
    facts = args.facts
    return AttentionShape(
        heads=facts.heads,
        kv_heads=facts.kv_heads,
        head_dim=facts.head_dim,
        block_tokens=args.layout.block_tokens,
        dtype=facts.dtype,
        scale=facts.scale if facts.scale is not None else 1.0 / math.sqrt(facts.head_dim),
        windows=tuple(dict.fromkeys(facts.windows)),
    )


def _info(places: Places, blocks: int, notes: Mapping[str, object]) -> DeviceInfo:
    splits = places.splits()
    return DeviceInfo(
        splits,
        frozenset((p, d) for p in splits for d in splits if places.disjoint(p, d)),
        {key: places.read_back(place) for key, place in places.all().items()},
        blocks,
        notes,
    )
