"""Advice in two sentences: what binds one lane, and what two lanes do about it."""

from __future__ import annotations

from smpart.bench.advise.contenders import CHUNKED, ORDER, PDMUX, SMPART
from smpart.bench.advise.facts import Facts
from smpart.bench.advise.findings import Findings
from smpart.bench.advise.gain import MARGIN


def why(found: Findings) -> str:
    """Two sentences, of measured facts only."""
    return f"{_one_lane(found)} {_two_lanes(found)}"


def _one_lane(found: Findings) -> str:
    facts = found.one_lane
    budget = facts.policy.partition(":")[2]
    way = f"At {facts.rate:.3g} req/s chunked prefill ({budget} tokens a step)"
    met = f"{way} meets every objective for {facts.met:.0%}"
    missed = facts.binding
    if missed is None:
        return f"{met} of the requests, but its queue grows."
    share = facts.misses[missed]
    if missed == "service":
        return f"{met} of the requests and leaves {share:.0%} unserved: their KV does not fit."
    return f"{met} of the requests, and {share:.0%} miss {missed}: {_cause(found, facts, missed)}."


def _cause(found: Findings, facts: Facts, missed: str) -> str:
    steps = ""
    if facts.hybrid_ms is not None and facts.plain_ms is not None:
        steps = f"a step with prompt tokens takes {facts.hybrid_ms:.3g} ms, one without {facts.plain_ms:.3g} ms"
    elif facts.hybrid_ms is not None:
        steps = f"a step with prompt tokens takes {facts.hybrid_ms:.3g} ms, and there is hardly one without"
    if missed == "TTFT":
        if found.hopeless > 0.5 * (1.0 - found.question.target):
            return f"{found.hopeless:.0%} are too long even alone on the idle GPU, and the others have little to spare"
        prompts = f"prompts of {found.typical.prompt} tokens queue for the room beside {facts.batch:.0f} decodes"
        return f"{prompts}; {steps}" if steps else prompts
    more = f", those with are {facts.hybrid_share:.0%} of the time" if facts.plain_ms is not None else ""
    return f"{steps or 'steps take too long'}{more}, and {facts.batch:.0f} decode in each"


def _two_lanes(found: Findings) -> str:
    low, high = found.spans(SMPART)
    rates = f"{low:.3g} req/s" if low == high else f"{low:.3g} to {high:.3g} req/s"
    won = found.gain()
    against = f"{won} of chunked's {_mean(found.base):.3g}" if won else "where chunked holds no rate at all"
    if found.split:
        return f"{_shares(found)}, so that smpart holds {rates}, {against}."
    if found.ordered:
        least, most = found.spans(ORDER)
        one = f"{least:.3g} req/s" if least == most else f"{least:.3g} to {most:.3g} req/s"
        return f"smpart holds {rates}, {against}, but so does its order of prompts in one lane, {one}, without a split."
    if won is None:
        return f"Two lanes hold {rates}, {against}, but not at every contention constant and seed."
    if won.high <= 1.0 + MARGIN:
        reason = "both lanes share one memory bandwidth, and a hybrid step reads the weights once for both phases"
        return f"Two lanes hold {rates}, {against}: {reason}."
    rest = f"from {won.low:.2f}x to {won.high:.2f}x, and only more than {1 + MARGIN:.2f}x throughout counts as a gain"
    return f"Two lanes hold {rates}: how much a neighbour costs decides, {rest}."


def _shares(found: Findings) -> str:
    rows, holds = found.table.rows, found.table.holds
    if not rows:
        return "On two lanes prefill runs on between decode steps, and no step waits for a chunk"
    first, last = rows[0].split.decode, rows[-1].split.decode
    units = f"{first}" if first == last else f"{first} to {last}"
    return (
        f"Beside a prefill a decode step holds TPOT on {units} of {found.units} SMs, up to a batch of {holds}, and "
        "prefill has the others without a chunk's detour"
    )


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values)


_STEADY = 5.0
"""Requests for each that decodes at a time below which a run is mostly its beginning and its end."""


def cautions(found: Findings) -> list[str]:
    """What the advice leaves out."""
    said = []
    if (by_table := found.gain(PDMUX)) is not None:
        said.append(
            f"under SGLang's rule the exported table holds {by_table} of {CHUNKED}'s capacity: that rule knows no "
            "objective, chunks no prompt and keeps a split until the prefill ends"
        )
    said_so = found.split or found.ordered
    if not said_so and (order := found.gain(ORDER)) is not None and order.low > 1.0 + MARGIN:
        said.append(f"one lane that serves prompts by deadline ({ORDER}) holds {order} of {CHUNKED}'s, without a split")
    requests, batch = found.question.source.limit, found.one_lane.batch
    if requests is not None and requests < _STEADY * batch:
        said.append(f"{requests} requests are few where {batch:.0f} decode at a time: raise --limit")
    return said
