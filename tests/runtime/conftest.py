"""A model body with a board and pages of its own, driven the way an engine drives it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from device_rig import CpuQueue, device_feed, place
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from smpart.runtime.adapter import ModelAdapter
from smpart.runtime.batch import Batch, Chunk, Sampler, Segment, StepResult
from smpart.runtime.board import Board
from smpart.runtime.body import ModelBody
from smpart.runtime.feed import HostFeed
from smpart.runtime.sampling import SamplingParams

BLOCK = 16


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


class Rig:
    """One body; requests get slots in order and scattered blocks. Pages start as NaN: no read of theirs may show.

    With `device`, the body is one for a device: see device_rig.py.
    """

    def __init__(
        self, adapter: ModelAdapter, slots: int = 8, max_len: int = 160, seed: int = 0, *, device: bool = False
    ) -> None:
        self.adapter = adapter
        self.random = random.Random(seed)
        self.board = Board.over(bytearray(Board.size(slots, max_len, BLOCK)), slots, max_len, BLOCK)
        self.blocks = slots * -(-max_len // BLOCK)
        facts = adapter.facts
        shape = (2, self.blocks + device, BLOCK, facts.kv_heads, facts.head_dim)
        self.memory = [torch.full(shape, torch.nan, dtype=facts.dtype) for _ in range(facts.layers)]
        self.place, self.queue = place(), CpuQueue()
        if device:
            self.feed, self.queue = device_feed(adapter, self.board, self.memory)
        else:
            self.feed = HostFeed(adapter, self.memory, self.board)
        self.body = ModelBody(self.feed)
        self.free = self.random.sample(range(self.blocks), self.blocks)
        self.samplers: dict[int, Sampler] = {}
        self.lengths: list[int] = []
        self.results: list[StepResult] = []
        self.forward = 0

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None, seed: int = 0) -> int:
        """Admit a prompt; its slot."""
        slot = len(self.lengths)
        self.lengths.append(len(prompt))
        self.board.write_tokens(slot, prompt)
        self.board.append_blocks(slot, 0, [self.free.pop() for _ in range(self.board.max_len // BLOCK)])
        self.samplers[slot] = Sampler(params or SamplingParams(), len(prompt), seed)
        return slot

    def run(
        self, decode: dict[int, int] | None = None, chunks: Sequence[Chunk] = (), layers: int | None = None
    ) -> StepResult:
        """Start a forward (its number is `self.forward`): decode rows ``slot: position``, and chunks."""
        self.forward += 1
        decode = decode or {}
        batch = Batch(int32(*decode), int32(*decode.values()), tuple(chunks))
        samplers, self.samplers = self.samplers, {}
        return self._do(Segment(self.forward, batch, layers, samplers=samplers))

    def finish(self, forward: int) -> StepResult:
        """Resume a paused forward to its end."""
        return self._do(Segment(forward))

    def _do(self, segment: Segment) -> StepResult:
        return self.body.enqueue(segment, self.place)()

    def serve(self, slot: int, tokens: int) -> list[int]:
        """Prefill and decode one request alone; its output."""
        length = self.lengths[slot]
        self.results.append(self.run(chunks=[Chunk(slot, 0, length, True)]))
        for step in range(tokens - 1):
            self.results.append(self.run({slot: length + step}))
        return self.output(slot, tokens)

    def serve_all(self, tokens: int) -> list[list[int]]:
        """Serve every request under a random schedule: chunks of random size, paused and interleaved at random
        layers, beside decode steps and in hybrid ones, packed at times."""
        done = [0] * len(self.lengths)
        paused: dict[int, list[Chunk]] = {}
        goal = [length + tokens - 1 for length in self.lengths]
        while any(d < g for d, g in zip(done, goal, strict=True)):
            busy = {chunk.slot for chunks in paused.values() for chunk in chunks}
            waiting = [s for s, length in enumerate(self.lengths) if done[s] < length and s not in busy]
            decode = {s: done[s] for s, g in enumerate(goal) if self.lengths[s] <= done[s] < g}
            decode = {s: p for s, p in decode.items() if self.random.random() < 0.7}
            chunks = [self._chunk(s, done[s]) for s in waiting if self.random.random() < 0.6]
            action = self.random.choice(("prefill", "decode", "resume", "hybrid"))
            if action == "resume" and paused:
                forward = self.random.choice(list(paused))
                result = self._do(Segment(forward, layers=self.random.choice((1, None))))
                self._count(forward, result, paused, done)
            elif action == "prefill" and chunks and len(paused) < 4:
                result = self.run(chunks=chunks, layers=self.random.choice((1, 2)))
                paused[self.forward] = chunks
                self._count(self.forward, result, paused, done)
            elif decode and (action == "decode" or (action == "hybrid" and not chunks)):
                self.run(decode)
                for slot in decode:
                    done[slot] += 1
            elif action == "hybrid" and (decode or chunks):
                self.run(decode, chunks)
                for slot in decode:
                    done[slot] += 1
                for chunk in chunks:
                    done[chunk.slot] += chunk.length
        return [self.output(slot, tokens) for slot in range(len(self.lengths))]

    def output(self, slot: int, tokens: int) -> list[int]:
        length = self.lengths[slot]
        return self.feed.tokens[slot, length : length + tokens].tolist()

    def _chunk(self, slot: int, start: int) -> Chunk:
        left = self.lengths[slot] - start
        size = self.random.randint(1, left)
        return Chunk(slot, start, size, size == left)

    @staticmethod
    def _count(forward: int, result: StepResult, paused: dict[int, list[Chunk]], done: list[int]) -> None:
        if result.done:
            for chunk in paused.pop(forward):
                done[chunk.slot] += chunk.length


@pytest.fixture
def rig() -> type[Rig]:
    return Rig


@pytest.fixture
def greedy() -> Callable[[PreTrainedModel, Sequence[int], int], list[int]]:
    """transformers' own answer to one prompt, end-of-sequence ignored."""

    def generate(model: PreTrainedModel, prompt: Sequence[int], tokens: int) -> list[int]:
        model.generation_config.eos_token_id = None  # else it completes the config below
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, pad_token_id=0)
        ids = torch.tensor([list(prompt)])
        return model.generate(ids, generation_config=config, attention_mask=torch.ones_like(ids))[
            0, len(prompt) :
        ].tolist()

    return generate


@pytest.fixture(autouse=True)
def one_quiet_thread() -> None:
    """Tiny models gain nothing from more threads, and lose much where cores are shared."""
    logging.set_verbosity_error()
    torch.set_num_threads(1)
