"""Summaries as the structs of the contract and as JSON, for tests."""

import json
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar
from unittest.mock import patch

import msgspec

from ampacity.analysis.contract.part import Part, plain
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import read_summary, to_json
from ampacity.analysis.summary import summarise as summary_of
from ampacity.loadgen.rundir.files import Run

P = TypeVar("P", bound=Part)
T = TypeVar("T")


def summarise(run: Run, labels: Mapping[int, bool] | None = None) -> dict[str, Any]:
    """Return the summary of a run as a reader of summary.json gets it."""
    return to_json(summary_of(run, labels))


_hints = cache(typing.get_type_hints)  # each takes a millisecond
_fields = cache(msgspec.structs.fields)


def blank(part: type[Part]) -> dict[str, Any]:
    """Return the required fields of a struct as JSON, each as empty as its type allows."""
    hints = _hints(part)
    return {f.encode_name: _empty(hints[f.name]) for f in _fields(part) if f.required}


def _empty(kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return None  # every union of the contract is with None
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Part):
        return blank(kind)
    return (origin or kind)()


def struct_of(part: type[P], given: Mapping[str, Any]) -> P:
    """Return a struct of the contract with these fields, nested ones as far as given."""
    return msgspec.convert(plain(_filled(part, given)), part)


def _filled(kind: Any, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_filled(kind, item) for item in value]
    inner = [
        kind,
        *typing.get_args(kind),
        *(a for k in typing.get_args(kind) for a in typing.get_args(k)),
    ]
    part = next((k for k in inner if isinstance(k, type) and issubclass(k, Part)), None)
    if part is None or not isinstance(value, Mapping):
        return value
    if typing.get_origin(kind) is dict:
        return {name: _filled(part, held) for name, held in value.items()}
    hints = _hints(part)
    names = {f.encode_name: f.name for f in _fields(part)}
    return blank(part) | {k: _filled(hints[names[k]], v) for k, v in value.items()}


def on_stages(function: Callable[..., T]) -> Callable[..., T]:
    """Let a function on stages take them as dicts of the fields that matter."""

    def structs(given: Any) -> Any:
        if isinstance(given, Mapping):
            return struct_of(Stage, given)
        is_listed = isinstance(given, (list, tuple)) and given and isinstance(given[0], Mapping)
        return [structs(item) for item in given] if is_listed else given

    return lambda *arguments, **named: function(*map(structs, arguments), **named)


def lost_in_contract(run: Run) -> list[str]:
    """Return the top-level fields in which the contract changes what the analysis found."""
    with patch("ampacity.analysis.summary.read_summary", side_effect=read_summary) as read:
        after = to_json(summary_of(run))
    made = ("verdict", "warnings", "limits", "next_command")  # of the typed summary
    before = json.loads(json.dumps(read.call_args.args[0])) | {k: after.get(k) for k in made}
    before = json.loads(json.dumps(plain(before)))
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]


def describe_fields(*roots: type) -> str:
    """Return structs and all within them as Markdown tables of their fields, for a page of docs."""
    lines, found = [], dict[type, None]()
    for root in roots:
        _structs_of(root, found)
    for part in found:
        lines += [f"### {part.__name__}", "", "| field | type | may be left out |", "|---|---|---|"]
        for name, encoded, required in _fields_of(part):
            declared = next(p for p in part.__mro__ if name in getattr(p, "__annotations__", {}))
            kind = str(declared.__annotations__[name]).replace("|", "\\|")
            lines.append(f"| `{encoded}` | {kind} | {'' if required else 'yes'} |")
        lines.append("")
    return "\n".join(lines)


def _fields_of(kind: Any) -> list[tuple[str, str, bool]]:
    """Return (name, name in JSON, required) of the fields of a struct or dataclass."""
    if is_dataclass(kind):  # never left out
        return [(field.name, field.name, True) for field in fields(kind)]
    return [(f.name, f.encode_name, f.required) for f in msgspec.structs.fields(kind)]


def _structs_of(kind: Any, found: dict[type, None]) -> None:
    """Add the structs and dataclasses within a type to ``found``, in the order of their fields."""
    is_struct = isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind))
    if is_struct and kind not in found:
        found[kind] = None
        for inner in typing.get_type_hints(kind).values():
            _structs_of(inner, found)
    for inner in typing.get_args(kind):
        _structs_of(inner, found)
