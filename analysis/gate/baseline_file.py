"""The baseline file: a line per field, sorted keys, a checksum over the content (docs/ci.md)."""

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ampacity.analysis.change.comparable import format_value
from ampacity.analysis.change.judged import CompareError
from ampacity.analysis.change.samples import BLOCKS, CELLS, MARKS, METRICS, TRACKED
from ampacity.files import read_bytes, read_text, why

KIND, SCHEMA_VERSION = "ampacity baseline", 4


def _object(**fields: Any) -> Any:
    """Return a JSON object's type; an optional field is a pair of its type and a default."""
    listed = [
        (name, *kind) if isinstance(kind, tuple) else (name, kind) for name, kind in fields.items()
    ]
    return msgspec.defstruct("Object", listed)


def _list(kind: Any, n: int) -> Any:
    return Annotated[list[kind], Meta(min_length=n, max_length=n)]


_AMOUNT: Any = Annotated[float, Meta(ge=0, le=2.0**62)]
_SECONDS: Any = Annotated[float, Meta(gt=0, le=2.0**31)]
_COUNT: Any = Annotated[int, Meta(ge=0, le=2 * 10**7)]  # of requests
_TOLERANCE: Any = Annotated[float, Meta(gt=0, le=10)] | None
_NAME: Any = Annotated[str, Meta(pattern=f"^({'|'.join(TRACKED)})$")]
_COUNTED: Any = _object(
    over=_list(float, BLOCKS), size=_list(_AMOUNT, BLOCKS), effective=_AMOUNT | None
)
_FOUND: Any = _object(now=float | None, longer=float | None, more_runs=float | None)
_TABLE: Any = _list(Annotated[float, Meta(ge=-2, le=2)], CELLS)
_QUANTILE: Any = _object(
    value_s=_SECONDS,
    marks_s=_list(_SECONDS, MARKS),
    noise=Annotated[float, Meta(ge=0, le=1)],
    amplified=Annotated[float, Meta(ge=1, le=1e9)],
    runs=list[_COUNTED],
    tolerance=_object(same_schedule=_TOLERANCE, other_schedule=_TOLERANCE),
    finds=_object(same_schedule=_FOUND, other_schedule=_FOUND),
    expected=list[_TABLE] | None,
)
_CELLS: Any = _object(
    by=Literal["queue", "at_arrival", "in_flight", "output_tokens"],
    edges=_list(_AMOUNT, CELLS - 1),
    s_per_token=_SECONDS | None,
)
_LEVEL: Any = _object(
    kind=Literal["open", "closed"],
    offered_rps=_AMOUNT | None,
    concurrency=_AMOUNT | None,
    skipped=_COUNT,
    requests=list[_COUNT],
    schedules=list[str | None],
    errors=list[_COUNTED],
    rates=list[_COUNTED],
    output_tokens_per_s=_AMOUNT | None,
    client_delay_s=_AMOUNT,
    quantiles=Annotated[dict[_NAME, _QUANTILE], Meta(min_length=1)],
    untracked=dict[str, str],
    cells=dict[Annotated[str, Meta(pattern=f"^({'|'.join(METRICS)})$")], list[_CELLS]],
    slos=(dict[str, _AMOUNT], None),
)
_RUN: Any = _object(seed=int | str | None)
_FILE = _object(  # what a gate reads of it
    identity=dict[str, Any],
    realised=dict[str, _AMOUNT | None],
    slos=list[str],
    runs=Annotated[list[_RUN], Meta(min_length=1)],
    capacity_rps=_object(value=_SECONDS, bracket=tuple[_AMOUNT, _AMOUNT]) | None,
    levels=Annotated[dict[str, _LEVEL], Meta(min_length=1)],
)


def write_baseline(content: Mapping[str, Any]) -> str:
    """Return the text of the file, each list of numbers in one line."""
    signed = {**content, "checksum": _checksum(content)}
    text = json.dumps(signed, indent=1, sort_keys=True, allow_nan=False)
    lists = r"\[\s+([^\[\]{}\"]+?)\s+\]"
    return re.sub(lists, lambda m: f"[{' '.join(m[1].split())}]", text) + "\n"


def _checksum(content: Mapping[str, Any]) -> str:
    plain = json.loads(json.dumps({k: v for k, v in content.items() if k != "checksum"}))
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def _fault(content: Mapping[str, Any]) -> str | None:
    """Return what is wrong: the shape, or a list that lacks samples of a run; else None."""
    try:
        msgspec.convert(content, _FILE)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # a lone surrogate
        return str(error)
    runs = len(content["runs"])
    for name, level in content["levels"].items():
        lists = {k: level[k] for k in ("requests", "schedules", "errors", "rates")}
        for what, held in (lists | {k: q["runs"] for k, q in level["quantiles"].items()}).items():
            if len(held) != runs or any(isinstance(x, dict) and not sum(x["size"]) for x in held):
                return f"{what} of {name} is not that of {runs} runs with samples"
        for metric, held in level["cells"].items():
            if any(cells["edges"] != sorted(cells["edges"]) for cells in held):
                return f"cells of {metric} at {name} are not in order"
        for metric, entry in level["quantiles"].items():
            cells = level["cells"].get(metric.split("_")[0], [])
            if entry["expected"] is not None and len(entry["expected"]) != len(cells):
                return f"expected of {metric} at {name} is not that of its cells"
    return None


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")


def check_replaceable(path: Path) -> None:
    """Raise CompareError where a file that is no baseline, of any version, would be overwritten."""
    held = read_bytes(path) if path.exists() else b""
    if held.strip() and f'"{KIND}"'.encode() not in held:
        raise CompareError(f"{path} is no baseline and is not overwritten: give -o another file")


def read_baseline(path: Path) -> dict[str, Any]:
    """Read a baseline. Raises CompareError where it is none, of another version, or changed."""
    try:
        found = json.loads(read_text(path), parse_constant=_no_number)
    except FileNotFoundError as error:
        raise CompareError(
            f"{path} does not exist: make it with 'ampacity baseline RUN -o {path}'"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CompareError(f"{path} cannot be read, it may be cut off: {why(error)}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise CompareError(
            f"{path} is no baseline: make one with 'ampacity baseline RUN -o FILE', in another file"
        )
    if found.get("schema_version") != SCHEMA_VERSION:
        raise CompareError(
            f"{path} has schema_version {format_value(found.get('schema_version'))}, "
            f"this ampacity reads {SCHEMA_VERSION}: make it again: ampacity baseline RUN -o FILE"
        )
    if found.get("checksum") != _checksum(found):
        raise CompareError(
            f"{path} was changed by hand or is damaged (its checksum differs): make it again: "
            "ampacity baseline RUN -o FILE"
        )
    if fault := _fault(found):
        raise CompareError(f"{path} was changed by hand or is damaged: {fault}: make it anew")
    return found
