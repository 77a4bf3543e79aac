"""The base of every struct of summary.json, and the error of a file that does not fit."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

Interval = tuple[float | None, float | None]


class ContractError(ValueError):
    """A summary.json does not have the fields of the contract."""


class Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """An object of summary.json. A field with a default may be left out of the file."""


P = TypeVar("P", bound=Part)


def with_nulls(kind: type[P], **known: Any) -> P:
    """Return a struct with these fields; all others are None."""
    return kind(**{**dict.fromkeys(kind.__struct_fields__), **known})


def plain(value: Any) -> Any:
    """Return a part, or a dict or list of parts, as summary.json has it: plain objects."""
    return msgspec.to_builtins(value, enc_hook=lambda scalar: scalar.item())  # numpy's
