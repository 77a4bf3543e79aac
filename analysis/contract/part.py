"""The base of every struct of summary.json, and the error of a file that does not fit."""

from __future__ import annotations

import msgspec

Interval = tuple[float | None, float | None]


class ContractError(ValueError):
    """A summary.json does not have the fields of the contract."""


class Part(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """An object of summary.json. A field with a default may be left out of the file."""
