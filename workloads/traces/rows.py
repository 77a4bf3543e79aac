"""Parse the rows of a trace one by one, and count what has to be noted about them."""

from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.prompts.conversations import FAR, is_far
from ampacity.workloads.text import mended
from ampacity.workloads.traces import recorded
from ampacity.workloads.traces.block_ids import BlockIds
from ampacity.workloads.traces.columns import WITH_FAILED_REQUESTS, Columns
from ampacity.workloads.traces.spans import STEPS, SpanTree
from ampacity.workloads.traces.values import (
    MISSING,
    NO_CALL,
    NO_TEXT,
    UNKNOWN,
    BadRow,
    CellError,
    NoCall,
    cell,
    has,
    id_text,
    is_placeholder,
    span_ns,
    time_ns,
    tokens,
    writes_no_text,
)

_SAME_SPAN = "rows have the id of a span that came before: they are left out (the same span)"
_LOST_PAUSE = "rows that are left out have a pause before them, which is not played either"
_OPTIONAL = ("session", "parent", "client", "cached", "blocks", "shared_blocks", "span")
Record = Mapping[str, Any]


def _check_counts(columns: Columns, input_tokens: int | None, output_tokens: int) -> None:
    if input_tokens == 0 and output_tokens > 0:
        raise CellError(columns.name("input"), "0 is too few tokens: a prompt has at least 1")
    if output_tokens == 0 and columns.format not in WITH_FAILED_REQUESTS:
        raise CellError(columns.name("output"), "0 is too few tokens: an answer has at least 1")


class Prompt(NamedTuple):
    """A recorded prompt: messages ([]: none), further body fields, whether it is one text."""

    messages: list[dict[str, Any]]
    fields: dict[str, Any]
    is_text: bool


_NO_PROMPT = Prompt([], {}, False)


@dataclass(frozen=True)
class ReadOptions:
    """Options of ``read_trace`` for rows; see there."""

    context: int | None = None
    skip_bad_rows: bool = False
    count: Callable[[str], int] | None = None
    keep_texts: bool = False


class _Row(NamedTuple):
    """The parsed values of one row, in the order of ``Rows.values``."""

    arrival_ns: int
    end_ns: int
    took_ns: int
    pause_ns: int
    entry: int
    place: int
    input_tokens: int
    output_tokens: int


class Rows:
    """The rows read so far."""

    def __init__(
        self, path: Path, place: str, columns: Columns | None, options: ReadOptions
    ) -> None:
        self.path, self.place, self.columns, self.options = path, place, columns, options
        self.values = {name: array("q") for name in _Row._fields}
        self.optional = {role: array("q") for role in _OPTIONAL}
        self.blocks = BlockIds()
        self.block_sizes: Counter[int] = Counter()
        self.spans = SpanTree()
        self.recording = recorded.Recording(options.count)
        self.clock = ""  # notation of the times in this file
        self.no_output = 0
        self.bad: Counter[str] = Counter()
        self.note_counts: Counter[str] = Counter()  # rows by what is noted about them
        self._row_notes: list[str] = []  # of the current row
        self._untimed = 0
        self._numbers: dict[str, dict[str, int]] = {"session": {}, "client": {}}
        self._last_of: dict[int, int] = {}  # the latest row of each session
        # each request of a chat has its own id and names the previous one
        self._chats = (
            columns is not None
            and "chat_id" in columns.name("session").lower()
            and "parent" in columns.by_role
        )

    def __len__(self) -> int:
        return len(self.values["arrival_ns"])

    def add(self, place: int, record: Record | BadRow) -> None:
        """Add one row. Raises WorkloadError for a bad row, unless these are skipped."""
        self._row_notes.clear()
        try:
            if isinstance(record, NoCall) or self._why_no_call(record):
                self._add_no_call(record)
            elif isinstance(record, BadRow):
                raise ValueError(record.reason)
            elif self.columns is None:
                raise ValueError("there are no columns")
            else:
                self._add_request(place, record, self.columns)
        except ValueError as error:
            column = error.column.strip() if isinstance(error, CellError) else ""
            self._add_bad(place, column, str(error))
            self._count_lost_pause(record)

    def _add_request(self, place: int, record: Record, columns: Columns) -> None:
        input_tokens = self._count(record, columns, "input")
        if input_tokens is not None:
            input_tokens += sum(cell(record, name, tokens, 0) for name in columns.apart)
        prompt = self._prompt(record, columns, input_tokens is None)
        if input_tokens is None and not prompt.messages:
            raise CellError(columns.name("input") or columns.name("messages"), MISSING)
        output_tokens = self._output_tokens(record, columns)
        at_ns, clock = self._time(record, columns)
        _check_counts(columns, input_tokens, output_tokens)
        unit = columns.name("unit")
        if has(record, unit) and str(record[unit]).strip().lower() != "tokens":
            raise CellError(unit, f"the counts are {str(record[unit])[:40]!r}, not tokens")
        optional = self._optional(record, columns) if output_tokens else {}
        pause = columns.name("pause")
        pause_ns = cell(record, pause, lambda value: span_ns(value, pause), UNKNOWN)
        if output_tokens:
            at_ns = self._arrival_ns(at_ns, pause_ns, optional.get("session", -1), columns)
        block_size = cell(record, columns.name("block_size"), tokens, 0)
        took = columns.name("duration")
        took_ns = cell(record, took, lambda value: span_ns(value, took), UNKNOWN)
        end_ns = self._end_ns(record, columns, at_ns, took_ns, clock)
        if optional.get("span", -1) in self.spans.read:
            self.note_counts[_SAME_SPAN] += 1
            return
        if input_tokens is not None and optional.get("cached", -1) > input_tokens:
            self._row_notes.append(
                f"rows have more {columns['cached']} than tokens: all are taken for cached"
            )
        entry = -1
        if prompt.messages and output_tokens:
            entry, input_tokens = self._record(prompt, input_tokens)
        input_tokens = input_tokens or 0
        self._check_context(columns, input_tokens, output_tokens)
        self.clock = clock
        if output_tokens == 0:
            self.no_output += 1
            self._count_lost_pause(record)
            return
        row = _Row(at_ns, end_ns, took_ns, pause_ns, entry, place, input_tokens, output_tokens)
        self._store(row, optional)
        if optional.get("span", -1) >= 0:
            is_agent = record.get("is_agent") or record.get("type") in STEPS
            self.spans.add_row(optional["span"], bool(is_agent))
        if "hash_ids" in columns.by_role:
            where = f"{self.place.strip(' :') or 'line'} {place}"
            self.blocks.add(record, columns["hash_ids"], where)
        if block_size:
            self.block_sizes[block_size] += 1

    def _record(self, prompt: Prompt, input_tokens: int | None) -> tuple[int, int]:
        """Keep a recorded prompt; return (its entry, its tokens, estimated where not counted)."""
        entry, estimate = self.recording.add(prompt.messages, prompt.fields, is_text=prompt.is_text)
        if input_tokens is None:
            counted_by = self.recording.counted_by
            self._row_notes.append(f"rows have no count of input tokens: {counted_by}")
        elif is_far(prompt.messages, estimate, input_tokens):
            self._row_notes.append(
                f"rows have a text that is {FAR:g} times shorter or longer than its count of input "
                "tokens (cut off, or redacted?): it is sent as recorded"
            )
        return entry, estimate if input_tokens is None else input_tokens

    def _check_context(self, columns: Columns, input_tokens: int, output_tokens: int) -> None:
        context = self.options.context
        if context is not None and input_tokens + output_tokens > context:
            raise CellError(
                columns.name("input"),
                f"{input_tokens} tokens and {output_tokens} of output are more than the context "
                f"of {context}",
            )

    def _store(self, row: _Row, optional: Mapping[str, int]) -> None:
        self.note_counts.update(self._row_notes)
        for held, value in zip(self.values.values(), row, strict=True):
            held.append(value)
        for role, value in optional.items():
            self.optional[role].append(value)
        if optional.get("session", -1) >= 0:
            self._last_of[optional["session"]] = len(self) - 1

    def _add_no_call(self, record: Record | BadRow) -> None:
        """Count an entry that is not replayed; its span may link a call to its agent."""
        if isinstance(record, NoCall):
            ids: tuple[object, object] = record.span, record.parent_span
            if record.reason:
                self.note_counts[record.reason] += 1
        else:
            assert self.columns is not None
            assert not isinstance(record, BadRow)
            span, parent = (self.columns.name(role) for role in ("span", "parent_span"))
            ids = record.get(span), record.get(parent)
            self.note_counts[self._why_no_call(record)] += 1
        self.spans.number(*ids)

    def _count_lost_pause(self, record: Record | BadRow) -> None:
        if not isinstance(record, BadRow) and self.columns is not None:
            self.note_counts[_LOST_PAUSE] += has(record, self.columns.name("pause"))

    def _add_bad(self, place: int, column: str, reason: str) -> None:
        if not self.options.skip_bad_rows:
            where = f"column {column}: " if column else ""
            raise WorkloadError(
                f"{self.path}{self.place}{place}: {where}{reason}; "
                "mend or remove the row, or give --skip-bad-rows"
            )
        self.bad[f"column {column}" if column else "not readable"] += 1

    def _why_no_call(self, record: Record | BadRow) -> str:
        """Return why a row is not to be played: it writes no text, or is an agent's step; or ""."""
        if isinstance(record, BadRow) or self.columns is None:
            return ""
        kind, call = record.get("type"), self.columns.name("call")
        if kind == "EMBEDDING" or (call and writes_no_text(record.get(call))):
            return NO_TEXT
        return NO_CALL if kind in STEPS and not has(record, self.columns.name("input")) else ""

    def _prompt(self, record: Record, columns: Columns, needed: bool) -> Prompt:
        """Return the recorded prompt, where it is ``needed`` or texts are kept."""
        name = columns.held(record, "messages") if needed or self.options.keep_texts else ""
        is_count = name.lower().endswith("input") and str(record[name]).strip().isdecimal()
        if not name or is_count:
            return _NO_PROMPT
        prefix = name[: name.rfind(".") + 1]
        try:
            found = recorded.read_messages(record[name], listed=name.lower().endswith("messages"))
            if found is None:
                return _NO_PROMPT
            fields = mended(recorded.read_fields(record, prefix))
            system = mended(
                recorded.read_system(
                    record.get(f"{prefix}system") or record.get(f"{prefix}instructions")
                )
            )
        except ValueError as error:
            if needed:
                raise CellError(name, error) from None
            self._row_notes.append(
                f"rows have prompts that cannot be read ({error}): text of the same length is sent"
            )
            return _NO_PROMPT
        messages, is_text = mended(found[0]), found[1] and not system
        if messages is not found[0]:
            self._row_notes.append(
                "prompts hold half of a character (a lone surrogate): U+FFFD is sent for it"
            )
        return Prompt([*system, *messages], fields, is_text)

    def _output_tokens(self, record: Record, columns: Columns) -> int:
        """Return the counted output tokens, else those of the answer, else the request's limit."""
        counted = self._count(record, columns, "output")
        if counted is not None:
            return counted
        answer, limit = columns.held(record, "answer"), columns.held(record, "limit")
        text, choices = recorded.answer_text(record[answer]) if answer else ("", 1)
        if text:
            if choices > 1:
                self._row_notes.append("rows have several choices: the first is the answer")
            self._row_notes.append(
                "rows have no count of output tokens: "
                f"of the recorded answer {self.recording.counted_by}"
            )
            return self.recording.count(text)
        if not limit:
            named = (columns.name(role) for role in ("output", "limit", "answer"))
            raise CellError(next(filter(None, named), ""), MISSING)
        self._row_notes.append(
            "rows have no count of output tokens: the request's own limit is taken"
        )
        return int(cell(record, limit, tokens))

    def _count(self, record: Record, columns: Columns, role: str) -> int | None:
        """Return the tokens of a role; None: the row has no count of them."""
        column = columns.count(record, role)
        if column != columns.name(role):
            missing = columns.name(role).strip() or f"first column of {role}"
            self._row_notes.append(f"rows have no {missing}: {column.strip()} is taken")
        counted: int | None = cell(record, column, tokens)
        return counted

    def _time(self, record: Record, columns: Columns) -> tuple[int, str]:
        """Return (the row's time in ns or UNKNOWN, its notation)."""
        column = columns.name("time")
        if not has(record, column):
            return UNKNOWN, self.clock
        at_ns, clock = cell(record, column, lambda value: time_ns(value, columns.unit))
        if clock != (self.clock or clock):
            raise CellError(
                column, f"this time is {clock}, those before it are {self.clock}: use one form"
            )
        return at_ns, clock

    def _arrival_ns(self, at_ns: int, pause_ns: int, session: int, columns: Columns) -> int:
        """Return the row's time, or the end of the previous row of its session and its pause."""
        has_column = bool(columns.name("time"))
        column = columns.name("time") or columns.name("session")
        if at_ns != UNKNOWN:
            if self._untimed:
                raise CellError(column, "this row has a time, rows before it have none")
            return at_ns
        if has_column and self.clock and pause_ns == UNKNOWN:
            raise CellError(column, MISSING)
        before = self._last_of.get(session, -1)
        if before >= 0:
            last_ns = max(self.values["arrival_ns"][before], self.values["end_ns"][before])
            if has_column:
                self._row_notes.append(
                    f"rows have no {column.strip()}: they come a pause after the row above them "
                    "in their session"
                )
            return last_ns + max(pause_ns, 0)
        if has_column and (self.clock or session < 0):
            raise CellError(column, MISSING)
        self._untimed += 1
        return 0

    def _end_ns(
        self, record: Record, columns: Columns, at_ns: int, took_ns: int, clock: str
    ) -> int:
        """Return when the row's answer ended, from its end time, else from its duration."""
        name = columns.name("end")
        if has(record, name) and "time" in columns.by_role:
            end_ns, form = cell(record, name, lambda value: time_ns(value, columns.unit))
            if form == clock and end_ns >= at_ns:
                return int(end_ns)
            self._row_notes.append(
                f"rows have a {name.strip()} in another form or before their start: it is not used"
            )
        return UNKNOWN if took_ns == UNKNOWN else at_ns + int(took_ns)

    def _optional(self, record: Record, columns: Columns) -> dict[str, int]:
        found: dict[str, int] = {}
        for role in self.optional.keys() & columns.by_role.keys():
            value = record.get(columns[role])
            if role == "span":
                found[role] = self.spans.number(value, record.get(columns["parent_span"]))
            elif role in ("session", "client", "parent"):
                found[role] = self._number(role, value, columns[role].strip())
            elif role == "cached":
                cached = self._count(record, columns, role)
                found[role] = -1 if cached is None else cached
            else:
                found[role] = cell(record, columns[role], tokens, -1)
        if self._chats and found.get("parent", -1) >= 0:  # continue the named chat's conversation
            name = id_text(record.get(columns["session"]))
            found["session"] = self._numbers["session"][name] = found["parent"]
            found["parent"] = -1
        return found

    def _number(self, role: str, value: object, column: str) -> int:
        """Return the number of a session, client or parent session; -1: none."""
        if is_placeholder(value) or isinstance(value, list | dict):
            if value not in (None, "") and role == "session":
                self._row_notes.append(f"rows have the {column} {value!s:.20}, which is none")
            return -1
        name = id_text(value)
        if name != str(value).strip():
            self._row_notes.append(
                f"rows have a {column} as a number with a point: 5.0 is taken for 5"
            )
        if role == "parent":
            found = self._numbers["session"].get(name, -1)
            if found < 0:
                self._row_notes.append(f"rows name a {column} that no row before them has")
            return found
        numbers = self._numbers[role]
        if role == "session" and self._chats and name in numbers:
            self._row_notes.append(
                "rows have the id of an earlier chat: they are taken for one conversation with it"
            )
        return numbers.setdefault(name, len(numbers))
