"""A profile on the disk: samples that no kill, full disk or second writer takes away again.

    DIR/profile.json                                whose profile it is, and what was to be measured
    DIR/samples/part-000001-000008.parquet          samples 1 to 8, in the order they were written
    DIR/lock                                        locked by the one process that writes, samples or a fit of them

Every file is written whole (see `smpart.durable`), and a part never changes. When there are many, they are
merged: the larger part is written first, then those that lie in it are removed; parts that lie in another one count
no more. So the samples are the same whenever the process dies.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from smpart import durable
from smpart.errors import SmpartError, UsageError
from smpart.profiler import parts
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.parts import Part, Span
from smpart.profiler.sample import Sample

_log = logging.getLogger(__name__)

MERGE_AT = 64
"""Parts that a merge must save to be worth it."""

_TRIES = 100


class Store:
    """A profile folder. `create` opens it for writing and keeps others from writing; `open` reads only.

    For one thread at a time. A store that writes is a context manager that ends with `close`.

    Attributes:
        folder: where it is.
        fingerprint: whose samples they are.
        configuration: what was to be measured, as JSON has it.
    """

    def __init__(self, folder: Path, fingerprint: Fingerprint, configuration: Mapping[str, Any]) -> None:
        self.folder = folder
        self.fingerprint = fingerprint
        self.configuration = configuration
        self._known: dict[Span, Part] = {}
        self._unsaved = 0.0
        self._unlock: weakref.finalize[..., Store] | None = None

    @classmethod
    def create(cls, folder: Path, fingerprint: Fingerprint, configuration: Mapping[str, Any] | None = None) -> Store:
        """A new profile, or one to go on with.

        Args:
            folder: made if missing.
            fingerprint: must equal that of an existing profile.
            configuration: kept with a new profile, ready for `json.dumps`; must equal an existing one's unless None.

        Raises:
            UsageError: another process writes there, the profile there is another one or damaged, or the folder
                cannot be written.
            BackendUnavailable: pyarrow is missing.
        """
        parts.arrow()
        fingerprint = Fingerprint.from_json(_plain(fingerprint.to_json()))
        with _explained(folder, "cannot be written", "choose another folder"):
            try:
                durable.make_folder(folder / "samples")
            except FileExistsError as error:
                raise UsageError(f"{error.filename} is no folder: choose another place for the profile") from None
            descriptor = _lock(folder)
            try:
                durable.sweep_out(folder / _HEAD)
                durable.sweep_out(folder / "samples" / "*.parquet")
                store = cls._resume_or_begin(folder, fingerprint, configuration)
                store._tidy()
            except BaseException:
                os.close(descriptor)
                raise
        store._unlock = weakref.finalize(store, os.close, descriptor)
        return store

    @classmethod
    def open(cls, folder: Path) -> Store:
        """An existing profile, to read; also while another process writes it.

        Raises:
            UsageError: there is none, or a file of it is damaged, foreign, or of another schema or profile.
            BackendUnavailable: pyarrow is missing.
        """
        parts.arrow()
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder: {_MAKE.format(folder)}")
        store = cls(folder, *_read_head(folder))
        store._parts()
        return store

    @property
    def minutes(self) -> float:
        """Time spent measuring so far, over all runs."""
        return (sum(part.seconds for part in self._parts()) + self._unsaved) / 60

    def samples(self) -> list[Sample]:
        """All samples, in the order they were written.

        Raises:
            UsageError: a part is damaged, foreign, or of another schema or profile.
        """
        return [sample for part in self._parts() for sample in part.samples]

    def add(self, samples: Sequence[Sample], seconds: float = 0.0) -> None:
        """Add samples, all or none; on the disk when it returns.

        Args:
            samples: each with at least one repeat, all times finite and above 0.
            seconds: time spent on measuring them. Without samples it is written with the next ones.

        Raises:
            SmpartError: they could not be written: the disk is full, the folder gone. What was there stays.
            UsageError: the store is not open for writing, or a sample is unsound.
        """
        if self._unlock is None or not self._unlock.alive:
            raise UsageError(f"{self.folder} is not open for writing: open it with Store.create")
        if not samples:
            self._unsaved += seconds
            return
        known = self._parts()
        first = known[-1].span.last + 1 if known else 1
        part = Part(Span(first, first + len(samples) - 1), tuple(samples), self._unsaved + seconds)
        try:
            self._write(part)
        except OSError as error:
            kept = f"the {sum(part.span.samples for part in known)} samples before are safe"
            cure = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "see to the folder"
            why = f"samples cannot be saved ({error.strerror})"
            raise SmpartError(f"{self.folder}: {why}; {kept}: {cure}, and run it again") from None
        self._unsaved = 0.0
        self._merge([*known, part])

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep others from writing meanwhile, as whoever writes samples does. For a store that was opened to read.

        Raises:
            UsageError: another process writes there, or the folder cannot be written.
        """
        with _explained(self.folder, "cannot be written", "check its permissions"):
            descriptor = _lock(self.folder)
        try:
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Let others write. Reading goes on working."""
        if self._unlock is not None:
            self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @classmethod
    def _resume_or_begin(cls, folder: Path, fingerprint: Fingerprint, configuration: Mapping[str, Any] | None) -> Store:
        if not (folder / _HEAD).exists():
            store = cls(folder, fingerprint, _plain(configuration or {}))
            if store._spans():
                raise UsageError(f"{folder} has samples, but no {_HEAD} that tells whose: choose another folder")
            head = {"schema": parts.SCHEMA, "fingerprint": fingerprint.to_json(), "configuration": store.configuration}
            durable.write_whole(folder / _HEAD, json.dumps(head, indent=2).encode() + b"\n")
            return store
        store = cls(folder, *_read_head(folder))
        differences = store.fingerprint.differences(fingerprint)
        if configuration is not None:
            differences += _differences(store.configuration, _plain(configuration))
        if differences:
            raise UsageError(f"{folder} holds another profile ({', '.join(differences)}): choose another folder")
        return store

    def _spans(self) -> set[Span]:
        """Of all parts there, merged ones too."""
        try:
            names = [path.name for path in (self.folder / "samples").iterdir()]
        except FileNotFoundError:
            return set()
        spans = {name: Span.of(name) for name in names if name.endswith(".parquet")}
        foreign = next((name for name, span in spans.items() if span is None), None)
        if foreign is not None:
            raise UsageError(f"{self.folder / 'samples' / foreign} is no part of this profile: move it away")
        return {span for span in spans.values() if span is not None}

    def _parts(self) -> list[Part]:
        """All parts that count, in order."""
        with _explained(self.folder / "samples", "cannot be read", "check its permissions"):
            for _ in range(_TRIES):
                before = self._spans()
                with _named(self.folder / "samples"):
                    counting = parts.outermost(before)
                try:
                    found = {span: self._known.get(span) or self._read(span) for span in counting}
                except FileNotFoundError:  # a writer has merged it meanwhile
                    continue
                # A listing that a merge overtakes may show neither the parts nor what they became: see it twice.
                if self._spans() == before:
                    self._known = found
                    return list(found.values())
        raise SmpartError(f"{self.folder / 'samples'} changes all the while it is read: wait until it rests")

    def _read(self, span: Span) -> Part:
        path = self.folder / "samples" / span.name
        data = path.read_bytes()
        with _named(path):
            return parts.decode(data, span, self.fingerprint)

    def _write(self, part: Part) -> None:
        durable.write_whole(self.folder / "samples" / part.span.name, parts.encode(part, self.fingerprint))
        self._known[part.span] = part

    def _merge(self, known: Sequence[Part]) -> None:
        """Make one part of each run of parts without a gap, if that saves many files."""
        runs: list[list[Part]] = []
        for part in known:
            if runs and runs[-1][-1].span.last + 1 == part.span.first:
                runs[-1].append(part)
            else:
                runs.append([part])
        if len(known) - len(runs) < MERGE_AT:
            return
        try:
            for run in runs:
                span = Span(run[0].span.first, run[-1].span.last)
                if span != run[0].span:
                    samples = tuple(sample for part in run for sample in part.samples)
                    self._write(Part(span, samples, sum(part.seconds for part in run)))
            self._tidy()
        except OSError as error:
            _log.warning("%s: parts stay unmerged (%s); no sample is lost", self.folder, error.strerror)

    def _tidy(self) -> None:
        """Remove parts that lie in others, after making sure that these can be read."""
        counting = {part.span for part in self._parts()}
        for span in self._spans() - counting:
            (self.folder / "samples" / span.name).unlink()


_HEAD = "profile.json"
_MAKE = "make a profile with `smpart profile MODEL --out {}`"


def _read_head(folder: Path) -> tuple[Fingerprint, dict[str, Any]]:
    """Fingerprint and configuration. Raises `UsageError`."""
    path = folder / _HEAD
    with _explained(path, "cannot be read", "check its permissions"):
        if not path.exists():
            raise UsageError(f"{folder} holds no profile ({_HEAD} is missing): {_MAKE.format(folder)}")
        text = path.read_bytes()
    with _named(path):
        try:
            head = json.loads(text)
        except ValueError:
            raise UsageError(f"is damaged: {_ANEW}") from None
        if not isinstance(head, dict) or "schema" not in head:
            raise UsageError(f"was not written by smpart: {_ANEW}")
        parts.check_version(head["schema"])
        try:
            return Fingerprint.from_json(head["fingerprint"]), dict(head["configuration"])
        except (KeyError, TypeError, ValueError):
            raise UsageError(f"is damaged: {_ANEW}") from None


def _lock(folder: Path) -> int:
    return durable.lock(folder / "lock", folder)


_ANEW = "move the folder away and profile again"


@contextmanager
def _explained(path: Path, what: str, advice: str) -> Iterator[None]:
    """Raise the system's errors as `UsageError`, in words."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{error.filename or path} {what} ({error.strerror or error}): {advice}") from None


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Begin the messages of `UsageError` with the name of the file."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"{path} {error}") from None


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """As it reads back from JSON."""
    plain: dict[str, Any] = json.loads(json.dumps(value, allow_nan=False))
    return plain


def _differences(mine: Mapping[str, Any], yours: Mapping[str, Any]) -> list[str]:
    names = sorted(mine.keys() | yours.keys())
    return [f"{n} {mine.get(n)}, not {yours.get(n)}" for n in names if mine.get(n) != yours.get(n)]
