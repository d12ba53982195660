"""The exported file, read by the rules of SGLang's own reader and scheduler (restated here from its source)."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from advise_findings import findings
from hypothesis import given
from hypothesis import strategies as st

from smpart.bench.advise.sglang import PdmuxConfig, token_budget
from smpart.bench.advise.table import Table, divide
from smpart.partition.gpus import GPUS

CONSTRAINTS = {8: (4, 2), 9: (8, 8)}
KEYS = {"sm_group_num", "manual_divisions", "split_forward_token_budget", "decode_bs_divisor"}


def read(text: str) -> dict[str, Any]:
    """`load_pdmux_config`: what it demands, and what `initialize_stream_groups` then makes of it."""
    raw = yaml.safe_load(text)
    assert set(raw) <= KEYS and raw["sm_group_num"] >= 3
    assert len(raw["manual_divisions"]) == raw["sm_group_num"] - 2
    assert all(len(row) == 3 and all(type(value) is int for value in row) for row in raw["manual_divisions"])
    assert type(raw["split_forward_token_budget"]) is int
    return raw


def group(raw: dict[str, Any], decode_batch: int) -> int | None:
    """`adjust_stream_groups` while both phases have work: the group's number; None: left undefined."""
    chosen = None
    for i, (_, _, threshold) in enumerate(raw["manual_divisions"]):
        if decode_batch >= threshold:
            chosen = i + 1
    return chosen


@given(st.sampled_from(sorted(GPUS)), st.floats(1e-4, 1e-2), st.floats(0.001, 0.1), st.integers(1, 256))
def test_it_follows_sglangs_rules(gpu: str, row: float, limit: float, most: int) -> None:
    units = GPUS[gpu]
    table = divide(lambda batch, split: 1e-3 + row * batch / split.decode, units.splits(), limit, most)
    if not table.rows:
        return
    config = PdmuxConfig.of(findings(gpu=gpu, table=table))
    assert config is not None
    raw = read(config.text(["a comment"]))
    least, step = CONSTRAINTS[units.capability[0]]
    for prefill, decode, _ in raw["manual_divisions"]:
        assert prefill + decode == units.sms and prefill % step == 0 and min(prefill, decode) >= least
    thresholds = [threshold for *_, threshold in raw["manual_divisions"]]
    assert thresholds[0] == 1 and thresholds == sorted(set(thresholds))
    for batch in range(1, table.holds + 1):
        chosen = group(raw, batch)
        assert chosen is not None
        _, decode, _ = raw["manual_divisions"][chosen - 1]
        assert 1e-3 + row * batch / decode <= limit


def test_the_launch_line_names_as_many_groups_as_the_file() -> None:
    """SGLang makes one attention backend a group of its own option, and indexes them by the file's groups."""
    table = divide(lambda batch, split: batch / split.decode, GPUS["h100"].splits(), 1.0, 100)
    config = PdmuxConfig.of(findings(table=table))
    assert config is not None
    text = config.text([])
    assert f"--sm-group-num {read(text)['sm_group_num']} --disable-overlap-schedule --chunked-prefill-size -1" in text


def test_without_a_split_that_holds_there_is_no_file() -> None:
    assert PdmuxConfig.of(findings(table=Table((), 0), prefill_s=None)) is None


@given(st.integers(1, 20_000), st.integers(1, 120), st.floats(1e-3, 10.0), st.floats(1e-3, 0.5))
def test_a_group_lasts_a_step_and_not_a_layer_more(tokens: int, layers: int, prefill_s: float, limit_s: float) -> None:
    launched = max(1, token_budget(tokens, layers, prefill_s, limit_s) // tokens)
    layer_s = prefill_s / layers
    assert launched * layer_s >= limit_s * (1 - 1e-6)
    assert launched == 1 or (launched - 1) * layer_s < limit_s * (1 + 1e-6)


@pytest.mark.parametrize("tokens", [300, 2048, 9000])
def test_the_budget_gives_other_batches_about_the_same_time(tokens: int) -> None:
    """A layer's time is about proportional to the tokens, so that the budget fits whatever SGLang packs."""
    budget = token_budget(2048, 32, 0.080, 0.050)
    assert max(1, budget // tokens) * (0.080 / 32 * tokens / 2048) == pytest.approx(0.050, rel=0.25)
