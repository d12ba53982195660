"""SGLang's PD multiplexing configuration, as ``--pdmux-config-path`` reads it.

Source: sglang `python/sglang/srt/multiplex/pdmux_context.py` (`load_pdmux_config`, `get_arch_constraints`),
`multiplexing_mixin.py` (`adjust_stream_groups`) and `docs/advanced_features/pd_multiplexing.md`: two groups more than
rows; a row is SMs of prefill, SMs of decode (all SMs together) and the decode batch from which it counts, of all rows
reached the last; a batch below the first threshold is left undefined.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from smpart.bench.advise.findings import Findings
from smpart.bench.advise.table import Row

_CONSTRAINTS = {8: (4, 2), 9: (8, 8)}
"""Fewest SMs of a side and the step of prefill's, by compute capability: those of our GPUs that SGLang splits."""


@dataclass(frozen=True, slots=True)
class PdmuxConfig:
    """Attributes:
    rows: manual divisions.
    budget: prompt tokens times layers of a group (`split_forward_token_budget`).
    """

    rows: tuple[Row, ...]
    budget: int

    @classmethod
    def of(cls, found: Findings) -> Self | None:
        """That of a table; None where there is none, or SGLang does not split the GPU."""
        if found.prefill_s is None or found.capability[0] not in _CONSTRAINTS:
            return None
        least, step = _CONSTRAINTS[found.capability[0]]
        for split, _ in found.table.rows:
            assert split.prefill % step == 0 and min(split.prefill, split.decode) >= least, split
        return cls(
            found.table.rows,
            token_budget(found.typical.fresh, found.layers, found.prefill_s, found.question.slo.tpot_ms / 1e3),
        )

    @property
    def groups(self) -> int:
        """`sm_group_num`: a group a row, one of all SMs for prefill, one of all for decode."""
        return len(self.rows) + 2

    def text(self, comments: Sequence[str]) -> str:
        """The file, comments first."""
        lines = [f"# {line}" for line in comments]
        lines += [
            "# python -m sglang.launch_server ... --enable-pdmux --pdmux-config-path THIS_FILE \\",
            f"#   --sm-group-num {self.groups} --disable-overlap-schedule --chunked-prefill-size -1",
            f"sm_group_num: {self.groups}",
            "manual_divisions:  # [SMs of prefill, SMs of decode, from this decode batch on]",
        ]
        lines += [f"  - [{row.split.prefill}, {row.split.decode}, {row.batch}]" for row in self.rows]
        lines.append(f"split_forward_token_budget: {self.budget}")
        return "\n".join(lines) + "\n"


def token_budget(tokens: int, layers: int, prefill_s: float, limit_s: float) -> int:
    """Prompt tokens times layers that SGLang launches beside each decode step.

    The layers of a typical prefill that last as long as the longest decode step may, rounded up: with fewer the prefill
    lane would wait for the loop; more would only lie queued, and be launched ahead of the next step.

    Args:
        tokens: new tokens of the prefill, which takes `prefill_s` over `layers` layers.
        limit_s: the TPOT objective.

    >>> token_budget(2048, 32, 0.080, 0.050)           # 20 layers of 2.5 ms
    40960
    """
    return tokens * max(1, math.ceil(layers * limit_s / prefill_s - 1e-9))
