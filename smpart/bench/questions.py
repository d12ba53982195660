"""Scripts that put many questions to simulated GPUs: their options, their processes, and the answers as they come.

A question holds every option that its answer depends on, and the file of ``--out`` holds each answer under its
question. So a script that was ended goes on where it was, and what is asked with other options is another question.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from smpart.bench.bench import FEWEST
from smpart.bench.console import Display
from smpart.bench.host import host
from smpart.bench.plots import figure
from smpart.bench.pool import as_done, processes
from smpart.bench.stdout import print_json, stdout
from smpart.bench.study import Cell, Handicap, Study, profiled
from smpart.durable import lock, make_folder, write_whole
from smpart.errors import SmpartError, UsageError

Answer = dict[str, Any]
"""Ready for JSON."""

MINUTES, QUICK_MINUTES = 10, 2
"""Virtual ones that profiles are measured for. In 2 a model of 70 billion weights runs too few forwards."""

_REQUESTS = 300
_SCHEMA = 1
_WIDE = 160
"""Columns that tables may have where there is no terminal that tells."""
_ENTRY = ("question", "answer", "where")
_WHERE = ("name", "revision", "command")
"""What is kept with each answer of the host's facts: a file may hold answers of several commands."""


@dataclass(frozen=True, kw_only=True)
class Question(ABC):
    """What is asked about a cell. Scripts add fields of their own; every one of them is part of the question.

    Attributes:
        requests, windows, contention: as `Study` takes them.
        minutes: of the profile that policies predict from.
    """

    cell: Cell
    requests: int
    windows: int = 1
    contention: float = 1.0
    minutes: int = MINUTES

    @abstractmethod
    def answer(self, profiles: Path) -> Answer:
        """Find out, with the profiles of a folder; called in a process of its own."""

    @abstractmethod
    def line(self, answer: Answer) -> str:
        """The answer for a person, in a line."""

    def profile(self, profiles: Path) -> str:
        """What policies predict from, made if it is missing."""
        return profiled(self.cell.model, self.cell.gpu, profiles, self.contention, self.minutes)

    def study(self, profiles: Path, handicap: Handicap | None = None) -> Study:
        """The cell, ready to be asked."""
        return Study(self.cell, self.requests, self.windows, self.contention, handicap, self.profile(profiles))

    @property
    def key(self) -> str:
        """The whole question, as one text."""
        return json.dumps(self.record(), sort_keys=True)

    def record(self) -> dict[str, Any]:
        """The whole question, for JSON."""
        return {"asks": type(self).__name__, **asdict(self)}


def parser(doc: str | None, name: str, *, jobs: str, quick: str, windows: int = 1) -> argparse.ArgumentParser:
    """The options that all such scripts have.

    Args:
        doc: of the script.
        name: of its results.
        jobs: what is done at a time.
        quick: what a quick look is at.
        windows: of the trace, if not said otherwise.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--out", type=Path, default=Path(f"out/{name}.json"), help="goes on with what is there; a .png beside it"
    )
    made.add_argument("--profiles", type=Path, default=Path("out/profiles"), help="made there if they are missing")
    made.add_argument("--jobs", type=count, default=2, help=f"{jobs} at a time")
    made.add_argument("--requests", type=several, help=f"requests of one replay: {_REQUESTS}, at least {FEWEST}")
    made.add_argument("--windows", type=count, help=f"windows of the trace that each rate is tried on: {windows}")
    made.add_argument("--quick", action="store_true", help=f"{quick}, unless said otherwise")
    made.set_defaults(usual_windows=windows)
    made.add_argument("--json", action="store_true", help="print one JSON object as stdout's last line")
    return made


def size(asked: argparse.Namespace, quick_requests: int) -> dict[str, int]:
    """`Question.requests`, `windows` and `minutes` as asked for; a quick look has one window of so many requests, if
    not said otherwise. What was not said is filled in, for the record."""
    usual_windows = vars(asked).pop("usual_windows")
    asked.requests = asked.requests or (quick_requests if asked.quick else _REQUESTS)
    asked.windows = asked.windows or (1 if asked.quick else usual_windows)
    minutes = QUICK_MINUTES if asked.quick else MINUTES
    return {"requests": asked.requests, "windows": asked.windows, "minutes": minutes}


def count(text: str) -> int:
    """A whole number of at least 1, for `argparse`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number of at least 1")
    return int(text)


def several(text: str) -> int:
    """A whole number of at least `FEWEST`, for `argparse`."""
    if count(text) < FEWEST:
        raise argparse.ArgumentTypeError(f"{text} requests are too few to tell a capacity by: at least {FEWEST}")
    return int(text)


class Inquiry:
    """One run of a script, see `inquiry`.

    Args:
        options: as `parser` read them.
        name: of the script.
        pool: where questions are answered.
    """

    def __init__(self, options: argparse.Namespace, name: str, pool: Executor) -> None:
        self._out, self._profiles, self._as_json = Path(options.out), Path(options.profiles), bool(options.json)
        self._asked = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
        self._name, self._pool, self._host = name, pool, host()
        self._display = Display(as_json=self._as_json)
        self._display.tables.width = max(self._display.tables.width, _WIDE)
        self._answers = _read(self._out, name)
        others = {entry["where"]["revision"] for entry in self._answers.values()} - {self._host["revision"]}
        if others:
            self.say(f"{self._out} holds answers of other revisions ({', '.join(map(str, others))}), which are kept")

    def say(self, line: str) -> None:
        """A line on how far it is."""
        self._display.say(line)

    def show(self, result: Any) -> None:
        """A result for people: text, or a table of `rich`."""
        self._display.tables.print(result, markup=False)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in the order of the questions; those that are not known yet are found, saved and told."""
        todo = [question for question in questions if question.key not in self._answers]
        for cell in {question.cell for question in todo}:
            cell.source()  # profiles take minutes: what is absent is told before
        # Each place is profiled before anybody needs it.
        places = {(q.cell.model, q.cell.gpu, q.contention, q.minutes): q for q in todo}
        for _, profile in as_done(self._pool, partial(_profile, profiles=self._profiles), places.values()):
            self.say(f"profile: {profile}")
        for question, answer in as_done(self._pool, partial(_answer, profiles=self._profiles), todo):
            where = {key: self._host[key] for key in _WHERE}
            self._answers[question.key] = {"question": question.record(), "answer": answer, "where": where}
            self._save({})
            self.say(question.line(answer))
        return [self._answers[question.key]["answer"] for question in questions]

    def known(self, questions: Iterable[Question]) -> list[Answer]:
        """The answers to those of the questions that were asked, now or before."""
        return [self._answers[question.key]["answer"] for question in questions if question.key in self._answers]

    def finish(self, results: dict[str, Any], draw: Callable[[Path], None]) -> None:
        """Write what came of it all, and its picture beside it; with ``--json`` print it."""
        if self._as_json:
            print_json(self._whole(results))
        self._save(results)
        draw(self._out.with_suffix(".png"))
        self.say(f"written: {self._out}, {self._out.with_suffix('.png')}")

    def _save(self, results: dict[str, Any]) -> None:
        write_whole(self._out, json.dumps(self._whole(results), indent=1).encode() + b"\n")

    def _whole(self, results: dict[str, Any]) -> dict[str, Any]:
        return {
            "schema": _SCHEMA,
            "command": self._name,
            "host": self._host,
            "options": self._asked,
            "seed": 0,  # of the first window; the next ones have 1, 2, ...
            **results,
            "answers": list(self._answers.values()),
        }


@contextmanager
def inquiry(options: argparse.Namespace, name: str) -> Iterator[Inquiry]:
    """Open the answers in ``--out`` and the processes that find more. Ends the script in a line where that fails."""
    try:
        with stdout(name), _opened(options) as pool:
            yield Inquiry(options, name, pool)
    except SmpartError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UsageError) else 1) from None
    except KeyboardInterrupt:
        print(f"{name}: interrupted; run it again to go on", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def _opened(options: argparse.Namespace) -> Iterator[Executor]:
    figure(1, [1.0], (1.0, 1.0))  # not after hours: there may be no matplotlib
    try:
        make_folder(options.out.parent)
        descriptor = lock(options.out.with_name(f".{options.out.name}.lock"), options.out)
    except OSError as error:
        raise UsageError(f"--out {options.out}: cannot be written ({error.strerror}); nothing was run") from None
    try:
        with processes(options.jobs) as pool:
            yield pool
    finally:
        os.close(descriptor)


def _read(path: Path, name: str) -> dict[str, dict[str, Any]]:
    """Answers by the keys of their questions; none if there is no file."""
    try:
        kept = json.loads(path.read_bytes())
        if (kept["schema"], kept["command"]) != (_SCHEMA, name):
            raise ValueError
        if any(not entry["where"].keys() >= set(_WHERE) for entry in kept["answers"]):
            raise ValueError
        return {
            json.dumps(entry["question"], sort_keys=True): {key: entry[key] for key in _ENTRY}
            for entry in kept["answers"]
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UsageError(f"--out {path}: holds no results of {name} to go on with; name another file") from None


def _profile(question: Question, profiles: Path) -> str:
    from joblib import parallel_config  # type: ignore[import-untyped]

    with parallel_config(backend="sequential"):  # this is one of several processes; it begins no others
        return question.profile(profiles)


def _answer(question: Question, profiles: Path) -> Answer:
    """As it reads back from JSON, so that an answer is the same whether it was just found or kept."""
    answer: Answer = json.loads(json.dumps(question.answer(profiles)))
    return answer
