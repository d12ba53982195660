"""Whose profile it is: the device, the model and the engine that samples and artefacts are good for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from smpart.errors import UsageError
from smpart.partition import Device, ModelShape

ENGINE = 1
"""Grows when the engine changes so that forwards take other times than before."""

_NO_MATTER = frozenset(
    {"uuid", "allowed_cpus", "mode", "disjoint", "guarantee", "resize", "clients_per_device", "compute_mode", "daemon"}
)
"""Facts that change no time: which of several equal GPUs or CPUs it is, and words that `doctor` has for a mode.

What changes from moment to moment (memory in use, clocks, load) is among no backend's facts.
"""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What must be equal for a measured time to hold.

    Attributes:
        backend: as `open_backend` takes it: ``cores``, ``green``, ``sim:h100``.
        device: name, kind, number of units, and the facts (driver, compute capability, quota) a backend tells of it.
        model: its dimensions.
        dtype: element type of weights and KV, torch's name.
        engine: `ENGINE` of the smpart that measured.
    """

    backend: str
    device: Mapping[str, Any]
    model: ModelShape
    dtype: str
    engine: int = ENGINE

    @classmethod
    def of(cls, backend: str, device: Device, model: ModelShape, dtype: str) -> Fingerprint:
        """The fingerprint of a model on a device.

        Left out is what changes no time: memory sizes, which of several equal GPUs or CPUs it is, and a quota that the
        CPUs cannot reach. A cpuset counts by the number of its cores, wherever they are.
        """
        facts = {name: value for name, value in device.facts.items() if name not in _NO_MATTER}
        allowed, quota = device.facts.get("allowed_cpus"), device.facts.get("quota_cpus")
        if isinstance(allowed, list) and isinstance(quota, float | int) and quota >= len(allowed):
            facts["quota_cpus"] = None
        facts |= {"name": device.name, "kind": device.kind, "units": device.units}
        plain: dict[str, Any] = json.loads(json.dumps(facts, default=str, sort_keys=True))
        return cls(backend, plain, model, dtype)

    @property
    def digest(self) -> str:
        """16 hexadecimal digits; equal for equal fingerprints."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint) -> list[str]:
        """What differs, each in words with both values: ``units 2, not 4``. Empty if nothing does."""
        mine, yours = _flat(self.to_json()), _flat(other.to_json())
        names = sorted(mine.keys() | yours.keys())
        return [f"{n} {mine.get(n)}, not {yours.get(n)}" for n in names if mine.get(n) != yours.get(n)]

    def to_json(self) -> dict[str, Any]:
        """Ready for `json.dumps`."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Fingerprint:
        """Read back what `to_json` gave. Raises `UsageError` for anything else."""
        try:
            model = ModelShape(**value["model"])
            return cls(str(value["backend"]), dict(value["device"]), model, str(value["dtype"]), int(value["engine"]))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"a fingerprint cannot be read ({error!r})") from None


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, item in value.items():
        flat.update(_flat(item, f"{prefix}{name}.") if isinstance(item, Mapping) else {f"{prefix}{name}": item})
    return flat
