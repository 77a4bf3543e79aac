"""The columns of a trace: found by name, reached by path, and what is to be said of them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ampacity.workloads.errors import WorkloadError, did_you_mean
from ampacity.workloads.text import duplicate_key_notes, mended
from ampacity.workloads.traces.recorded import SENT_FIELDS
from ampacity.workloads.traces.records import Records
from ampacity.workloads.traces.values import UNITS, has

_DATA = Path(__file__).parents[1] / "data" / "trace_columns.json"
# {role: its column names in lower case, preferred first}; "a.b" is field b of the object a
ROLES: dict[str, tuple[str, ...]] = {
    role: tuple(names) for role, names in json.loads(_DATA.read_text(encoding="utf-8")).items()
}
PER_ROW = ("messages", "answer", "limit")  # roles whose column may differ from row to row
COUNTS = ("input", "output", "cached")  # as these, by ``Columns.count``
REQUIRED = {
    "time": "the arrival time (as timestamp)",
    "input": "the input tokens (as input_tokens)",
    "output": "the output tokens (as output_tokens)",
}
_NEEDS = {  # roles that have no use without another one
    "span": "parent_span",
    "parent": "session",
    "end": "session",
    "duration": "session",
    "block_size": "hash_ids",
    "blocks": "shared_blocks",
    "shared_blocks": "blocks",
}
_FORMATS = {
    "contexttokens": "Azure",
    "request tokens": "BurstGPT",
    "gen_ai.usage.input_tokens": "OpenTelemetry",
    "gen_ai.usage.prompt_tokens": "OpenTelemetry",
    "usage.prompt_tokens": "OpenAI usage",
    "in": "agentic coding",
}
# formats whose rows with 0 output tokens are failed requests
WITH_FAILED_REQUESTS = ("LiteLLM spend log", *(set(_FORMATS.values()) - {"Azure"}))

_ADDED = (  # columns that the reader adds to nested requests and to spans
    *("session", "hash_id_scope", "parent_session"),
    *("span_id", "parent_span_id", "is_agent"),
)
_SHOWN = 12


@dataclass(frozen=True)
class Columns:
    """The columns of a trace by role (see ROLES), its format, and the unit of its times."""

    by_role: Mapping[str, str]
    format: str
    unit: str | None  # of numbers in the time column; None: by their size
    unit_is_explicit: bool = False  # given by the user or the column's name, not by the format
    others: Mapping[str, Sequence[str]] = field(default_factory=dict)  # further candidates by role
    given: frozenset[str] = frozenset()  # roles whose column the user named
    apart: tuple[str, ...] = ()  # counts of a prompt's tokens that are not in those of ``input``

    def __getitem__(self, role: str) -> str:
        return self.by_role[role]

    def name(self, role: str) -> str:
        """Return the column of a role; "" where the file has none."""
        return self.by_role.get(role, "")

    def held(self, record: Mapping[str, Any], role: str) -> str:
        """Return the first column with a value in this row, of a role listed in PER_ROW."""
        names = (self.name(role), *self.others.get(role, ()))
        return next((name for name in names if has(record, name)), "")

    def count(self, record: Mapping[str, Any], role: str) -> str:
        """Return the column of a count; where it has no value, a known one that has; "": none."""
        name = self.name(role)
        if role in self.given or has(record, name):
            return name
        names = {key.strip().lower(): key for key in record}
        held = (names[known] for known in ROLES[role] if known in names)
        return next((other for other in held if has(record, other)), name)


def find_columns(
    names: Sequence[str],
    where: str,
    given: Mapping[str, str] | None = None,
    unit: str | None = None,
    timed: bool = True,
) -> Columns:
    """Recognise the columns, ignoring case; ``given`` names some by role.

    Unless ``timed``, the time may be missing. Raises WorkloadError that lists what is missing.
    """
    by_name = {name.strip().lower(): name for name in names}
    found, others = _match_roles(names, where, given or {})
    alternatives = {
        "input": {"messages"},
        "output": {"answer", "limit"},
        "time": set() if timed else {"input", "messages"},
    }
    missing = [
        role for role in REQUIRED if role not in found and not alternatives[role] & found.keys()
    ]
    if missing:
        what = " nor with ".join(REQUIRED[role] for role in missing)
        options = " ".join(f"--column {role}=NAME" for role in missing)
        raise WorkloadError(
            f"{where}: no column with {what}: say which it is ({options}); "
            f"the file has {_listed(names)}"
        )
    time = found.get("time", "")
    known_format = _format(found, by_name)
    ending = time.rpartition("_")[2]
    named = "ns" if time == "starttimeunixnano" else ending if ending in UNITS else None
    by_role = {role: by_name[name] for role, name in found.items()}
    explicit = unit or named
    default = "ms" if _is_mooncake(found, by_name) else None
    apart = tuple(by_name[name] for name in _apart(found) if name in by_name)
    roles = frozenset(given or {})
    return Columns(by_role, known_format, explicit or default, bool(explicit), others, roles, apart)


def _apart(found: Mapping[str, str]) -> tuple[str, ...]:
    """Return where Anthropic's usage counts cached tokens, which are not in its input_tokens."""
    prefix = found.get("input", "").removesuffix("input_tokens")
    cached = f"{prefix}cache_read_input_tokens"
    return (cached, f"{prefix}cache_creation_input_tokens") if found.get("cached") == cached else ()


def _match_roles(
    names: Sequence[str], where: str, given: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, Sequence[str]]]:
    """Return ({role: lower-case column}, {role: further candidates}). Raises WorkloadError."""
    by_name = {name.strip().lower(): name for name in names}
    found: dict[str, str] = {}
    others: dict[str, Sequence[str]] = {}
    for role, known in ROLES.items():
        wanted = given.get(role)
        candidates = (wanted.strip().lower(),) if wanted is not None else known
        hit = next((name for name in candidates if name in by_name), None)
        if hit is None:
            if wanted is not None:
                raise WorkloadError(
                    f"{where}: there is no column {wanted!r} for {role}; "
                    f"the file has {_listed(names)}"
                )
            continue
        if len(same := [name.strip() for name in names if name.strip().lower() == hit]) > 1:
            twice = "stands there twice: keep one"
            spelled = f"is spelled {' and '.join(dict.fromkeys(same))}: use one spelling"
            what = twice if len(set(same)) == 1 else spelled
            raise WorkloadError(f"{where}: the column {hit} {what}")
        found[role] = hit
        also = [by_name[name] for name in known if name in by_name and name != hit]
        if wanted is None and also:
            others[role] = also
    for role, needed in _NEEDS.items():
        if needed not in found:
            found.pop(role, None)
            others.pop(role, None)
    return found, others


def _listed(names: Sequence[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:12])


def _is_mooncake(found: Mapping[str, str], by_name: Mapping[str, str]) -> bool:
    """Return whether times are Mooncake's milliseconds; Qwen-Bailian has a chat_id and seconds."""
    # aiperf's files with texts have no input length, only the output length
    length = found.get("input") or found.get("output", "").replace("output", "input")
    is_timestamp = found.get("time") == "timestamp"
    return is_timestamp and length == "input_length" and "chat_id" not in by_name


def _format(found: Mapping[str, str], by_name: Mapping[str, str]) -> str:
    time, input_ = found.get("time", ""), found.get("input", "")
    if time == "scheduled_s":
        return "schedule"
    if "shared_blocks" in found:
        return "agentic coding"
    if input_ == "prompt_tokens" and time == "starttime":
        return "LiteLLM spend log"
    return "Mooncake" if _is_mooncake(found, by_name) else _FORMATS.get(input_, "generic")


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """Parse texts such as ``input=usage.prompt_tokens`` into {role: name}. Raises WorkloadError."""
    found: dict[str, str] = {}
    for text in texts:
        role, equals, name = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise WorkloadError(
                f"--column {text}: write it as role=name, as in input=prompt_tokens"
            )
        if role not in ROLES:
            raise WorkloadError(
                f"--column {text}: role {role!r} is not known{did_you_mean(role, ROLES)}: "
                f"use {', '.join(ROLES)}"
            )
        if role in found:
            raise WorkloadError(f"--column {role} stands there twice: keep one")
        found[role] = name
    return found


def column_notes(name: str, columns: Columns | None, records: Records) -> Iterator[str]:
    """Yield one line for each note, once the rows of the file ``name`` have been read."""
    if columns is None or columns.format == "schedule":  # see ampacity.workloads.schedule_file
        return
    for role, others in columns.others.items():
        rest = " or ".join(map(mended, others))
        taken = f"{name}: column {columns[role].strip()} is taken for the {role}"
        if role not in PER_ROW:
            yield f"{taken}, not {rest}"
        elif role == "messages":
            yield f"{taken}, and {rest} only in rows where it has no value"
    if columns.apart:
        yield (
            f"{name}: the input is the sum of {columns['input']} and {' and '.join(columns.apart)}, "
            "as Anthropic counts it"
        )
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
        least = "at least " if records.columns.is_full else ""
        more = f" and {least}{len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
        yield f"{name}: columns that are not used: {', '.join(shown)}{more}"


def _unused(names: Mapping[str, int], columns: Columns) -> list[str]:
    prompts = columns.name("messages")
    prefix = prompts[: prompts.rfind(".") + 1]
    used = {*columns.by_role.values(), *_ADDED, *columns.apart}
    counts = {name for role in COUNTS if role not in columns.given for name in ROLES[role]}
    used |= {other for others in columns.others.values() for other in others}
    if prompts:
        used |= {f"{prefix}{field}" for field in (*SENT_FIELDS, "system", "instructions")}
    paths = [path.lower() for path in columns.by_role.values() if "." in path]
    return [
        name
        for name in names
        if name not in used
        and name.strip().lower() not in counts
        and not any(p.startswith(f"{name.lower()}.") for p in paths)
    ]


def missing_notes(name: str, columns: Columns, held: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each column with gaps; ``held`` by role: int64[n], -1 for none."""
    if columns.format == "schedule":
        return
    for role, values in held.items():
        if role == "parent":  # most rows have none
            continue
        missing = int(np.count_nonzero(np.asarray(values) < 0))
        if missing and role in columns.by_role:
            column = columns[role].strip()
            yield f"{name}: column {column} has no value in {missing} of {len(values)} rows"


def reach(row: Mapping[str, Any], path: str) -> Any:
    """Return the value at ``path``, as ``events.0.at`` or ``events.-1.at``; None where absent.

    A part is a key in any case, or an index into a list. The row's own names may contain dots.
    """
    parts = path.strip().split(".")
    for cut in range(len(parts), 0, -1):
        value = _key(row, ".".join(parts[:cut]))
        for part in parts[cut:]:
            value = _key(value, part) if isinstance(value, Mapping) else _item(value, part)
        if value is not None:
            return value
    return None


def _key(row: Mapping[str, Any], name: str) -> Any:
    if name in row:
        return row[name]
    wanted = name.lower()
    return next((value for key, value in row.items() if key.strip().lower() == wanted), None)


def _item(value: Any, part: str) -> Any:
    digits = part.removeprefix("-")
    is_index = digits.isdecimal() and digits.isascii() and len(digits) < 9
    if not is_index or not isinstance(value, list | tuple):
        return None
    place = int(part)
    return value[place] if -len(value) <= place < len(value) else None
