"""``smpart advise`` from the command line, on rooflines: fast, and no measurements needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from smpart import cli

ASKED = {"--model": "llama-3.1-8b", "--gpu": "h100-roofline", "--trace": "synth:code", "--slo": "ttft=400,tpot=30"}


def advise(*more: str, **changed: str) -> Result:
    options = {**ASKED, **{f"--{name}": value for name, value in changed.items()}}
    arguments = [part for option in options.items() for part in option]
    return CliRunner().invoke(cli.app, ["advise", *arguments, "--quick", "--jobs", "1", *more])


def test_advice_and_files(tmp_path: Path) -> None:
    sglang, plan = tmp_path / "sglang.yaml", tmp_path / "plan.json"
    result = advise("--limit", "12", "--json", "--export", str(sglang), "--export", str(plan))
    assert result.exit_code == 0, result.stderr
    printed: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    assert printed["schema"] == 1 and printed["command"] == "advise" and printed["host"]["cores"] >= 1
    assert printed["verdict"] in ("split", "do not split")
    gain = printed["gain"]
    assert gain["low"] <= gain["median"] <= gain["high"]
    (capacities,) = printed["capacities"]
    one_lane = max(capacities["chunked"][0], capacities["chunked+slack"][0])
    assert (printed["verdict"] == "split") == (capacities["smpart"][0] > (1.0 + printed["margin"]) * one_lane)
    assert capacities["contention"] == 1.0
    assert gain["low"] == pytest.approx(capacities["smpart"][0] / capacities["chunked"][0])
    assert printed["why"].count(". ") == 1
    assert printed["export"] == {str(sglang): None, str(plan): None}
    rows = [[row["prefill"], row["decode"], row["from_batch"]] for row in printed["splits"]]
    exported = yaml.safe_load(sglang.read_text())
    assert exported["manual_divisions"] == rows and exported["sm_group_num"] == len(rows) + 2
    assert exported["split_forward_token_budget"] == printed["split_forward_token_budget"]
    assert json.loads(plan.read_text())["splits"] == printed["splits"]
    assert printed["why"] in result.stderr and "Advice: " in result.stderr


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "no/such/model"}, "model"),
        ({"gpu": "abacus"}, "sim:h100"),
        ({"gpu": "h100~1.2"}, "contention is swept"),
        ({"trace": "nowhere.csv"}, "synth:"),
        ({"slo": "ttft=fast"}, "ttft"),
        ({"slo": "ttft=400,tpot=0.1"}, "no rate holds these objectives on h100-roofline: a decode step"),
        ({"slo": "ttft=1,tpot=30"}, "of the prompts take longer than ttft"),
        ({"limit": "3"}, "too few"),
        ({"export": "plan.txt"}, ".yaml"),
        ({"export": "/nowhere/at/all/plan.json"}, "nothing was run"),
        ({"jobs": "-1"}, "--jobs -1"),
        ({"model": "llama-3.1-70b", "gpu": "rtx4090-roofline"}, "memory"),
    ],
)
def test_bad_input_is_one_clear_line_and_2(changed: dict[str, str], message: str) -> None:
    more = [part for name, value in changed.items() if name == "jobs" for part in ("--jobs", value)]
    result = advise(*more, **{name: value for name, value in changed.items() if name != "jobs"})
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    complaint = result.stderr.strip().splitlines()[-1]
    assert complaint.startswith("smpart: ") and message in complaint
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("text", ["", "TIMESTAMP,ContextTokens,GeneratedTokens\n"])
def test_a_trace_with_nothing_in_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "empty.csv"
    path.write_text(text)
    result = advise(trace=str(path))
    assert result.exit_code == 2 and str(path) in result.stderr and "Traceback" not in result.stderr


def test_requests_that_all_arrive_at_once_have_no_rate(tmp_path: Path) -> None:
    path = tmp_path / "burst.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5}\n' * 20)
    result = advise(trace=str(path))
    assert result.exit_code == 2 and "arrive at once" in result.stderr and "Traceback" not in result.stderr
