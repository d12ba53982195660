"""Reads recorded loads: Mooncake JSONL, Azure CSV, and CSV of lengths only. The format is told by the content.

A row that cannot be read ends the run with ``file:line: what`` (`UsageError`); no row is ever dropped.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

from smpart.bench.load import Arrival, Load, Prefix
from smpart.errors import UsageError

MOONCAKE_BLOCK = 512
"""Prompt tokens behind one of Mooncake's ``hash_ids``."""

_MOST_TOKENS = 10**9
"""A length above is a broken row: no model has such a context."""

PLAUSIBLE_RPS = 200.0
"""A trace whose numbers, read as milliseconds, would be denser than this is taken to be in seconds."""


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    time: float | datetime | None
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...] | None = None


def read_trace(path: Path, time_unit: str = "auto") -> Load:
    """Load a trace file.

    Args:
        path: a Mooncake ``.jsonl`` (timestamp, input_length, output_length[, hash_ids]), an Azure ``.csv``
            (TIMESTAMP, ContextTokens, GeneratedTokens) or a lengths ``.csv`` (num_prefill_tokens, num_decode_tokens).
        time_unit: ``auto``, ``ms`` or ``s``: what numeric timestamps are in.

    Raises:
        UsageError: no such file, unknown format, or a broken row.
    """
    if time_unit not in ("auto", "ms", "s"):
        raise UsageError(f"--time-unit {time_unit!r}: use auto, ms or s")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"trace {path}: cannot be read ({error})") from None
    rows, kind = _rows(path, lines)
    if not rows:
        raise UsageError(f"{path}: the trace has no requests")
    seconds, note = _seconds(path, rows, time_unit)
    arrivals = [Arrival(t, r.prompt_tokens, r.output_tokens, _prefix(r)) for t, r in zip(seconds, rows, strict=True)]
    notes = [f"{path.name}: {kind}, {len(rows)} requests{note}"]
    if any(b < a for a, b in pairwise(seconds)):
        arrivals.sort(key=lambda a: a.time_s)
        notes.append(f"{path.name}: rows were not in order of time and have been sorted")
    return Load(str(path), tuple(arrivals), timed=rows[0].time is not None, notes=tuple(notes))


def _prefix(row: _Row) -> Prefix | None:
    return None if row.ids is None else Prefix(row.ids, Fraction(MOONCAKE_BLOCK))


def _rows(path: Path, lines: list[str]) -> tuple[list[_Row], str]:
    head = next((line for line in lines if line.strip()), "")
    columns = {name.strip() for name in head.split(",")}
    if head.lstrip().startswith("{"):
        return list(_jsonl(path, lines)), "Mooncake JSONL"
    if columns >= {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}:
        names = ("ContextTokens", "GeneratedTokens", "TIMESTAMP")
        return list(_csv(path, lines, names)), "Azure CSV"
    if columns >= {"num_prefill_tokens", "num_decode_tokens"}:
        return list(_csv(path, lines, ("num_prefill_tokens", "num_decode_tokens", None))), "CSV of lengths"
    raise UsageError(
        f"{path}:1: unknown trace format; known are Mooncake JSONL (timestamp, input_length, output_length, hash_ids), "
        "Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens) and lengths CSV (num_prefill_tokens,num_decode_tokens)"
    )


def _jsonl(path: Path, lines: list[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise UsageError(f"{path}:{number}: not valid JSON: {line.strip()[:60]!r}") from None
        if not isinstance(row, dict):
            raise UsageError(f"{path}:{number}: expected a JSON object, got {line.strip()[:60]!r}")

        def get(name: str, row: dict[str, object] = row, number: int = number) -> object:
            if name not in row:
                raise UsageError(f"{path}:{number}: {name} is missing")
            return row[name]

        where = f"{path}:{number}"
        prompt = _count(where, "input_length", get("input_length"))
        output = _count(where, "output_length", get("output_length"))
        time = _number(where, "timestamp", get("timestamp"))
        ids = _hash_ids(where, row["hash_ids"], prompt) if "hash_ids" in row else None
        yield _Row(number, time, prompt, output, ids)


def _hash_ids(where: str, value: object, prompt: int) -> tuple[int, ...]:
    blocks = -(-prompt // MOONCAKE_BLOCK)
    if not isinstance(value, list) or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in value):
        raise UsageError(f"{where}: hash_ids must be a list of whole numbers")
    if len(value) != blocks:
        raise UsageError(
            f"{where}: {len(value)} hash_ids for {prompt} tokens; {blocks} blocks of {MOONCAKE_BLOCK} expected"
        )
    return tuple(value)


def _csv(path: Path, lines: list[str], names: tuple[str, str, str | None]) -> Iterator[_Row]:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader)]
    columns = [None if name is None else header.index(name) for name in names]
    for fields in _fields(path, reader):
        number, where = reader.line_num, f"{path}:{reader.line_num}"
        if not fields:
            continue
        if len(fields) != len(header):
            raise UsageError(f"{where}: {len(fields)} fields where the header has {len(header)}")
        prompt, output, stamp = (None if c is None else fields[c] for c in columns)
        time = None if stamp is None else _timestamp(where, stamp)
        yield _Row(number, time, _count(where, str(names[0]), prompt), _count(where, str(names[1]), output))


def _fields(path: Path, reader: Iterator[list[str]]) -> Iterator[list[str]]:
    try:
        yield from reader
    except csv.Error as error:
        raise UsageError(f"{path}: not a valid CSV file: {error}") from None


def _timestamp(where: str, text: str) -> float | datetime:
    """A number where it can be one: ``20231116`` is a date to `datetime`, too."""
    if math.isnan(_float(text)):
        with suppress(ValueError):
            return datetime.fromisoformat(text.strip())
    return _number(where, "TIMESTAMP", text)


def _number(where: str, name: str, value: object) -> float:
    number = _float(value)
    if not math.isfinite(number) or number < 0:
        raise UsageError(f"{where}: {name} {_short(value)} is not a time")
    return number


def _count(where: str, name: str, value: object) -> int:
    number = _float(value)
    if not number.is_integer() or number < 1:
        raise UsageError(f"{where}: {name} {_short(value)} is not a whole number of at least 1")
    if number > _MOST_TOKENS:
        raise UsageError(f"{where}: {name} {number:g} is more than any request has tokens")
    return int(number)


def _float(value: object) -> float:
    """A field as a number; NaN if it is none that a float can hold."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return math.nan


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _seconds(path: Path, rows: list[_Row], time_unit: str) -> tuple[list[float], str]:
    first = rows[0].time
    if first is None:
        return [0.0] * len(rows), ""
    for row in rows:
        if isinstance(row.time, datetime) is not isinstance(first, datetime):
            raise UsageError(f"{path}:{row.line}: dates and numbers are mixed as timestamps")
        if (
            isinstance(row.time, datetime)
            and isinstance(first, datetime)
            and (row.time.tzinfo is None) != (first.tzinfo is None)
        ):
            raise UsageError(f"{path}:{row.line}: timestamps with and without a time zone are mixed")
    if isinstance(first, datetime):
        dates = [row.time for row in rows if isinstance(row.time, datetime)]
        start = min(dates)
        return [(date - start).total_seconds() for date in dates], ", times are dates"
    numbers = [row.time for row in rows if isinstance(row.time, float)]
    start_number, span = min(numbers), max(numbers) - min(numbers)
    unit, why = (time_unit, "as told by --time-unit") if time_unit != "auto" else _unit(len(rows), span)
    divisor = {"ms": 1000.0, "s": 1.0}[unit]
    return [(n - start_number) / divisor for n in numbers], f", times read as {unit} ({why})"


def _unit(count: int, span: float) -> tuple[str, str]:
    """Milliseconds, the format's own unit, unless that makes the trace implausibly dense."""
    rate = (count - 1) * 1000.0 / span if span else 0.0
    if rate > PLAUSIBLE_RPS:
        return "s", f"as ms it would be {rate:.0f} requests/s; --time-unit ms says otherwise"
    return "ms", f"{rate:.3g} requests/s"
