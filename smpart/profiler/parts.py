"""One file of samples: a Parquet file whose name tells which samples of the profile it holds."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NamedTuple

from smpart.errors import BackendUnavailable, SmpartError, UsageError
from smpart.partition import Shape
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.sample import COLUMNS, SHAPE_COLUMNS, Conditions, Point, Pressure, Sample

SCHEMA = 1
"""Grows when the columns change, or what they mean."""

_SHAPE = {
    "prefill_tokens": ("int64", "prompt tokens computed"),
    "prefill_context": ("int64", "tokens in the KV memory before the chunks, summed over chunks"),
    "prefill_pairs": ("float64", "query-key pairs of the chunks"),
    "prefill_chunks": ("int64", "packed chunks"),
    "decode_batch": ("int64", "sequences that compute one token each"),
    "decode_context": ("int64", "tokens those sequences attend to, summed"),
}

_COLUMNS = {
    **_SHAPE,
    "units": ("int64", "units the forward runs on"),
    **{f"neighbour_{name}": (kind, f"of the neighbour: {text}") for name, (kind, text) in _SHAPE.items()},
    "neighbour_units": ("int64", "units the neighbour runs on; 0: nothing runs beside the forward"),
    "contender_bytes_s": ("float64", "bytes/s that a contender kernel moves alone on the neighbour's units"),
    "contender_flops_s": ("float64", "floating-point operations/s, likewise"),
    "contender_kind": ("string", "name of that kernel; empty: none"),
    "seconds": ("list", "seconds of each undisturbed repeat, in the order they ran"),
    "disturbed": ("int64", "repeats thrown away"),
    "stage": ("string", "why it was measured: fill, active, anchor"),
    "moment": ("float64", "Unix time of the first repeat, seconds"),
    "sm_mhz": ("float64?", "clock of the SMs; null: unknown"),
    "memory_mhz": ("float64?", "clock of the memory; null: unknown"),
    "celsius": ("float64?", "temperature of the chip; null: unknown"),
    "watts": ("float64?", "power drawn; null: unknown"),
}
"""Columns of a part, in order, with type and meaning. The first are those of an estimator's matrix."""

_VERSION, _FINGERPRINT, _SECONDS = b"smpart.schema", b"smpart.fingerprint", b"smpart.seconds"
_NAME = re.compile(r"part-(\d{6,})-(\d{6,})\.parquet")


class Span(NamedTuple):
    """Which samples a part holds: numbers from `first` to `last`, counted from 1 in the order of writing."""

    first: int
    last: int

    @property
    def name(self) -> str:
        """The file's name.

        >>> Span(9, 16).name
        'part-000009-000016.parquet'
        """
        return f"part-{self.first:06d}-{self.last:06d}.parquet"

    @property
    def samples(self) -> int:
        """How many samples."""
        return self.last - self.first + 1

    @classmethod
    def of(cls, name: str) -> Span | None:
        """The span that a file's name tells; None if it is no part's name."""
        match = _NAME.fullmatch(name)
        span = cls(int(match[1]), int(match[2])) if match else None
        return span if span is not None and 0 < span.first <= span.last and span.name == name else None


@dataclass(frozen=True, slots=True)
class Part:
    """What one file holds.

    Attributes:
        seconds: time it took to measure these samples, everything included.
    """

    span: Span
    samples: tuple[Sample, ...]
    seconds: float


def outermost(spans: Iterable[Span]) -> list[Span]:
    """The spans that lie in no other one, in order: a part that was merged into a larger one counts no more.

    Raises:
        UsageError: two overlap, and neither lies in the other. The message goes on after the folder's name.

    >>> outermost([Span(1, 2), Span(3, 4), Span(1, 4), Span(5, 6)])
    [Span(first=1, last=4), Span(first=5, last=6)]
    """
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        if not found or span.first > found[-1].last:
            found.append(span)
        elif span.last > found[-1].last:
            both = f"holds {found[-1].name} and {span.name}, which claim the same samples"
            raise UsageError(f"{both}: move away the one that was copied here")
    return found


def arrow() -> Any:
    """The module `pyarrow`, with `pyarrow.parquet` loaded. Raises `BackendUnavailable` where it is missing."""
    try:
        importlib.import_module("pyarrow.parquet")
        return importlib.import_module("pyarrow")
    except ImportError:
        raise BackendUnavailable("profiles need pyarrow: pip install 'smpart[profile]'") from None


def encode(part: Part, fingerprint: Fingerprint) -> bytes:
    """A part as the bytes of its file. Raises `UsageError` for a sample that was not measured soundly."""
    wrong = next((why for why in map(_unsound, part.samples) if why is not None), None)
    if wrong is not None:
        raise UsageError(f"a sample cannot be stored: {wrong}")
    pa = arrow()
    notes = {
        _VERSION: str(SCHEMA).encode(),
        _FINGERPRINT: json.dumps(fingerprint.to_json(), sort_keys=True).encode(),
        _SECONDS: repr(part.seconds).encode(),
    }
    schema = _schema(pa).with_metadata(notes)
    columns = zip(*map(_row, part.samples), strict=True)
    arrays = [pa.array(list(values), field.type) for values, field in zip(columns, schema, strict=True)]
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table(arrays, schema=schema), sink, write_page_checksum=True)
    return bytes(sink.getvalue())


def decode(data: bytes, span: Span, fingerprint: Fingerprint) -> Part:
    """The part that a file's bytes hold.

    Raises:
        UsageError: it is damaged, foreign, of another schema or fingerprint. The message goes on after the file's name.
    """
    pa = arrow()
    lost = f"delete it, which loses its {span.samples} samples and nothing else"
    try:
        file = pa.parquet.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        seconds = _check_notes(file.metadata.metadata or {}, fingerprint)
        table = file.read()
        if [(f.name, f.type) for f in table.schema] != [(f.name, f.type) for f in _schema(pa)]:
            raise UsageError(f"has other columns than schema {SCHEMA}: {lost}")
        samples = tuple(map(_sample, zip(*(column.to_pylist() for column in table.columns), strict=True)))
    except SmpartError:
        raise
    # The bytes are in memory: whatever goes wrong here, and Arrow raises many things, is the fault of what they say.
    except Exception as error:
        what = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"is damaged ({what}): {lost}") from None
    wrong = next((why for why in map(_unsound, samples) if why is not None), None)
    if wrong is None and len(samples) != span.samples:
        wrong = f"{len(samples)} samples, its name says {span.samples}"
    if wrong is not None:
        raise UsageError(f"is damaged ({wrong}): {lost}")
    return Part(span, samples, seconds)


def check_version(version: object) -> None:
    """Raise `UsageError` unless a file's schema version is the one that this smpart reads; goes on after its name."""
    if version == SCHEMA:
        return
    if isinstance(version, int) and version > SCHEMA:
        raise UsageError(f"was written by a newer smpart (schema {version}, this one reads {SCHEMA}): update smpart")
    raise UsageError(f"has schema {version}, this smpart reads {SCHEMA}: profile again into a new folder")


def _check_notes(notes: dict[bytes, bytes], fingerprint: Fingerprint) -> float:
    """Seconds that the notes of a part tell, if the part belongs to this profile."""
    if _VERSION not in notes:
        raise UsageError("is a Parquet file that smpart did not write: move it away")
    check_version(int(notes[_VERSION]))
    theirs = Fingerprint.from_json(json.loads(notes[_FINGERPRINT]))
    differences = theirs.differences(fingerprint)
    if differences:
        raise UsageError(f"belongs to another profile ({', '.join(differences)}): move it away")
    seconds = float(notes[_SECONDS])
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"{seconds} seconds of measuring")
    return seconds


def _schema(pa: Any) -> Any:
    types = {"int64": pa.int64(), "float64": pa.float64(), "string": pa.string()}
    types["list"] = pa.list_(pa.field("element", pa.float64(), nullable=False))
    return pa.schema(
        pa.field(name, types[kind.rstrip("?")], kind.endswith("?"), metadata={"description": text})
        for name, (kind, text) in _COLUMNS.items()
    )


def _unsound(sample: Sample) -> str | None:
    """What is wrong with a sample's times; None if nothing is."""
    if not sample.seconds:
        return "no repeat was measured"
    wrong = next((s for s in sample.seconds if not (math.isfinite(s) and s > 0)), None)
    return None if wrong is None else f"a forward took {wrong} s"


def _row(sample: Sample) -> tuple[Any, ...]:
    point, pressure = sample.point, sample.point.contender
    shapes = (*astuple(point.shape), point.units, *astuple(point.neighbour), point.neighbour_units)
    rest = (list(sample.seconds), sample.disturbed, sample.stage, sample.moment, *astuple(sample.conditions))
    return (*shapes, pressure.bytes_s, pressure.flops_s, pressure.kind, *rest)


def _sample(row: Sequence[Any]) -> Sample:
    wide = len(SHAPE_COLUMNS)
    shape, (units, *beside), rest = row[:wide], row[wide : len(COLUMNS)], row[len(COLUMNS) :]
    *neighbour, neighbour_units, bytes_s, flops_s = beside
    kind, seconds, disturbed, stage, moment, *conditions = rest
    contender = Pressure(kind, bytes_s, flops_s)
    point = Point(Shape(*shape), units, Shape(*neighbour), neighbour_units, contender)
    return Sample(point, tuple(seconds), disturbed, stage, moment, Conditions(*conditions))
