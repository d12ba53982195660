"""Questions of the form: what does a policy hold here? A cell is a model on a simulated GPU, a trace and objectives.

Objectives, all with gaps between tokens of at most twice the TPOT:

* ``papers``: TTFT 200 ms, TPOT 50 ms; where the prefill of a prompt of the 99th percentile takes longer than half of
  that, TTFT is twice what it takes alone on the whole GPU. An objective that several in a hundred prompts cannot meet
  on an empty GPU tells nothing: what is left of the 10 % that may miss decides then, not the load.
* ``tight``: TPOT 1.25 times a decode step of 32 sequences alone on the whole GPU, TTFT as above.
* ``loose``: 5 times the step (Sarathi's strict objective, section 5.1), 5 times the prefill.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from smpart.bench import profile
from smpart.bench.bench import Bench, Options, Task, unwatched
from smpart.bench.capacity import Care, at_capacity
from smpart.bench.crew import Alone
from smpart.bench.fit import fit_folder
from smpart.bench.load import Load
from smpart.bench.run import Run
from smpart.bench.source import TraceOptions, open_load
from smpart.bench.typical import Typical
from smpart.engine.deployment import Deployment
from smpart.errors import UsageError
from smpart.partition import Shape, Split
from smpart.partition.gpus import GPUS
from smpart.predictor.artefact import NAME
from smpart.predictor.estimators.doubt import Doubt
from smpart.scheduler.slo import SLO
from smpart.sim import DIMENSIONS, SiliconCost
from smpart.sim.published import data_file

TRACES = {
    "azure-conv": "traces/AzureLLMInferenceTrace_conv.csv",
    "azure-code": "traces/AzureLLMInferenceTrace_code.csv",
    "mooncake-conv": "traces/mooncake_conversation_trace.jsonl",
    "mooncake-synth": "traces/mooncake_synthetic_trace.jsonl",
    "arxiv": "traces/arxiv_summarization_lengths.csv",
}
"""Recorded traces by a short name: files of the data folder."""

OBJECTIVES = ("papers", "tight", "loose")
_FACTORS = {"papers": (2.0, 0.0), "tight": (2.0, 1.25), "loose": (5.0, 5.0)}
"""Times a long prefill, and times a step."""
_BATCH = 32
"""Sequences of the decode step that objectives are multiples of."""
_TOLERANCE = 0.03
"""Share by which the lowest rate that failed may be above the capacity found."""
_SAMPLE = 1000
"""Requests, the first of the trace, that objectives are taken from."""

_SHARES = re.compile(r"(static:|split=)([^+]*)")

Handicap = Callable[[Deployment], Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One question: what is held here?

    Attributes:
        model: a name of `DIMENSIONS`.
        gpu: a name of `GPUS`.
        trace: a name of `TRACES`, or what ``smpart bench --trace`` takes.
        objective: one of `OBJECTIVES`.
    """

    model: str
    gpu: str
    trace: str
    objective: str

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.model} on {self.gpu}, {self.trace}, {self.objective}"

    def source(self) -> str:
        """The trace, as ``smpart bench --trace`` takes it. Raises `UsageError` for one of `TRACES` that is absent."""
        return str(data_file(TRACES[self.trace])) if self.trace in TRACES else self.trace


class Study:
    """A cell, ready to be asked.

    Args:
        requests: of one replay.
        windows: of the trace, each that long: seeds 0, 1, ...
        contention: what the simulated slowdowns beside a neighbour are multiplied by.
        handicap: makes the predictor that policies plan with from the deployment; None: its own.
        predicts: the profile that the predictor starts from, as ``smpart bench --profile`` takes it.

    Raises:
        UsageError: there is no such trace.
        BackendUnavailable: the measurements that price the GPU are not installed.
    """

    def __init__(
        self,
        cell: Cell,
        requests: int,
        windows: int = 1,
        contention: float = 1.0,
        handicap: Handicap | None = None,
        predicts: str = "none",
    ) -> None:
        self.cell, self.windows = cell, windows
        self._source = TraceOptions(cell.source(), limit=requests, clip=True)
        made = Deployment.open(
            cell.model, backend=f"sim:{cell.gpu}{_worse(contention)}", dtype="bfloat16", profile=predicts
        )
        self.deployment = made if handicap is None else replace(made, predictor=handicap(made))
        self.slo, self.guess = self._demands()

    def at(self, policy: str, rate: float, seed: int = 0, best_effort: float = 0.0) -> Run:
        """One replay, such a share of its requests best effort."""
        return self._bench(policy, rate, best_effort).run(Task(self.spec(policy), rate, seed))

    def capacity(self, policy: str, guess: float | None = None, least: float | None = None) -> Run:
        """The search for a policy's capacity: the run at it, with ``capacity_rps`` and ``trials`` in its record.

        Args:
            guess: a rate that should be near, such as another policy's capacity.
            least: lower rates are not tried: who holds less is found to hold nothing.
        """
        bench = self._bench(policy, guess or self.guess)
        care = Care(_TOLERANCE, 1.2 if guess else 2.0, least or self.guess / 40)
        (found,) = at_capacity(bench, Alone(bench, _silent), _silent, care)
        return found

    def spec(self, policy: str) -> str:
        """A policy as it is run: shares in percent (``static:75/25``, ``smpart:split=75/25``) become a split."""
        return _SHARES.sub(lambda found: f"{found[1]}{self.nearest(shares(found[2]))}", policy)

    def nearest(self, wanted: float) -> Split:
        """The split of this GPU whose prefill side is nearest to a share."""
        proper = [split for split in self.deployment.lanes.splits() if not split.exclusive]
        return min(proper, key=lambda split: abs(split.prefill / split.total - wanted))

    def _bench(self, policy: str, rate: float, best_effort: float = 0.0) -> Bench:
        spec = self.spec(policy)
        options = Options(
            (spec,),
            self._source,
            self.slo,
            (rate,),
            repeat=self.windows,
            jobs=1,
            best_effort=best_effort,
        )
        return Bench(self.deployment, options, _silent, unwatched)

    def _demands(self) -> tuple[SLO, float]:
        """The objectives, and half the rate that the whole GPU could serve if nobody were in a hurry."""
        load = open_load(replace(self._source, limit=_SAMPLE), self.deployment.max_len, _SAMPLE)
        cost, units = SiliconCost(DIMENSIONS[self.cell.model], self.cell.gpu), GPUS[self.cell.gpu].sms
        guess = 0.5 * Typical.of(load).rate(cost, units)
        prompts, outputs = _lengths(load)

        def alone_ms(shape: Shape) -> float:
            return 1e3 * cost(shape, units, Shape(), 0)

        long, mean = (int(x) for x in (np.percentile(prompts, 99), prompts.mean()))
        step = alone_ms(Shape.decode(_BATCH, _BATCH * int(mean + outputs.mean() / 2)))
        prefill = alone_ms(Shape.prefill([(long, 0)]))
        times_prefill, times_step = _FACTORS[self.cell.objective]
        ttft, tpot = max(200.0, times_prefill * prefill), times_step * step or 50.0
        return SLO(ttft_ms=_round(ttft), tpot_ms=_round(tpot)), _round(guess)


def shares(text: str) -> float:
    """The first of two shares of the units, which are given in percent.

    Raises `UsageError` if they do not make 100.

    >>> shares("75/25")
    0.75
    """
    if not (found := re.fullmatch(r"(\d+)/(\d+)", text)) or int(found[1]) + int(found[2]) != 100:
        raise UsageError(f"policy static:{text}: give shares in percent that make 100, as in static:75/25")
    return int(found[1]) / 100


def profiled(model: str, gpu: str, folder: Path, contention: float, minutes: int) -> str:
    """A profile of a model on a simulated GPU, measured in virtual time if `folder` has none yet; for `Study`.

    What policies predict from is then what `smpart profile` would have measured, not what a cold start guesses: a
    replay of a few hundred requests lasts seconds.
    """
    place = folder / f"{model}-{gpu}{_worse(contention)}-{minutes}min"
    if not (place / NAME).is_file():
        options = profile.Options(model, place, minutes, f"sim:{gpu}{_worse(contention)}", "bfloat16")
        profile.measure(
            options, Doubt, lambda made: fit_folder(made, published={}, install=False).report, _silent, _unshown
        )
    return str(place)


def _worse(contention: float) -> str:
    return "" if contention == 1.0 else f"~{contention:g}"


@contextmanager
def _unshown(title: str, total_s: float) -> Iterator[Callable[[float, str], None]]:
    yield lambda gone_s, detail: None


def _lengths(load: Load) -> tuple[Any, Any]:
    arrivals = load.arrivals
    return np.array([a.prompt_tokens for a in arrivals]), np.array([a.output_tokens for a in arrivals])


def _round(value: float) -> float:
    return float(f"{value:.3g}")


def _silent(line: str) -> None:
    pass


def geometric(ratios: Sequence[float]) -> float | None:
    """Geometric mean of the ratios that are finite and positive; None if there are none.

    >>> geometric([1.0, 4.0, float("inf")])
    2.0
    """
    usable = [ratio for ratio in ratios if 0.0 < ratio < float("inf")]
    return round(float(np.exp(np.mean(np.log(usable)))), 3) if usable else None
