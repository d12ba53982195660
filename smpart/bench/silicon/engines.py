"""How the engines ran that others measured: their rules and their overheads."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from smpart.bench.silicon.points import EndToEnd
from smpart.scheduler.plan import Policy
from smpart.scheduler.policies.chunked import Chunked
from smpart.scheduler.policies.mixed import Mixed
from smpart.scheduler.registry import Setup
from smpart.sim import Host
from smpart.sim.host import HOSTS

SYNCHRONOUS = Host(step=1.9e-3, sequence=32e-6)
"""vLLM before it planned a step while the one before it runs (0.14): nothing of the host's work is hidden.

Fitted on every other point of the sweep under 0.12, like the overheads of SGLang and TensorRT-LLM in
`smpart.sim.host.HOSTS` on theirs: `smpart.bench.silicon.hosts`. The others are predicted."""

_TOKENS = 8192
"""Tokens of a step at most, each engine's default on these GPUs."""


class Engine(NamedTuple):
    """An engine as it ran.

    Attributes:
        family: points of one family share their overheads.
        rule: makes its policy.
    """

    family: str
    rule: Callable[[Setup], Policy]
    host: Host

    def policy(self) -> Policy:
        """A fresh policy."""
        return self.rule(Setup(str(_TOKENS)))


def engine_of(point: EndToEnd) -> Engine:
    """The engine that a point was measured under.

    SGLang runs prefill first, but in the sweep under 0.5.6: there the first tokens of clients that began together came
    four times sooner than whole prompts could have been computed, and as soon as hybrid steps compute them (its option
    ``enable-mixed-chunk``). TensorRT-LLM is said to fill a step with whole prompts; on the fitted half of its points
    cut ones come nearer.
    """
    match point.engine, point.version:
        case "vllm", "0.12.0":
            return Engine("vllm 0.12", Chunked, SYNCHRONOUS)
        case "sglang", "0.5.6.post2":
            return Engine("sglang", Chunked, HOSTS["sglang"])
        case "sglang", _:
            return Engine("sglang", Mixed, HOSTS["sglang"])
        case engine, _:
            return Engine(engine, Chunked, HOSTS[engine])
