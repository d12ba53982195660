from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from smpart.bench.tracefile import read_trace
from smpart.errors import UsageError

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def save(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return save


def mooncake(times: list[float]) -> str:
    rows = [
        {"timestamp": t, "input_length": 600, "output_length": 9, "hash_ids": [1, i + 2]} for i, t in enumerate(times)
    ]
    return "\n".join(map(json.dumps, rows)) + "\n"


@pytest.mark.parametrize(
    ("name", "count", "minutes"),
    [
        ("mooncake_conversation_trace.jsonl", 12031, 3537 / 60),
        ("mooncake_synthetic_trace.jsonl", 3993, 1022 / 60),
        ("AzureLLMInferenceTrace_code.csv", 8819, 57.27),
        ("AzureLLMInferenceTrace_conv.csv", 19366, 58.36),
    ],
)
def test_recorded_traces_have_the_requests_and_the_length_their_authors_state(
    data: Path, name: str, count: int, minutes: float
) -> None:
    load = read_trace(data / "traces" / name)
    assert len(load.arrivals) == count
    assert load.arrivals[0].time_s == 0.0
    assert load.arrivals[-1].time_s == pytest.approx(60 * minutes, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "share"), [pytest.param("conversation", 0.366, marks=pytest.mark.slow), ("synthetic", 0.640)]
)
def test_prefix_hits_of_mooncake_are_the_published_ones(data: Path, name: str, share: float) -> None:
    load = read_trace(data / "traces" / f"mooncake_{name}_trace.jsonl")
    seen: set[bytes] = set()
    hits = total = 0
    for arrival in load.arrivals:
        assert arrival.prefix is not None
        trace_blocks = arrival.prefix.hashes(arrival.prompt_tokens, 512)
        hit = next((i for i, h in enumerate(trace_blocks) if h not in seen), len(trace_blocks))
        hits, total = hits + 512 * hit, total + arrival.prompt_tokens
        seen.update(trace_blocks)
    assert hits / total == pytest.approx(share, abs=0.03)


def test_lengths_only(data: Path) -> None:
    load = read_trace(data / "traces" / "arxiv_summarization_lengths.csv")
    assert len(load.arrivals) == 28257 and not load.timed
    assert (load.arrivals[0].prompt_tokens, load.arrivals[0].output_tokens) == (3772, 54)


def test_numbers_that_could_be_dates_are_numbers(write: Write) -> None:
    """``20231116`` is the 16th of November 2023 to ISO 8601, and 5.6 hours to who counts milliseconds."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n0,5,1\n20231116,7,2\n20231117,7,2"
    load = read_trace(write("t.csv", text), "ms")
    assert [a.time_s for a in load.arrivals] == pytest.approx([0.0, 20231.116, 20231.117])


def test_azure_dates_become_seconds(write: Write) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2023-11-16 18:17:03.9799600,5,1\r\n2023-11-16 18:18:04.4799600,7,2"
    )
    load = read_trace(write("t.csv", text))
    assert [a.time_s for a in load.arrivals] == [0.0, pytest.approx(60.5)]
    assert [(a.prompt_tokens, a.output_tokens) for a in load.arrivals] == [(5, 1), (7, 2)]


@pytest.mark.parametrize(
    ("times", "unit", "seconds"),
    [
        ([0, 3000, 6000], "auto", 6.0),  # the format's own milliseconds
        ([5000, 5250.5, 6000], "auto", 1.0),  # fractions of milliseconds
        ([0, 1, 2, 3], "auto", 3.0),  # 1,000 requests/s would be implausible
        ([0.0, 0.4, 2.5], "auto", 2.5),
        ([0, 1, 2, 3], "ms", 0.003),
        ([0, 3000, 6000], "s", 6000.0),
        ([4, 4], "auto", 0.0),
    ],
)
def test_milliseconds_and_seconds_are_told_apart(write: Write, times: list[float], unit: str, seconds: float) -> None:
    load = read_trace(write("t.jsonl", mooncake(times)), unit)
    assert load.arrivals[-1].time_s == pytest.approx(seconds)
    assert any("times read as" in note for note in load.notes)


def test_a_mooncake_trace_rewritten_in_seconds_reads_the_same(data: Path, write: Write) -> None:
    path = data / "traces" / "mooncake_synthetic_trace.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    text = "\n".join(json.dumps({**r, "timestamp": r["timestamp"] / 1000}) for r in rows)
    assert read_trace(write("s.jsonl", text)).rate == pytest.approx(read_trace(path).rate)


def test_rows_out_of_order_are_sorted_and_it_is_said(write: Write) -> None:
    load = read_trace(write("t.jsonl", mooncake([3000, 0, 1000])))
    assert [a.time_s for a in load.arrivals] == [0.0, 1.0, 3.0]
    assert any("sorted" in note for note in load.notes)


GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.jsonl", GOOD + "{oops\n", r"t\.jsonl:2: not valid JSON"),
        ("t.jsonl", GOOD + "[1]\n", r"t\.jsonl:2: expected a JSON object"),
        ("t.jsonl", GOOD + '\n{"timestamp": 1, "output_length": 2}\n', r"t\.jsonl:3: input_length is missing"),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": -3, "output_length": 2}',
            r":1: input_length -3 is not a whole number",
        ),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": 0}', r":1: output_length 0 is not"),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": true}', r":1: output_length True is not"),
        ("t.jsonl", '{"timestamp": NaN, "input_length": 3, "output_length": 2}', r":1: timestamp nan is not a time"),
        (
            "t.jsonl",
            '{"timestamp": 1, "input_length": 513, "output_length": 2, "hash_ids": [1]}',
            r"2 blocks of 512 expected",
        ),
        ("t.jsonl", '{"timestamp": 1, "input_length": 3, "output_length": 2, "hash_ids": ["x"]}', r"hash_ids must be"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5\n", r"t\.csv:2: 2 fields where"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,1\n", r"t\.csv:2: TIMESTAMP 'yesterday'"),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n1.5,5,1\n2023-11-16 18:17:03,5,1\n",
            r"t\.csv:3: dates and numbers",
        ),
        (
            "t.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,5.5,1\n",
            r"t\.csv:2: ContextTokens '5\.5'",
        ),
        ("t.csv", "num_prefill_tokens,num_decode_tokens\n5,x\n", r"t\.csv:2: num_decode_tokens 'x'"),
        ("t.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n", r"no requests"),
        ("t.csv", "a,b\n1,2\n", r"t\.csv:1: unknown trace format; known are"),
        ("t.csv", "", r"unknown trace format"),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": 5, "output_length": 5}\n' + "[" * 100_000,
            r"t\.jsonl:2: not valid",
        ),
        (
            "t.jsonl",
            '{"timestamp": 0, "input_length": ' + "9" * 400 + ', "output_length": 5}',
            r"t\.jsonl:1: input_length 9",
        ),
        ("t.csv", 'num_prefill_tokens,num_decode_tokens\n"' + "5" * 200_000 + '",1\n', r"t\.csv: not a valid CSV"),
        ("t.csv", "num_prefill_tokens,num_decode_tokens\n" + "9x" * 3000 + ",1\n", r"t\.csv:2: .{1,120}$"),
    ],
)
def test_a_broken_row_ends_the_run_with_file_line_and_what(write: Write, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_trace(write(name, text))
    assert "\n" not in str(caught.value)


def test_binary_and_missing_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("b.jsonl", "none.csv"):
        with pytest.raises(UsageError, match=r"cannot be read"):
            read_trace(tmp_path / name)
    with pytest.raises(UsageError, match="auto, ms or s"):
        read_trace(tmp_path / "b.jsonl", "minutes")
