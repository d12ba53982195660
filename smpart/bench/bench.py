"""`smpart bench`: one load, several policies, on one deployment, paired seed by seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from statistics import fmean

from smpart.bench import capacity
from smpart.bench.budget import fair_budget
from smpart.bench.load import Load
from smpart.bench.metrics import attainment, backlog_grows
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

_CHUNKED = "chunked"

Watch = Callable[[Status], None]
Watcher = Callable[[str], AbstractContextManager[Watch]]
"""Opens a display for one replay, given its title."""


@dataclass(frozen=True, slots=True)
class Options:
    """What to compare, and on which load.

    Attributes:
        slo: None: fitted to the machine by a probe.
        rate: requests per second; None: the trace's own, or (synthetic) `LOAD` of what a probe measures.
        repeat: replays of each policy, on seeds `source.seed`, `source.seed` + 1, and so on.
        capacity: search for each policy's capacity, and report the run at that rate.
    """

    policies: tuple[str, ...]
    source: TraceOptions
    slo: SLO | None = None
    rate: float | None = None
    speedup: float = 1.0
    repeat: int = 1
    capacity: bool = False
    attainment: float = 0.9

    def __post_init__(self) -> None:
        if not self.policies or any(not p for p in self.policies):
            raise UsageError("--policy: name at least one, for example mixed,chunked,smpart")
        if twice := [p for p in self.policies if self.policies.count(p) > 1]:
            raise UsageError(f"--policy: {twice[0]} is named twice; --repeat replays a policy more than once")
        if self.repeat < 1:
            raise UsageError(f"--repeat {self.repeat}: must be at least 1")
        if not 0 < self.attainment <= 1:
            raise UsageError(f"--attainment {self.attainment:g}: must be above 0 and at most 1")
        if not 1e-6 <= self.speedup <= 1e6:
            raise UsageError(f"--speedup {self.speedup:g}: must be a positive number from 1e-6 to 1e6")
        if self.rate is not None and self.speedup != 1.0:
            raise UsageError("--rate and --speedup both set the rate: give one of them")

    def check(self) -> None:
        """Raise `UsageError` for a policy, trace or rate that no deployment can use, before one is opened."""
        for policy in self.policies:
            make_policy(policy)
        load = open_load(self.source, max_len=2**31, default_count=2)
        if not load.timed and self.rate is None:
            raise UsageError(f"{load.name} has lengths only: give --rate")
        if self.rate is not None:
            load.at_rate(self.rate)
        load.sped_up(self.speedup)


class Bench:
    """A deployment, the load it is to serve, and the objectives.

    Args:
        deployment: where requests run.
        options: what to compare.
        say: told one line about each thing that is chosen, measured or changed.
        watcher: displays a replay while it runs.

    Raises:
        UsageError: a bad option, policy or trace.
    """

    def __init__(self, deployment: Deployment, options: Options, say: Callable[[str], None], watcher: Watcher) -> None:
        self._deployment, self._options, self._say, self._watcher = deployment, options, say, watcher
        self._loads: dict[tuple[int, int], Load] = {}
        for policy in options.policies:
            deployment.core(policy, options.slo or SLO())
        sample = self._open(options.source.seed, default_count=24)
        self._warm_up()
        measures = options.slo is None or self._rate_is_free or _CHUNKED in options.policies
        self._speed = self._probe() if measures else None
        self._rate = self._choose_rate(sample)
        self._count = round(min(1000.0, max(12.0, DURATION_S * (self._rate or 0.0))))
        self.load = self._at(self._rate, options.source.seed)
        self.slo = options.slo or self._fit_slo()
        self._specs = {policy: self._spec(policy) for policy in options.policies}
        for note in self.load.notes:
            say(note)
        if longer := self.load.longer_than(deployment.max_len):
            say(f"{longer} requests are over the limit of {deployment.max_len} tokens and will be refused (see --clip)")

    def runs(self) -> Iterator[Run]:
        """Every policy once a seed, in turns, so that a drift of the machine meets all alike."""
        for seed in range(self._options.source.seed, self._options.source.seed + self._options.repeat):
            for policy in self._options.policies:
                yield self._search(policy) if self._options.capacity else self._run(policy, self._rate, seed)
            if self._options.capacity:
                return

    def _run(self, policy: str, rate: float | None, seed: int, capacity_rps: float | None = None) -> Run:
        load = self._at(rate, seed)
        with self._watcher(f"{policy} @ {load.rate:.3g} req/s, seed {seed}") as watch:
            jobs = self._jobs(load, seed)
            done = run(
                self._deployment,
                policy,
                self.slo,
                load,
                jobs,
                spec=self._specs[policy],
                seed=seed,
                watch=watch,
                capacity_rps=capacity_rps,
            )
        met = attainment(done.replay, self.slo)
        self._say(f"{policy}, seed {seed}: {len(jobs)} requests in {done.replay.seconds:.3g} s, {met:.0%} met the SLO")
        return done

    def _search(self, policy: str) -> Run:
        """The run at the capacity of one policy (at the lowest rate tried if none held)."""
        first = self._options.source.seed
        seeds = range(first, first + self._options.repeat)

        def attempt(rate: float) -> capacity.Trial:
            replays = [self._run(policy, rate, seed).replay for seed in seeds]
            trial = capacity.Trial(
                rate,
                fmean(attainment(r, self.slo) for r in replays),
                sum(map(backlog_grows, replays)) * 2 > len(replays),
            )
            queue = "the queue grows" if trial.grows else "the queue does not grow"
            self._say(f"{policy} at {rate:.4g} req/s: attainment {trial.attainment:.1%}, {queue}")
            return trial

        found = capacity.search(attempt, self.load.rate, target=self._options.attainment)
        best = self._run(policy, found.rate or min(t.rate for t in found.trials), first, found.rate)
        trials = [{"rate": t.rate, "slo_attainment": t.attainment, "queue_grows": t.grows} for t in found.trials]
        return replace(best, record={**best.record, "trials": trials})

    @property
    def _rate_is_free(self) -> bool:
        return self._options.rate is None and self._options.source.synthetic

    def _open(self, seed: int, default_count: int) -> Load:
        """The load of a seed; a recorded one is read once and is the same for all."""
        key = (seed, default_count) if self._options.source.synthetic else (0, 0)
        if key not in self._loads:
            source = replace(self._options.source, seed=seed)
            self._loads[key] = open_load(source, self._deployment.max_len, default_count)
        return self._loads[key]

    def _at(self, rate: float | None, seed: int) -> Load:
        load = self._open(seed, self._count)
        return load.sped_up(self._options.speedup) if rate is None else load.at_rate(rate, seed)

    def _choose_rate(self, sample: Load) -> float | None:
        """None: the trace's own times."""
        if not self._rate_is_free:
            return self._options.rate
        assert self._speed is not None
        prompts, outputs = zip(*((a.prompt_tokens, a.output_tokens) for a in sample.arrivals), strict=True)
        rate = float(f"{self._speed.rate_for(prompts, outputs, LOAD) * self._options.speedup:.3g}")
        self._say(f"rate {rate:g} req/s: {LOAD:.0%} of a lane of an even split; --rate sets another")
        return rate

    def _probe(self) -> Speed:
        prompt = min(256, self._deployment.max_len // 2)
        with self._watcher("measuring the machine"):
            speed = measure(self._deployment, prompt)
        self._say(
            f"measured under {speed.lanes}: prefill {speed.prefill_tok_s:.4g} tok/s, "
            f"decode step {1e3 * speed.step(1):,.1f} ms at batch 1, {1e3 * speed.step(8):,.1f} ms at batch 8"
        )
        return speed

    def _warm_up(self) -> None:
        """A short request on each policy's lanes, not timed: page faults and first-time work are nobody's latency."""
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        for policy in self._options.policies:
            patient = SLO(ttft_ms=1e9, tpot_ms=1e9)
            replay(self._deployment.core(policy, patient), [Job(0.0, range(1, 17), params, ())], patient)
        self._say("warmed up: one short request a policy, not timed")

    def _spec(self, policy: str) -> str:
        """The policy as it is run: chunked prefill that was given no budget gets one that fits the objectives."""
        if policy != _CHUNKED:
            return policy
        assert self._speed is not None
        load = self.load.within(self._deployment.max_len)
        tokens = fmean(a.prompt_tokens for a in load.arrivals) * load.rate
        batch = self._speed.mean_batch(load)
        budget = fair_budget(self._deployment, self._speed, self.slo, batch, tokens)
        self._say(f"{policy}: {budget} tokens a step, what fits the TPOT objective, or more if it could not keep up")
        return f"{policy}:{budget}"

    def _fit_slo(self) -> SLO:
        assert self._speed is not None
        load = self.load.within(self._deployment.max_len)
        slo = self._speed.slo_for(load, self._speed.mean_batch(load))
        self._say(f"SLO fitted to the machine: ttft={slo.ttft_ms:g},tpot={slo.tpot_ms:g},itl={slo.itl_ms:g} (ms)")
        return slo

    def _jobs(self, load: Load, seed: int) -> list[Job]:
        """Prompts for each arrival. In virtual time nobody reads the tokens: lengths and prefix hashes are enough."""
        jobs = []
        for index, arrival in enumerate(load.arrivals):
            params = SamplingParams(max_tokens=arrival.output_tokens, ignore_eos=True)
            shared = (
                arrival.prefix.hashes(arrival.prompt_tokens, self._deployment.kv.block_tokens) if arrival.prefix else ()
            )
            prompt: Sequence[int] = range(arrival.prompt_tokens)
            if not self._deployment.virtual:
                prompt = random_prompt(arrival, index, self._deployment.model_shape.vocab, seed)
            jobs.append(Job(arrival.time_s, prompt, params, shared))
        return jobs
