"""Which profile a deployment predicts from: the one that was named, or the one installed for its fingerprint."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, Self

from smpart.errors import UsageError
from smpart.predictor.artefact import Artefact, find
from smpart.predictor.online import OnlinePredictor, Prior
from smpart.predictor.tables import Tables
from smpart.profiler.fingerprint import Fingerprint
from smpart.profiler.probe import Probe

Profile = str | Path | Artefact | None
"""``auto``: the installed one, if there is one; ``none`` or None: none; else a profile's folder or file, or itself."""

_log = logging.getLogger(__name__)

_LEAST_BOUND = math.log(1.15)
"""Log error that a few forwards may show by chance, however narrow the profile's own bound is."""
_GRAVE = 3.0
"""Factor beyond which a profile is of no use."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for with ``profile=``, read before anything that takes long.

    Attributes:
        artefact: the one that was named.
        auto: whether to look for an installed one instead.
    """

    artefact: Artefact | None
    auto: bool

    @classmethod
    def read(cls, profile: Profile) -> Self:
        """Raises `UsageError` for a file that is no profile, or an argument of another kind."""
        if isinstance(profile, Artefact):
            return cls(profile, auto=False)
        if profile is None or profile == "none":
            return cls(None, auto=False)
        if profile == "auto":
            return cls(None, auto=True)
        if isinstance(profile, str | Path) and str(profile):
            return cls(Artefact.load(Path(profile)), auto=False)
        raise UsageError(f"profile={profile!r}: must be auto, none, a profile's folder or file, or an Artefact")

    def choose(self, fingerprint: Fingerprint) -> Artefact | None:
        """The profile to use, logged; None: none. Raises `UsageError` if the one that was named is for another."""
        if self.artefact is not None:
            self.artefact.require(fingerprint)
            _log.info("profile: %s", self.artefact.words)
            return self.artefact
        return _installed(fingerprint) if self.auto else None


NONE = Wanted(None, auto=False)
"""Nothing was asked for."""


def _installed(fingerprint: Fingerprint) -> Artefact | None:
    try:
        found = find(fingerprint)
    except UsageError as error:
        _log.warning("profile auto: going on without one: %s", error)
        return None
    if found is None:
        _log.info(
            "profile auto: none is installed for this machine and model (fingerprint %s); "
            "`smpart profile MODEL --backend %s --out DIR` makes one",
            fingerprint.digest,
            fingerprint.backend,
        )
    else:
        _log.info("profile auto: %s", found.words)
    return found


def predictor_of(artefact: Artefact) -> OnlinePredictor:
    """What predicts from a profile, and learns."""
    return OnlinePredictor(Tables.from_arrays(artefact.arrays), profiled=True)


class Contradiction(NamedTuple):
    """What measured forwards say against a profile.

    Attributes:
        words: about the one that says it the loudest.
        factor: between what that takes and what the profile says, whichever is larger over the other.
    """

    words: str
    factor: float

    @property
    def grave(self) -> bool:
        """Whether physics and a first look would do better: an installed profile is then not used."""
        return self.factor > _GRAVE


def contradiction(prior: Prior, probes: Iterable[Probe]) -> Contradiction | None:
    """What a few measured forwards say against a profile; None if they take what it says.

    Several probes of one shape count by their median. A profile stands as long as each shape is within the profile's
    own bound, or within 15 % where that is narrower; a grave contradiction counts however wide its bound is.
    """
    seen: dict[Probe, list[float]] = {}
    for probe in probes:
        seen.setdefault(probe._replace(seconds=0.0), []).append(probe.seconds)
    found: list[Contradiction] = []
    for probe, seconds in seen.items():
        shape, units, actual = probe.shape, probe.units, median(seconds)
        ratio = actual / prior.seconds(shape, units)
        bound = min(max(_LEAST_BOUND, prior.margin(shape, beside=False)), math.log(_GRAVE))
        if abs(math.log(ratio)) > bound:
            what = f"a decode step of {shape.decode_batch}" if shape.decode_batch else f"a prefill of {shape.tokens}"
            words = f"{what} on {units} units takes {1e3 * actual:.3g} ms, {ratio:.2f}x what the profile says"
            found.append(Contradiction(words, max(ratio, 1.0 / ratio)))
    return max(found, key=lambda each: each.factor, default=None)
