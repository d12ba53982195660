"""The stages of `make gpu-check` on the fake driver, as far as it goes: no kernel of theirs runs but the SM probe."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_cuda import Fake

from smpart.bench.gpu_check import every_kernel
from smpart.bench.gpu_check.record import Record, Setting
from smpart.bench.gpu_check.report import details
from smpart.bench.gpu_check.stage import find, run
from smpart.bench.gpu_check.stages import doctor, switch
from smpart.partition import Side
from smpart.partition.cuda.driver import driver
from smpart.partition.cuda.streams import StreamLanes
from smpart.partition.green import Green

pytestmark = pytest.mark.drivers("13.0")

HERE = Setting(parts="fake_parts:open_here", tiny=True)
PROCESS = Setting(parts="fake_parts:open_parts", tiny=True)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and two threads wait for each other where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measured(name: str, setting: Setting, tmp_path: Path, seconds: float = 120.0) -> Record:
    """A stage run here, with what it wrote checked to be JSON of the same figures."""
    record = Record(tmp_path / "part.json", seconds)
    run(name, setting, record)
    written = json.loads((tmp_path / "part.json").read_text())
    assert written["finished"] and written["faults"] == record.faults
    assert written["figures"] == json.loads(json.dumps(record.figures))
    details(name, record.figures)
    return record


def test_device_says_what_it_is(fake: Fake, tmp_path: Path) -> None:
    figures: Any = measured("device", HERE, tmp_path).figures
    assert figures["missing"] is None and figures["driver"] == fake.driver
    assert figures["device"]["sms"] == 132 and "H200" in figures["device"]["name"]


def test_doctor_reads_every_split_and_looks_at_its_sms(fake: Fake, tmp_path: Path) -> None:
    record = measured("doctor", HERE, tmp_path)
    figures: Any = record.figures
    assert len(figures["splits"]) == figures["of"] == 17
    assert all(split["as_asked"] for split in figures["splits"].values())
    assert figures["sms"]["64/68 prefill"] == "0-63" and figures["sms"]["64/68 decode"] == "64-131"
    assert figures["looked_at"] == "every side has its SMs and shares none"
    # No block of the fake's meets another: that must be told, never taken for a proof.
    assert figures["proved"] == 0
    assert len(record.faults) == 1 and "does not prove" in record.faults[0]


def test_doctor_tells_lanes_that_lack_sms(fake: Fake, tmp_path: Path) -> None:
    fake.reset(short_context=2)
    record = measured("doctor", HERE, tmp_path)
    assert len(record.faults) == 1 and "instead of" in record.faults[0]


def test_doctor_goes_on_where_no_kernel_can_be_loaded(fake: Fake, tmp_path: Path) -> None:
    fake.fail("cuLibraryLoadData", times=None)
    record = measured("doctor", HERE, tmp_path)
    figures: Any = record.figures
    assert len(figures["splits"]) == 17
    assert "could not be looked at" in record.faults[0] and "cuLibraryLoadData" in record.faults[1]


def test_nesting_is_found_out(fake: Fake) -> None:
    with Green().open() as places:
        nested = {
            (side, split): frozenset(split.indices(side, 132))
            for split in places.splits()
            for side in Side
            if split.units(side)
        }
        found = doctor.nesting(places, nested)
        assert found["nested_prefill"] is found["nested_decode"] is True
        assert found["disjoint_across_splits"] == found["disjoint_across_splits_if_nested"] == 15 * 14 // 2
        turned = {key: frozenset((sm + len(sms)) % 132 for sm in sms) for key, sms in nested.items()}
        assert doctor.nesting(places, turned)["nested_prefill"] is False


def test_switch_costs(fake: Fake, tmp_path: Path) -> None:
    record = measured("switch", HERE, tmp_path)
    figures: Any = record.figures
    assert record.faults == []
    assert figures["contexts"] == 30 and figures["contexts_mib"] >= 0
    assert figures["launch_moved_us"]["repeats"] == figures["launch_same_us"]["repeats"] == 350
    assert figures["wait_event_us"]["repeats"] == 2000 and figures["gap_moved_us"]["repeats"] == 63


def test_launches_go_round_the_splits(fake: Fake) -> None:
    with Green().open() as places:
        lanes = StreamLanes(driver(), Green().device(), places, switch.Nothing)
        shared = [split for split in lanes.splits() if not split.exclusive]
        fake.forget_calls()
        switch.launches(lanes, shared[:1])
        assert fake.calls("cuStreamWaitEvent") == []
        switch.launches(lanes, shared)
        assert len(fake.calls("cuStreamWaitEvent")) == 399  # all but the first, which is where the lane was
        lanes.close()


def test_a_graph_is_replayed_on_the_other_lane_and_stays_on_its_own(fake: Fake, tmp_path: Path) -> None:
    record = measured("graphs", HERE, tmp_path)
    figures: Any = record.figures
    assert record.faults == []
    assert figures["graph_sms"]["same"] and figures["graph_sms"]["captured_on"] == 124
    assert figures["driver_names_context"] == "the lane's"
    assert figures["captured"] == figures["asked"] == 2 * 3 and figures["graphs_mib"] == 6
    assert [row["rows"] for row in figures["eager"]] == [row["rows"] for row in figures["replay"]] == [1, 4]


def test_contention_is_a_table_of_samples(fake: Fake, tmp_path: Path) -> None:
    record = measured("contention", HERE, tmp_path)
    rows: Any = record.figures["rows"]
    assert record.faults == []
    assert len(rows) == 2 + 4 * 2
    for row in rows:
        beside = row["neighbour_prefill_tokens"] + row["neighbour_decode_batch"]
        assert row["seconds"]["repeats"] > 0 or beside
        assert row["units"] in (int(n) for n in row["split"].split("/"))
    assert {row["prefill_tokens"] for row in rows if row["side"] == "prefill"} == {48}
    assert {(row["decode_batch"], row["decode_context"]) for row in rows if row["side"] == "decode"} == {(4, 160)}


def test_profile_finds_the_blocks_where_they_were(fake: Fake, tmp_path: Path) -> None:
    record = measured("profile", HERE, tmp_path)
    figures: Any = record.figures
    assert figures["same_blocks"] and figures["kv_unchanged"] and figures["kv_memories"] == 1
    assert figures["steady"]["steps"] >= 8
    # What only a GPU's profiler shows is said to be missing, not to be fine.
    assert [fault.split(":")[0] for fault in record.faults] == [
        "the hand-off cannot be seen",
        "the profiler saw no work on a device",
    ]


@pytest.mark.slow
@pytest.mark.drivers("13.0")
def test_tokens_are_those_of_generate(fake: Fake, tmp_path: Path) -> None:
    record = measured("tokens", PROCESS, tmp_path)
    figures: Any = record.figures
    assert record.faults == []
    assert [run["equal"] for run in figures["fp32"]] == [4, 4]
    assert figures["fp32"][0]["resizes"] > 0 and figures["bf16"]["requests"] == 4


@pytest.mark.slow
@pytest.mark.drivers("13.0")
def test_serving_compares_both_policies(fake: Fake, tmp_path: Path) -> None:
    record = measured("serving", PROCESS, tmp_path)
    figures: Any = record.figures
    assert record.faults == []
    assert {run["policy"] for run in figures["runs"]} == {"chunked", "smpart"}
    assert set(figures["side_by_side"]["goodput_rps"]) == {"chunked", "smpart"}


def test_every_kernel_is_launched(fake: Fake) -> None:
    with pytest.raises(AssertionError, match="came back changed"):  # nothing moves them on the fake
        every_kernel.main()
    ran = {launch.kernel for launch in fake.launches()}
    assert ran == {"probe", "meet", "arithmetic", "memory", "gather", "scatter"}
    fake.excuse_live()


def test_stages_without_what_they_need_say_so(fake: Fake, tmp_path: Path) -> None:
    assert "sees no GPU" in measured("gemm", HERE, tmp_path).faults[0]
    sanitizer = measured("sanitizer", HERE, tmp_path)
    assert sanitizer.faults == [] and "not installed" in str(sanitizer.figures["refused_here"])
    mps: Any = measured("mps", HERE, tmp_path).figures
    assert set(mps) == {"percentage", "affinity", "partition"} and all("refused_here" in mode for mode in mps.values())


def test_every_stage_of_the_plan_is_there() -> None:
    from smpart.bench.gpu_check.plan import STAGES, TOTAL_S

    for stage in STAGES:
        assert callable(find(stage.name))
    assert sum(stage.limit_s for stage in STAGES[:4]) < TOTAL_S < 480
