"""Where a command's runs go: the table, the JSON line, and a folder with everything behind them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from smpart.bench import plots
from smpart.bench.console import Display
from smpart.bench.host import host
from smpart.bench.report import by_rate, document, pandas, table, write
from smpart.bench.run import Run
from smpart.bench.stdout import print_json
from smpart.errors import UsageError
from smpart.partition import Device


@dataclass(frozen=True, slots=True)
class Output:
    """How a command was asked to report.

    Attributes:
        command: its name.
        as_json: one JSON object as stdout's last line, the table to stderr.
        folder: for files; None writes none.
        config: everything that decided the runs, written beside them.
    """

    command: str
    as_json: bool
    folder: Path | None
    config: Mapping[str, object]
    display: Display

    def check(self) -> None:
        """Find out now, not after the runs, whether the results can be written.

        Raises:
            BackendUnavailable: a package that writing needs is missing.
            UsageError: the folder cannot be made or written to.
        """
        if self.folder is not None:
            plots.figure(1, [1], (1, 1))
            pandas()
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
            except OSError as error:
                raise UsageError(
                    f"--out {self.folder}: cannot be written ({error.strerror}); nothing was run"
                ) from None

    def report(self, runs: Sequence[Run], device: Device, gpus: int, title: str, **more: object) -> None:
        """Print and write what `runs` gave on devices of so many GPUs each; `more` goes into the JSON."""
        results = document(self.command, host(), [run.record for run in runs], **more)
        for rate, records in by_rate([run.record for run in runs]):
            self.display.tables.print(table(records, title if rate is None else f"{title}, {rate:g} req/s"))
        if self.as_json:  # before the files: a full disk costs them, not the results
            print_json(results)
        if self.folder is not None:
            paths = [
                *write(self.folder, results, runs, self.config),
                *self._pictures(self.folder, runs, device, gpus, title),
            ]
            self.display.say("written: " + ", ".join(map(str, paths)))

    def _pictures(self, folder: Path, runs: Sequence[Run], device: Device, gpus: int, title: str) -> list[Path]:
        paths = [folder / name for name in ("lanes.png", "goodput.png", "latencies.png", "shares.png")]
        units = "core" if device.kind == "cpu" else "SM"
        plots.lanes(contrast(runs), device.units, units, paths[0], title, gpus)
        plots.goodput(runs, paths[1], title)
        plots.latencies(runs, paths[2], title)
        plots.shares(contrast(runs), device.units, units, paths[3], title, gpus)
        return paths


def contrast(runs: Sequence[Run]) -> list[Run]:
    """The runs worth seeing one above the other: the first of chunked and of smpart, else the first of each policy."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.policy.partition(":")[0], run)
    return [first["chunked"], first["smpart"]] if {"chunked", "smpart"} <= first.keys() else list(first.values())
