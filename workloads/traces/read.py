"""Recorded load: arrival times and token counts of real requests, from a trace or a log."""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.prefixes import take_lists
from ampacity.workloads.text import mended
from ampacity.workloads.traces.columns import column_notes, missing_notes
from ampacity.workloads.traces.fields import (
    LOCAL,
    NO_CALL,
    ZONED,
    BadRow,
    Columns,
    NoCall,
    find_columns,
    has,
    is_placeholder,
    span_ns,
    time_ns,
    tokens,
)
from ampacity.workloads.traces.formats import open_records
from ampacity.workloads.traces.recorded import (
    CUT_OFF,
    Recorded,
    Recording,
    read_fields,
    read_messages,
    read_system,
    text_of,
)
from ampacity.workloads.traces.spans import STEPS, SpanTree
from ampacity.workloads.traces.times import time_notes

_REPORT_EVERY = 200_000  # rows between two calls of progress
# logs in which an answer of 0 tokens is a failed request
WITH_FAILED_REQUESTS = (
    "BurstGPT",
    "LiteLLM spend log",
    "OpenAI usage",
    "OpenTelemetry",
    "agentic coding",
)
_UNKNOWN = np.iinfo(np.int64).min  # a time that the file does not say
_TIED = (
    0.2  # share of requests with the time of an earlier one, from which on a clock may be coarse
)


@dataclass(frozen=True, eq=False)
class Blocks:
    """Prompts as chains of block ids: those of request i are ``ids[start[i]:start[i + 1]]``, int64."""

    ids: NDArray[np.int64]
    start: NDArray[np.int64]

    def take(self, index: NDArray[np.int64]) -> "Blocks":
        """The chains of the requests ``index``, in that order."""
        places, start = take_lists(self.start, index)
        return Blocks(self.ids[places], start)


@dataclass(frozen=True, eq=False)
class Trace:
    """n requests by arrival: ``arrival_s`` float64[n] in seconds from 0, token counts int64[n] of at least 1.

    ``notes``: what a reader of the results should know about the file, one line each. ``session`` and ``client``
    int64[n] number them from 0 (-1: none). ``clock_step_s``: of a clock so coarse that requests share their
    times.
    """

    arrival_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    source: str
    notes: tuple[str, ...] = ()
    session: NDArray[np.int64] | None = None
    parent: NDArray[np.int64] | None = None  # the session that called this one for help; -1: none
    client: NDArray[np.int64] | None = None
    cached_tokens: NDArray[np.int64] | None = None  # -1: not known
    blocks: Blocks | None = None
    block_tokens: int | None = None  # as the file says it
    shared_blocks: NDArray[np.int64] | None = (
        None  # int64[n, 2]: shared with the turn before, of how many
    )
    end_s: NDArray[np.float64] | None = None  # when the answer ended; NaN: not known
    pause_s: NDArray[np.float64] | None = None  # as recorded, before the request; NaN: not known
    entry: NDArray[np.int64] | None = None  # the request's messages in ``recorded``; -1: none
    recorded: Recorded | None = None
    clock: str = ""  # how the times were written
    clock_step_s: float | None = None
    resolution_s: float = 0.0  # times and ends are whole multiples of it
    place: NDArray[np.int64] | None = None  # of each row in the file ...
    place_word: str = "line"  # ... counted in lines, entries or rows
    as_schedule: bool = (
        False  # written by ``workload sample``: times count from the start of the stage
    )
    from_session_start: bool = (
        False  # times count from the start of each session: there are no arrivals
    )

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def says_arrivals(self) -> bool:
        """Whether the file says when its requests, or its sessions, arrived."""
        return bool(self.clock) and not self.from_session_start

    def take(
        self, index: NDArray[np.int64], arrival_s: NDArray[np.float64] | None = None
    ) -> "Trace":
        """The requests ``index`` (int64), sorted by ``arrival_s`` (default: their own times, not shifted).

        An answer ends as long after its request as before.
        """
        arrival_s = self.arrival_s[index] if arrival_s is None else arrival_s
        order = np.argsort(arrival_s, kind="stable")
        index = index[order]
        names = (
            "input_tokens",
            "output_tokens",
            "session",
            "parent",
            "client",
            "cached_tokens",
            "shared_blocks",
            "pause_s",
            "entry",
            "place",
        )
        taken: dict[str, Any] = {
            name: None if getattr(self, name) is None else getattr(self, name)[index]
            for name in names
        }
        if self.end_s is not None:
            taken["end_s"] = arrival_s[order] + (self.end_s - self.arrival_s)[index]
        blocks = self.blocks.take(index) if self.blocks else None
        return replace(self, arrival_s=arrival_s[order], blocks=blocks, **taken)


def read_trace(
    path: Path,
    *,
    columns: Mapping[str, str] | None = None,
    time_unit: str | None = None,
    context: int | None = None,
    skip_bad_rows: bool = False,
    timed: bool = True,
    progress: Callable[[int, float], None] | None = None,
    count: Callable[[str], int] | None = None,
    keep_texts: bool = False,
) -> Trace:
    """Read a trace or a log, row by row; columns are found by name (docs/fitting.md), or given as {role: name}.

    Times keep their full precision and count from the earliest row. Rows with 0 output tokens are
    left out and noted in a log that holds failed requests, else they are bad rows.
    ``context``: more tokens than that in a request are an error of its row; ``skip_bad_rows`` counts bad rows in
    the notes; ``timed`` False takes a file without times (all are 0); ``progress(rows, share)`` is called now
    and then; ``count`` gives the tokens of a text, of which the file has no count (default: four characters
    each); ``keep_texts``: prompts are kept, to be sent. Raises WorkloadError with one line that names file, line and column.
    """
    with open_records(path, frozenset((columns or {}).values())) as records:
        found = None
        if records.names:
            where = f"{path}{records.place}{records.first}" if records.first else str(path)
            found = find_columns(records.names, where, columns, time_unit, timed=timed)
        rows = _Rows(path, records.place, found, context, skip_bad_rows, count, keep_texts)
        for number, (place, record) in enumerate(records.rows, start=1):
            rows.add(place, record)
            if progress and number % _REPORT_EVERY == 0:
                progress(number, records.read_share())
        given = ", ".join(f"{role}={name}" for role, name in (columns or {}).items())
        unit = f"{path.name}: times are taken for numbers of {time_unit}, as given (--time-unit)"
        rows.of_columns = (
            *([f"{path.name}: columns are taken as given: {given} (--column)"] if given else []),
            *([unit] if time_unit else []),
            *column_notes(path.name, found, records),
        )
    return rows.trace()


_PER_ROW = (
    "arrival_ns",
    "end_ns",
    "pause_ns",
    "entry",
    "at",
    "input_tokens",
    "output_tokens",
)  # of _Rows


class _CellError(ValueError):
    """A value that cannot be used, and its column."""

    def __init__(self, column: str, reason: str) -> None:
        super().__init__(reason)
        self.column = column


def _cell(
    record: Mapping[str, Any], column: str, read: Callable[[Any, str], Any], missing: Any = None
) -> Any:
    """``read(value, column)`` of a row's value, ``missing`` where it has none. Raises _CellError."""
    if not has(record, column):
        return missing
    try:
        return read(record[column], column)
    except ValueError as error:
        raise _CellError(column, str(error)) from None


def _tokens(value: object, _column: str) -> int:
    return tokens(value)


class _Rows:
    """The rows read so far, and what is to be said about them."""

    def __init__(
        self,
        path: Path,
        place: str,
        columns: Columns | None,
        context: int | None,
        skip_bad_rows: bool,
        count: Callable[[str], int] | None,
        keep_texts: bool,
    ) -> None:
        self.keep_texts = keep_texts
        self.path, self.place, self.context, self.skip = path, place, context, skip_bad_rows
        self.arrival_ns, self.input_tokens, self.output_tokens = array("q"), array("q"), array("q")
        self.end_ns, self.pause_ns, self.entry, self.at = (
            array("q"),
            array("q"),
            array("q"),
            array("q"),
        )
        self.optional = {
            role: array("q")
            for role in ("session", "parent", "client", "cached", "blocks", "shared_blocks", "span")
        }
        self.block_ids, self.block_start = array("q"), array("q", [0])
        self.block_sizes: Counter[int] = Counter()
        self.numbers: dict[str, dict[str, int]] = {
            name: {} for name in ("session", "client", "hash_ids", "scope")
        }
        self.spans = SpanTree()
        self.last_of: dict[int, int] = {}  # the latest row of each session
        self.recording = Recording(count)
        self.columns = columns
        # each request of a chat has an id of its own and names the one before it
        self.chats = (
            columns is not None
            and "chat_id" in columns.name("session").lower()
            and "parent" in columns.by_role
        )
        self.clock = ""  # how the times of this file are written
        self.no_output = 0
        self.bad: Counter[str] = Counter()
        self.told: Counter[str] = Counter()  # what is said of so many rows
        self.saying: list[str] = []  # of the row that is being read
        self.untimed = 0
        self.first_odd: dict[str, str] = {}  # of odd ids, by what is said of them
        self.of_columns: tuple[str, ...] = ()

    def add(self, place: int, record: Mapping[str, Any] | BadRow) -> None:
        column, columns = "", self.columns
        self.saying.clear()
        try:
            if isinstance(record, NoCall) or self._is_step(record):
                self._no_call(record)
                return
            if isinstance(record, BadRow):
                raise ValueError(record.reason)
            if columns is None:
                raise ValueError("there are no columns")
            column = columns.name("input") or columns.name("messages")
            input_tokens = (
                tokens(record.get(column)) if has(record, columns.name("input")) else None
            )
            said, fields, is_text = self._said(record, columns, input_tokens is None)
            if input_tokens is None and not said:
                raise ValueError("the value is missing")
            column = columns.name("output") or columns.name("limit") or columns.name("answer")
            output_tokens = self._output(record, columns)
            column = columns.name("time")
            at_ns, clock = _UNKNOWN, self.clock
            if has(record, column):
                at_ns, clock = time_ns(record.get(column), columns.unit)
            if clock != (self.clock or clock):
                raise ValueError(
                    f"this time is {clock}, those before it are {self.clock}: use one form"
                )
            column = columns.name("input")
            if input_tokens == 0 and output_tokens > 0:
                raise ValueError("0 is too few tokens: a prompt has at least 1")
            if output_tokens == 0 and columns.format not in WITH_FAILED_REQUESTS:
                column = columns.name("output")
                raise ValueError("0 is too few tokens: an answer has at least 1")
            optional = self._optional(record, columns) if output_tokens else {}
            pause_ns = _cell(record, columns.name("pause"), span_ns, _UNKNOWN)
            column = columns.name("time") or columns.name("session")
            if output_tokens and at_ns == _UNKNOWN:
                at_ns = self._follows(
                    optional.get("session", -1), pause_ns, bool(columns.name("time"))
                )
            elif output_tokens and self.untimed:
                raise ValueError("this row has a time, rows before it have none")
            size = _cell(record, columns.name("block_size"), _tokens, 0)
            end_ns = self._end(record, columns, at_ns, clock)
            if optional.get("span", -1) in self.spans.read:
                self.told[
                    "rows have the id of a span that came before: they are left out (the same span)"
                ] += 1
                return
            if input_tokens is not None and optional.get("cached", -1) > input_tokens:
                self.saying.append(
                    f"rows have more {columns['cached']} than tokens: all are taken for cached"
                )
            entry = -1
            if said and output_tokens:
                entry, estimate = self.recording.add(said, fields, is_text=is_text)
                if input_tokens is None:
                    input_tokens = estimate
                    self.saying.append(
                        f"rows have no count of input tokens: {self.recording.counted_by}"
                    )
            column = columns.name("input")
            if self.context is not None and (input_tokens or 0) + output_tokens > self.context:
                raise ValueError(
                    f"{input_tokens} tokens and {output_tokens} of output are more than the context of {self.context}"
                )
        except ValueError as error:
            self._bad(place, error.column if isinstance(error, _CellError) else column, str(error))
            return
        self.clock = clock
        if output_tokens == 0:
            self.no_output += 1
            return
        if self.saying:
            self.told.update(self.saying)
        self.arrival_ns.append(at_ns)
        self.end_ns.append(end_ns)
        self.pause_ns.append(pause_ns)
        self.entry.append(entry)
        self.at.append(place)
        self.input_tokens.append(input_tokens or 0)
        self.output_tokens.append(output_tokens)
        for role, value in optional.items():
            self.optional[role].append(value)
        if optional.get("session", -1) >= 0:
            self.last_of[optional["session"]] = len(self.arrival_ns) - 1
        if optional.get("span", -1) >= 0:
            self.spans.read.add(optional["span"])
            if record.get("is_agent") or record.get("type") in STEPS:
                self.spans.agents.add(optional["span"])
        if "hash_ids" in columns.by_role:
            self._add_blocks(place, record, columns["hash_ids"])
        if size:
            self.block_sizes[size] += 1

    def _no_call(self, record: Mapping[str, Any] | BadRow) -> None:
        """Count what is not played; a span among it may stand between a call and the agent that made it."""
        columns = self.columns
        if isinstance(record, NoCall):
            ids = record.span, record.parent_span
            if record.reason:
                self.told[record.reason] += 1
        else:
            assert columns is not None
            assert not isinstance(record, BadRow)
            ids = record.get(columns.name("span")), record.get(columns.name("parent_span"))
            self.told[NO_CALL] += 1
        self.spans.number(*ids)

    def _is_step(self, record: Mapping[str, Any] | BadRow) -> bool:
        """Whether a row is a step of an agent, and counts nothing."""
        if isinstance(record, BadRow) or record.get("type") not in STEPS or self.columns is None:
            return False
        return record["type"] == "EMBEDDING" or not has(record, self.columns.name("input"))

    def _said(
        self, record: Mapping[str, Any], columns: Columns, needed: bool
    ) -> tuple[list[dict[str, Any]], dict[str, Any], bool]:
        """(messages, further fields of the body, whether they are one text) as recorded; [] where there are none."""
        name = columns.held(record, "messages") if needed or self.keep_texts else ""
        if not name or str(record[name]).strip().isdecimal():  # a column of counts
            return [], {}, False
        prefix = name[: name.rfind(".") + 1]
        try:
            found = read_messages(record[name], listed=name.lower().endswith("messages"))
            if found is None:
                return [], {}, False
            fields = mended(read_fields(record, prefix))
            system = mended(read_system(record.get(f"{prefix}system")))
        except ValueError as error:
            if needed:
                raise _CellError(name, str(error)) from None
            self.saying.append(
                f"rows have prompts that cannot be read ({error}): text of the same length is sent"
            )
            return [], {}, False
        messages, is_text = mended(found[0]), found[1] and not system
        if messages is not found[0]:
            self.saying.append(
                "prompts hold half of a character (a lone surrogate): U+FFFD is sent for it"
            )
        return [*system, *messages], fields, is_text

    def _output(self, record: Mapping[str, Any], columns: Columns) -> int:
        """Output tokens as counted, else as the recorded answer has them, else the request's own limit."""
        name, answer, limit = (
            columns.name("output"),
            columns.held(record, "answer"),
            columns.held(record, "limit"),
        )
        if has(record, name):
            return tokens(record[name])
        if answer and (text := _answer_text(record[answer])):
            self.saying.append(
                f"rows have no count of output tokens: of the recorded answer {self.recording.counted_by}"
            )
            return self.recording.count(text)
        if limit:
            self.saying.append(
                "rows have no count of output tokens: the request's own limit is taken"
            )
            return int(_cell(record, limit, _tokens))
        raise ValueError("the value is missing")

    def _follows(self, session: int, pause_ns: int, has_column: bool) -> int:
        """The time of a row that has none: that of the row before it in its session, and its pause."""
        if has_column and self.clock and pause_ns == _UNKNOWN:
            raise ValueError("the value is missing")
        before = self.last_of.get(session, -1)
        if before >= 0:
            return max(self.arrival_ns[before], self.end_ns[before]) + max(pause_ns, 0)
        if has_column and (self.clock or session < 0):
            raise ValueError("the value is missing")
        self.untimed += 1
        return 0

    def _end(self, record: Mapping[str, Any], columns: Columns, at_ns: int, clock: str) -> int:
        """When the row's answer ended, by the time or by how long it took."""
        name, took = columns.name("end"), columns.name("duration")
        if has(record, name) and "time" in columns.by_role:
            end_ns, form = _cell(
                record, name, lambda value, _: time_ns(value, columns.unit), (0, "")
            )
            if form == clock and end_ns >= at_ns:
                return int(end_ns)
            self.saying.append(
                f"rows have a {name.strip()} in another form or before their start: it is not used"
            )
            return _UNKNOWN
        took_ns = _cell(record, took, span_ns, _UNKNOWN)
        return _UNKNOWN if took_ns == _UNKNOWN else at_ns + int(took_ns)

    def _bad(self, place: int, column: str, reason: str) -> None:
        if not self.skip:
            where = f"column {column.strip()}: " if column else ""
            raise WorkloadError(
                f"{self.path}{self.place}{place}: {where}{reason}; mend or remove the row, or give --skip-bad-rows"
            )
        self.bad[f"column {column.strip()}" if column else "not readable"] += 1

    def _optional(self, record: Mapping[str, Any], columns: Columns) -> dict[str, int]:
        found: dict[str, int] = {}
        chats = self.chats
        for role in self.optional.keys() & columns.by_role.keys():
            value = record.get(columns[role])
            if role == "span":
                found[role] = self.spans.number(value, record.get(columns["parent_span"]))
            elif role in ("session", "client", "parent"):
                if is_placeholder(value) or isinstance(value, list | dict):
                    found[role] = -1
                    if value not in (None, "") and role == "session":
                        self.saying.append(
                            f"rows have the {columns[role].strip()} {value!s:.20}, which is none"
                        )
                elif role != "parent":
                    numbers = self.numbers[role]
                    if role == "session" and chats and str(value) in numbers:
                        self.saying.append(
                            "rows have the id of an earlier chat: they are taken for one conversation with it"
                        )
                    found[role] = numbers.setdefault(str(value), len(numbers))
                else:
                    found[role] = self.numbers["session"].get(str(value), -1)
                    if found[role] < 0 and str(value) != "-1":  # which stands for none
                        self.saying.append(
                            f"rows name a {columns[role].strip()} that no row before them has"
                        )
            else:
                found[role] = _cell(record, columns[role], _tokens, -1)
        if chats and found.get("parent", -1) >= 0:
            found["session"] = self.numbers["session"][str(record.get(columns["session"]))] = found[
                "parent"
            ]
            found["parent"] = -1
        return found

    def _add_blocks(self, place: int, record: Mapping[str, Any], column: str) -> None:
        ids = record.get(column)
        if isinstance(ids, str):
            try:
                ids = json.loads(ids)
            except (ValueError, RecursionError):
                ids = None
        if not isinstance(ids, list) and has(record, column):
            self.told[
                "rows have hash_ids that are no list: no blocks are known of their prompts"
            ] += 1
        base = 0
        if record.get("hash_id_scope") == "local":
            scope, numbers = str(record.get("session")).partition("/")[0], self.numbers["scope"]
            base = (numbers.setdefault(scope, len(numbers)) + 1) << 40
        numbers = self.numbers["hash_ids"]
        odd: dict[str, Any] = {}  # the first of each kind
        for block in ids if isinstance(ids, list) else ():
            if type(block) is int and 0 <= block < 1 << 40:  # nearly every one
                self.block_ids.append(base + block)
                continue
            number, kind = _block(block)
            if kind:
                odd.setdefault(kind, block)
            if isinstance(number, int) and 0 <= number < 1 << 40:
                self.block_ids.append(base + number)
            else:  # what is no id is a block of its own, with a name that no other has
                name = str(number) if number is not None else f"{len(self.block_ids)} is none"
                self.block_ids.append(~numbers.setdefault(name, len(numbers)))
        for kind, block in odd.items():
            self.told[kind] += 1
            self.first_odd.setdefault(
                kind, f"{self.place.strip(' :') or 'line'} {place}: {block!s:.20}"
            )
        self.block_start.append(len(self.block_ids))

    def _drop(self, left_out: NDArray[np.bool_]) -> None:
        """Forget these rows."""
        kept = np.flatnonzero(~left_out)

        def rest(held: "array[int]") -> "array[int]":
            return array("q", np.frombuffer(held, dtype=np.int64)[kept].tobytes())

        for name in _PER_ROW:
            setattr(self, name, rest(getattr(self, name)))
        self.optional = {role: rest(held) if held else held for role, held in self.optional.items()}
        if len(self.block_start) > 1:
            ids, start = (
                np.array(held, dtype=np.int64) for held in (self.block_ids, self.block_start)
            )
            blocks = Blocks(ids, start).take(kept)
            self.block_ids, self.block_start = (
                array("q", blocks.ids.tobytes()),
                array("q", blocks.start.tobytes()),
            )

    def trace(self) -> Trace:
        if self.columns is None:
            raise WorkloadError(
                f"{self.path}: the file holds no rows: a trace needs at least one request"
            )
        if not self.arrival_ns:
            if self.bad:
                raise WorkloadError(
                    f"{self.path}: all {self.bad.total()} rows are bad: nothing is left of the trace"
                )
            some = "every row has 0 output tokens" if self.no_output else "the file holds no rows"
            raise WorkloadError(f"{self.path}: {some}: a trace needs at least one request")
        counts = [
            np.frombuffer(held, dtype=np.int64) for held in (self.input_tokens, self.output_tokens)
        ]
        left_out, told_of = self.spans.parents(self.optional["span"], np.column_stack(counts))
        self.told.update(told_of)
        if left_out.any():
            self._drop(left_out)
        arrival_ns = np.frombuffer(self.arrival_ns, dtype=np.int64)
        as_schedule = self.columns.format == "schedule"
        step_s = None if as_schedule else _clock_step_s(np.sort(arrival_ns))
        from_start = _from_session_start(arrival_ns, self._array("session"))
        notes = [*self._notes(arrival_ns, self.columns), *self.of_columns]
        told: dict[str, Any] = {
            role: held for role, held in self.optional.items() if role not in ("parent", "span")
        }
        ended = np.frombuffer(self.end_ns, dtype=np.int64)
        told["end" if "end" in self.columns.by_role else "duration"] = np.where(
            ended == _UNKNOWN, -1, 0
        )
        told["hash_ids"] = np.diff(np.frombuffer(self.block_start, dtype=np.int64)) - 1  # -1: none
        notes += missing_notes(self.path.name, self.columns, told)
        if self.clock and not (as_schedule or from_start):
            notes += time_notes(self.path.name, arrival_ns, self.columns, self.clock)
        tied = len(arrival_ns) - len(
            np.unique(arrival_ns)
        )  # rows whose time an earlier row has too
        if self.clock and tied and not (step_s or as_schedule or from_start):
            notes.append(
                f"{self.path.name}: {tied} rows have the very time of another row; they are kept and arrive together"
            )
        chains = (
            np.array(self.block_ids, dtype=np.int64),
            np.array(self.block_start, dtype=np.int64),
        )
        shared, of = self._array("shared_blocks"), self._array("blocks")
        unsorted = Trace(
            arrival_s=(arrival_ns - (0 if as_schedule else arrival_ns.min())) / 1e9,
            input_tokens=np.frombuffer(self.input_tokens, dtype=np.int64),
            output_tokens=np.frombuffer(self.output_tokens, dtype=np.int64),
            source=f"{self.path.name} ({self.columns.format} format)",
            notes=tuple(notes),
            session=self._array("session"),
            parent=self._array("parent"),
            client=self._array("client"),
            cached_tokens=self._array("cached"),
            blocks=Blocks(*chains) if self.block_ids else None,
            block_tokens=self.block_sizes.most_common(1)[0][0] if self.block_sizes else None,
            end_s=_seconds(self.end_ns, 0 if as_schedule else arrival_ns.min()),
            pause_s=_seconds(self.pause_ns),
            entry=np.frombuffer(self.entry, dtype=np.int64) if max(self.entry) >= 0 else None,
            recorded=self.recording.done(),
            place=np.frombuffer(self.at, dtype=np.int64),
            place_word=self.place.strip(" :") or "line",
            resolution_s=_resolution_s(arrival_ns, np.frombuffer(self.end_ns, dtype=np.int64)),
            shared_blocks=None if shared is None or of is None else np.column_stack([shared, of]),
            clock=self.clock,
            clock_step_s=None if from_start else step_s,
            from_session_start=from_start,
            as_schedule=as_schedule,
        )
        return unsorted.take(np.arange(len(arrival_ns)))

    def _array(self, role: str) -> NDArray[np.int64] | None:
        held = self.optional[role]
        return np.frombuffer(held, dtype=np.int64) if held and max(held) >= 0 else None

    def _notes(self, arrival_ns: NDArray[np.int64], columns: Columns) -> Iterator[str]:
        name = self.path.name
        if self.clock not in ("", LOCAL, ZONED, "a number of seconds"):
            yield f"{name}: column {columns['time']} is read as {self.clock.removeprefix('a number of ')}"
        if self.no_output:
            yield f"{name}: {self.no_output} rows with 0 output tokens are left out (failed requests)"
        if len(self.block_sizes) > 1:
            shown = ", ".join(
                f"{size} ({rows} rows)" for size, rows in self.block_sizes.most_common(3)
            )
            yield f"{name}: column {columns['block_size'].strip()} has several values ({shown}): the first is taken for all"
        if self.bad:
            reasons = ", ".join(f"{count} for {reason}" for reason, count in self.bad.most_common())
            yield f"{name}: {self.bad.total()} bad rows of {self.bad.total() + len(arrival_ns) + self.no_output} are left out: {reasons}"
        for text, count in self.told.items():
            first = f" (first {self.first_odd[text]})" if text in self.first_odd else ""
            yield f"{name}: {count} {text}{first}"
        session = self._array("session")
        order = (
            np.arange(len(arrival_ns)) if session is None else np.argsort(session, kind="stable")
        )
        same = slice(None) if session is None else np.diff(session[order]) == 0
        late = int(np.count_nonzero(np.diff(arrival_ns[order])[same] < 0))
        if late:
            where = "" if session is None else " of their session"
            yield f"{name}: the rows{where} are not in the order of time ({late} come before the row above them); they are sorted"


def _block(block: object) -> tuple[int | str | None, str]:
    """(the number or the name of a member of hash_ids, None where it is none; what is odd about it, or "")."""
    what = "rows have hash_ids with members that are"
    if isinstance(block, int) and not isinstance(block, bool):
        return block, "" if block >= 0 else f"{what} negative numbers: they are taken for ids"
    if isinstance(block, str) and block.strip():
        digits = block.isdecimal() and block.isascii() and len(block) < 19
        return int(block) if digits else f"text {block}", f"{what} texts: they are taken for ids"
    if isinstance(block, Decimal | float) and block == int(block):
        return int(block), f"{what} no whole numbers: 5.0 is taken for the id 5, others for none"
    if isinstance(block, Decimal | float):
        return None, f"{what} no whole numbers: 5.0 is taken for the id 5, others for none"
    return None, f"{what} none (null, lists, objects): nothing is shared from there on"


def _answer_text(value: Any) -> str:
    """The text of a recorded answer: itself, a message, a list of them, or of choices."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(v, Mapping) and "message" in v for v in value)
    ):
        value = [choice["message"] for choice in value]
    try:
        found = read_messages(value)
    except ValueError as error:
        if str(error) == CUT_OFF:
            return ""
        return json.dumps(value, default=str)
    return " ".join(map(text_of, found[0])) if found else ""


def _seconds(ns: "array[int]", zero_ns: int = 0) -> NDArray[np.float64] | None:
    """Times from ``zero_ns`` on, NaN where they are not known; None where none is."""
    held = np.frombuffer(ns, dtype=np.int64)
    known = held != _UNKNOWN
    return np.where(known, (held - zero_ns) / 1e9, np.nan) if known.any() else None


def _resolution_s(*times_ns: NDArray[np.int64]) -> float:
    """The coarsest of 1 s, 1 ms and 1 us of which all times are multiples, else 0."""
    worst = 1e9
    for held in times_ns:
        known = held[held != _UNKNOWN]
        while worst > 1 and (known % int(worst)).any():
            worst /= 1000
    return worst / 1e9 if worst > 1 else 0.0


def _clock_step_s(sorted_ns: NDArray[np.int64]) -> float | None:
    """The step of a coarse clock: many requests share their times, and the times lie a step or more apart."""
    if len(sorted_ns) < 10:
        return None
    gaps = np.diff(np.unique(sorted_ns))
    if len(gaps) == 0 or (len(gaps) + 1) > (1 - _TIED) * len(sorted_ns):
        return None
    smallest, middle = np.quantile(gaps, [0.01, 0.5])
    return (
        float(middle if smallest > 0.9 * middle else smallest) / 1e9
        if smallest >= 0.3 * middle
        else None
    )


def _from_session_start(arrival_ns: NDArray[np.int64], session: NDArray[np.int64] | None) -> bool:
    """Whether there are sessions, and most of them begin at the very time 0."""
    if session is None or (session < 0).any() or session.max() < 1:
        return False
    first = np.full(session.max() + 1, np.iinfo(np.int64).max)
    np.minimum.at(first, session, arrival_ns)
    return bool(np.count_nonzero(first == 0) * 2 > len(first))
