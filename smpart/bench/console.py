"""What a person at a terminal sees while a command runs. Everything goes to stderr; stdout is for results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

from smpart.bench.bench import Watch
from smpart.bench.replay import Status

_REFRESH_S = 0.1
_LINE_S = 30.0
"""Between two lines of log about the same thing, where there is no live line."""


class Display:
    """Log lines, and a live line for each replay where stderr is a terminal.

    Args:
        as_json: stdout is for one line of JSON, and nothing moves.

    Attributes:
        console: stderr.
        tables: where results for people go.
    """

    def __init__(self, *, as_json: bool) -> None:
        self.console = Console(stderr=True, highlight=False)
        self.tables = self.console if as_json else Console()
        self._live = not as_json and self.console.is_terminal

    def say(self, line: str) -> None:
        """One line of log."""
        self.console.print(line, markup=False, soft_wrap=True)

    @contextmanager
    def watch(self, title: str) -> Iterator[Watch]:
        """A display for one replay; gives the function that a replay calls with its status."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self._live) as progress:
            task = progress.add_task(title, total=None, detail="")
            shown = 0.0

            def update(status: Status) -> None:
                nonlocal shown
                if self._live and monotonic() - shown > _REFRESH_S:
                    shown = monotonic()
                    detail = f"{status.seconds:.1f} s, {status.arrived - status.ended} in the system"
                    progress.update(task, total=status.total, completed=status.ended, detail=detail)

            yield update

    @contextmanager
    def budget(self, title: str, total_s: float) -> Iterator[Callable[[float, str], None]]:
        """A display for what goes on for a given time; gives the function to call with the seconds gone, and a line."""
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}", markup=False),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self._live) as progress:
            task = progress.add_task(title, total=total_s, detail="")
            said = monotonic()

            def update(gone_s: float, detail: str) -> None:
                nonlocal said
                progress.update(task, completed=min(gone_s, total_s), detail=detail)
                if not self._live and monotonic() - said > _LINE_S:
                    said = monotonic()
                    self.say(f"{title}: {detail}")

            yield update
