"""A question that no GPU is simulated for. Those who answer it leave a line in a file."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from smpart.bench.questions import Answer, Question
from smpart.bench.study import Cell
from smpart.errors import SmpartError

CELL = Cell("model", "gpu", "trace", "tight")


@dataclass(frozen=True, kw_only=True)
class Toy(Question):
    """The square of a number; 0 fails, and 13 takes for ever."""

    cell: Cell = CELL
    requests: int = 300
    number: int

    def profile(self, profiles: Path) -> str:
        return "none"

    def answer(self, profiles: Path) -> Answer:
        if not self.number:
            raise SmpartError("no square of nothing")
        if self.number == 13:
            threading.Event().wait()
        profiles.mkdir(exist_ok=True)
        with (profiles / "asked").open("a") as file:
            file.write(f"{self.number}\n")
        return {"square": self.number**2, "pair": (1, 2)}

    def line(self, answer: Answer) -> str:
        return f"{self.number} squared is {answer['square']}"
