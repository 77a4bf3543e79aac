"""Summaries as the structs of the contract and as JSON, for tests."""

from __future__ import annotations

import json
import types
import typing
from typing import Any

import msgspec

from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.summary import read_summary, to_json


def blank(part: type[Part]) -> dict[str, Any]:
    """Return the required fields of a struct as JSON, each as empty as its type allows."""
    hints = typing.get_type_hints(part)
    return {
        f.encode_name: _empty(hints[f.name]) for f in msgspec.structs.fields(part) if f.required
    }


def _empty(kind: Any) -> Any:
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        return None  # every union of the contract is with None
    if origin is typing.Literal:
        return typing.get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, Part):
        return blank(kind)
    return (origin or kind)()


def difference(summary: dict[str, Any]) -> list[str]:
    """Return the top-level fields in which a summary differs after being read and written."""
    before, after = json.loads(json.dumps(summary)), to_json(read_summary(summary))
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
