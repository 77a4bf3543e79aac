"""What is to be said of the columns of a trace: which of two was taken, what is not used, what has no value."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ampacity.workloads.text import mended, twice_notes
from ampacity.workloads.traces.fields import PER_ROW, Columns
from ampacity.workloads.traces.formats import Records
from ampacity.workloads.traces.recorded import SENT_FIELDS

_OURS = (  # that the reader adds to rows of nested requests, and to spans
    "session",
    "hash_id_scope",
    "parent_session",
    "span_id",
    "parent_span_id",
    "is_agent",
)
_SHOWN = 12


def column_notes(name: str, columns: Columns | None, records: Records) -> Iterator[str]:
    """One line each, once the rows of the file ``name`` have been read."""
    if columns is None or columns.format == "schedule":  # read by ampacity.workloads.schedule_file
        return
    for role, others in columns.others.items():
        if role in PER_ROW:
            continue
        yield f"{name}: column {columns[role].strip()} is taken for the {role}, not {' or '.join(map(mended, others))}"
    yield from twice_notes(name, records.twice)
    rows = records.columns.by_name()
    prompts = columns.name("messages")
    prefix = prompts[: prompts.rfind(".") + 1]
    used = {
        *columns.by_role.values(),
        *(f"{prefix}{field}" for field in (*SENT_FIELDS, "system") if prompts),
        *_OURS,
        *(other for others in columns.others.values() for other in others),
    }
    paths = [path.lower() for path in columns.by_role.values() if "." in path]  # into this column
    unused = [
        field
        for field in rows
        if field not in used and not any(p.startswith(f"{field.lower()}.") for p in paths)
    ]
    if unused:
        total = records.columns.rows
        shown = (
            f"{mended(field).strip() or '(without a name)'}{'' if rows[field] == total else f' (of {rows[field]} rows)'}"
            for field in unused[:_SHOWN]
        )
        more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        yield f"{name}: columns that are not used: {', '.join(shown)}{more}"


def missing_notes(name: str, columns: Columns, held: Mapping[str, Any]) -> Iterator[str]:
    """One line for each column that not all rows have a value of; ``held`` by role: whole numbers, -1 for none."""
    if columns.format == "schedule":
        return
    for role, values in held.items():
        if role not in columns.by_role:
            continue
        missing = int(np.count_nonzero(np.asarray(values) < 0))
        if missing:
            yield f"{name}: column {columns[role].strip()} has no value in {missing} of {len(values)} rows"
