"""From a question to advice: the table, the search for capacities, the verdict and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from statistics import fmean

from smpart.bench.advise.contenders import CHUNKED, ONE_LANE, ORDER, PDMUX, SMPART, STATIC, Contenders
from smpart.bench.advise.facts import Facts
from smpart.bench.advise.findings import Findings
from smpart.bench.advise.fleet import fleet
from smpart.bench.advise.knockout import Winner, knockout
from smpart.bench.advise.question import Question
from smpart.bench.advise.rates import LEAST, Rates, Search
from smpart.bench.advise.reach import out_of_reach, too_long
from smpart.bench.advise.table import Table, divide
from smpart.bench.bench import Chosen, Options
from smpart.bench.crew import Crew, Recipe
from smpart.bench.typical import Typical
from smpart.engine.deployment import Deployment
from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.partition.sim import Cost, SimLanes
from smpart.predictor.estimate import NOTHING

DTYPE = "bfloat16"
"""Of weights and KV, unless the model's own configuration says less."""

Progress = Callable[[str, float], AbstractContextManager[Callable[[float, str], None]]]
"""Opens a display for a number of things to do; gives the function to call with those done, and a line."""

_OVER = 1.1
"""Multiple of chunked's capacity at which it is looked at, where smpart holds no more."""


def advise(question: Question, say: Callable[[str], None], progress: Progress) -> Findings:
    """Search, and say what was found as it is found.

    Raises:
        UsageError: no such model, one that does not fit, or objectives that nothing holds.
        BackendUnavailable: what the GPU is priced by is not installed.
    """
    with Deployment.open(question.model, backend=question.backend(question.worst), dtype=DTYPE, profile="none") as made:
        load = question.load(made.max_len)
        for note in load.notes:
            say(note)
        typical = Typical.of(load)
        assert isinstance(made.lanes, SimLanes)
        cost, units = made.lanes.cost, made.device.units
        if reason := out_of_reach(load, typical, question.slo, 1.0 - question.target, cost, units):
            raise UsageError(f"no rate holds these objectives on {question.gpu}: {reason}")
        hopeless = too_long(load, question.slo, cost, units)
        fit = max(1, min(made.kv.max_requests, made.blocks * made.kv.block_tokens // typical.context))
        most = min(fit, typical.most(cost, units, question.slo.tpot_ms / 1e3))
        table, known_for, prefill_s = _table(question, typical, made.lanes.splits(), most)
        batch = max(1, most // 4)
        question = question.shortened(batch)
        fits = _fits(cost, typical, units, question, batch)
        contenders = Contenders.of(made.lanes.splits(), table.rows, fits, question.quick)
        recipes = _recipes(question, contenders, made)
        guess = 0.5 * typical.rate(cost, units)
        layers = made.model_shape.layers
        major, minor = str(made.device.facts["compute_capability"]).split(".")
    with fleet(recipes, question.jobs) as crews, progress("advise", _searches(question)) as update:
        search = _Search(question, contenders, crews, guess, say, update)
        names, held = search.everything()
        one, two = search.facts(names, held)
    found = Findings(
        question=question,
        units=units,
        capability=(int(major), int(minor)),
        layers=layers,
        typical=typical,
        hopeless=hopeless,
        table=table,
        known_for=known_for,
        prefill_s=prefill_s,
        names=names,
        held=held,
        one_lane=one,
        two_lanes=two,
        runs=search.runs,
    )
    found.check()
    return found


def _table(
    question: Question, typical: Typical, splits: tuple[Split, ...], most: int
) -> tuple[Table, float, float | None]:
    """The table, the contention constant it holds for, and the seconds of a typical prefill on its first row.

    Priced by the simulator's own truth: nothing more is known of the GPU. For the largest constant at which every batch
    up to `most` finds a split; if there is none, for that at which most of them do.
    """
    best: tuple[Table, float, float | None] = Table((), 0), question.worst, None
    for contention in (question.worst, *question.others()):
        with Deployment.open(question.model, backend=question.backend(contention), dtype=DTYPE, profile="none") as made:
            assert isinstance(made.lanes, SimLanes)
            cost = made.lanes.cost

        def step_s(batch: int, split: Split, cost: Cost = cost) -> float:
            return cost(typical.step(batch), split.decode, typical.head, split.prefill)

        table = divide(step_s, splits, question.slo.tpot_ms / 1e3, most)
        if table.holds > best[0].holds:
            split, batch = table.rows[0]
            best = table, contention, cost(typical.head, split.prefill, typical.step(batch), split.decode)
        if table.holds == most:
            break
    return best


def _fits(cost: Cost, typical: Typical, units: int, question: Question, batch: int) -> Callable[[int], bool]:
    """Whether a hybrid step with so many prompt tokens and `batch` decodes holds TPOT on the whole device."""
    step = typical.step(batch)

    def fits(tokens: int) -> bool:
        hybrid = Shape.prefill([(tokens, 0)]).join(step)
        return cost(hybrid, units, NOTHING, 0) <= question.slo.tpot_ms / 1e3

    return fits


def _recipes(question: Question, contenders: Contenders, made: Deployment) -> list[Recipe]:
    """One bench a contention constant. Nothing is probed or fitted: budgets are contenders, rates are searched."""
    options = Options(contenders.policies, question.source, question.slo, (1.0,), jobs=1)
    count = question.source.limit or 1
    chosen = Chosen((1.0,), count, question.slo, {policy: policy for policy in contenders.policies})
    first = Recipe(question.model, made.backend, DTYPE, made.kv, "none", options, chosen)
    return [replace(first, backend=question.backend(contention)) for contention in question.contentions]


def _searches(question: Question) -> int:
    """How many searches there are, at most."""
    return 3 + len(question.seeds) * (2 + 3 * len(question.contentions))


class _Search:
    """Attributes:
    done: searches so far.
    """

    def __init__(
        self,
        question: Question,
        contenders: Contenders,
        crews: Mapping[str, Crew],
        guess: float,
        say: Callable[[str], None],
        update: Callable[[float, str], None],
    ) -> None:
        self.done, self._won = 0, 0.0
        self._question, self._contenders, self._guess = question, contenders, guess
        self._say, self._update = say, update
        self._rates = {c: Rates(crews[question.backend(c)], question.target) for c in question.contentions}

    @property
    def runs(self) -> int:
        """How many loads were replayed."""
        return sum(rates.runs for rates in self._rates.values())

    def everything(self) -> tuple[dict[str, str], dict[float, dict[str, tuple[float, ...]]]]:
        """The policy behind each contender, and what each holds.

        The fixed split and the table are chosen under the largest constant: what holds beside the worst neighbour
        holds beside others.
        """
        question, contenders = self._question, self._contenders
        chunked = self._best(contenders.budgets, self._guess)
        self._won = chunked.rate
        names = {CHUNKED: chunked.name, ORDER: ORDER, SMPART: SMPART}
        guesses = dict.fromkeys(names, chunked.rate)
        if contenders.fixed:
            fixed = self._best(contenders.fixed, chunked.rate)
            names[STATIC], guesses[STATIC] = fixed.name, fixed.rate
        if contenders.table:
            names[PDMUX], guesses[PDMUX] = contenders.table, chunked.rate
        held = {question.worst: self._held(question.worst, names, guesses)}
        for contention in question.others():
            before = held[question.worst]
            known = {name: fmean(before[name]) or chunked.rate for name in names}
            again = {name: policy for name, policy in names.items() if name not in ONE_LANE}
            held[contention] = {
                **{name: before[name] for name in ONE_LANE},
                **self._held(contention, again, known),
            }
        return names, dict(sorted(held.items()))

    def facts(
        self, names: Mapping[str, str], held: Mapping[float, Mapping[str, tuple[float, ...]]]
    ) -> tuple[Facts, Facts]:
        """One lane and two at the same rate: what smpart holds, but in any case too much for chunked."""
        capacities = held[self._question.worst]
        rate = max(fmean(capacities[SMPART]), _OVER * fmean(capacities[CHUNKED])) or self._guess
        rates, seed = self._rates[self._question.worst], self._question.seeds[0]
        one, two = (Facts.of(rates.run(names[name], rate, seed)) for name in (CHUNKED, SMPART))
        self._step("done")
        return one, two

    def _best(self, policies: tuple[str, ...], guess: float) -> Winner:
        rates, seed = self._rates[self._question.worst], self._question.seeds[0]
        kind = policies[0].partition(":")[0]
        self._update(self.done, f"the best {kind} of {len(policies)}")
        won = knockout(
            policies, lambda names, rate: rates.attempt(names, rate, seed), guess, target=self._question.target
        )
        self._say(f"the best of {', '.join(p.partition(':')[2] for p in policies)}: {won.name}")
        self._step(f"the best {kind}")
        return won

    def _held(
        self, contention: float, names: Mapping[str, str], guesses: Mapping[str, float]
    ) -> dict[str, tuple[float, ...]]:
        seeds = self._question.seeds
        searches = [Search(names[name], seed, guesses[name], self._least(name)) for name in names for seed in seeds]
        found: list[float] = []
        for search, rate in zip(searches, self._rates[contention].capacities(searches), strict=True):
            found.append(rate)
            self._step(f"{search.policy.partition(':')[0]} at contention {contention:g}")
        by_name = {name: tuple(found[i * len(seeds) : (i + 1) * len(seeds)]) for i, name in enumerate(names)}
        told = ", ".join(f"{name} {fmean(rates):.4g}" for name, rates in by_name.items())
        self._say(f"contention {contention:g}, req/s held: {told}")
        return by_name

    def _least(self, name: str) -> float:
        """Where to give a contender up: chunked never, others far below what it held in the knock-out."""
        return 0.0 if name == CHUNKED else LEAST * self._won

    def _step(self, what: str) -> None:
        self.done += 1
        self._update(self.done, what)
