"""Scripts of many questions: what was answered stays answered, and only that."""

from __future__ import annotations

import argparse
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from toy_question import Toy

import smpart
from smpart.bench import questions
from smpart.bench.questions import inquiry, parser, size
from smpart.bench.study import Cell

SCRIPT = """
import sys
from pathlib import Path
from smpart.bench.questions import inquiry, parser
from toy_question import Toy

if __name__ == "__main__":
    with inquiry(parser("", "toy", jobs="squares", quick="").parse_args(), "toy") as survey:
        survey.ask([Toy(number=2), Toy(number=3), Toy(number=13)])
"""


@contextmanager
def thread(count: int) -> Iterator[Executor]:
    """In place of processes, each of which would import half the world."""
    with ThreadPoolExecutor(count) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "processes", thread)


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    words = ["--out", str(tmp_path / "new" / "toy.json"), "--profiles", str(tmp_path / "profiles"), "--jobs", "1"]
    made = parser("", "toy", jobs="squares", quick="fewer").parse_args(words)
    size(made, 80)
    return made


def asked(options: argparse.Namespace) -> list[str]:
    """Numbers whose answers somebody worked out."""
    path = options.profiles / "asked"
    return path.read_text().split() if path.exists() else []


def kept(options: argparse.Namespace) -> Any:
    return json.loads(options.out.read_text())


def test_answers_come_in_order_and_are_not_asked_twice(options: argparse.Namespace) -> None:
    with inquiry(options, "toy") as survey:
        (first,) = survey.ask([Toy(number=3)])
    with inquiry(options, "toy") as survey:
        assert survey.ask([Toy(number=2), Toy(number=3)]) == [{"square": 4, "pair": [1, 2]}, first]
        assert survey.known([Toy(number=5), Toy(number=3)]) == [first]
        survey.finish({"summary": 13}, lambda path: path.write_text("picture"))  # type: ignore[arg-type, return-value]
    assert asked(options) == ["3", "2"] and options.out.with_suffix(".png").read_text() == "picture"
    results = kept(options)
    assert results["summary"] == 13 and results["seed"] == 0 and results["command"] == "toy"
    assert results["options"]["requests"] == 300 and {"command", "smpart", "name", "revision"} <= set(results["host"])
    assert [entry["answer"]["square"] for entry in results["answers"]] == [9, 4]
    assert all(entry["where"]["command"] == results["host"]["command"] for entry in results["answers"])


def test_other_options_are_another_question(options: argparse.Namespace) -> None:
    for each in (Toy(number=2), Toy(number=2, requests=80), Toy(number=2, windows=3), Toy(number=2, contention=1.3)):
        with inquiry(options, "toy") as survey:
            assert survey.known([each]) == []
            survey.ask([each])
    assert len(kept(options)["answers"]) == 4 and asked(options) == ["2"] * 4


def test_what_was_answered_outlives_a_kill_and_an_error(options: argparse.Namespace, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = [str(Path(smpart.__file__).parents[1]), str(Path(sys.modules["toy_question"].__file__ or "").parent)]
    words = ["--out", str(options.out), "--profiles", str(options.profiles), "--jobs", "1"]
    command, env = [sys.executable, str(script), *words], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, env=env, text=True) as run:
        assert run.stderr is not None
        missing = {"2 squared is 4", "3 squared is 9"}  # in either order: what is told was saved before
        while missing:
            line = run.stderr.readline()
            assert line
            missing = {words for words in missing if words not in line}
        run.send_signal(signal.SIGKILL)
    with pytest.raises(SystemExit) as ended, inquiry(options, "toy") as survey:
        survey.ask([Toy(number=2), Toy(number=3), Toy(number=4), Toy(number=0)])
    assert ended.value.code == 1 and sorted(asked(options)) == ["2", "3", "4"]
    assert {entry["question"]["number"] for entry in kept(options)["answers"]} == {2, 3, 4}


def test_a_trace_that_is_absent_is_told_before_anything_is_profiled(
    options: argparse.Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SMPART_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as ended, inquiry(options, "toy") as survey:
        survey.ask([Toy(number=2), Toy(number=3, cell=Cell("model", "gpu", "azure-code", "tight"))])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "set SMPART_DATA" in said and "profile" not in said
    assert asked(options) == []


def test_json_is_the_last_line_of_stdout(options: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    options.json = True
    with inquiry(options, "toy") as survey:
        survey.ask([Toy(number=2)])
        survey.finish({"summary": 4}, lambda path: None)
        survey.show("for people")
    said = capsys.readouterr()
    assert json.loads(said.out) == kept(options) and "for people" in said.err and "2 squared is 4" in said.err


def test_a_picture_that_finds_the_disk_full_costs_no_result(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    options.json = True
    with pytest.raises(SystemExit) as ended, inquiry(options, "toy") as survey:
        survey.ask([Toy(number=2)])
        survey.finish({"summary": 4}, draw)
    said = capsys.readouterr()
    assert ended.value.code == 1 and json.loads(said.out) == kept(options)
    assert f"toy: {options.out.with_suffix('.png')} cannot be written" in said.err and "stdout" not in said.err


def test_what_is_said_wins_over_a_quick_look(options: argparse.Namespace) -> None:
    made = parser("", "toy", jobs="squares", quick="fewer", windows=3)
    for words, wanted in (
        ([], (300, 3)), (["--quick"], (80, 1)), (["--quick", "--requests", "12"], (12, 1)),
        (["--quick", "--windows", "2"], (80, 2)), (["--requests", "12"], (12, 3)),
    ):  # fmt: skip
        read = made.parse_args(words)
        scope = size(read, 80)
        assert (scope["requests"], scope["windows"]) == (read.requests, read.windows) == wanted
        assert "usual_windows" not in vars(read)


def test_too_few_requests_tell_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser("", "toy", jobs="squares", quick="").parse_args(["--requests", "9"])
    assert "too few to tell a capacity" in capsys.readouterr().err


_NOWHERE = '{"schema": 1, "command": "toy", "answers": [{"question": {}, "answer": {}, "where": []}]}'


@pytest.mark.parametrize(
    "text", [_NOWHERE, "{", "[]", '{"schema": 1, "command": "other", "answers": []}', '{"cells": []}']
)
def test_a_file_of_something_else_is_refused_and_stays(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    options.out.parent.mkdir()
    options.out.write_text(text)
    with pytest.raises(SystemExit) as ended, inquiry(options, "toy"):
        pass
    assert ended.value.code == 2 and "holds no results of toy" in capsys.readouterr().err
    assert options.out.read_text() == text


def test_one_script_at_a_time_writes_a_file(options: argparse.Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    with inquiry(options, "toy"), pytest.raises(SystemExit) as ended, inquiry(options, "toy"):
        pass
    assert ended.value.code == 2 and "another process is writing here" in capsys.readouterr().err


def test_counts_are_at_least_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser("", "toy", jobs="squares", quick="").parse_args(["--jobs", "0"])
    assert "at least 1" in capsys.readouterr().err
