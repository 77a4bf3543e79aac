"""Read the rows of a JSON document or of JSON lines; requests nested in sessions are expanded."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.text import BROKEN_BYTES, counting_pairs, is_broken, mended
from ampacity.workloads.traces.columns import ROLES, reach
from ampacity.workloads.traces.recorded import SENT_FIELDS
from ampacity.workloads.traces.records import ColumnCounts, Records, Row
from ampacity.workloads.traces.spans import as_list, read_otlp, read_span
from ampacity.workloads.traces.values import BadRow, NoCall, id_text, is_placeholder

_PEEKED = 20  # rows whose names are merged: a field may be missing in the first ones
_PEEKED_MAX = 10_000  # rows searched for these: many other spans may precede the first call
DOCUMENT_MAX = 1 << 30  # characters of a JSON document, which is read as a whole
_TIMES = frozenset(ROLES["time"])
_COUNTS = frozenset({*ROLES["input"], *ROLES["output"]})
_EVENT_TIMES = ("timestamp", "time", "start_time", "created_at", "at", "ts")
_TURNS = ("requests", "turns", "observations")  # lists of requests
_PAGES = ("data", "items", "results", "sessions", "traces")  # lists of objects with such lists
_COMMON = ("block_size", "hash_id_scope", *ROLES["client"])  # session fields its requests inherit
_SESSION_IDS = ("session_id", "sessionId", "conversation_id", "id", "trace_id", "traceId")

_NO_REQUEST = BadRow("this is no JSON object with one request")
_EMPTY = NoCall("entries have a list of requests that is empty: they are not played")
_OWN_COUNTS = NoCall(
    "entries have counts of tokens beside a list of requests: "
    "they are taken for their sum, and not played"
)
_JOINED = NoCall(
    "entries have the session id of an earlier entry: their requests are taken for one session"
)
Item = Mapping[str, Any]


def json_records(
    text: TextIOWrapper,
    lines: Callable[[], Iterator[str]],
    path: Path,
    read_share: Callable[[], float],
    keep: frozenset[str],
) -> Records:
    """Return the rows of a JSON document, or else of JSON lines. Raises WorkloadError."""
    duplicates: Counter[str] = Counter()
    parse = _parser(duplicates)
    first = next((line for line in lines() if line.strip()), "")
    is_document = first.lstrip()[:1] in ("[", "{") and isinstance(parse(first), BadRow | list)
    duplicates.clear()  # the first line is read again
    document = _document(first, text, path, parse) if is_document else None
    text.seek(0)
    if isinstance(document, BadRow):
        duplicates.clear()
        document = None
    if document is None:
        numbered = ((n, line) for n, line in enumerate(lines(), start=1) if line.strip())
        items = ((n, BadRow(BROKEN_BYTES) if is_broken(s) else parse(s)) for n, s in numbered)
        return expanded_records(items, ":", read_share, keep, duplicates)
    values = document if isinstance(document, list) else [document]
    expand = _Expander(keep, duplicates)
    entries = enumerate(itertools.chain.from_iterable(map(expand, values)), start=1)
    return _peeked_records(entries, " entry ", read_share, duplicates)


def expanded_records(
    items: Iterator[tuple[int, Any]],
    place: str,
    read_share: Callable[[], float],
    keep: frozenset[str],
    duplicates: Counter[str],
) -> Records:
    """Return the requests of objects, each of which is one or holds some, with its number."""
    expand = _Expander(keep, duplicates)
    rows = ((n, row) for n, item in items for row in expand(item))
    return _peeked_records(rows, place, read_share, duplicates)


def _peeked_records(
    rows: Iterator[Row], place: str, read_share: Callable[[], float], duplicates: Counter[str]
) -> Records:
    """Return the rows, with the names of the first ones' columns."""
    columns = ColumnCounts()
    counted = _counted(rows, columns)
    peeked: list[Row] = []
    calls = 0
    while calls < _PEEKED and len(peeked) < _PEEKED_MAX and (row := next(counted, None)):
        peeked.append(row)
        calls += not isinstance(row[1], NoCall)
    names = {name: None for _, held in peeked if not isinstance(held, BadRow) for name in held}
    where = next((line for line, held in peeked if not isinstance(held, BadRow)), 1)
    rest = itertools.chain(peeked, counted)
    return Records(list(names), where, rest, place, read_share, columns, duplicates)


def _document(first: str, text: TextIOWrapper, path: Path, parse: Callable[[str], Any]) -> Any:
    """Return the whole file as one JSON value, BadRow where it is none. Raises WorkloadError."""
    whole = first + text.read(DOCUMENT_MAX)
    if len(whole) >= DOCUMENT_MAX:
        raise WorkloadError(
            f"{path}: this JSON document has {DOCUMENT_MAX:,} characters or more: "
            "write it as JSON lines (.jsonl)"
        )
    document = parse(whole)
    if is_broken(whole) and isinstance(document, list):
        return [item if mended(item) is item else BadRow(BROKEN_BYTES) for item in document]
    return document


def _counted(rows: Iterator[Row], columns: ColumnCounts) -> Iterator[Row]:
    for row in rows:
        if isinstance(row[1], NoCall):
            columns.add_unused(row[1].fields)
        elif not isinstance(row[1], BadRow):
            columns.add(tuple(row[1]))
        yield row


def _parser(duplicates: Counter[str]) -> Callable[[str], Any]:
    """Return a JSON parser with exact numbers; ``duplicates`` counts repeated keys of objects."""
    decoder = json.JSONDecoder(
        parse_float=Decimal,
        parse_constant=float,  # NaN is a missing value; Infinity is refused where it is used
        object_pairs_hook=counting_pairs(duplicates),
    )

    def parse(content: str) -> Any:
        try:
            return decoder.decode(content)
        except ValueError as error:
            return BadRow(f"this is no JSON: {error}")
        except (ArithmeticError, RecursionError):
            return BadRow("this is no JSON: a number is too large, or it is nested too deep")

    return parse


class _Expander:
    """Expands a JSON value to its requests: itself, spans, or the requests of a session.

    ``keep``: wanted paths into lists, each of which selects one value of a whole item;
    ``duplicates`` counts attributes that a span has twice.
    """

    def __init__(self, keep: frozenset[str], duplicates: Counter[str]) -> None:
        self._paths = [name.strip() for name in keep if "." in name]
        self._sessions: set[str] = set()  # ids seen so far
        self._duplicates = duplicates
        self._begun = False

    def __call__(self, item: Any) -> Iterator[Item | BadRow]:
        if self._begun and isinstance(item, dict) and "schedule_of" in item:
            item = BadRow("a second schedule begins here: give each a file of its own")
        self._begun = True
        if self._paths and isinstance(item, dict):
            row = _flat(item, self._duplicates)
            held = {path: reach(row, path) for path in self._paths}
            held = {path: value for path, value in held.items() if value is not None}
            if held:
                yield row | held
                return
        yield from self._expand(item)

    def _expand(self, item: Any) -> Iterator[Item | BadRow]:
        if isinstance(item, BadRow):
            yield item
        elif not isinstance(item, dict):
            yield _NO_REQUEST
        elif "schedule_of" in item:  # the first line of a schedule
            return
        elif isinstance(item.get("spans"), list):
            for span in item["spans"]:
                yield from read_span(span, self._duplicates)
            yield _unused(item, "spans", ("spans", "trace_id", "traceId"))
        elif isinstance(item.get("resourceSpans"), list):
            yield from read_otlp(item["resourceSpans"], self._duplicates)
            yield _unused(item, "resourceSpans", ("resourceSpans",))
        elif _is_span(item):
            yield from read_span(item, self._duplicates)
        elif nested := _nested(item):
            yield from self._expand_nested(item, nested[0])
        elif any(item.get(n) == [] for n in _TURNS) and not _counts(item) and _session_id(item):
            yield _EMPTY
        else:
            yield _timed(_flat(item, self._duplicates))

    def _expand_nested(self, item: Item, name: str) -> Iterator[Item | BadRow]:
        session = _session_id(item)
        if session is None:  # a list of independent entries
            yield from itertools.chain.from_iterable(map(self._expand, item[name]))
            yield from _beside(item)
            return
        if session in self._sessions:
            yield _JOINED
        self._sessions.add(session)
        yield from _session(item, session, self._duplicates)


def _is_span(item: Item) -> bool:
    has_time = bool({"start_time", "startTimeUnixNano"} & item.keys())
    return has_time and isinstance(item.get("attributes"), dict | list)


def _flat(
    item: Item, twice: Counter[str] | None = None, prefix: str = "", depth: int = 0
) -> dict[str, Any]:
    """Return the fields of an object by path; ``twice`` counts paths that two of them have."""
    found: dict[str, Any] = {}
    for name, value in item.items():
        inner = {prefix + name: value}
        if isinstance(value, dict) and depth < 4 and name not in SENT_FIELDS:
            inner = _flat(value, twice, f"{prefix}{name}.", depth + 1)
        if twice is not None and (both := inner.keys() & found.keys()):
            twice.update(both)
        found.update(inner)
    return found


def _nested(item: Item) -> list[str]:
    """Return the names of the lists that hold requests.

    Their objects have the token counts that the object itself lacks, or are turns with texts.
    """
    found: list[str] = []
    for name, held in item.items():
        some = [entry for entry in as_list(held)[:_PEEKED] if isinstance(entry, dict)]
        is_turns = (name in _TURNS and some) or (name in _PAGES and any(map(_nested, some)))
        has_counts = name != "choices" and any(map(_counts, some))
        if is_turns or (has_counts and (found or not _counts(item))):
            found.append(name)
    return found


def _counts(item: Item) -> bool:
    """Return whether an object has a token count of a request."""
    return any(name.lower() in _COUNTS for name in _flat(item))


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with start and end from its list of events, where it has no other time."""
    if any(name.lower() in _TIMES for name in row):
        return row
    for held in row.values():
        events = [event for event in as_list(held) if isinstance(event, dict)]
        for name in _EVENT_TIMES:
            if events and all(name in event for event in events):
                return {**row, "timestamp": events[0][name], "end_time": events[-1][name]}
    return row


def _session_id(item: Item) -> str | None:
    about = item["trace"] if isinstance(item.get("trace"), dict) else item
    ids = (about[name] for name in _SESSION_IDS if not is_placeholder(about.get(name)))
    return next(map(id_text, ids), None)


def _session(
    about: Item,
    session: str,
    twice: Counter[str],
    parent: str | None = None,
    begun: Any = 0,
    common: Item | None = None,
) -> Iterator[Item | BadRow]:
    """Yield the turns of a session and of its helpers, each of which is a session of its own.

    A helper's times count from its start ``begun``. ``common``: fields inherited by all turns.
    """
    taken = _nested(about)[0]
    common = {**(common or {}), **{name: about[name] for name in _COMMON if name in about}}
    for i, entry in enumerate(about[taken]):
        if not isinstance(entry, dict):
            yield _NO_REQUEST
        elif _nested(entry):
            name = f"{session}/{entry.get('agent_id', entry.get('id', i))}"
            yield from _session(entry, name, twice, session, _seconds(entry.get("t")) or 0, common)
        else:
            row = {
                **common,
                **_timed(_flat(entry, twice)),
                "session": session,
                "parent_session": parent,
            }
            if begun and (at := _seconds(row.get("t"))) is not None:
                row["t"] = at + begun
            yield row
    yield from _beside(about)


def _seconds(value: Any) -> Decimal | None:
    is_time = isinstance(value, int | float | Decimal) and math.isfinite(value)
    return Decimal(str(value)) if is_time else None


def _beside(about: Item) -> Iterator[NoCall]:
    """Yield what an object has beside its requests and is not replayed."""
    taken, *others = _nested(about)
    if _counts(about):
        yield _OWN_COUNTS
    for name in others:
        for _ in about[name]:
            yield NoCall(f"entries of the list {name} beside {taken} are not played")
    yield _unused(about, taken, (taken, *others, *_COMMON, *_SESSION_IDS, "agent_id", "t"))


def _unused(about: Item, taken: str, used: tuple[str, ...]) -> NoCall:
    """Return the fields beside the list ``taken``; ``used`` are excluded at any depth."""
    names = _flat({name: value for name, value in about.items() if name not in used})
    unused = (
        name
        for name in names
        if name.rpartition(".")[2] not in used and name.lower() not in _COUNTS
    )
    return NoCall("", tuple(f"{name} beside {taken}" for name in unused))
