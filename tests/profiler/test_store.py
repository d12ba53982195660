"""A profile keeps its samples, once and in order, through kills, full disks, other writers and merges."""

import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smpart.errors import BackendUnavailable, SmpartError, UsageError
from smpart.partition import Device, ModelShape, Shape
from smpart.profiler import parts, store
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.parts import Span
from smpart.profiler.sample import COLUMNS, Conditions, Point, Pressure, Sample, matrix
from smpart.profiler.store import Store

MODEL = ModelShape(2, 64, 4, 2, 16, 256, 100_000, 16_384, 400_000, 4)
OURS = Fingerprint("cores", {"name": "some CPU", "units": 2, "quota": None}, MODEL, "float32")
THEIRS = Fingerprint("cores", {"name": "some CPU", "units": 4, "quota": None}, MODEL, "float32")


def sample(number: int) -> Sample:
    """A sample like no other."""
    return Sample(Point(Shape.decode(1, number + 1), 2), (0.5, 0.25), moment=float(number))


def numbers(samples: list[Sample]) -> list[int]:
    return [int(each.moment) for each in samples]


def part(folder: Path, first: int, last: int) -> Path:
    return folder / "samples" / Span(first, last).name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "profile"


@pytest.fixture
def profile(folder: Path) -> Path:
    """Three parts of two samples each, measured in a minute each."""
    with Store.create(folder, OURS, {"tokens": 512}) as made:
        for i in range(3):
            made.add([sample(2 * i), sample(2 * i + 1)], seconds=60)
    return folder


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MERGE_AT", 1)


@pytest.fixture
def unflushed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing takes long, and only a power failure would show whether it was done."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def refusal(call: Callable[[], object], kind: type[SmpartError] = UsageError) -> str:
    with pytest.raises(kind) as raised:
        call()
    assert "\n" not in str(raised.value)
    return str(raised.value)


# What is written is read

COUNTS = st.integers(0, 2**62)
SECONDS = st.floats(1e-9, 1e9)
SHAPES = st.builds(Shape, COUNTS, COUNTS, st.floats(0, 1e300), COUNTS, COUNTS, COUNTS)
POINTS = st.builds(
    Point, SHAPES, COUNTS, SHAPES, COUNTS, st.builds(Pressure, st.text(max_size=5), st.floats(0, 1e18), st.floats(0))
)
VALUE = st.none() | st.floats(allow_nan=False)
SAMPLES = st.builds(
    Sample,
    POINTS,
    st.lists(SECONDS, min_size=1, max_size=4).map(tuple),
    COUNTS,
    st.sampled_from(["fill", "active", "anchor"]),
    st.floats(0, 1e12),
    st.builds(Conditions, VALUE, VALUE, VALUE, VALUE),
)


@settings(max_examples=20)
@given(runs=st.lists(st.lists(st.tuples(st.lists(SAMPLES, max_size=3), st.integers(0, 60)), max_size=5), max_size=3))
def test_any_samples_are_read_as_written_over_many_runs(runs: list[list[tuple[list[Sample], int]]]) -> None:
    written: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MERGE_AT", 3)
        patch.setattr(os, "fsync", lambda descriptor: None)
        spent = 0
        for run in runs:
            with Store.create(Path(folder), OURS) as made:
                unsaved = 0
                for batch, seconds in run:
                    made.add(batch, seconds)
                    written += batch
                    unsaved = unsaved + seconds if not batch else 0
                    spent += seconds
                    assert made.samples() == written
                    assert made.minutes == pytest.approx(spent / 60)
                spent -= unsaved
        if runs:
            assert Store.open(Path(folder)).samples() == written
            assert Store.open(Path(folder)).minutes == pytest.approx(spent / 60)


def test_the_head_is_read_as_written(profile: Path) -> None:
    read = Store.open(profile)
    assert read.fingerprint == OURS and read.fingerprint.digest == OURS.digest
    assert read.configuration == {"tokens": 512}
    assert read.minutes == 3


def test_a_fingerprint_of_a_real_device_is_its_own_after_reading(folder: Path) -> None:
    device = Device("x", "cuda", 2, (0, 1), 2**30, {"capability": (9, 0), "path": Path("/dev")})
    fingerprint = Fingerprint.of("green", device, MODEL, "bfloat16")
    for _ in range(2):
        with Store.create(folder, fingerprint) as made:
            assert made.fingerprint == fingerprint


def test_other_tools_read_the_columns_as_estimators_name_them(folder: Path) -> None:
    points = [Point(Shape.prefill([(8, 4), (2, 0)]), 1, Shape.decode(3, 90), 1), Point(Shape.decode(2, 7), 2)]
    points += [Point(Shape.decode(1, 5), 1, neighbour_units=1, contender=Pressure("copy", 1e9, 5.0))]
    with Store.create(folder, OURS) as made:
        made.add([Sample(point, (0.5,), conditions=Conditions(watts=70.0)) for point in points])
    table = pq.read_table(part(folder, 1, 3))
    assert table.schema.names[: len(COLUMNS)] == list(COLUMNS)
    values = np.stack([np.asarray(table[name].to_pylist(), dtype=float) for name in COLUMNS], axis=1)
    assert np.array_equal(values, matrix(points))
    assert table["contender_kind"].to_pylist() == ["", "", "copy"]
    assert table["watts"].to_pylist() == [70.0] * 3 and table["celsius"].to_pylist() == [None] * 3
    assert all(field.metadata[b"description"] for field in table.schema)


@pytest.mark.parametrize("seconds", [(), (0.0,), (-1.0,), (0.5, float("nan")), (float("inf"),)])
def test_an_unsound_sample_is_refused_with_all_that_came_along(profile: Path, seconds: tuple[float, ...]) -> None:
    with Store.create(profile, OURS) as made:
        refusal(lambda: made.add([sample(6), replace(sample(7), seconds=seconds)]))
        made.add([sample(6)])
        assert numbers(made.samples()) == list(range(7))


# Merging


def test_many_parts_become_one_and_gaps_stay_gaps(profile: Path, merging: None) -> None:
    part(profile, 3, 4).unlink()
    with Store.create(profile, OURS) as made:
        made.add([sample(6)], seconds=30)
        made.add([sample(7)], seconds=30)
    files = sorted(path.name for path in (profile / "samples").iterdir())
    assert files == [Span(1, 2).name, Span(5, 8).name]
    assert numbers(Store.open(profile).samples()) == [0, 1, 4, 5, 6, 7]
    assert Store.open(profile).minutes == 3


def test_a_store_of_many_parts_stays_small(folder: Path) -> None:
    with Store.create(folder, OURS) as made:
        for i in range(store.MERGE_AT + 5):
            made.add([sample(i)])
    assert len(list((folder / "samples").iterdir())) == 5
    assert numbers(Store.open(folder).samples()) == list(range(store.MERGE_AT + 5))


def test_a_reader_that_a_merge_overtakes_sees_every_sample(
    profile: Path, merging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = Store.open(profile), Store.create(profile, OURS)
    listing = (profile / "samples").iterdir
    first = list(listing())
    batches = iter([first[:1], first, first])  # a folder may show a part of what is there while it changes

    def overtaken(path: Path) -> Iterator[Path]:
        return iter(next(batches, None) or listing())

    writer.add([sample(6)])
    reader._known.clear()
    monkeypatch.setattr(Path, "iterdir", overtaken)
    assert numbers(reader.samples()) == list(range(7))
    writer.close()


def test_reading_while_another_writes_and_merges(folder: Path, merging: None) -> None:
    with Store.create(folder, OURS) as made:
        writer = threading.Thread(target=lambda: [made.add([sample(i)]) for i in range(30)])
        writer.start()
        seen = 0
        while seen < 30 and (writer.is_alive() or seen == 0):
            read = numbers(Store.open(folder).samples())
            assert read == list(range(len(read))) and len(read) >= seen
            seen = len(read)
        writer.join()
    assert numbers(Store.open(folder).samples()) == list(range(30))


def test_samples_that_never_rest_are_not_read_for_ever(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_TRIES", 3)
    part(profile, 7, 8).symlink_to("nowhere")
    assert "changes all the while" in refusal(lambda: Store.open(profile), SmpartError)


# Kills and failures at every system call

TOTAL = 6
CALLS = ("open", "write", "fsync", "replace", "unlink", "mkdir")


class Killed(BaseException):
    """The process is dead: nothing of it runs any more."""


class Disk:
    """Stands between the process and the disk, and strikes at the nth call. Counts them until then."""

    def __init__(self, nth: float, strike: Callable[["Disk", Callable[[], Any], str, tuple[Any, ...]], Any]) -> None:
        self.calls = 0
        self.dead = False
        self._nth = nth
        self._strike = strike

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            patch.setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def through(*args: Any, **options: Any) -> Any:
            if self.dead:
                raise Killed
            self.calls += 1
            if self.calls == self._nth:
                return self._strike(self, lambda: call(*args, **options), name, args)
            return call(*args, **options)

        return through


def kill(disk: Disk, _call: Callable[[], Any], name: str, args: tuple[Any, ...]) -> Any:
    """Dead before the call, or in the middle of a write."""
    disk.dead = True
    if name == "write":
        os.pwrite(args[0], bytes(args[1])[: len(args[1]) // 2], 0)
    raise Killed


def work(folder: Path, done: list[int]) -> None:
    """A run that is killed at some point; `done` tells how many samples it was told are safe; -1: not begun."""
    made = None
    try:
        made = Store.create(folder, OURS)
        done[0] = len(made.samples())
        for first in range(done[0], TOTAL, 2):
            made.add([sample(first), sample(first + 1)], seconds=60)
            done[0] = first + 2
    finally:
        if made is not None:  # as the kernel does
            made.close()


def test_a_kill_at_any_call_loses_and_doubles_nothing(folder: Path, merging: None, unflushed: None) -> None:
    for nth in itertools.count(1):
        place, done = folder / str(nth), [-1]
        disk = Disk(nth, kill)
        with pytest.MonkeyPatch.context() as patch, suppress(Killed):
            disk.install(patch)
            work(place, done)
        if not disk.dead:
            break
        if done[0] >= 0 or (place / "profile.json").exists():
            read = Store.open(place)
            kept = numbers(read.samples())
            assert kept == list(range(len(kept))) and max(0, done[0]) <= len(kept) <= max(0, done[0]) + 2
            assert read.minutes * 2 == len(kept)
        work(place, done)
        assert numbers(Store.open(place).samples()) == list(range(TOTAL)) and Store.open(place).minutes * 2 == TOTAL
        assert {path.name for path in place.iterdir()} == {"profile.json", "lock", "samples"}
        spans = [span for path in (place / "samples").iterdir() if (span := Span.of(path.name)) is not None]
        assert len(list((place / "samples").iterdir())) == len(spans) == len(parts.outermost(spans))
    assert nth > 30


def full(code: int, lasting: bool) -> Any:
    """A failure of one call; of all that write from then on, if lasting."""

    def strike(disk: Disk, call: Callable[[], Any], name: str, _args: tuple[Any, ...]) -> Any:
        if lasting:
            disk._nth += 1
        if lasting and name == "unlink":
            return call()
        raise OSError(code, os.strerror(code))

    return strike


@pytest.mark.parametrize("lasting", [False, True])
def test_a_failure_at_any_call_is_told_and_what_was_there_stays(
    folder: Path, merging: None, unflushed: None, lasting: bool
) -> None:
    code = errno.ENOSPC
    for nth in itertools.count(1):
        place, done = folder / str(nth), [-1]
        disk = Disk(nth, full(code, lasting))
        try:
            with pytest.MonkeyPatch.context() as patch:
                disk.install(patch)
                work(place, done)
        except SmpartError as error:
            assert str(place) in str(error) and os.strerror(code) in str(error) and "\n" not in str(error)
        if disk.calls < nth:
            break
        if done[0] >= 0:
            assert numbers(Store.open(place).samples()) == list(range(done[0]))
            assert Store.open(place).minutes * 2 == done[0]
        work(place, done)
        assert numbers(Store.open(place).samples()) == list(range(TOTAL)) and Store.open(place).minutes * 2 == TOTAL
    assert nth > 30


def test_a_full_disk_says_what_is_safe_and_the_same_store_goes_on(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(_descriptor: int, _data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store.create(profile, OURS) as made:
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            message = refusal(lambda: made.add([sample(6)], seconds=60), SmpartError)
        assert "No space left on device" in message and "the 6 samples before are safe: make room" in message
        assert numbers(made.samples()) == list(range(6))
        made.add([sample(6)], seconds=60)
    assert numbers(Store.open(profile).samples()) == list(range(7)) and Store.open(profile).minutes == 4


def test_a_part_is_flushed_before_it_gets_its_name_and_its_name_before_add_returns(
    profile: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    files: dict[int, str] = {}

    def recorded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def through(*args: Any) -> Any:
            done = call(*args)
            if name == "open":
                files[done] = Path(args[0]).suffix
            else:
                steps.append(f"{name} {files[args[0]] if isinstance(args[0], int) else Path(args[0]).suffix}")
            return done

        return through

    with Store.create(profile, OURS) as made:
        for name in ("open", "write", "fsync", "replace"):
            monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
        made.add([sample(6)])
    assert steps == ["write .tmp", "fsync .tmp", "replace .tmp", "fsync "]


def test_a_folder_that_is_gone_is_told(profile: Path) -> None:
    with Store.create(profile, OURS) as made:
        profile.rename(profile.with_name("moved"))
        message = refusal(lambda: made.add([sample(6)]), SmpartError)
    assert "No such file or directory" in message and "see to the folder" in message
    assert len(Store.open(profile.with_name("moved")).samples()) == 6


def test_a_short_write_is_finished(profile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:100]))
    with Store.create(profile, OURS) as made:
        made.add([sample(6)])
    assert numbers(Store.open(profile).samples()) == list(range(7))


ENDLESS = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_store import OURS, sample, store
store.MERGE_AT = 2
with store.Store.create(Path({folder!r}), OURS) as made:
    for i in itertools.count():
        made.add([sample(i)])
        print(i + 1, flush=True)
"""


def test_a_killed_writer_leaves_all_it_was_told_is_safe_and_no_lock(folder: Path) -> None:
    code = ENDLESS.format(tests=str(Path(__file__).parent), folder=str(folder))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        lines = [writer.stdout.readline() for _ in range(25)]
        assert "another process is writing here" in refusal(lambda: Store.create(folder, OURS))
        writer.send_signal(signal.SIGKILL)
        told = int([*lines, *writer.stdout.readlines()][-1])
    with Store.create(folder, OURS) as again:
        kept = numbers(again.samples())
        assert kept == list(range(len(kept))) and len(kept) >= told


# Who may write


def test_one_writer_at_a_time(profile: Path) -> None:
    with Store.create(profile, OURS):
        assert "another process is writing here" in refusal(lambda: Store.create(profile, OURS))
        assert len(Store.open(profile).samples()) == 6
    Store.create(profile, OURS).close()


def test_a_refused_or_forgotten_store_keeps_nobody_out(profile: Path) -> None:
    refusal(lambda: Store.create(profile, THEIRS))
    Store.create(profile, OURS)  # and dropped
    Store.create(profile, OURS).close()


def test_a_reader_and_a_closed_store_do_not_write(profile: Path) -> None:
    made = Store.create(profile, OURS)
    made.close()
    made.close()
    for unwritable in (made, Store.open(profile)):
        assert "not open for writing" in refusal(lambda s=unwritable: s.add([sample(6)]))  # type: ignore[misc]
        assert len(unwritable.samples()) == 6


# Refusals


def test_another_fingerprint_or_configuration_is_refused(profile: Path) -> None:
    message = refusal(lambda: Store.create(profile, THEIRS))
    assert message == f"{profile} holds another profile (device.units 2, not 4): choose another folder"
    message = refusal(lambda: Store.create(profile, OURS, {"tokens": 256, "blocks": 9}))
    assert "(blocks None, not 9, tokens 512, not 256)" in message
    for configuration in (None, {"tokens": 512}):
        with Store.create(profile, OURS, configuration) as made:
            assert made.configuration == {"tokens": 512}


def test_no_profile_there(tmp_path: Path, profile: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is no folder" in refusal(lambda: Store.open(tmp_path / "nowhere"))
    assert "is no folder" in refusal(lambda: Store.open(tmp_path / "file"))
    assert "holds no profile" in refusal(lambda: Store.open(tmp_path))
    for inner in (tmp_path / "file", tmp_path / "file" / "inner"):
        assert f"{tmp_path / 'file'} is no folder" in refusal(lambda place=inner: Store.create(place, OURS))  # type: ignore[misc]
    (profile / "profile.json").unlink()
    assert "no profile.json" in refusal(lambda: Store.create(profile, OURS))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is damaged"),
        ('{"schema": 1, "fing', "is damaged"),
        ("\xff", "is damaged"),
        ('{"schema": 1, "fingerprint": {}, "configuration": {}}', "is damaged"),
        ('{"schema": 1, "fingerprint": [], "configuration": {}}', "is damaged"),
        ("[1]", "was not written by smpart"),
        ('{"name": "x"}', "was not written by smpart"),
        ('{"schema": 7}', "newer smpart (schema 7, this one reads 1): update smpart"),
        ('{"schema": 0}', "has schema 0, this smpart reads 1: profile again"),
        ('{"schema": "x"}', "has schema x"),
    ],
)
def test_a_head_that_cannot_be_used(profile: Path, text: str, words: str) -> None:
    (profile / "profile.json").write_text(text, encoding="latin-1")
    for call in (lambda: Store.open(profile), lambda: Store.create(profile, OURS)):
        message = refusal(call)
        assert message.startswith(f"{profile / 'profile.json'} ") and words in message


def test_a_truncated_part_is_named_with_what_its_loss_costs(profile: Path) -> None:
    damaged = part(profile, 3, 4)
    whole = damaged.read_bytes()
    for size in range(0, len(whole), 97):
        damaged.write_bytes(whole[:size])
        message = refusal(lambda: Store.open(profile))
        assert message.startswith(f"{damaged} is damaged (")
        assert message.endswith("delete it, which loses its 2 samples and nothing else")
    damaged.unlink()
    assert numbers(Store.open(profile).samples()) == [0, 1, 4, 5]
    with Store.create(profile, OURS) as made:
        made.add([sample(9)])
        assert numbers(made.samples()) == [0, 1, 4, 5, 9]


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_a_flipped_byte_is_refused_or_harmless(place: float, flip: int) -> None:
    written = parts.Part(Span(1, 2), (sample(0), sample(1)), 60.0)
    data = bytearray(parts.encode(written, OURS))
    data[int(place * len(data))] ^= flip
    with suppress(UsageError):
        assert parts.decode(bytes(data), Span(1, 2), OURS).samples == written.samples


def test_foreign_and_misplaced_parts(profile: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(path: Path) -> str:
        for call in (lambda: Store.open(profile), lambda: Store.create(profile, OURS)):
            message = refusal(call)
            assert str(path) in message
        path.unlink()
        return message

    foreign = part(profile, 7, 8)
    pq.write_table(pa.table({"x": [1, 2]}), foreign)
    assert "is a Parquet file that smpart did not write: move it away" in told(foreign)

    foreign = profile / "samples" / "data.parquet"
    pq.write_table(pa.table({"x": [1, 2]}), foreign)
    assert "is no part of this profile" in told(foreign)

    foreign = part(profile, 7, 8)
    with Store.create(tmp_path / "other", THEIRS) as other:
        other.add([sample(0), sample(1)])
    foreign.write_bytes(part(tmp_path / "other", 1, 2).read_bytes())
    assert "belongs to another profile (device.units 4, not 2): move it away" in told(foreign)

    foreign = part(profile, 7, 9)
    foreign.write_bytes(part(profile, 1, 2).read_bytes())
    assert "is damaged (2 samples, its name says 3)" in told(foreign)

    foreign = part(profile, 4, 7)
    foreign.write_bytes(part(profile, 1, 2).read_bytes())
    message = refusal(lambda: Store.open(profile))
    assert f"holds {part(profile, 3, 4).name} and {foreign.name}, which claim the same samples" in message
    foreign.unlink()

    foreign = part(profile, 7, 8)
    for version, words in ((2, "newer smpart (schema 2"), (0, "has schema 0")):
        with monkeypatch.context() as patch:
            patch.setattr(parts, "SCHEMA", version)
            foreign.write_bytes(parts.encode(parts.Part(Span(7, 8), (sample(6), sample(7)), 1.0), OURS))
        assert words in told(foreign)

    notes = pq.read_schema(part(profile, 1, 2)).metadata
    pq.write_table(pa.table({"x": [1, 2]}).replace_schema_metadata(notes), foreign)
    assert "has other columns than schema 1" in told(foreign)
    assert len(Store.open(profile).samples()) == 6


def test_files_of_others_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".draft-1.tmp").write_text("mine")
    with Store.create(tmp_path, OURS) as made:
        (tmp_path / "samples" / ".DS_Store").write_text("mine")
        made.add([sample(0)])
    Store.create(tmp_path, OURS).close()
    assert len(Store.open(tmp_path).samples()) == 1
    assert all((tmp_path / name).exists() for name in ("notes.txt", ".draft-1.tmp", "samples/.DS_Store"))


def test_no_pyarrow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for call in (lambda: Store.create(folder, OURS), lambda: Store.open(folder)):
        assert "pip install 'smpart[profile]'" in refusal(call, BackendUnavailable)
    assert not folder.exists()


def test_importing_the_store_imports_neither_torch_nor_pyarrow() -> None:
    code = "import sys, smpart.profiler.store; print({'torch', 'transformers', 'pyarrow'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "set()\n"
