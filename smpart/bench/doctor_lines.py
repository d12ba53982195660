"""What `smpart doctor` found, as lines for people."""

from __future__ import annotations

import os
from contextlib import suppress

Facts = dict[str, object]

_LONG = 8
"""Units beyond which their number is told, and not which they are."""

_GPU_LINE = (
    "GPU {index}",
    "{name}",
    "driver {driver_version}",
    "CUDA {cuda_version}",
    "compute capability {compute_capability}",
    "{free:.1f} of {total:.1f} GiB free",
    "SMs at {sm_clock_mhz} of {sm_clock_max_mhz} MHz",
    "{temperature_c} C",
    "{power_draw_w:.0f} of {power_limit_w:.0f} W",
)


def lines(facts: Facts) -> list[str]:
    """The same for people."""
    about = facts["host"]
    assert isinstance(about, dict)
    text = [
        f"host      {about['cpu']}, {about['cores']} usable cores, {about['memory_gib']} GiB free",
        f"python    {about['python']}, torch {about['torch']}, transformers {about['transformers']}, "
        f"smpart {about['smpart']}",
    ]
    for backend in listed(facts["backends"]):
        text.append(f"backend   {backend['name']}: {backend['why_unusable'] or 'usable'}")
        device = backend.get("device")
        if isinstance(device, dict):
            text.append(f"          {device['name']}: {device['units']} units, {device['memory_gib']} GiB")
            text.append(f"          splits (prefill/decode): {_short([str(s) for s in _items(backend['splits'])])}")
        for each in listed(backend.get("realised", [])):
            word = "as asked" if each["as_asked"] else "NOT AS ASKED"
            sides = ", ".join(f"{side} on {_units(each[side])}" for side in ("prefill", "decode"))
            text.append(f"          {each['split']}: {sides}, {word}")
        text += [f"          {note}" for note in _items(backend.get("notes", []))]
    auto, cuda = facts["auto"], facts["cuda"]
    assert isinstance(auto, dict) and isinstance(cuda, dict)
    text.append(f"auto      {auto['backend'] or auto['why_unusable']}")
    text.append(f"cuda      {'; '.join(cuda['missing']) or 'nothing is missing'}")
    return text + _nvml_lines(facts["nvml"])


def _nvml_lines(section: object) -> list[str]:
    assert isinstance(section, dict)
    text = [line for gpu in listed(section["gpus"]) for line in _gpu_lines(gpu)]
    return text or [f"nvml      {section['missing'] or 'no GPU is visible'}"]


def _gpu_lines(gpu: Facts) -> list[str]:
    """Whatever is known of one GPU, what to beware of, and what could not be read."""
    gib = {
        name: value / 2**30 for name in ("free", "total") if isinstance(value := gpu.get(f"memory_{name}_bytes"), int)
    }
    parts = []
    for part in _GPU_LINE:
        with suppress(KeyError):
            parts.append(part.format_map(gpu | gib))
    text = [f"nvml      {', '.join(parts)}"]
    others = [each for each in listed(gpu.get("processes", [])) if each["pid"] != os.getpid()]
    if others:
        text.append(
            f"          others use it, so measurements are disturbed: {_short([_user(each) for each in others])}"
        )
    if gpu.get("throttled"):
        text.append(f"          its clocks are held down: {', '.join(str(each) for each in _items(gpu['throttled']))}")
    if gpu.get("mig"):
        text.append("          MIG mode is on")
    unavailable = gpu["unavailable"]
    assert isinstance(unavailable, dict)
    for why in dict.fromkeys(unavailable.values()):
        names = ", ".join(name for name, each in unavailable.items() if each == why)
        text.append(f"          not known: {names} ({why})")
    return text


def _user(process: Facts) -> str:
    held = process["memory_bytes"]
    return f"pid {process['pid']}" + (f" with {held / 2**30:.1f} GiB" if isinstance(held, int) else "")


def _units(owned: object) -> str:
    units = _items(owned)
    return str(units) if len(units) <= _LONG else f"{len(units)} units"


def _short(names: list[str], most: int = 9) -> str:
    return ", ".join(names if len(names) <= most else [*names[: most - 2], "...", names[-1]])


def _items(value: object) -> list[object]:
    assert isinstance(value, list)
    return value


def listed(value: object) -> list[Facts]:
    """The objects in a list of a JSON value."""
    return [item for item in _items(value) if isinstance(item, dict)]
