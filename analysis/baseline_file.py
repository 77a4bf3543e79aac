"""The baseline file: one line per field, keys sorted, a checksum over the content. docs/ci.md describes it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import msgspec

from analysis.comparable import CompareError

KIND, SCHEMA_VERSION = "ampacity baseline", 2


class _Counted(TypedDict):
    over: list[float]
    size: list[float]
    effective: float | None
    explained: NotRequired[list[float]]


class _Entry(TypedDict):
    value_s: float
    marks_s: list[float]
    noise: float
    tolerance: dict[str, float | None]
    runs: list[_Counted]
    expected: NotRequired[list[float]]


class _Level(TypedDict):
    kind: str
    skipped: int
    requests: list[int]
    schedules: list[str | None]
    errors: list[_Counted]
    rates: list[_Counted]
    output_tokens_per_s: float
    client_delay_s: float
    quantiles: dict[str, _Entry]
    untracked: dict[str, str]
    queue: dict[str, Any] | None
    slos: NotRequired[dict[str, float]]


class _File(TypedDict):
    """What a gate reads of the file."""

    identity: dict[str, Any]
    realised: dict[str, Any]
    slos: list[str]
    runs: list[dict[str, Any]]
    usable_rps: dict[str, Any] | None
    levels: dict[str, _Level]


def write_baseline(content: Mapping[str, Any]) -> str:
    """The text of the file; lists of numbers stand in one line."""
    text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, sort_keys=True, allow_nan=False)
    return re.sub(r"\[\s+([^\[\]{}\"]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps({k: v for k, v in content.items() if k != "checksum"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def read_baseline(path: Path) -> dict[str, Any]:
    """Raises CompareError with one line where the file is not one, is of another version, or was changed."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CompareError(
            f"{path} does not exist: make it with 'ampacity baseline RUN -o {path}'"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CompareError(f"{path} cannot be read, it may be cut off: {error}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise CompareError(f"{path} is no baseline: make one with 'ampacity baseline RUN -o {path}'")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise CompareError(f"{path} has schema_version {found.get('schema_version')!r}, this ampacity reads {SCHEMA_VERSION}: make it anew")  # fmt: skip
    if found.get("checksum") != _checksum(found):
        raise CompareError(f"{path} was changed by hand or is damaged (its checksum differs): make it anew")
    try:
        msgspec.convert(found, _File)
    except msgspec.ValidationError as error:
        raise CompareError(f"{path} was changed by hand or is damaged: {error}: make it anew") from error
    if not (found["levels"] and found["runs"]):
        raise CompareError(f"{path} holds no {'load level' if found['runs'] else 'run'}: make it anew")
    return found
