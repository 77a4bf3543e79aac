"""Summaries as the structs of the contract and as JSON, for tests."""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import msgspec

from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.summary import read_summary, to_json
from ampacity.analysis.summary import summarise as summary_of
from ampacity.loadgen.rundir.files import Run


def summarise(run: Run, labels: Mapping[int, bool] | None = None) -> dict[str, Any]:
    """Return the summary of a run as a reader of summary.json gets it."""
    return to_json(summary_of(run, labels))


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


def lost_in_contract(run: Run) -> list[str]:
    """Return the top-level fields in which the contract changes what the analysis found."""
    with patch("ampacity.analysis.summary.read_summary", side_effect=read_summary) as read:
        after = to_json(summary_of(run))
    before = json.loads(json.dumps(read.call_args.args[0])) | {"limits": after["limits"]}
    return [key for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
