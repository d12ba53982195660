"""From capacities to a verdict, and to two sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from advise_findings import TABLE, facts, findings, held

from smpart.bench.advise.answer import Answer
from smpart.bench.advise.export import check
from smpart.bench.advise.gain import MARGIN, Gain
from smpart.bench.advise.table import Table
from smpart.bench.advise.why import cautions, why
from smpart.errors import UsageError


@pytest.mark.parametrize(
    ("chunked", "smpart", "verdict"),
    [
        ([2.0], {1.0: [4.0], 1.3: [3.0]}, "split"),
        ([2.0], {1.0: [4.0], 1.3: [2.0 * (1 + MARGIN)]}, "do not split"),
        ([2.0], {1.0: [4.0], 1.3: [2.2]}, "split"),
        ([2.0], {1.0: [1.9], 1.3: [1.5]}, "do not split"),
        ([2.0, 3.0], {1.0: [4.0, 6.0], 1.3: [4.0, 3.0]}, "do not split"),
        ([0.0], {1.0: [4.0], 1.3: [3.0]}, "split"),
        ([0.0], {1.0: [4.0], 1.3: [0.0]}, "do not split"),
    ],
)
def test_a_split_must_win_everywhere_by_a_margin(
    chunked: list[float], smpart: dict[float, list[float]], verdict: str
) -> None:
    found = findings(held=held(chunked, smpart))
    assert found.verdict == verdict
    record = Answer(found).record()
    json.dumps(record, allow_nan=False)
    assert record["verdict"] == verdict


def test_a_gain_that_needs_no_split_is_none() -> None:
    """One lane with the same order and deadlines holds as much: that is not the split's doing."""
    found = findings(held=held([2.0], {1.0: [4.0], 1.3: [3.0]}, order=[2.9]))
    assert found.verdict == "do not split" and found.ordered and found.gain() == Gain(1.5, 1.75, 2.0)
    text = why(found)
    assert "2.9 req/s, without a split" in text and text.count(". ") == 1
    assert not findings().ordered and not any("without a split" in line for line in cautions(found))  # not twice
    neither = findings(held=held([2.0], {1.0: [2.0], 1.3: [2.0]}, order=[2.9]))
    assert not neither.ordered and "holds 1.45x of chunked's, without a split" in cautions(neither)[1]


def test_the_interval_is_over_constants_and_seeds_pair_by_pair() -> None:
    found = findings(held=held([2.0, 4.0], {1.0: [4.0, 6.0], 1.3: [3.0, 4.4]}))
    assert found.gain() == pytest.approx(Gain(1.1, 1.5, 2.0))
    assert found.gain("static") == Gain(1.0, 1.0, 1.0)
    assert found.gain("astrology") is None
    assert findings(held=held([0.0, 1.0], {1.0: [4.0, 4.0], 1.3: [4.0, 4.0]})).gain() is None


def test_nobody_holds_anything() -> None:
    with pytest.raises(UsageError, match="no policy holds ttft=200,tpot=20"):
        findings(held=held([0.0], {1.0: [0.0], 1.3: [0.0]})).check()
    findings().check()


TTFT = {"TTFT": 0.4, "TPOT": 0.1, "ITL": 0.0, "service": 0.0}
NONE = dict.fromkeys(TTFT, 0.0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ["40% miss TTFT", "prompts of 500 tokens queue", "21 ms", "1.75x (1.50 to 2.00)", "holds 3 to 4 req/s"]),
        ({"hopeless": 0.08}, ["8% are too long even alone"]),
        ({"one_lane": facts(misses={**NONE, "TPOT": 0.4})}, ["40% miss TPOT", "70% of the time", "14 decode in each"]),
        ({"one_lane": facts(misses={**NONE, "ITL": 0.2}, plain_ms=None)}, ["20% miss ITL", "hardly one without"]),
        ({"one_lane": facts(misses={**NONE, "service": 0.3})}, ["30% unserved"]),
        ({"one_lane": facts(misses=NONE)}, ["its queue grows"]),
        ({"one_lane": facts(hybrid_ms=None)}, ["40% miss TTFT"]),
        ({"table": Table((), 0), "prefill_s": None}, ["between decode steps"]),
        ({"table": Table(TABLE.rows[:1], 8)}, ["on 20 of 132 SMs, up to a batch of 8"]),
        ({"held": held([2.0], {1.0: [1.9], 1.3: [1.8]})}, ["Two lanes hold 1.8 to 1.9 req/s", "one memory bandwidth"]),
        ({"held": held([2.0], {1.0: [4.0], 1.3: [1.8]})}, ["how much a neighbour costs decides", "0.90x to 2.00x"]),
        ({"held": held([0.0], {1.0: [4.0], 1.3: [3.0]})}, ["where chunked holds no rate"]),
        ({"held": held([0.0], {1.0: [4.0], 1.3: [0.0]})}, ["where chunked holds no rate", "but not at every"]),
    ],
)
def test_two_sentences_of_facts(changed: dict[str, Any], words: list[str]) -> None:
    text = why(findings(**changed))
    assert text.endswith(".") and text.count(". ") == 1
    for word in words:
        assert word in text


def test_what_the_advice_leaves_out_is_said() -> None:
    (said,) = cautions(findings())
    assert "under SGLang's rule the exported table holds 1.00x of chunked" in said
    assert "raise --limit" in cautions(findings(one_lane=facts(batch=21.0)))[1]
    assert cautions(findings(names={"chunked": "chunked:512", "smpart": "smpart"})) == []


def test_files(tmp_path: Path) -> None:
    for name in ("plan.txt", "nowhere/plan.json"):
        with pytest.raises(UsageError, match="--export"):
            check([tmp_path / name])
    paths = [tmp_path / "sglang.yaml", tmp_path / "plan.json"]
    check(paths)
    said: list[str] = []
    assert set(Answer(findings()).export(paths, said.append).values()) == {None}
    assert said == [f"written: {path}" for path in paths]
    plan = json.loads(paths[1].read_text())
    assert plan["splits"] == [
        {"prefill": 112, "decode": 20, "from_batch": 1}, {"prefill": 96, "decode": 36, "from_batch": 9},
    ]  # fmt: skip
    assert "  - [96, 36, 9]\n" in paths[0].read_text()


def test_a_file_that_has_nothing_to_say_is_not_written(tmp_path: Path) -> None:
    path, said = tmp_path / "sglang.yaml", list[str]()
    exported = Answer(findings(table=Table((), 0), prefill_s=None)).export([path], said.append)
    assert exported[str(path)] is not None and not path.exists()
    assert said[0].startswith("not written") and "no split holds TPOT" in said[0]
