from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from smpart import cli
from smpart.errors import SmpartError

RUNNER = CliRunner()
SIM = ["bench", "--backend", "sim:h100", "--model", "llama-3.1-8b", "--dtype", "bfloat16", "--limit", "12",
       "--jobs", "1"]  # fmt: skip


def smpart(*arguments: str, **options: Any) -> Result:
    return RUNNER.invoke(cli.app, list(arguments), **options)


def last_json(result: Result) -> Any:
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["generate"],
        ["generate", "smollm2"],
        ["bench", "--repeat", "zero"],
        ["bench", "--seed", "-1"],
        ["doctor", "--loudly"],
    ],
)
def test_usage_errors_are_2(arguments: list[str]) -> None:
    assert smpart(*arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*SIM, "--policy", "astrology"], "chunked"),
        ([*SIM, "--policy", ","], "--policy"),
        ([*SIM, "--policy", "static:1/1"], "no such split"),
        ([*SIM, "--policy", "mixed,chunked,mixed"], "mixed is named twice"),
        ([*SIM, "--time-unit", "ms"], "--time-unit"),
        ([*SIM, "--trace", "nowhere.jsonl"], "synth:"),
        ([*SIM, "--trace", "synth:poetry"], "chat"),
        ([*SIM, "--slo", "ttft=fast"], "ttft"),
        ([*SIM, "--slo", "ttft=-1,tpot=5"], "positive"),
        ([*SIM, "--slo", "ttft=5,ttft=6,tpot=1"], "given twice"),
        ([*SIM, "--rate", "0"], "--rate"),
        ([*SIM, "--rate", "nan"], "--rate"),
        ([*SIM, "--rate", "2", "--speedup", "3"], "--speedup"),
        ([*SIM, "--speedup", "1e308"], "--speedup"),
        ([*SIM, "--repeat", "0"], "--repeat"),
        ([*SIM, "--limit", "0"], "--limit"),
        ([*SIM, "--scale", "7"], "--scale"),
        ([*SIM, "--attainment", "2"], "--attainment"),
        ([*SIM, "--attainment", "0.5"], "--capacity"),
        ([*SIM, "--capacity", "--limit", "9"], "at least 10 requests"),
        ([*SIM, "--model", "llama-3.1-70b"], "sim:h100x2"),
        (["bench", "--backend", "sim:h100-roofline~1.3"], "give one of them"),
        ([*SIM, "--policy", "smpart:period=1e9"], "whole ms"),
        (["bench", "--backend", "quantum"], "sim:h100"),
        (["bench", "--backend", "sim:abacus"], "sim:h100"),
        (["bench", "--backend", "sim:h100", "--model", "no/such/model"], "model"),
        (["fit", "nowhere"], "smpart profile MODEL --out"),
        (["report", "nowhere"], "neither a profile folder"),
        (["generate", "smollm2", "--prompt", ""], "empty prompt"),
        (["generate", "smollm2", "--prompt", "a", "--max-tokens", "0"], "max_tokens"),
        (["generate", "smollm2", "--prompt", "a", "--temperature", "nan"], "temperature"),
        (["generate", "smollm2", "--prompt", "a", "--policy", "astrology"], "chunked"),
        (["generate", "smollm2", "--prompt", "a", "--backend", "quantum"], "cores"),
        (["generate", "smollm2", "--prompt", "a", "--backend", "sim:h100"], "simulates"),
    ],
)
def test_bad_input_is_one_clear_line_and_2(arguments: list[str], message: str) -> None:
    result = smpart(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    complaint = result.stderr.strip().splitlines()[-1]
    assert complaint.startswith("smpart: ") and message in complaint
    assert "Traceback" not in result.stderr


def test_a_broken_trace_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5,1\n2023-11-16 18:17:04,x,1\n")
    result = smpart(*SIM, "--trace", str(path))
    assert result.exit_code == 2 and f"{path}:3: ContextTokens 'x'" in result.stderr


def test_a_length_beyond_any_context_is_a_broken_row(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 99999999999999999999999, "output_length": 5}\n')
    result = smpart(*SIM, "--trace", str(path))
    assert result.exit_code == 2 and f"{path}:1: input_length" in result.stderr and "Traceback" not in result.stderr


def test_a_folder_that_cannot_be_written_is_found_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = smpart(*SIM, "--out", str(tmp_path / "file"))
    assert result.exit_code == 2 and "nothing was run" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize("config", ['{"model_type": "llama", "hidden_size": "x"}', "not json"])
def test_a_model_folder_that_cannot_be_read(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    result = smpart("bench", "--backend", "sim:h100", "--model", str(tmp_path), "--limit", "3")
    assert result.exit_code == 2 and "cannot be loaded" in result.stderr and "Traceback" not in result.stderr


def test_a_request_that_is_refused_does_not_shape_the_objectives(tmp_path: Path) -> None:
    rows = "\n".join(f'{{"timestamp": {1000 * i}, "input_length": 500, "output_length": 9}}' for i in range(4))
    (tmp_path / "plain.jsonl").write_text(rows + "\n")
    giant = '\n{"timestamp": 4000, "input_length": 90000000, "output_length": 9}\n'
    (tmp_path / "giant.jsonl").write_text(rows + giant)
    ttft = []
    for name in ("plain", "giant"):
        result = smpart(*SIM, "--policy", "chunked", "--trace", str(tmp_path / f"{name}.jsonl"), "--json")
        assert result.exit_code == 0, result.stderr
        ttft.append(last_json(result)["runs"][0]["slo"]["ttft_ms"])
    assert ttft[0] == ttft[1]


def test_lengths_without_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n100,5\n200,5\n300,5\n")
    assert smpart(*SIM, "--trace", str(path)).exit_code == 2
    result = smpart(
        *SIM, "--policy", "chunked", "--trace", str(path), "--rate", "10", "--slo", "ttft=200,tpot=50", "--json"
    )
    assert result.exit_code == 0, result.stderr
    assert last_json(result)["runs"][0]["rate"] == pytest.approx(10)


@pytest.mark.parametrize(
    "arguments", [("--version",), pytest.param(("doctor", "--json"), marks=pytest.mark.slow)], ids=" ".join
)
def test_a_full_stdout_is_one_line(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "smpart", *arguments]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1 and ended.stderr.startswith("smpart: stdout cannot be written (No space left")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [("--version",), ("--help",), pytest.param(("doctor", "--json"), marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_reader_that_has_gone_is_no_news(arguments: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-m", "smpart", *arguments], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


PRINTS = """
from smpart.bench.stdout import print_json, stdout
with stdout("script"):
    print("not flushed")
    print_json({"a": 1})
"""


@pytest.mark.parametrize(("gone", "said"), [(False, b"script: stdout cannot be written"), (True, b"")])
def test_a_script_ends_as_the_command_does(gone: bool, said: bytes) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    target = writer if gone else os.open("/dev/full", os.O_WRONLY)
    ended = subprocess.run([sys.executable, "-c", PRINTS], stdout=target, stderr=subprocess.PIPE)
    assert ended.returncode == 1 and ended.stderr.startswith(said) and len(ended.stderr.splitlines()) == bool(said)


def test_the_version() -> None:
    from smpart import __version__

    assert smpart("--version").stdout.strip() == __version__


def test_failures_are_1_and_interrupts_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(error: BaseException) -> None:
        def examine() -> None:
            raise error

        monkeypatch.setattr("smpart.bench.doctor.examine", examine)

    fail(SmpartError("it broke"))
    result = smpart("doctor")
    assert (result.exit_code, result.stderr.strip()) == (1, "smpart: it broke")
    fail(KeyboardInterrupt())
    result = smpart("doctor")
    assert result.exit_code == 130 and "Traceback" not in result.output


def test_doctor_proves_the_splits_it_lists() -> None:
    result = smpart("doctor", "--json")
    assert result.exit_code == 0
    facts = last_json(result)
    cores = next(b for b in facts["backends"] if b["name"] == "cores")
    ids = cores["device"]["unit_ids"]
    assert [r["split"] for r in cores["realised"]] == cores["splits"]
    for each in cores["realised"]:
        assert each["as_asked"] and sorted(each["prefill"] + each["decode"]) == ids
    assert "cores" in smpart("doctor").stdout


RUN_KEYS = """policy backend model trace rate seed slo requests finished refused ttft_ms tpot_ms itl_ms gpus goodput_rps
goodput_per_gpu_rps capacity_rps capacity_per_gpu_rps slo_attainment throughput_tok_s bubble resizes decision_us"""


def test_bench_in_virtual_time(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = smpart(*SIM, "--policy", "mixed,chunked", "--repeat", "2", "--out", str(out), "--json")
    assert result.exit_code == 0, result.stderr
    printed = last_json(result)
    assert set(printed) >= {"schema", "command", "host", "runs"} and printed["schema"] == 1
    assert [(r["policy"], r["seed"]) for r in printed["runs"]] == [
        ("mixed", 0),
        ("chunked", 0),
        ("mixed", 1),
        ("chunked", 1),
    ]
    for run in printed["runs"]:
        assert set(run) >= set(RUN_KEYS.split())
        assert run["requests"] == run["finished"] + run["refused"] + run["failed"] == 12
    assert {p.name for p in out.iterdir()} == {
        "config.json", "results.json", "requests.parquet", "lanes.png", "goodput.png", "latencies.png", "shares.png",
    }  # fmt: skip


def test_capacity_holds_its_own_target() -> None:
    result = smpart(*SIM, "--policy", "chunked", "--capacity", "--slo", "ttft=500,tpot=50", "--json")
    assert result.exit_code == 0, result.stderr
    (run,) = last_json(result)["runs"]
    assert (
        run["capacity_rps"] > 0 and run["slo_attainment"] >= 0.9 and run["rate"] == pytest.approx(run["capacity_rps"])
    )
    assert any(t["slo_attainment"] < 0.9 or t["queue_grows"] for t in run["trials"])


def test_two_devices_count_as_two_gpus() -> None:
    result = smpart(*SIM, "--policy", "disagg,chunked", "--capacity", "--slo", "ttft=500,tpot=50", "--json")
    assert result.exit_code == 0, result.stderr
    two, one = last_json(result)["runs"]
    assert (two["gpus"], one["gpus"]) == (2, 1)
    for run in (two, one):
        assert run["goodput_per_gpu_rps"] == pytest.approx(run["goodput_rps"] / run["gpus"]) and run["goodput_rps"] > 0
        assert run["capacity_per_gpu_rps"] == run["capacity_rps"] / run["gpus"] > 0
    assert "capacity per GPU" in result.stderr


def test_what_lanes_cannot_do_is_refused_before_a_request_runs() -> None:
    link = smpart(*SIM, "--policy", "disagg:fast", "--json")
    assert link.exit_code == 2 and "gigabits" in link.stderr
    cores = ["bench", "--backend", "cores", "--model", "random:llama", "--policy", "disagg", "--limit", "2"]
    alone = smpart(*cores, "--profile", "none")
    assert alone.exit_code == 2 and "needs a device for prefill and another for decode" in alone.stderr


def test_the_installed_command_imports_nothing_heavy_for_help() -> None:
    code = "import sys; from smpart.cli import app; assert not {'torch', 'transformers', 'pandas'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    command = [sys.executable, "-m", "smpart", "generate"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr


def test_best_effort_requests_yield_and_are_not_judged() -> None:
    """At twice the rate, half of it best effort: those who were promised something hardly notice."""
    at = ("--policy", "smpart", "--trace", "synth:chat", "--slo", "ttft=500,tpot=50", "--limit", "80", "--json")
    sim = ("bench", "--backend", "sim:h100-roofline", "--model", "llama-3.1-8b")
    crowded, mixed = (
        last_json(smpart(*sim, *at, "--rate", "160", *more))["runs"][0] for more in ((), ("--best-effort", "0.5"))
    )
    assert crowded["best_effort"] is None
    assert mixed["best_effort"]["finished"] == mixed["best_effort"]["requests"] in range(25, 56)
    assert mixed["slo_attainment"] > crowded["slo_attainment"]
    assert mixed["ttft_ms"]["p95"] < 0.5 * crowded["ttft_ms"]["p95"]
    for wrong in (["--best-effort", "1"], ["--best-effort", "0.5", "--capacity"]):
        refused = smpart(*sim, *at, *wrong)
        assert refused.exit_code == 2 and "--best-effort" in refused.stderr
