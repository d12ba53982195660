"""What a backend knows of the device whose units it partitions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Device:
    """One device: an ordered set of units that splits share out.

    Attributes:
        kind: ``cpu``, ``cuda`` or ``sim``.
        units: number of units (SMs, cores) that splits may use.
        unit_ids: the platform's own number of each unit, in split order.
        memory_bytes: memory this process may really use for weights and KV.
        facts: whatever else `doctor` should show, and fingerprints contain.
    """

    name: str
    kind: str
    units: int
    unit_ids: tuple[int, ...]
    memory_bytes: int
    facts: Mapping[str, object] = field(default_factory=dict)
