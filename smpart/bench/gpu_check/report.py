"""The report as a table for people: each stage, then what was to be reached and what was."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from smpart.bench.gpu_check.plan import STAGES
from smpart.bench.gpu_check.record import Figures

Stages = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Target:
    """A figure to reach.

    Attributes:
        found: reads it from the stages; raises LookupError, TypeError or ValueError where it was not measured.
        met: whether it is reached.
    """

    what: str
    goal: str
    found: Callable[[Stages], Any]
    met: Callable[[Any], bool]


def _ratio(part: str, of: str) -> Callable[[Stages], tuple[int, int]]:
    def read(stages: Stages) -> tuple[int, int]:
        doctor = stages["doctor"]
        return int(doctor[part]), int(doctor[of])

    return read


def _fp32(stages: Stages) -> tuple[int, int]:
    runs = stages["tokens"]["fp32"]
    return sum(run["equal"] for run in runs), sum(run["requests"] for run in runs)


def _conformance(stages: Stages) -> tuple[int, int]:
    stage = stages["conformance"]
    return stage["passed"], stage["passed"] + len(stage["failed"]) + stage["skipped"]


def _all(found: tuple[int, int]) -> bool:
    return found[0] == found[1] > 0


TARGETS = (
    Target("splits proved disjoint and as large as promised", "all", _ratio("proved", "of"), _all),
    Target("conformance checks passed on green", "all", _conformance, _all),
    Target("answers equal to generate, fp32", "all", _fp32, _all),
    Target(
        "bf16: most below the likeliest, over plain forward's noise",
        "<= 2",
        lambda s: _over(s["tokens"]["bf16"], "most_below_likeliest", "noise_of_plain_forward"),
        lambda ratio: ratio <= 2,
    ),
    Target(
        "bytes copied on the device at the hand-off",
        "0",
        lambda s: s["profile"]["handoff_copied_bytes"]["DtoD"],
        lambda copied: copied == 0,
    ),
    Target(
        "host waits in the steady state",
        "none",
        lambda s: _waits(s["profile"]["profiled_steady"]),
        lambda waits: waits == 0,
    ),
    Target("switch, host (us)", "<= 4.1 (Bullet)", lambda s: s["switch"]["switch_host_us"], lambda us: us <= 4.1),
    Target("switch, device (us)", "<= 4.1 (Bullet)", lambda s: s["switch"]["switch_device_us"], lambda us: us <= 4.1),
    Target(
        "decode bubble, steady state",
        "<= 1.5 %",
        lambda s: s["profile"]["steady"]["bubble"],
        lambda part: part <= 0.015,
    ),
    Target(
        "decode bubble, smpart on the bursty load",
        "<= 1.5 %",
        lambda s: s["serving"]["side_by_side"]["bubble"]["smpart"]["decode"],
        lambda part: part <= 0.015,
    ),
    Target(
        "graphs' memory of the device's",
        "<= 6.2 % (MuxWise)",
        lambda s: s["graphs"]["graphs_share"],
        lambda p: p <= 0.062,
    ),
)


def targets(stages: Stages) -> list[Figures]:
    """Each target: what was found, and whether it is met; None where it was not measured."""
    rows: list[Figures] = []
    for target in TARGETS:
        try:
            found = target.found(stages)
            met: bool | None = target.met(found)
        except (LookupError, TypeError, ValueError):
            found, met = None, None
        rows.append({"what": target.what, "goal": target.goal, "found": found, "met": met})
    return rows


def lines(report: Figures) -> list[str]:
    """The whole table."""
    stages: Any = report["stages"]
    device: Any = report.get("device", {})
    titles = {stage.name: stage.title for stage in STAGES}
    text = ["", f"gpu-check: {device.get('name', 'an unknown device')}, driver {report.get('driver')}", ""]
    for name, stage in stages.items():
        text.append(
            f"  {'ok' if stage['ok'] else 'NOT OK':7}{name:13}{stage['seconds']:6.1f} s  {titles.get(name, '')}"
        )
        text += [f"{'':22}  ! {stage['error'][:200]}"] if stage["error"] else []
        text += [f"{'':22}  {line}" for line in details(name, stage)]
    text += ["", f"  {'':7}{'found':>14}  {'to reach':20}what"]
    for row in targets(stages):
        word = {True: "met", False: "MISSED", None: "-"}[row["met"]]  # type: ignore[index]
        text.append(f"  {word:7}{_found(row['found']):>14}  {row['goal']!s:20}{row['what']}")
    return [*text, "", f"  {report['seconds']} s in all"]


def details(name: str, stage: Mapping[str, Any]) -> list[str]:
    """A stage's most telling figures. What was not measured is left out."""
    made: list[str] = []
    for line in _DETAILS.get(name, ()):
        try:
            made += line(stage)
        except (LookupError, TypeError, ValueError, AttributeError):
            continue
    return made


def _doctor(stage: Mapping[str, Any]) -> list[str]:
    across = f"{stage['disjoint_across_splits']} of {stage['disjoint_across_splits_if_nested']}"
    return [
        f"{stage['contexts']}",
        f"nested: prefill {stage['nested_prefill']}, decode {stage['nested_decode']}; disjoint across splits: {across}",
    ]


def _switch(stage: Mapping[str, Any]) -> list[str]:
    return [
        f"contexts: {stage['contexts']} in {stage['contexts_ms']} ms, {stage['contexts_mib']} MiB",
        f"launch: {_mid(stage['launch_same_us'])} us on the same split, {_mid(stage['launch_moved_us'])} on another; "
        f"the wait itself {_mid(stage['wait_event_us'])}",
        f"between kernels: {_mid(stage['gap_same_us'])} us on a stream, {_mid(stage['gap_moved_us'])} across a switch",
    ]


def _graphs(stage: Mapping[str, Any]) -> list[str]:
    made = [f"{stage['captured']} of {stage['asked']} captured, {stage['graphs_mib']} MiB"]
    for eager, replay in zip(stage["eager"], stage["replay"], strict=False):
        made.append(
            f"{eager['rows']:4} rows: eager {_mid(eager['step_ms'])} ms (launch {_mid(eager['launch_ms'])}), "
            f"replay {_mid(replay['step_ms'])} ms (launch {_mid(replay['launch_ms'])})"
        )
    return made


def _contention(stage: Mapping[str, Any]) -> list[str]:
    alone = {_key(row): row for row in stage["rows"] if not _beside(row)}
    made = [
        f"{'model':6}{'split':>8}  {'side':8}{'tokens':>7}{'rows':>5}{'alone ms':>10}{'beside ms':>11}{'slower':>8}"
    ]
    for row in stage["rows"]:
        solo = alone.get(_key(row))
        if _beside(row) and solo and row["seconds"]["median"] and solo["seconds"]["median"]:
            one, other = 1e3 * solo["seconds"]["median"], 1e3 * row["seconds"]["median"]
            made.append(
                f"{row['model']:6}{row['split']:>8}  {row['side']:8}{row['prefill_tokens']:7}{row['decode_batch']:5}"
                f"{one:10.3f}{other:11.3f}{other / one:8.2f}"
            )
    return made


def _gemm(stage: Mapping[str, Any]) -> list[str]:
    made: dict[str, list[str]] = {}
    for row in stage["rows"]:
        made.setdefault("x".join(map(str, row["mkn"])), []).append(f"{row['units']}:{row['carved_over_plain']:.2f}")
    return [f"carved / plain, {shape}: {'  '.join(cells)}" for shape, cells in made.items()]


def _serving(stage: Mapping[str, Any]) -> list[str]:
    made = []
    for name, by_policy in stage["side_by_side"].items():
        made += [f"{name:16}" + "   ".join(f"{policy} {_short(found)}" for policy, found in by_policy.items())]
    return made


def _tokens(stage: Mapping[str, Any]) -> list[str]:
    exact = (f"{r['policy']}: {r['equal']} of {r['requests']}, {r['splits_used']} splits" for r in stage["fp32"])
    return [f"fp32: {'; '.join(exact)}", f"bf16: {_short(stage['bf16'])}"]


def _conform(stage: Mapping[str, Any]) -> list[str]:
    return [f"{check}: {why[:150]}" for check, why in stage["failed"].items()]


def _profile(stage: Mapping[str, Any]) -> list[str]:
    steady, seen = stage["steady"], stage["profiled_steady"]
    return [
        f"attention: {stage['attention']}",
        f"step of {steady['rows']} rows {_mid(steady['step_ms'])} ms; bubble by the device's record "
        f"{seen['bubble_on_device']}; waits {seen['host_waits'] or 'none'}",
    ]


def _mps(stage: Mapping[str, Any]) -> list[str]:
    modes = {name: value for name, value in stage.items() if isinstance(value, dict)}
    return [f"{name}: {value.get('refused_here') or value.get('shares')}"[:200] for name, value in modes.items()]


def _sanitizer(stage: Mapping[str, Any]) -> list[str]:
    if "refused_here" in stage:
        return [str(stage["refused_here"])]
    return [f"{tool}: clean {stage[tool]['clean']}, {stage[tool]['status']}" for tool in ("memcheck", "racecheck")]


_DETAILS: dict[str, tuple[Callable[[Mapping[str, Any]], list[str]], ...]] = {
    "doctor": (_doctor,),
    "conformance": (_conform,),
    "tokens": (_tokens,),
    "switch": (_switch,),
    "graphs": (_graphs,),
    "contention": (_contention,),
    "gemm": (_gemm,),
    "serving": (_serving,),
    "profile": (_profile,),
    "mps": (_mps,),
    "sanitizer": (_sanitizer,),
}


def _waits(steady: Mapping[str, Any]) -> int:
    if not steady["works_on_device"]:
        raise ValueError("the profiler saw no device")
    return sum(steady["host_waits"].values())


def _short(found: Any) -> str:
    """A figure, or several under their names, in few digits."""
    if isinstance(found, Mapping):
        return ", ".join(f"{name} {_short(value)}" for name, value in found.items())
    return f"{found:.4g}" if isinstance(found, float) else str(found)


def _over(figures: Mapping[str, float], one: str, other: str) -> float:
    if not figures[other]:
        raise ValueError("no noise was seen")
    return round(figures[one] / figures[other], 3)


def _mid(sample: Mapping[str, Any]) -> Any:
    return sample["median"]


def _beside(row: Mapping[str, Any]) -> bool:
    return bool(row["neighbour_prefill_tokens"] or row["neighbour_decode_batch"])


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[n] for n in ("model", "split", "side", "prefill_tokens", "decode_batch", "decode_context"))


def _found(value: object) -> str:
    if value is None:
        return "not measured"
    return f"{value[0]} of {value[1]}" if isinstance(value, tuple) else _short(value)
