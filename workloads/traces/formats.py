"""Rows of a log or trace as mappings, streamed: CSV, JSON lines, JSON documents, Parquet, vLLM's log; each also gzipped."""

import csv
import gzip
import io
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NoReturn

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.text import (
    BROKEN_BYTES,
    DECODE_ERRORS,
    counting_pairs,
    encoding_of,
    is_broken,
    mended,
)
from ampacity.workloads.traces.fields import ROLES, BadRow, NoCall, is_placeholder, reach
from ampacity.workloads.traces.recorded import SENT_FIELDS
from ampacity.workloads.traces.spans import listed, read_otlp, read_span

_JSON_ENDINGS = (".jsonl", ".ndjson", ".json")
_PEEKED = (
    20  # rows of JSON whose names are taken together: a field may be missing in the first ones
)
_PEEKED_MAX = (
    10_000  # rows that are looked at for these: before the first call there may be many other spans
)
LINE_MAX = 1 << 28  # characters of a line
DOCUMENT_MAX = 1 << 30  # of a JSON document, which is read as a whole
_FIELD_MAX = 1 << 24  # of a field of a CSV file
_BATCH = 20_000
_TIMES = frozenset(ROLES["time"])
_COUNTS = frozenset({*ROLES["input"], *ROLES["output"]})
_TURNS = (
    "requests",
    "turns",
    "observations",
)  # lists whose objects are requests, whatever they hold
_PAGES = (
    "data",
    "items",
    "results",
    "sessions",
    "traces",
)  # lists whose objects may hold such lists
_COMMON = (
    "block_size",
    "hash_id_scope",
    *ROLES["client"],
)  # of a session, that its requests have too
_SESSION_IDS = ("session_id", "sessionId", "conversation_id", "id", "trace_id", "traceId")


_OWN_COUNTS = "entries have counts of tokens beside a list of requests: they are taken for their sum, and not played"
_JOINED = (
    "entries have the session id of an earlier entry: their requests are taken for one session"
)


Row = tuple[int, Mapping[str, Any] | BadRow]


class ColumnCounts:
    """In how many of the ``rows`` read each column stood; the memory does not grow with the rows."""

    _SHAPES_MAX, _NAMES_MAX = 1000, 10_000

    def __init__(self) -> None:
        self.rows = 0
        self._shapes: Counter[tuple[str, ...]] = Counter()
        self._names: Counter[str] = Counter()

    def add(self, names: tuple[str, ...], rows: int = 1) -> None:
        """So many rows have these columns."""
        self.rows += rows
        self._shapes[names] += rows
        if len(self._shapes) > self._SHAPES_MAX:
            self.by_name()

    def beside(self, names: tuple[str, ...]) -> None:
        """So are the fields named that an entry has beside its requests."""
        self._add(names, 1)

    def by_name(self) -> Counter[str]:
        """Rows by column; of more than ten thousand names the first ones."""
        for shape, rows in self._shapes.items():
            self._add(shape, rows)
        self._shapes.clear()
        return self._names

    def _add(self, names: tuple[str, ...], rows: int) -> None:
        for name in names:
            if name in self._names or len(self._names) < self._NAMES_MAX:
                self._names[name] += rows


@dataclass(frozen=True)
class Records:
    """Rows with their number in the file, the names of the columns, and how far the reading is (0 to 1)."""

    names: list[str]
    first: int  # number of the line that holds the names
    rows: Iterator[Row]
    place: str  # what the number of a row counts: ":" for a line, else " entry " or " row "
    read_share: Callable[[], float]
    columns: ColumnCounts = field(default_factory=ColumnCounts)
    twice: Counter[str] = field(default_factory=Counter)  # how often a key stood twice in an object


@contextmanager
def open_records(path: Path, keep: frozenset[str] = frozenset()) -> Iterator[Records]:
    """The rows of ``path``; ``keep`` names columns that are wanted beside the known ones, paths into lists included.

    The ending says what the file is, the header of a CSV file what stands between its fields, and the first
    bytes whether it is UTF-16. Raises WorkloadError with one line.
    """
    with _plain_errors(path), path.open("rb") as file:
        size = max(file.seek(0, io.SEEK_END), 1)
        file.seek(0)
        zipped = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        binary: Any = gzip.GzipFile(fileobj=file) if zipped else file
        stem = path.name.lower().removesuffix(".gz")
        if stem.endswith(".parquet"):
            yield _parquet(io.BytesIO(binary.read()) if zipped else binary, path, keep)
            return
        encoding = encoding_of(binary.peek(2))
        with io.TextIOWrapper(binary, encoding=encoding, errors=DECODE_ERRORS, newline="") as text:

            def read_share() -> float:
                return file.tell() / size

            if stem.endswith(_JSON_ENDINGS):
                yield _json(text, path, read_share, keep)
            elif stem.endswith((".csv", ".tsv")):
                yield _csv(text, path, read_share, keep)
            elif stem.endswith(".log"):
                yield Records(
                    ["timestamp", "input_tokens", "output_tokens"],
                    1,
                    _vllm_log(_lines(text, path)),
                    ":",
                    read_share,
                )
            else:
                raise WorkloadError(
                    f"{path}: the ending is none of .csv, .tsv, .jsonl, .json, .parquet and .log (each also with .gz): rename it"
                )


@contextmanager
def _plain_errors(path: Path) -> Iterator[None]:
    """Turn what reading a file can raise into one line."""
    try:
        yield
    except WorkloadError:
        raise
    except UnicodeDecodeError as error:
        raise WorkloadError(
            f"{path}: this is no {error.encoding.upper()} text ({error.reason}): give a CSV or JSONL file"
        ) from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise WorkloadError(
            f"{path}: the gzip data are broken ({error}): fetch the file again"
        ) from None
    except OSError as error:
        raise WorkloadError(f"trace {path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise WorkloadError(
            f"{path}: the file does not fit into this machine's memory: split it, or leave out columns that are not needed"
        ) from None


def _lines(text: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """The lines of a file, of which none may be longer than LINE_MAX characters. Raises WorkloadError."""
    number = 0
    while line := text.readline(LINE_MAX):
        number += 1
        if len(line) == LINE_MAX and line[-1] not in "\r\n":
            raise WorkloadError(
                f"{path}:{number}: this line has more than {LINE_MAX:,} characters: is it a log with a request in each line?"
            )
        yield line


def _csv(
    text: io.TextIOWrapper, path: Path, read_share: Callable[[], float], keep: frozenset[str]
) -> Records:
    broken: list[int] = []  # lines with bytes that are no text
    lines = _watched(_lines(text, path), broken)
    first = next(lines, "")
    delimiter = _delimiter(first, keep)
    kept = [] if _SEPARATOR.fullmatch(first) else [first]
    csv.field_size_limit(_FIELD_MAX)  # of Python's 128 KiB a recorded prompt may have more
    reader = csv.reader(itertools.chain(kept, lines), delimiter=delimiter, strict=True)
    skipped = 1 - len(kept)
    try:
        header: list[str] = next((row for row in reader if row), [])
    except csv.Error as error:
        raise WorkloadError(f"{path}:{reader.line_num}: this is no CSV: {error}") from None
    columns = ColumnCounts()

    def rows() -> Iterator[Row]:
        width, last, good = len(header), reader.line_num + skipped, 0
        try:
            for row in reader:
                line = reader.line_num + skipped
                if broken and broken[-1] > last:
                    yield line, BadRow(BROKEN_BYTES)
                elif len(row) == width:
                    good += 1
                    yield line, dict(zip(header, row, strict=True))
                elif row:
                    yield line, BadRow(f"the row has {len(row)} fields, the header has {width}")
                last = line
        except csv.Error as error:
            raise WorkloadError(f"{path}:{last + 1}: this is no CSV: {error}") from None
        finally:
            columns.add(tuple(header), good)

    return Records(header, reader.line_num + skipped, rows(), ":", read_share, columns)


_DELIMITERS = (",", ";", "\t", "|")
_SEPARATOR = re.compile(r"sep=(.)\s*", re.IGNORECASE)  # what Excel writes above the header


def _delimiter(header: str, keep: frozenset[str]) -> str:
    """What stands between the fields: with which the header has the most known names, else the most names."""
    if told := _SEPARATOR.fullmatch(header):
        return told[1]
    known = {name for names in ROLES.values() for name in names} | {
        name.strip().lower() for name in keep
    }

    def fields(delimiter: str) -> tuple[int, int]:
        names = [name.strip(' "\r\n').lower() for name in header.split(delimiter)]
        return len(known.intersection(names)), len(names)

    return max(_DELIMITERS, key=fields)


def _watched(text: Iterable[str], broken: list[int]) -> Iterator[str]:
    """The lines; ``violated`` gets the numbers of those that hold bytes that are no text."""
    for number, line in enumerate(text, start=1):
        if is_broken(line):
            broken.append(number)
        yield line


def _json(
    text: io.TextIOWrapper, path: Path, read_share: Callable[[], float], keep: frozenset[str]
) -> Records:
    rows: Iterator[Row]
    twice: Counter[str] = Counter()
    columns = ColumnCounts()
    parse, paths = _parser(twice), [path.strip() for path in keep if "." in path]
    first = next((line for line in _lines(text, path) if line.strip()), "")
    document: Any = BadRow("it begins as JSON lines do")
    if first.lstrip()[:1] in ("[", "{") and isinstance(parse(first), BadRow | list):
        whole = first + text.read(DOCUMENT_MAX)
        if len(whole) >= DOCUMENT_MAX:
            raise WorkloadError(
                f"{path}: this JSON document has {DOCUMENT_MAX:,} characters or more: write it as JSON lines (.jsonl)"
            )
        twice.clear()  # of the first line
        document = parse(whole)
        if is_broken(whole) and isinstance(document, list):
            document = [item if mended(item) is item else BadRow(BROKEN_BYTES) for item in document]
    text.seek(0)
    if isinstance(document, BadRow):
        twice.clear()  # its line is read again

    sessions: set[str] = set()

    def expanded(item: Any) -> Iterator[Mapping[str, Any] | BadRow]:
        if paths and isinstance(item, dict):  # a path into a list names one value of the whole
            row = _flat(item)
            held = {path: value for path in paths if (value := reach(row, path)) is not None}
            if held:
                yield row | held
                return
        yield from _expand(item, sessions)

    def counted(rows: Iterator[Row]) -> Iterator[Row]:
        for row in rows:
            if isinstance(row[1], NoCall):
                columns.beside(row[1].fields)
            elif not isinstance(row[1], BadRow):
                columns.add(tuple(row[1]))
            yield row

    if isinstance(document, BadRow):
        numbered = enumerate(_lines(text, path), start=1)
        lines = ((line, content) for line, content in numbered if content.strip())
        rows, place = (
            ((line, row) for line, content in lines for row in expanded(_line(content, parse))),
            ":",
        )
    else:
        items = document if isinstance(document, list) else [document]
        rows, place = (
            enumerate(itertools.chain.from_iterable(map(expanded, items)), start=1),
            " entry ",
        )
    rows = counted(rows)
    peeked: list[Row] = []
    calls = 0
    while calls < _PEEKED and len(peeked) < _PEEKED_MAX and (row := next(rows, None)):
        peeked.append(row)
        calls += not isinstance(row[1], NoCall)
    names = {name: None for _, row in peeked if not isinstance(row, BadRow) for name in row}
    where = next((line for line, row in peeked if not isinstance(row, BadRow)), 1)
    return Records(
        list(names), where, itertools.chain(peeked, rows), place, read_share, columns, twice
    )


def _line(content: str, parse: Callable[[str], Any]) -> Any:
    return BadRow(BROKEN_BYTES) if is_broken(content) else parse(content)


def _parser(twice: Counter[str]) -> Callable[[str], Any]:
    """Reads JSON with exact numbers; ``twice`` counts the keys that stand twice in an object."""
    decoder = json.JSONDecoder(
        parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=counting_pairs(twice)
    )

    def parse(content: str) -> Any:
        try:
            return decoder.decode(content)
        except ValueError as error:
            return BadRow(f"this is no JSON: {error}")
        except (ArithmeticError, RecursionError):
            return BadRow("this is no JSON: a number is too large, or it is nested too deep")

    return parse


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _expand(item: Any, sessions: set[str]) -> Iterator[Mapping[str, Any] | BadRow]:
    """The requests of one JSON value: itself, the spans of a trace, or the requests of a recorded agent run.

    ``sessions``: the ids of those before it.
    """
    if isinstance(item, BadRow):
        yield item
    elif not isinstance(item, dict):
        yield BadRow("this is no JSON object with one request")
    elif "schedule_of" in item:  # the first line of a schedule
        return
    elif isinstance(item.get("spans"), list):
        yield from itertools.chain.from_iterable(read_span(span) for span in item["spans"])
        yield _unused(item, "spans", ("spans", "trace_id", "traceId"))
    elif isinstance(item.get("resourceSpans"), list):
        yield from read_otlp(item["resourceSpans"])
        yield _unused(item, "resourceSpans", ("resourceSpans",))
    elif (
        isinstance(item.get("attributes"), dict | list)
        and {"start_time", "startTimeUnixNano"} & item.keys()
    ):
        yield from read_span(item)
    elif nested := _nested(item):
        session = _session_id(item)
        if session is None:  # a list of entries, each by itself
            yield from itertools.chain.from_iterable(
                _expand(entry, sessions) for entry in item[nested[0]]
            )
            yield from _beside(item)
            return
        if session in sessions:
            yield NoCall(_JOINED)
        sessions.add(session)
        yield from _session(item, session)
    elif any(item.get(name) == [] for name in _TURNS) and not _counts(item) and _session_id(item):
        yield NoCall("entries have a list of requests that is empty: they are not played")
    else:
        yield _timed(_flat(item))


def _flat(item: Mapping[str, Any], prefix: str = "", depth: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in item.items():
        if isinstance(value, dict) and depth < 4 and name not in SENT_FIELDS:
            found.update(_flat(value, f"{prefix}{name}.", depth + 1))
        else:
            found[prefix + name] = value
    return found


def _nested(item: Mapping[str, Any]) -> list[str]:
    """The names of lists with the requests of a session that are nested in its object.

    They have the counts that the object itself has not, or are turns of texts.
    """
    found: list[str] = []
    for name, held in item.items():
        some = [entry for entry in listed(held)[:_PEEKED] if isinstance(entry, dict)]
        turns = (name in _TURNS and some) or (name in _PAGES and any(map(_nested, some)))
        if turns or (
            name != "choices" and any(map(_counts, some)) and (found or not _counts(item))
        ):
            found.append(name)
    return found


def _counts(item: Mapping[str, Any]) -> bool:
    """Whether an object counts the tokens of a request."""
    return any(name.lower() in _COUNTS for name in _flat(item))


def _timed(row: dict[str, Any]) -> dict[str, Any]:
    """A row whose only times stand in a list of events: the first is its start, the last one its end."""
    if any(name.lower() in _TIMES for name in row):
        return row
    for held in row.values():
        events = [event for event in listed(held) if isinstance(event, dict)]
        for name in ("timestamp", "time", "start_time", "created_at", "at", "ts"):
            if events and all(name in event for event in events):
                return {**row, "timestamp": events[0][name], "end_time": events[-1][name]}
    return row


def _session_id(item: Mapping[str, Any]) -> str | None:
    """The id of a session whose requests are nested in it."""
    about = item["trace"] if isinstance(item.get("trace"), dict) else item
    return next(
        (str(about[name]) for name in _SESSION_IDS if not is_placeholder(about.get(name))), None
    )


def _session(
    about: Mapping[str, Any],
    session: str,
    parent: str | None = None,
    begun: Any = 0,
    common: Mapping[str, Any] | None = None,
) -> Iterator[Mapping[str, Any] | BadRow]:
    """The turns of one session, and of its helpers: each of these is a conversation of its own whose
    times count from its beginning ``begun``. Where ids of blocks are ``local``, they are to the whole.

    ``common``: fields that all of them have.
    """
    taken = _nested(about)[0]
    common = {**(common or {}), **{name: about[name] for name in _COMMON if name in about}}
    for i, entry in enumerate(about[taken]):
        if not isinstance(entry, dict):
            yield BadRow("this is no JSON object with one request")
        elif _nested(entry):
            name = f"{session}/{entry.get('agent_id', entry.get('id', i))}"
            at = entry.get("t") if isinstance(entry.get("t"), int | Decimal) else 0
            yield from _session(entry, name, session, at, common)
        else:
            row = {**common, **_timed(_flat(entry)), "session": session, "parent_session": parent}
            if begun and isinstance(row.get("t"), int | Decimal):
                row["t"] += begun
            yield row
    yield from _beside(about)


def _beside(about: Mapping[str, Any]) -> Iterator[NoCall]:
    """What an object has beside its requests, and is not played."""
    taken, *others = _nested(about)
    if _counts(about):
        yield NoCall(_OWN_COUNTS)
    for name in others:
        for _ in about[name]:
            yield NoCall(f"entries of the list {name} beside {taken} are not played")
    yield _unused(about, taken, (taken, *others, *_COMMON, *_SESSION_IDS, "agent_id", "t"))


def _unused(about: Mapping[str, Any], taken: str, used: tuple[str, ...]) -> NoCall:
    """The fields that an object has beside the list that is ``taken`` of it; those ``used`` may stand deeper too."""
    names = _flat({name: value for name, value in about.items() if name not in used})
    unused = (
        name
        for name in names
        if name.rpartition(".")[2] not in used and name.lower() not in _COUNTS
    )
    return NoCall("", tuple(f"{name} beside {taken}" for name in unused))


def _parquet(file: Any, path: Path, keep: frozenset[str]) -> Records:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        parquet = pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise WorkloadError(
            f"{path}: this is no Parquet file: {str(error).splitlines()[0][:120]}"
        ) from None
    known = {name for names in ROLES.values() for name in names}
    tops, leaves = _leaves(parquet.schema_arrow)
    nested = [name.strip() for name in keep if "." in name and name.strip() not in leaves]
    wanted = {
        tops[leaf]
        for leaf in leaves
        if leaf.strip().lower() in known | {n.strip().lower() for n in keep}
    }
    wanted |= {
        top
        for top in tops.values()
        if any(name.lower().startswith(f"{top.lower()}.") for name in nested)
    }
    total, done = max(parquet.metadata.num_rows, 1), 0
    counts = ColumnCounts()

    def rows() -> Iterator[Row]:
        nonlocal done
        try:
            for batch in parquet.iter_batches(_BATCH, columns=sorted(wanted)):
                table = pa.Table.from_batches([batch])
                while any(pa.types.is_struct(column.type) for column in table.schema):
                    table = table.flatten()
                columns = [
                    (c.cast(pa.string()) if pa.types.is_timestamp(c.type) else c).to_pylist()
                    for c in table.columns
                ]
                counts.add(tuple(leaves), len(table))
                for values in zip(*columns, strict=True):
                    done += 1
                    row = dict(zip(table.column_names, values, strict=True))
                    yield done, row | {name: reach(row, name) for name in nested}
        except pa.ArrowException as error:
            raise WorkloadError(
                f"{path}: the Parquet data are broken: {str(error).splitlines()[0][:120]}"
            ) from None

    tops_read = tuple(f"{top.lower()}." for top in wanted)
    reached = [name for name in nested if name.lower().startswith(tops_read)]
    return Records([*leaves, *reached], 0, rows(), " row ", lambda: done / total, counts)


def _leaves(schema: Any) -> tuple[dict[str, str], list[str]]:
    """({leaf: column}, leaves) of a Parquet schema: field b of the struct a is the leaf ``a.b``."""
    import pyarrow as pa

    def inner(name: str, kind: Any) -> Iterator[str]:
        if pa.types.is_struct(kind):
            for i in range(kind.num_fields):
                yield from inner(f"{name}.{kind.field(i).name}", kind.field(i).type)
        else:
            yield name

    tops = {
        leaf: str(column.name) for column in schema for leaf in inner(str(column.name), column.type)
    }
    return tops, list(tops)


_RECEIVED = re.compile(
    r"(\d\d)-(\d\d) (\d\d:\d\d:\d\d)\S*.*?Received request ([^\s:]+):.*params: .*?max_tokens=(\d+|None).*?prompt_token_ids: (\[[\d, ]*\]|None)"
)
_GENERATED = re.compile(r"Generated response ([^\s:]+).*output_token_ids: (\[[\d, ]*\]|None)")


def _vllm_log(text: Iterable[str]) -> Iterator[Row]:
    """Requests of vLLM's own log (--enable-log-requests, better with --enable-log-outputs), which has no year.

    Where the answer is not logged with its tokens, as in streams, the limit max_tokens stands for it.
    """
    waiting: dict[str, tuple[int, dict[str, Any]]] = {}
    for line, content in enumerate(text, start=1):
        if received := _RECEIVED.search(content):
            month, day, clock, request, limit, ids = received.groups()
            row = {
                "timestamp": f"2000-{month}-{day} {clock}",
                "input_tokens": _listed(ids),
                "output_tokens": None if limit == "None" else limit,
            }
            if request in waiting:  # as after a restart
                yield waiting.pop(request)
            waiting[request] = line, row
        elif "Received request " in content:
            yield line, BadRow("this line of a received request has a form that is not known")
        elif answered := _GENERATED.search(content):
            if answered[1] in waiting:
                at, row = waiting.pop(answered[1])
                yield at, {**row, "output_tokens": _listed(answered[2]) or row["output_tokens"]}
            else:
                yield (
                    line,
                    NoCall(
                        "answers are to requests that the log does not hold: they are not played"
                    ),
                )
    yield from waiting.values()


def _listed(ids: str) -> int | None:
    return None if ids == "None" else ids.count(",") + 1 if ids != "[]" else 0
