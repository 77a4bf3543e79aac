"""One field of a trace: which column it is, and what its text means. Exact: times are integer nanoseconds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from ampacity.workloads.errors import WorkloadError, did_you_mean
from ampacity.workloads.lengths.parse import MAX_TOKENS

# What a column may mean, and the names by which it is known (lower case; "a.b" is field b of the object a).
ROLES: dict[str, tuple[str, ...]] = {
    "time": (
        "scheduled_s",
        "timestamp",
        "timestamp_s",
        "arrival_s",
        "arrived_at",
        "timestamp_ms",
        "timestamp_us",
        "timestamp_ns",
        "starttime",
        "start_time",
        "starttimeunixnano",
        "created",
        "created_at",
        "t_s",
        "t",
    ),
    "input": (
        "contexttokens",
        "input_length",
        "request tokens",
        "input_tokens",
        "prompt_tokens",
        "num_prefill_tokens",
        "usage.prompt_tokens",
        "usage.input_tokens",
        "response.usage.prompt_tokens",
        "response.body.usage.prompt_tokens",
        "gen_ai.usage.input_tokens",
        "gen_ai.usage.prompt_tokens",
        "in",
        "prompttokens",
        "usagedetails.input",
        "usage_details.input",
        "usage.input",
        "inputusage",
        "llm.token_count.prompt",
    ),
    "output": (
        "generatedtokens",
        "output_length",
        "response tokens",
        "output_tokens",
        "completion_tokens",
        "num_decode_tokens",
        "usage.completion_tokens",
        "usage.output_tokens",
        "response.usage.completion_tokens",
        "response.body.usage.completion_tokens",
        "gen_ai.usage.output_tokens",
        "gen_ai.usage.completion_tokens",
        "out",
        "completiontokens",
        "usagedetails.output",
        "usage_details.output",
        "usage.output",
        "outputusage",
        "llm.token_count.completion",
    ),
    "cached": (
        "cached_tokens",
        "usage.prompt_tokens_details.cached_tokens",
        "usage.cache_read_input_tokens",
        "response.usage.prompt_tokens_details.cached_tokens",
        "gen_ai.usage.cache_read.input_tokens",
    ),
    "session": (
        "session id",
        "session_id",
        "sessionid",
        "session",
        "conversation_id",
        "conversationid",
        "chat_id",
        "gen_ai.conversation.id",
        "session.id",
        "thread_id",
        "threadid",
        "trace_id",
        "traceid",
    ),
    "parent": (
        "parent_session",
        "parent_chat_id",
    ),  # the session that a helper's belongs to, the chat gone on with
    "span": ("span_id", "spanid", "id"),
    "parent_span": (
        "parent_span_id",
        "parentspanid",
        "parentobservationid",
        "parent_observation_id",
    ),
    "client": (
        "client_id",
        "client",
        "tenant",
        "api_key",
        "end_user",
        "user_id",
        "user",
        "service.name",
    ),
    "end": ("endtime", "end_time", "endtimeunixnano", "ended_at", "completed_at", "finished_at"),
    "duration": (
        "elapsed time",
        "api_time",
        "api_time_s",
        "duration_s",
        "duration_ms",
        "latency_s",
        "latency_ms",
        "latency",
    ),
    "pause": (
        "delay",
        "delay_ms",
        "delay_s",
        "think_time",
        "think_time_s",
        "think_time_ms",
        "think_ms",
    ),
    "messages": (
        "messages",
        "body.messages",
        "request.messages",
        "request.body.messages",
        "input.messages",
        "text_input",
        "prompt",
        "body.prompt",
        "body.input",
        "input",
        "text",
    ),
    "answer": (
        "answer",
        "output",
        "output.content",
        "response",
        "completion",
        "output_text",
        "response.choices",
        "response.body.choices",
        "choices",
    ),
    "limit": tuple(
        f"{prefix}{name}"
        for prefix in ("", "body.", "request.", "request.body.", "modelparameters.")
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens")
    ),
    "hash_ids": ("hash_ids",),
    "block_size": ("block_size",),
    "blocks": ("input_blocks", "input_blocks64"),
    "shared_blocks": ("shared_blocks", "blocks_shared_with_prev_turn"),
}
PER_ROW = ("messages", "answer", "limit")  # roles of which each row may have another column
REQUIRED = {
    "time": "the arrival time (as timestamp)",
    "input": "the input tokens (as input_tokens)",
    "output": "the output tokens (as output_tokens)",
}
_FORMATS = {
    "contexttokens": "Azure",
    "request tokens": "BurstGPT",
    "gen_ai.usage.input_tokens": "OpenTelemetry",
    "gen_ai.usage.prompt_tokens": "OpenTelemetry",
    "usage.prompt_tokens": "OpenAI usage",
    "in": "agentic coding",
}
_PLACEHOLDERS = frozenset(
    {"", "nan", "none", "null", "nil", "-", "--", "n/a", "na", "<na>", "undefined", "(null)"}
)
UNITS = {"s": 9, "ms": 6, "us": 3, "ns": 0}  # powers of ten to nanoseconds
_UNIT_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s?(Z|UTC|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)
_PLAIN_SECONDS = re.compile(r"([0-3]?\d{1,9})(?:\.(\d{1,30}))?", re.ASCII)  # up to 3,999,999,999
_WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
_THOUSANDS = re.compile(
    r"[+-]?\d{1,3}(?:(?:[,'_ \u00a0\u2009\u202f]\d{3})+|(?:\.\d{3}){2,}|\.000)", re.ASCII
)
ZONED, LOCAL = "a date and time with a zone", "a date and time without a zone"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TIME_S = 4_000_000_000  # the year 2096: differences fit 64 bits of ns


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and why."""

    reason: str


@dataclass(frozen=True)
class NoCall(BadRow):
    """What of an entry is no call of a model, or is not played, and why; "": only ``fields`` are told, which are not used.

    ``span`` and ``parent_span``: of a span, which may stand between a call and the agent that made it.
    """

    fields: tuple[str, ...] = ()
    span: str | None = None
    parent_span: str | None = None


NO_CALL = "entries are no calls of a model (spans, steps of an agent): they are not played"


@dataclass(frozen=True)
class Columns:
    """The columns of a trace by what they mean (see ROLES), and how its numbers of time are written."""

    by_role: Mapping[str, str]
    format: str
    unit: str | None  # of numbers in the time column; None: by their size
    unit_told: bool = False  # by the user or by the column's name, not by the format
    others: Mapping[str, Sequence[str]] = field(
        default_factory=dict
    )  # by role, what could have served as well

    def __getitem__(self, role: str) -> str:
        return self.by_role[role]

    def name(self, role: str) -> str:
        """The column of a role; "" where the file has none."""
        return self.by_role.get(role, "")

    def held(self, record: Mapping[str, Any], role: str) -> str:
        """The column of a role of which rows may have different ones (see PER_ROW), the first with a value."""
        names = (self.name(role), *self.others.get(role, ()))
        return next((name for name in names if has(record, name)), "")


def find_columns(
    names: Sequence[str],
    where: str,
    given: Mapping[str, str] | None = None,
    unit: str | None = None,
    timed: bool = True,
) -> Columns:
    """Recognise the columns, whatever their case; ``given`` names some by role. Raises WorkloadError.

    Unless ``timed``, the time may be missing. The message names all that is missing and what there is.
    """
    by_name = {name.strip().lower(): name for name in names}
    found: dict[str, str] = {}
    others: dict[str, Sequence[str]] = {}
    have = ", ".join(repr(name[:40]) for name in names[:12])
    for role, known in ROLES.items():
        wanted = (given or {}).get(role)
        hits = (wanted.strip().lower(),) if wanted is not None else known
        hit = next((name for name in hits if name in by_name), None)
        if hit is None:
            if wanted is not None:
                raise WorkloadError(
                    f"{where}: there is no column {wanted!r} for {role}; the file has {have}"
                )
            continue
        if sum(name.strip().lower() == hit for name in names) > 1:
            raise WorkloadError(f"{where}: the column {hit} stands there twice: keep one")
        found[role] = hit
        if wanted is None and (
            also := [by_name[name] for name in known if name in by_name and name != hit]
        ):
            others[role] = also
    if "parent_span" not in found:  # an id alone says nothing
        found.pop("span", None)
        others.pop("span", None)
    given_otherwise = {
        "input": {"messages"},
        "output": {"answer", "limit"},
        "time": set() if timed else {"input", "messages"},
    }
    missing = [
        role for role in REQUIRED if role not in found and not given_otherwise[role] & found.keys()
    ]
    if missing:
        raise WorkloadError(f"{where}: {_missing(missing)}; the file has {have}")
    time, input_ = found.get("time", ""), found.get("input", "")
    # Mooncake counts milliseconds; Qwen-Bailian has its length columns, a chat_id, and seconds.
    length = input_ or found.get("output", "").replace(
        "output", "input"
    )  # aiperf: a text has no length
    mooncake = time == "timestamp" and length == "input_length" and "chat_id" not in by_name
    if time == "scheduled_s":
        known_format = "schedule"
    elif "shared_blocks" in found:
        known_format = "agentic coding"
    elif input_ == "prompt_tokens" and time == "starttime":
        known_format = "LiteLLM spend log"
    else:
        known_format = "Mooncake" if mooncake else _FORMATS.get(input_, "generic")
    ending = time.rpartition("_")[2]
    named = "ns" if time == "starttimeunixnano" else ending if ending in UNITS else None
    by_role = {role: by_name[name] for role, name in found.items()}
    told = unit or named
    return Columns(by_role, known_format, told or ("ms" if mooncake else None), bool(told), others)


def parse_columns(texts: Sequence[str]) -> dict[str, str]:
    """{role: name} of texts such as ``input=usage.prompt_tokens``. Raises WorkloadError."""
    found: dict[str, str] = {}
    for text in texts:
        role, equals, name = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise WorkloadError(
                f"--column {text}: write it as role=name, as in input=prompt_tokens"
            )
        if role not in ROLES:
            raise WorkloadError(
                f"--column {text}: role {role!r} is not known{did_you_mean(role, ROLES)}: use {', '.join(ROLES)}"
            )
        if role in found:
            raise WorkloadError(f"--column {role} stands there twice: keep one")
        found[role] = name
    return found


def _missing(roles: Sequence[str]) -> str:
    """What to do about columns that are not recognised."""
    what = " nor with ".join(REQUIRED[role] for role in roles)
    named = " ".join(f"--column {role}=NAME" for role in roles)
    return f"no column with {what}: say which it is ({named})"


def reach(row: Mapping[str, Any], path: str) -> Any:
    """The value at ``path`` of a row, as ``events.0.at`` or ``events.-1.at``; None where there is none.

    A part is the key of an object, in any case, or the place in a list. The row's own names may hold points.
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
    if not (
        isinstance(value, list | tuple)
        and digits.isdecimal()
        and digits.isascii()
        and len(digits) < 9
    ):
        return None
    place = int(part)
    return value[place] if -len(value) <= place < len(value) else None


def has(record: Mapping[str, Any], column: str) -> bool:
    """Whether a row has a value in the column ("": there is none)."""
    return bool(column) and record.get(column) not in (None, "", [], {})


def is_placeholder(value: object) -> bool:
    """Whether an id is none: missing, or what programs write for that (nan, None, null, -)."""
    return value is None or str(value).strip().lower() in _PLACEHOLDERS


def tokens(value: object) -> int:
    """A whole number of tokens from a CSV cell or a JSON value. Raises ValueError that says what it is instead."""
    if type(value) is str and value.isdecimal() and value.isascii() and len(value) < 10:
        return int(value)  # nearly every cell of a large file
    if value is None or value == "":
        raise ValueError("the value is missing")
    text = str(value).strip()
    if type(value) is str and _THOUSANDS.fullmatch(text):
        raise ValueError(
            f"{text[:40]!r} seems to have separators of thousands: write the digits alone"
        )
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number of tokens")
    count = int(text.partition(".")[0])
    if count < 0:
        raise ValueError(f"{count} is a negative number of tokens")
    if count > MAX_TOKENS:
        raise ValueError(f"{count} tokens are more than {MAX_TOKENS}")
    return count


def time_ns(value: object, unit: str | None = None) -> tuple[int, str]:
    """Nanoseconds, and how they are written: a date and time with or without a zone, or a number of which unit.

    ``unit`` (s, ms, us, ns) is that of a number; without it numbers since 1970 tell theirs by their size, and
    small ones are seconds. Digits beyond nanoseconds are cut. Raises ValueError that says what is wrong.
    """
    if value is None or value == "":
        raise ValueError("the value is missing")
    text = str(value).strip()
    stamp = _STAMP.fullmatch(text) if len(text) > 18 else None
    if stamp:
        return _stamp_ns(stamp, text)
    plain = _PLAIN_SECONDS.fullmatch(text) if unit in (None, "s") else None
    if plain:  # as nearly all numbers of a large file
        return int(plain[1]) * 1_000_000_000 + int(
            ((plain[2] or "") + "0" * 9)[:9]
        ), "a number of seconds"
    try:
        number = Decimal(text) if text.isascii() and "_" not in text else Decimal("NaN")
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        raise ValueError(f"{text[:40]!r} is not a time (a number, or YYYY-MM-DD HH:MM:SS.fff)")
    unit = unit or _unit_by_size(number)
    shift, clock = UNITS[unit], f"a number of {_UNIT_WORDS[unit]}"
    if number.adjusted() + shift < 0 or not number:
        return 0, clock
    if number.adjusted() + shift > 19 or abs(number.scaleb(shift)) > _MAX_TIME_S * 1_000_000_000:
        raise ValueError(
            f"{text[:40]!r} is too large for a time in {_UNIT_WORDS[unit]}; see --time-unit"
        )
    return int(number.scaleb(shift)), clock


def span_ns(value: object, column: str) -> int:
    """Nanoseconds of a length of time; its unit is the ending of the column's name, else s (``delay``: ms, as
    aiperf has it). Raises ValueError that says what is wrong."""
    name = column.strip().lower()
    ending = name.rpartition("_")[2]
    unit = ending if ending in UNITS else "ms" if name == "delay" else "s"
    try:
        seconds = Decimal(str(value).strip())
    except InvalidOperation:
        seconds = Decimal("NaN")
    if not seconds.is_finite() or seconds < 0 or seconds.adjusted() + UNITS[unit] > 18:
        raise ValueError(f"{str(value)[:40]!r} is no length of time in {_UNIT_WORDS[unit]}")
    return int(seconds.scaleb(UNITS[unit]))


def _unit_by_size(number: Decimal) -> str:
    digits = number.adjusted()  # 10**digits <= |number|
    for unit, shift in (("ms", 11), ("us", 14), ("ns", 17)):
        if shift <= digits < shift + 3:
            return unit
    return "s"


def _stamp_ns(stamp: re.Match[str], text: str) -> tuple[int, str]:
    day, clock, fraction, zone = stamp.groups()
    try:
        seconds = _seconds(day, clock)
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} is not a time: {error}") from None
    if abs(seconds) > _MAX_TIME_S:
        raise ValueError(f"{text[:40]!r} is not a time of our age")
    ns = seconds * 1_000_000_000 + int(((fraction or "") + "0" * 9)[:9])
    if zone is None:
        return ns, LOCAL
    if zone.upper() in ("Z", "UTC"):
        return ns, ZONED
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"{text[:40]!r} is not a time: the zone {zone} does not exist")
    offset = timedelta(hours=hours, minutes=minutes) // timedelta(seconds=1) * 1_000_000_000
    return (ns + offset if zone[0] == "-" else ns - offset), ZONED


@lru_cache(maxsize=1024)  # requests of one second stand together in most files
def _seconds(day: str, clock: str) -> int:
    since = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC) - _EPOCH
    return since.days * 86_400 + since.seconds
