"""A fitted profile as one file: plain arrays, whose they are, and how good they are. A safetensors file, no pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from smpart.cache import cache
from smpart.durable import make_folder, write_whole
from smpart.errors import SmpartError, UsageError
from smpart.profiler.fingerprint import Fingerprint

SCHEMA = 2
"""Of the file's metadata and arrays: raised when older readers would misread it."""

NAME = "artefact.safetensors"
"""Of the file in a profile's folder."""

_FORMAT = "smpart profile"
_MANY = 4
"""Differences that a refusal lists."""


@dataclass(frozen=True, slots=True, eq=False)
class Artefact:
    """What `smpart fit` makes of a profile and the engine predicts from.

    Attributes:
        fingerprint: the machine, model and engine it is good for.
        arrays: as `smpart.predictor.tables.Tables.arrays` gives them.
        report: what ``smpart fit --json`` prints, for example ``report["solo"]["median_ape"]``; ``measured``, if it is
            there, is the Unix time of the last sample.
        source: the file it was loaded from or saved to; None: none yet.
    """

    fingerprint: Fingerprint
    arrays: Mapping[str, NDArray[Any]]
    report: Mapping[str, Any] = field(default_factory=dict)
    source: Path | None = None

    def save(self, path: Path) -> Path:
        """Write it in one step (see `smpart.durable.write_whole`). Raises `SmpartError` if that fails."""
        fingerprint, report = (json.dumps(value, sort_keys=True) for value in (self.fingerprint.to_json(), self.report))
        arrays = {name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        metadata = {"format": _FORMAT, "schema": str(SCHEMA), "fingerprint": fingerprint, "report": report}
        metadata["sha256"] = _digest(metadata, arrays)
        try:
            make_folder(path.parent)
            return write_whole(path, save(arrays, metadata))
        except OSError as error:
            raise SmpartError(f"profile {path} cannot be written ({error.strerror}); what was there stays") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file, or the one in a profile's folder.

        Raises:
            UsageError: it is missing, damaged, no profile, or of another version of smpart; the message says which.
        """
        if path.is_dir():
            if not (path / NAME).exists():
                raise UsageError(f"profile {path}: the folder holds no {NAME}; make it with `smpart fit {path}`")
            path = path / NAME
        try:
            with path.open("rb"), safe_open(path, framework="numpy") as opened:
                metadata = dict(opened.metadata() or {})
                _check_kind(path, metadata)
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
        except OSError as error:
            raise UsageError(f"profile {path} cannot be read ({error.strerror or error})") from None
        except SafetensorError as error:
            raise UsageError(f"profile {path} is damaged, or none ({error}); make it anew with `smpart fit`") from None
        if metadata.pop("sha256", "") != _digest(metadata, arrays):
            raise UsageError(f"profile {path} is damaged: make it anew with `smpart fit`")
        return cls(
            Fingerprint.from_json(json.loads(metadata["fingerprint"])), arrays, json.loads(metadata["report"]), path
        )

    def require(self, fingerprint: Fingerprint) -> None:
        """Raise `UsageError` unless it is good for `fingerprint`; the message names what differs and what to do."""
        differences = self.fingerprint.differences(fingerprint)
        if differences:
            which = f"profile {self.source}" if self.source else "this profile"
            more = f" and {len(differences) - _MANY} more" if len(differences) > _MANY else ""
            raise UsageError(
                f"{which} was measured for another machine or model ({'; '.join(differences[:_MANY])}{more}): measure "
                f"here with `smpart profile MODEL --backend {fingerprint.backend} --out DIR`, "
                "or go on without one (--profile none)"
            )

    @property
    def about(self) -> dict[str, object]:
        """For JSON: where it lies, whose it is, when it was measured, and how far off it is on forwards held out."""
        return {
            "file": str(self.source) if self.source else None,
            "fingerprint": self.fingerprint.digest,
            **{name: self.report.get(name) for name in ("measured", "solo", "corun", "bound")},
        }

    @property
    def words(self) -> str:
        """The same in words, for people."""
        parts = [str(self.source or "an artefact")]
        if isinstance(measured := self.report.get("measured"), int | float):
            parts.append(f"measured {datetime.fromtimestamp(measured):%Y-%m-%d %H:%M}")
        for name, situation in (("solo", "alone"), ("corun", "side by side")):
            error = (self.report.get(name) or {}).get("median_ape")
            if isinstance(error, int | float):
                parts.append(f"median error {situation} {error:.1%}")
        return ", ".join(parts)

    def install(self) -> Path:
        """Copy it into the user's cache, where `find` looks. Raises `SmpartError` if that cannot be written."""
        return self.save(installed(self.fingerprint))


def find(fingerprint: Fingerprint) -> Artefact | None:
    """The installed profile for a fingerprint; None without one. Raises `UsageError` if there is one that is no use."""
    try:
        path = installed(fingerprint)
    except RuntimeError:  # no home folder: nothing was ever installed
        return None
    if not path.exists():
        return None
    artefact = Artefact.load(path)
    artefact.require(fingerprint)
    return artefact


def installed(fingerprint: Fingerprint) -> Path:
    """Where the installed profile for a fingerprint lies."""
    return cache() / "profiles" / f"{fingerprint.digest}.safetensors"


def _check_kind(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != _FORMAT or not metadata.get("schema", "").isdecimal():
        raise UsageError(f"profile {path} was not made by `smpart fit`: it is some other safetensors file")
    schema = int(metadata["schema"])
    if schema > SCHEMA:
        raise UsageError(f"profile {path} is of a newer smpart (schema {schema}, this one reads {SCHEMA}): upgrade")
    if schema < SCHEMA:
        raise UsageError(f"profile {path} is of an older smpart (schema {schema}): make it anew with `smpart fit`")


def _digest(metadata: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> str:
    """Of all that a file says: safetensors itself notices no changed byte within an array."""
    whole = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name, array in sorted(arrays.items()):
        whole.update(f"{name} {array.dtype.str} {array.shape}".encode() + array.tobytes())
    return whole.hexdigest()
