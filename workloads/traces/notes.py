"""Notes on the columns of a trace: which of two was taken, which are unused or have gaps."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ampacity.workloads.text import duplicate_key_notes, mended
from ampacity.workloads.traces.columns import PER_ROW, Columns
from ampacity.workloads.traces.recorded import SENT_FIELDS
from ampacity.workloads.traces.records import Records

_ADDED = (  # columns that the reader adds to nested requests and to spans
    *("session", "hash_id_scope", "parent_session"),
    *("span_id", "parent_span_id", "is_agent"),
)
_SHOWN = 12


def column_notes(name: str, columns: Columns | None, records: Records) -> Iterator[str]:
    """Yield one line for each note, once the rows of the file ``name`` have been read."""
    if columns is None or columns.format == "schedule":  # see ampacity.workloads.schedule_file
        return
    for role, others in columns.others.items():
        if role not in PER_ROW:
            rest = " or ".join(map(mended, others))
            yield f"{name}: column {columns[role].strip()} is taken for the {role}, not {rest}"
    yield from duplicate_key_notes(name, records.duplicate_keys)
    rows = records.columns.by_name()
    unused = _unused(rows, columns)
    if unused:
        total = records.columns.rows
        shown = (
            (mended(field).strip() or "(without a name)")
            + ("" if rows[field] == total else f" (of {rows[field]} rows)")
            for field in unused[:_SHOWN]
        )
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        yield f"{name}: columns that are not used: {', '.join(shown)}{more}"


def _unused(names: Mapping[str, int], columns: Columns) -> list[str]:
    prompts = columns.name("messages")
    prefix = prompts[: prompts.rfind(".") + 1]
    used = {*columns.by_role.values(), *_ADDED}
    used |= {other for others in columns.others.values() for other in others}
    if prompts:
        used |= {f"{prefix}{field}" for field in (*SENT_FIELDS, "system")}
    paths = [path.lower() for path in columns.by_role.values() if "." in path]
    return [
        name
        for name in names
        if name not in used and not any(p.startswith(f"{name.lower()}.") for p in paths)
    ]


def missing_notes(name: str, columns: Columns, held: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each column with gaps; ``held`` by role: int64[n], -1 for none."""
    if columns.format == "schedule":
        return
    for role, values in held.items():
        if role in ("parent", "span"):  # most rows have none
            continue
        missing = int(np.count_nonzero(np.asarray(values) < 0))
        if missing and role in columns.by_role:
            column = columns[role].strip()
            yield f"{name}: column {column} has no value in {missing} of {len(values)} rows"
