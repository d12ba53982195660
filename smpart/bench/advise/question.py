"""What advice is asked about."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from smpart.bench.load import Load
from smpart.bench.source import TraceOptions, open_load
from smpart.errors import UsageError
from smpart.partition.registry import open_backend
from smpart.partition.sim import Sim
from smpart.scheduler.slo import SLO

CONTENTIONS = (1.0, 1.1, 1.2, 1.3)
"""How much worse a neighbour may be than the published fits say: nobody has measured it, so it is swept."""

QUICK_CONTENTIONS = (1.0, 1.3)

REQUESTS = 1000
QUICK_REQUESTS, QUICK_FEWEST, QUICK_TURNS = 500, 60, 20
"""Of a quick look: requests at most and at least, and how many for each that decodes at a time. With fewer the
device is mostly filling up, and rates seem to hold that do not."""

SEEDS, QUICK_SEEDS = 2, 1

FEWEST = 10
"""Requests below which 90 % of them means nothing."""


@dataclass(frozen=True, slots=True)
class Question:
    """A model on a simulated GPU, the load it is to serve and the objectives.

    Attributes:
        gpu: as after ``sim:``, without a contention constant.
        contentions: constants to sweep, rising.
        seeds: of arrivals (synthetic: of lengths too; a long recorded trace: of its windows); policies are compared
            seed by seed.
        target: share of requests that must meet every objective.
        jobs: processes that share the runs; 0: one a core.
        quick: look at fewer candidates.
        shorten: whether fewer requests will do, if they take long.
    """

    model: str
    gpu: str
    source: TraceOptions
    slo: SLO
    contentions: tuple[float, ...] = CONTENTIONS
    seeds: tuple[int, ...] = (0,)
    target: float = 0.9
    jobs: int = 0
    quick: bool = False
    shorten: bool = False

    @classmethod
    def ask(
        cls, model: str, gpu: str, trace: str, slo: SLO, *, limit: int | None, seed: int, jobs: int, quick: bool
    ) -> Self:
        """Fill in how much is looked at. Raises `UsageError` for a GPU, trace or number that cannot be."""
        backend = open_backend(f"sim:{gpu}")
        assert isinstance(backend, Sim)
        if backend.contention != 1.0:
            raise UsageError(f"--gpu {gpu}: contention is swept; leave ~{backend.contention:g} out")
        if jobs < 0:
            raise UsageError(f"--jobs {jobs}: must be at least 1, or 0 for one a core")
        requests = limit if limit is not None else QUICK_REQUESTS if quick else REQUESTS
        source = TraceOptions(trace, requests, seed=seed)
        load = open_load(source, max_len=2**31, default_count=requests)
        if len(load.arrivals) < FEWEST:
            raise UsageError(
                f"{load.name}: {len(load.arrivals)} requests are too few to tell which rate holds; at least {FEWEST}"
            )
        load.at_rate(1.0)
        contentions = (1.0,) if backend.roofline else QUICK_CONTENTIONS if quick else CONTENTIONS
        whole = open_load(replace(source, limit=None), max_len=2**31, default_count=requests)
        varies = source.synthetic or not load.timed or len(whole.arrivals) >= SEEDS * requests
        seeds = range(seed, seed + (QUICK_SEEDS if quick or not varies else SEEDS))
        return cls(
            model, gpu, source, slo, contentions, tuple(seeds), jobs=jobs, quick=quick, shorten=quick and limit is None
        )

    def shortened(self, batch: int) -> Self:
        """With as few requests as will do.

        Args:
            batch: that is expected to decode at a time.
        """
        if not self.shorten or self.source.limit is None:
            return self
        few = max(QUICK_FEWEST, QUICK_TURNS * batch)
        return replace(self, source=replace(self.source, limit=min(self.source.limit, few)))

    def backend(self, contention: float) -> str:
        """The backend's name at a contention constant."""
        return f"sim:{self.gpu}" + (f"~{contention:g}" if contention != 1.0 else "")

    def load(self, max_len: int) -> Load:
        """The load of the first seed."""
        return open_load(replace(self.source, seed=self.seeds[0]), max_len, self.source.limit or REQUESTS)

    @property
    def worst(self) -> float:
        """The largest contention constant: what is chosen once is chosen for it."""
        return max(self.contentions)

    def others(self) -> Iterable[float]:
        """The other constants, falling."""
        return sorted(set(self.contentions) - {self.worst}, reverse=True)
