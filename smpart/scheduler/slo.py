"""Service-level objectives."""

from __future__ import annotations

from dataclasses import dataclass

from smpart.errors import UsageError, is_number


@dataclass(frozen=True, slots=True)
class SLO:
    """What a reader is promised. All in milliseconds.

    Attributes:
        ttft_ms: arrival to first token, queueing included.
        tpot_ms: (last token - first token) / (output tokens - 1).
        itl_ms: the longest gap between two tokens; by default twice `tpot_ms`.

    >>> SLO(ttft_ms=200, tpot_ms=50).itl_ms
    100.0
    """

    ttft_ms: float = 200.0
    tpot_ms: float = 50.0
    itl_ms: float = 0.0

    def __post_init__(self) -> None:
        if self.itl_ms == 0.0:
            object.__setattr__(self, "itl_ms", 2.0 * self.tpot_ms)
        for name in ("ttft_ms", "tpot_ms", "itl_ms"):
            value = getattr(self, name)
            if not is_number(value) or value <= 0:
                raise UsageError(f"SLO {name}={value!r}: must be a positive number of milliseconds")

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Read ``ttft=200,tpot=50[,itl=100]``. Raises `UsageError`."""
        values: dict[str, float] = {}
        for part in text.split(","):
            key, equals, value = part.partition("=")
            if not equals or key.strip() not in ("ttft", "tpot", "itl"):
                raise UsageError(f"SLO {text!r}: write ttft=MS,tpot=MS[,itl=MS]")
            if key.strip() + "_ms" in values:
                raise UsageError(f"SLO {text!r}: {key.strip()} is given twice")
            try:
                values[key.strip() + "_ms"] = float(value)
            except ValueError:
                raise UsageError(f"SLO {text!r}: {value!r} is not a number of milliseconds") from None
        return cls(**values)
