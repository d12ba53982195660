"""Files for other engines."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from smpart.bench.advise.findings import Findings
from smpart.bench.advise.sglang import PdmuxConfig
from smpart.durable import write_whole
from smpart.errors import SmpartError, UsageError

_YAML, _JSON = (".yaml", ".yml"), (".json",)


def check(paths: Sequence[Path]) -> None:
    """Find out before anything is run whether these can be written. Raises `UsageError`."""
    for path in paths:
        if path.suffix not in (*_YAML, *_JSON):
            raise UsageError(f"--export {path}: name a .yaml for SGLang or a .json for others")
        if not path.parent.is_dir() or path.is_dir() or not os.access(path.parent, os.W_OK):
            raise UsageError(f"--export {path}: cannot be written there; nothing was run")


def exports(paths: Sequence[Path], found: Findings, result: Mapping[str, object], words: str) -> dict[str, str | None]:
    """Write each file; by path None, or why it was not written.

    Args:
        result: what the command found, for JSON.
        words: the advice in a line.

    Raises:
        SmpartError: a file cannot be written.
    """
    said: dict[str, str | None] = {}
    for path in paths:
        text, said[str(path)] = _text(path, found, result, words)
        if text is None:
            continue
        try:
            write_whole(path, text.encode())
        except OSError as error:
            raise SmpartError(f"{path} cannot be written ({error.strerror})") from None
    return said


def _text(path: Path, found: Findings, result: Mapping[str, object], words: str) -> tuple[str | None, str | None]:
    if path.suffix in _JSON:
        return json.dumps(result, indent=2) + "\n", None
    config = PdmuxConfig.of(found)
    if config is None:
        return None, "no split holds TPOT beside a prefill, so that there is no table"
    question = found.question
    slo = f"ttft={question.slo.ttft_ms:g},tpot={question.slo.tpot_ms:g}"
    comments = [f"smpart advise: {question.model} on {question.gpu}, {Path(question.source.trace).name}, {slo}", words]
    return config.text(comments), None
