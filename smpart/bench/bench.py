"""`smpart bench`: one load, several policies, at one or more rates, on one deployment, paired seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import numpy as np

from smpart.bench.budget import fair_budget
from smpart.bench.load import Load
from smpart.bench.probe import Speed, measure
from smpart.bench.replay import Job, Status, replay
from smpart.bench.run import Run, run
from smpart.bench.source import TraceOptions, open_load, random_prompt
from smpart.engine.deployment import Deployment
from smpart.errors import UsageError
from smpart.runtime.sampling import SamplingParams
from smpart.scheduler.registry import make_policy
from smpart.scheduler.slo import SLO

LOAD = 0.7
"""Share of one lane of an even split that a synthetic load uses if no rate is given."""

DURATION_S = 60.0
"""Seconds that a synthetic load lasts if no limit is given (but at least 12 and at most 1,000 requests)."""

FEWEST = 10
"""Requests below which no rate tells a queue that grows, nor one in ten that miss."""

_CHUNKED = "chunked"

Watch = Callable[[Status], None]
Watcher = Callable[[str], AbstractContextManager[Watch]]
"""Opens a display for one replay, given its title."""


@contextmanager
def unwatched(title: str) -> Iterator[Watch]:
    """No display."""
    yield lambda status: None


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare, and on which load.

    Attributes:
        slo: None: fitted to the machine by a probe.
        rates: requests per second, each of which every policy is run at; none: the trace's own, or (synthetic) `LOAD`
            of what a probe measures.
        repeat: replays of each policy, on seeds `source.seed`, `source.seed` + 1, and so on.
        capacity: search for each policy's capacity, and report the run at that rate.
        attainment: shares of requests that must meet every objective at capacity: one search each; none: 0.9.
        jobs: processes that share the runs, where time is virtual; 0: as many as there are cores, and runs.
        best_effort: share of the requests, drawn with the seed, that yield to all others and are not judged.
    """

    policies: tuple[str, ...]
    source: TraceOptions
    slo: SLO | None = None
    rates: tuple[float, ...] = ()
    speedup: float = 1.0
    repeat: int = 1
    capacity: bool = False
    attainment: tuple[float, ...] = ()
    jobs: int = 0
    best_effort: float = 0.0

    def __post_init__(self) -> None:
        if not self.policies or any(not p for p in self.policies):
            raise UsageError("--policy: name at least one, for example mixed,chunked,smpart")
        if twice := [p for p in self.policies if self.policies.count(p) > 1]:
            raise UsageError(f"--policy: {twice[0]} is named twice; --repeat replays a policy more than once")
        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat}: must be at least 1")
        if not all(0 < share <= 1 for share in self.attainment):
            raise UsageError(f"--attainment {_list(self.attainment)}: must be above 0 and at most 1")
        if self.attainment and not self.capacity:
            raise UsageError(f"--attainment {_list(self.attainment)}: says what --capacity asks for; give that, too")
        if self.capacity and self.source.limit is not None and self.source.limit < FEWEST:
            raise UsageError(f"--limit {self.source.limit}: --capacity needs at least {FEWEST} requests")
        if self.jobs < 0:
            raise UsageError(f"--jobs {self.jobs}: must be at least 1, or 0 for one a core")
        if not 0.0 <= self.best_effort < 1.0:
            raise UsageError(f"--best-effort {self.best_effort:g}: must be at least 0 and below 1")
        if self.best_effort and self.capacity:
            raise UsageError(
                "--best-effort: nothing was promised to those, so no rate is too high for them; --capacity takes none"
            )
        if self.capacity and len(self.rates) > 1:
            raise UsageError(
                f"--rate {_list(self.rates)}: --capacity chooses the rates; give one to begin with, or none"
            )
        if len(set(self.rates)) < len(self.rates):
            raise UsageError(f"--rate {_list(self.rates)}: a rate is named twice")
        if not 1e-6 <= self.speedup <= 1e6:
            raise UsageError(f"--speedup {self.speedup:g}: must be a positive number from 1e-6 to 1e6")
        if self.rates and self.speedup != 1.0:
            raise UsageError("--rate and --speedup both set the rate: give one of them")

    def check(self) -> None:
        """Raise `UsageError` for a policy, trace or rate that no deployment can use, before one is opened."""
        for policy in self.policies:
            make_policy(policy)
        load = open_load(self.source, max_len=2**31, default_count=2)
        if not load.timed and not self.rates:
            raise UsageError(f"{load.name} has lengths only: give --rate")
        for rate in self.rates:
            load.at_rate(rate)
        load.sped_up(self.speedup)


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """Numbers, comma-separated. Raises `UsageError` if there is anything else.

    >>> numbers("--rate", "2, 4.5"), numbers("--rate", None)
    ((2.0, 4.5), ())
    """
    if text is None:
        return ()
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{option} {text}: must be a number, or several, comma-separated") from None


def _list(values: Sequence[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was measured or fitted before the first run, and holds for all.

    Attributes:
        rates: that every policy is run at; None: the trace's own times.
        count: requests of a synthetic load.
        specs: the policies as they are run, with the arguments that were chosen for them.
    """

    rates: tuple[float | None, ...]
    count: int
    slo: SLO
    specs: Mapping[str, str]


class Task(NamedTuple):
    """One run: a policy at a rate (None: the trace's own times) on a seed, cut short when `least` is out of reach."""

    policy: str
    rate: float | None
    seed: int
    least: float = 0.0


class Bench:
    """A deployment, the load it is to serve, and the objectives.

    Args:
        deployment: where requests run.
        options: what to compare.
        say: told one line about each thing that is chosen, measured or changed.
        watcher: displays a replay while it runs.
        chosen: as another bench of the same options chose; None: it is chosen here, by measuring.

    Raises:
        UsageError: a bad option, policy or trace.
    """

    def __init__(
        self,
        deployment: Deployment,
        options: Options,
        say: Callable[[str], None],
        watcher: Watcher,
        chosen: Chosen | None = None,
    ) -> None:
        self.deployment, self.options = deployment, options
        self._say, self._watcher = say, watcher
        self._loads: dict[tuple[int, int], Load] = {}
        for policy in options.policies:
            deployment.core(policy, options.slo or SLO())
        self._warm_up()
        self.chosen = chosen or self._choose()

    @property
    def load(self) -> Load:
        """That of the first seed, at the first rate."""
        return self._at(self.chosen.rates[0], self.options.source.seed)

    def tasks(self) -> Iterator[Task]:
        """Every policy once a rate and seed, in turns, so that a drift of the machine meets all alike."""
        first = self.options.source.seed
        for rate in self.chosen.rates:
            for seed in range(first, first + self.options.repeat):
                for policy in self.options.policies:
                    yield Task(policy, rate, seed)

    def run(self, task: Task) -> Run:
        """Make one run."""
        policy, slo = task.policy, self.chosen.slo
        load = self._at(task.rate, task.seed)
        with self._watcher(f"{policy} @ {load.rate:.3g} req/s, seed {task.seed}") as watch:
            jobs = self._jobs(load, task.seed)
            spec = self.chosen.specs[policy]
            return run(
                self.deployment, policy, slo, load, jobs, spec=spec, seed=task.seed, watch=watch, least=task.least
            )

    def _choose(self) -> Chosen:
        """Measure, where something is to be fitted to the machine."""
        options = self.options
        sample = self._open(options.source.seed, default_count=24)
        measures = options.slo is None or self._rate_is_free or _CHUNKED in options.policies
        speed = self._probe() if measures else None
        rates = options.rates or (self._free_rate(sample, speed) if self._rate_is_free else None,)
        count = round(min(1000.0, max(12.0, DURATION_S * (rates[0] or 0.0))))
        chosen = Chosen(rates, count, options.slo or SLO(), {policy: policy for policy in options.policies})
        load = self._at(rates[0], options.source.seed, count)
        if options.slo is None:
            chosen = replace(chosen, slo=self._fit_slo(load, speed))
        if _CHUNKED in options.policies:
            chosen = replace(chosen, specs={**chosen.specs, _CHUNKED: self._chunked(load, chosen.slo, speed)})
        for note in (*load.notes, *self._repeated(load)):
            self._say(note)
        if longer := load.longer_than(self.deployment.max_len):
            limit = self.deployment.max_len
            self._say(f"{longer} requests are over the limit of {limit} tokens and will be refused (see --clip)")
        return chosen

    def _repeated(self, load: Load) -> list[str]:
        """What is to be said of repeats of a recorded trace that are not what they seem."""
        source, repeat = self.options.source, self.options.repeat
        if repeat == 1 or source.synthetic or not load.timed:
            return []
        if source.limit is None:
            return ["every repeat replays the whole trace; with --limit N each would replay the next N requests"]
        last = self._open(source.seed + repeat - 1, 0)
        return [note for note in last.notes if note not in load.notes]

    @property
    def _rate_is_free(self) -> bool:
        return not self.options.rates and self.options.source.synthetic

    def _open(self, seed: int, default_count: int) -> Load:
        """The load of a seed; a recorded one that is not cut into windows is the same for all."""
        source = self.options.source
        key = (seed, default_count) if source.synthetic else (0 if source.limit is None else seed, 0)
        if key not in self._loads:
            source = replace(self.options.source, seed=seed)
            self._loads[key] = open_load(source, self.deployment.max_len, default_count)
        return self._loads[key]

    def _at(self, rate: float | None, seed: int, count: int | None = None) -> Load:
        load = self._open(seed, self.chosen.count if count is None else count)
        return load.sped_up(self.options.speedup) if rate is None else load.at_rate(rate, seed)

    def _free_rate(self, sample: Load, speed: Speed | None) -> float:
        assert speed is not None
        prompts, outputs = zip(*((a.prompt_tokens, a.output_tokens) for a in sample.arrivals), strict=True)
        rate = float(f"{speed.rate_for(prompts, outputs, LOAD) * self.options.speedup:.3g}")
        self._say(f"rate {rate:g} req/s: {LOAD:.0%} of a lane of an even split; --rate sets another")
        return rate

    def _probe(self) -> Speed:
        prompt = min(256, self.deployment.max_len // 2)
        with self._watcher("measuring the machine"):
            speed = measure(self.deployment, prompt)
        self._say(
            f"measured under {speed.lanes}: prefill {speed.prefill_tok_s:.4g} tok/s, "
            f"decode step {1e3 * speed.step(1):,.1f} ms at batch 1, {1e3 * speed.step(8):,.1f} ms at batch 8"
        )
        return speed

    def _warm_up(self) -> None:
        """A short request on each policy's lanes, not timed: page faults and first-time work are nobody's latency."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for policy in self.options.policies:
            patient = SLO(ttft_ms=1e9, tpot_ms=1e9)
            replay(self.deployment.core(policy, patient), [Job(0.0, range(1, 17), params, ())], patient)
        self._say("warmed up: one short request a policy, not timed")

    def _chunked(self, load: Load, slo: SLO, speed: Speed | None) -> str:
        """Chunked prefill that was given no budget gets one that fits the objectives."""
        assert speed is not None
        load = load.within(self.deployment.max_len)
        tokens = fmean(a.prompt_tokens for a in load.arrivals) * load.rate
        budget = fair_budget(self.deployment, speed, slo, speed.mean_batch(load), tokens)
        self._say(f"{_CHUNKED}: {budget} tokens a step, what fits the TPOT objective, or more if it could not keep up")
        return f"{_CHUNKED}:{budget}"

    def _fit_slo(self, load: Load, speed: Speed | None) -> SLO:
        assert speed is not None
        load = load.within(self.deployment.max_len)
        slo = speed.slo_for(load, speed.mean_batch(load))
        self._say(f"SLO fitted to the machine: ttft={slo.ttft_ms:g},tpot={slo.tpot_ms:g},itl={slo.itl_ms:g} (ms)")
        return slo

    def _jobs(self, load: Load, seed: int) -> list[Job]:
        """Prompts for each arrival. In virtual time nobody reads the tokens: lengths and prefix hashes are enough."""
        jobs = []
        lots = np.random.default_rng([seed, 2]).random(len(load.arrivals))
        lots[0] = 1.0  # somebody is judged
        for index, arrival in enumerate(load.arrivals):
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            shared = (
                arrival.prefix.hashes(arrival.prompt_tokens, self.deployment.kv.block_tokens) if arrival.prefix else ()
            )
            prompt: Sequence[int] = range(arrival.prompt_tokens)
            if not self.deployment.virtual:
                prompt = random_prompt(arrival, index, self.deployment.model_shape.vocab, seed)
            jobs.append(Job(arrival.time_s, prompt, params, shared, bool(lots[index] < self.options.best_effort)))
        return jobs
