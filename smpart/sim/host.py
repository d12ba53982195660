"""What a step costs apart from its kernels: scheduling, preparing inputs, launching, sampling, reading tokens back."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.partition import Shape


@dataclass(frozen=True, slots=True)
class Host:
    """Overheads of an engine, in seconds.

    Attributes:
        step: of every forward: scheduling it, preparing its inputs, and gaps that launches leave on the GPU.
        sequence: of every sequence in it: its block table, its sampling, its detokenisation.
        chunk: of every prompt chunk in it.
        pace: kernels in a long run against the same kernels timed one by one (clocks, caches, gaps between them).
    """

    step: float
    sequence: float = 0.0
    chunk: float = 0.0
    pace: float = 1.0

    def seconds(self, shape: Shape) -> float:
        """Overhead of one forward."""
        chunks = shape.prefill_chunks
        return self.step + self.sequence * (shape.decode_batch + chunks) + self.chunk * chunks


HOSTS = {
    "vllm": Host(step=0.2e-3),
    "sglang": Host(step=0.8e-3, sequence=8e-6),
    "trtllm": Host(step=0.8e-3),
}
"""Overheads by engine. vLLM's, which plans a step while the one before it runs, are fitted on the first hundred
requests of a real run (`smpart.bench.silicon.run`), the others' on every other one of the public end-to-end points
(`smpart.bench.silicon.hosts`)."""
