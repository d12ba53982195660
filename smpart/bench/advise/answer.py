"""Advice for people, for programs, and for other engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from rich.table import Table as View

from smpart.bench.advise.contenders import CHUNKED
from smpart.bench.advise.export import exports
from smpart.bench.advise.findings import Findings
from smpart.bench.advise.gain import MARGIN
from smpart.bench.advise.sglang import PdmuxConfig
from smpart.bench.advise.why import cautions, why
from smpart.bench.host import host


class Answer:
    """What is said of findings."""

    def __init__(self, found: Findings) -> None:
        self.found = found

    def record(self) -> dict[str, object]:
        """The JSON object of the command, but for what was exported."""
        found, question, gain = self.found, self.found.question, self.found.gain()
        config = PdmuxConfig.of(found)
        return {
            "schema": 1,
            "command": "advise",
            "host": host(),
            "model": question.model,
            "gpu": question.gpu,
            "units": found.units,
            "trace": question.source.trace,
            "slo": {"ttft_ms": question.slo.ttft_ms, "tpot_ms": question.slo.tpot_ms, "itl_ms": question.slo.itl_ms},
            "attainment": question.target,
            "verdict": found.verdict,
            "margin": MARGIN,
            "splits": [
                {"prefill": row.split.prefill, "decode": row.split.decode, "from_batch": row.batch}
                for row in found.table.rows
            ],
            "holds_to_batch": found.table.holds,
            "holds_at_contention": found.known_for,
            "split_forward_token_budget": config.budget if config else None,
            "gain": gain._asdict() if gain else dict.fromkeys(("low", "median", "high")),
            "gains": {name: won._asdict() if (won := found.gain(name)) else None for name in self._rivals()},
            "why": why(found),
            "cautions": cautions(found),
            "contenders": dict(found.names),
            "capacities": [
                {"contention": contention, **{name: list(rates) for name, rates in by_name.items()}}
                for contention, by_name in found.held.items()
            ],
            "seeds": list(question.seeds),
            "requests": question.source.limit,
            "runs": found.runs,
            "load": {
                "prompt_tokens": found.typical.prompt,
                "new_prompt_tokens": found.typical.fresh,
                "answer_tokens": found.typical.answer,
                "too_long_alone": found.hopeless,
            },
            "facts": {"chunked": found.one_lane.record(), "smpart": found.two_lanes.record()},
        }

    def table(self) -> View:
        """Capacities: one row a contender, one column a contention constant, means over seeds; and the gain."""
        found, question = self.found, self.found.question
        title = f"{question.model} on {question.gpu}, {Path(question.source.trace).name}: req/s held, by contention"
        view = View(title=title, title_justify="left", title_style="bold", header_style="bold")
        view.add_column("")
        for contention in found.held:
            view.add_column(f"x{contention:g}", justify="right")
        view.add_column(f"against {CHUNKED}", justify="right")
        for name, policy in found.names.items():
            rates = [f"{fmean(by_name[name]):.3g}" for by_name in found.held.values()]
            label = policy if len(policy) <= 24 else f"{name}, the table below"
            view.add_row(label, *rates, "" if name == CHUNKED else str(found.gain(name) or "-"))
        return view

    def lines(self) -> list[str]:
        """The table of splits, the verdict and why."""
        rows = [f"{row.split} from batch {row.batch}" for row in self.found.table.rows]
        far = f"TPOT holds up to batch {self.found.table.holds} at contention x{self.found.known_for:g}"
        splits = f"prefill/decode SMs: {', '.join(rows)}; {far}"
        none = "no split holds TPOT beside a prefill"
        but = [f"But {line}." for line in cautions(self.found)]
        return [splits if rows else none, self.headline(), why(self.found), *but]

    def headline(self) -> str:
        """The verdict and the gain."""
        gain = self.found.gain()
        return f"Advice: {self.found.verdict}; smpart against chunked {gain or 'without a ratio'}"

    def export(self, paths: Sequence[Path], say: Callable[[str], None]) -> dict[str, str | None]:
        """Write the files; by path None, or why it was not written."""
        done = exports(paths, self.found, self.record(), self.headline())
        for path, why_not in done.items():
            say(f"not written: {path}: {why_not}" if why_not else f"written: {path}")
        return done

    def _rivals(self) -> list[str]:
        return [name for name in self.found.names if name != CHUNKED]
