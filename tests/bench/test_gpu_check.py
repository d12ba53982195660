"""`make gpu-check` where there is no GPU: the runner, the line it says, and how records and results are read."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from smpart.bench.gpu_check import report
from smpart.bench.gpu_check.__main__ import main
from smpart.bench.gpu_check.record import Record, Setting, spread
from smpart.bench.gpu_check.rig import SCALES, llama_facts, random_llama
from smpart.bench.gpu_check.runner import ROOT, Limits, Runner, Stage
from smpart.bench.gpu_check.stages.conformance import read
from smpart.bench.gpu_check.stages.contention import pick
from smpart.bench.gpu_check.stages.doctor import Meeting
from smpart.bench.gpu_check.stages.sanitizer import check
from smpart.bench.gpu_check.trace import Trace
from smpart.partition import Split
from smpart.runtime.adapter import ModelAdapter

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def toy(name: str, limit_s: float = 60.0) -> Stage:
    return Stage(f"gpu_check_toys:{name}", limit_s)


def run(tmp_path: Path, stages: list[Stage], **limits: Any) -> tuple[dict[str, Any], list[str]]:
    """The stages' results, the report on disk being checked to be the same after every stage."""
    out, said = tmp_path / "out" / "report.json", []

    def say(line: str) -> None:
        said.append(line)
        written = json.loads(out.read_text())
        assert len(written["stages"]) == len(said)

    limits = {"total_s": 300.0, "least_s": 0.0, "memory_bytes": 1 << 30} | limits
    runner = Runner(out, {"schema": 1}, Setting(tiny=True, seed=3), Limits(**limits), say, monotonic())
    made: Any = runner.run(stages)
    assert json.loads(out.read_text()) == json.loads(json.dumps(made))
    assert not [path for path in out.parent.iterdir() if path != out]
    return made["stages"], said


def test_each_fault_costs_its_own_stage_only(tmp_path: Path) -> None:
    names = ["faulty", "raises", "needs", "crashes", "leaves", "garbles", "fine"]
    stages, said = run(tmp_path, [toy(name) for name in names])
    of = {name.partition(":")[2]: stage for name, stage in stages.items()}
    assert of["fine"] | {"seconds": 0} == {
        "ok": True, "seconds": 0, "error": None, "answer": 42, "seed": 3, "tiny": True,
    }  # fmt: skip
    assert not any(of[name]["ok"] for name in names if name != "fine")
    assert of["faulty"]["error"] == "two lanes share an SM" and (of["faulty"]["before"], of["faulty"]["after"]) == (
        1,
        2,
    )
    assert of["raises"]["error"] == "ValueError: no such lane" and of["raises"]["before"] == 1
    assert "no such lane" in of["raises"]["printed"][-1]
    assert of["needs"]["error"] == "it needs greenlet, which is not installed here: pip install greenlet"
    assert of["crashes"]["error"] == "it was ended by SIGSEGV" and of["crashes"]["before"] == 1
    assert of["leaves"]["error"] == "it ended with status 3"
    assert "cannot be read" in of["garbles"]["error"]
    assert len(said) == len(names) and said[-1].startswith("gpu_check_toys:fine: ok")


def test_a_stage_that_hangs_is_ended_with_its_children_and_keeps_what_it_had(tmp_path: Path) -> None:
    stages, _ = run(tmp_path, [toy("hangs", limit_s=5.0)], least_s=0.0)
    (stage,) = stages.values()
    assert stage["error"] == "it was not done after 5 s" and stage["before"] == 1
    assert ends(stage["child"])
    assert any("about to hang" in line for line in stage["printed"])
    assert any("in hangs" in line for line in stage["printed"]), "where it hung is shown"


def test_a_stage_that_takes_too_much_memory_is_ended(tmp_path: Path) -> None:
    stages, _ = run(tmp_path, [toy("swells"), toy("fine")], memory_bytes=400 << 20)
    swollen, fine = stages.values()
    assert "MiB of memory, more than 400 MiB" in swollen["error"] and swollen["before"] == 1
    assert fine["ok"]


def test_a_stage_that_is_ended_can_stop_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("GPU_CHECK_MARK", str(mark))
    run(tmp_path, [toy("stops_politely", limit_s=4.0)], least_s=0.0)
    assert mark.read_text() == "stopped"


@pytest.mark.slow
def test_later_stages_get_what_is_left(tmp_path: Path) -> None:
    stages, _ = run(tmp_path, [toy("hangs"), toy("fine")], total_s=3.0, least_s=1.0)
    hung, late = stages.values()
    assert hung["error"] == "it was not done after 3 s"
    assert late == {"ok": False, "seconds": 0.0, "error": "left out: no time was left"}


def check_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "smpart.bench.gpu_check", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize(
    "wrong", [["--only", "swich"], ["--seconds", "-5"], ["--seconds", "nan"], ["--memory-gib", "0"]]
)
def test_a_users_mistake_writes_nothing(tmp_path: Path, wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    report.write_text("of last week")
    with pytest.raises(SystemExit) as ended:
        main(["--out", str(report), *wrong])
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err
    assert report.read_text() == "of last week"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_so_in_one_line_and_exits_2(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = check_command("--out", str(out))
    assert done.returncode == 2 and done.stdout == "" and not out.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("gpu-check: no GPU can be used here: ")


def test_the_runner_needs_nothing_but_the_standard_library_and_numpy() -> None:
    """Where greenlet, typer or even torch is missing, only the stages that need it fail, and say so."""
    missing = ["greenlet", "typer", "rich", "scipy", "safetensors", "torch", "transformers", "sklearn", "pytest"]
    program = f"import sys\nfor name in {missing}: sys.modules[name] = None\n" + (
        "import smpart.bench.gpu_check.__main__, smpart.bench.gpu_check.stage\n"
        "from smpart.bench.gpu_check.stages import conformance, device, doctor, mps, sanitizer, switch\n"
        "from smpart.bench.gpu_check import every_kernel\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_a_record_keeps_its_time(tmp_path: Path) -> None:
    clock = iter([100.0, 103.0, 111.0])
    record = Record(None, 10.0, lambda: next(clock))
    assert record.left() == 7.0
    assert record.left() == -1.0


def test_no_sample_has_no_median() -> None:
    assert spread([]) == {"median": None, "min": None, "max": None, "repeats": 0}


def test_a_meeting_is_read_as_the_kernel_wrote_it() -> None:
    assert Meeting.of(64 | 68 << 16, 5) == Meeting(True, (64, 68), 5)
    assert Meeting.of(1 << 32 | 64, 0) == Meeting(False, (64, 0), 0)


def test_splits_are_picked_once_each() -> None:
    splits = [Split(p, 132 - p) for p in range(0, 133, 8)] + [Split(132, 0)]
    assert [str(split) for split in pick(splits)][:3] == ["64/68", "96/36", "32/100"]
    assert pick([Split(0, 2), Split(1, 1), Split(2, 0)]) == [Split(1, 1)]


def test_facts_of_a_llama_are_those_an_adapter_finds() -> None:
    model = random_llama("tiny", torch.float32, torch.device("cpu"))
    assert llama_facts("tiny", torch.float32) == ModelAdapter(model).facts
    assert sum(weight.numel() for weight in model.parameters()) == 2 * 512 * 64 + 2 * (
        64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64
    ) + 64  # fmt: skip
    assert all(size.hidden % size.heads == 0 and size.heads % size.kv_heads == 0 for size in SCALES.values())


# ---- records of the profiler


def line(cat: str, name: str, ts: float, dur: float, *, tid: Any = 7, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def hand_off(*more: dict[str, Any]) -> Trace:
    """A prefill on stream 13, then two steps on stream 17."""
    lines = [
        line("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 1, stream=13, bytes=4096),
        line("kernel", "gemm", 2, 10, stream=13),
        line("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 5, 1, stream=13, bytes=1 << 20),
        line("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 12, 1, stream=13, bytes=4),
        line("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 20, 1, stream=17, bytes=256),
        line("kernel", "step", 21, 5, stream=17),
        line("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 26, 1, stream=17, bytes=4),
        line("kernel", "step", 40, 5, stream=17),
        {"ph": "M", "name": "process_name"},
    ]
    return Trace.read({"traceEvents": [*lines, *more]})


def test_the_hand_off_is_from_the_prefills_end_to_the_first_answer() -> None:
    trace = hand_off()
    assert trace.hand_off() == (13, 27)
    assert trace.copied(*trace.hand_off()) == {"DtoD": 0, "HtoD": 256, "DtoH": 4}
    assert trace.copied() == {"DtoD": 1 << 20, "HtoD": 4352, "DtoH": 8}


def test_a_copy_at_the_hand_off_is_seen() -> None:
    copy = line("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 14, 1, stream=17, bytes=8192)
    trace = hand_off(copy)
    assert trace.copied(*trace.hand_off())["DtoD"] == 8192


@pytest.mark.parametrize("lines", [[], [line("kernel", "step", 0, 1, stream=13)]])
def test_a_record_without_a_hand_off_says_so(lines: list[dict[str, Any]]) -> None:
    with pytest.raises(LookupError, match="the record shows no"):
        Trace.read({"traceEvents": lines}).hand_off()


def test_waits_are_those_of_the_windows_own_thread() -> None:
    trace = Trace.read(
        {
            "traceEvents": [
                line("user_annotation", "steady", 10, 100, tid=7),
                line("cuda_runtime", "cudaStreamSynchronize", 5, 1, tid=7),  # before the window
                line("cuda_runtime", "cudaStreamSynchronize", 20, 1, tid=7),
                line("cuda_runtime", "cudaLaunchKernel", 30, 1, tid=7),
                line("cuda_driver", "cuEventSynchronize", 40, 1, tid=8),  # a lane's watcher
                line("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 50, 1, tid=1, stream=17, bytes=4),
            ]
        }
    )
    window = trace.mark("steady")
    assert trace.waits(window) == {"cudaStreamSynchronize": 1, "Memcpy HtoD (Pageable -> Device)": 1}
    with pytest.raises(LookupError):
        trace.mark("another")


def test_gaps_of_the_busiest_stream() -> None:
    works = [(0, 10, 17), (12, 8, 17), (15, 2, 17), (30, 10, 17), (0, 500, 13)]
    events = [line("kernel", "k", ts, dur, stream=stream) for ts, dur, stream in works]
    trace = Trace.read({"traceEvents": [line("user_annotation", "w", 0, 100), *events]})
    assert trace.idle(trace.mark("w")) == (2 + 10, 40)


def test_a_real_record_has_the_mark_and_no_work_on_a_device() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("smpart mark"):
        torch.ones(8).sum()
    trace = Trace.of(profiler)
    assert trace.device == [] and trace.waits(trace.mark("smpart mark")) == {}


# ---- results of other tools


def test_pytests_results_are_read(tmp_path: Path) -> None:
    results = tmp_path / "results.xml"
    results.write_text(
        '<testsuites><testsuite><testcase name="test_conformance[check_a]"/>'
        '<testcase name="test_conformance[check_b]"><failure message="assert 1 == 2&#10;more">x</failure></testcase>'
        '<testcase name="test_conformance[check_c]"><error>no fixture</error></testcase>'
        '<testcase name="test_conformance[check_d]"><skipped/></testcase></testsuite></testsuites>'
    )
    assert read(results) == {"passed": 1, "skipped": 1, "failed": {"b": "assert 1 == 2 more", "c": "no fixture"}}


@pytest.mark.parametrize(
    ("script", "clean"),
    [
        ("echo launched probe; echo ERROR SUMMARY: 0 errors", True),
        ("echo launched probe; echo ERROR SUMMARY: 2 errors; exit 66", False),
        ("echo Device not supported; exit 66", None),  # it never came to a kernel
        ("exit 1", None),
        ("sleep 60", None),
    ],
)
def test_what_a_sanitizer_says(tmp_path: Path, script: str, clean: bool | None) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert check(str(program), "memcheck", 2.0)["clean"] is clean


# ---- the table

STAGES: dict[str, Any] = {
    "doctor": {"proved": 17, "of": 17},
    "conformance": {"passed": 12, "skipped": 0, "failed": {"check": "why"}},
    "tokens": {
        "fp32": [{"equal": 10, "requests": 10}, {"equal": 9, "requests": 10}],
        "bf16": {"most_below_likeliest": 0.1, "noise_of_plain_forward": 0.2},
    },
    "switch": {"switch_host_us": 3.0, "switch_device_us": 5.0},
    "profile": {
        "handoff_copied_bytes": {"DtoD": 0},
        "profiled_steady": {"host_waits": {}, "works_on_device": 9},
        "steady": {"bubble": 0.01},
    },
    "graphs": {"graphs_share": 0.07},
    "serving": {"side_by_side": {"bubble": {"smpart": {"decode": 0.02}}}},
}


def test_targets_are_met_missed_or_not_measured() -> None:
    met = [row["met"] for row in report.targets(STAGES)]
    assert met == [True, False, False, True, True, True, True, False, True, False, False]
    assert all(row["met"] is None and row["found"] is None for row in report.targets({}))


@pytest.mark.parametrize("stages", [{}, {name: {} for name in STAGES}], ids=["none", "empty"])
def test_the_table_can_be_made_of_whatever_there_is(stages: dict[str, Any]) -> None:
    filled = {name: {"ok": False, "seconds": 1.0, "error": "it hung"} | stage for name, stage in stages.items()}
    text = report.lines({"stages": filled, "seconds": 12.5, "driver": "13.0"})
    assert sum("not measured" in row for row in text) == len(report.TARGETS)


def ends(pid: int, within_s: float = 30.0) -> bool:
    """Whether a process that was killed is gone: a killed one may run on for a moment on a busy machine."""
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watched], [], [], within_s)[0])
    finally:
        os.close(watched)
