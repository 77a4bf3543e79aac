"""Parse one cell of a trace: ids, counts of tokens, and times as whole nanoseconds."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from ampacity.workloads.lengths.parse import MAX_TOKENS

# how programs write that there is no value, and no id, without signs such as <> () / \ #
_NO_VALUE = frozenset({"nan", "none", "null", "nil", "na", "undefined"})
_NO_ID = frozenset({"", "unknown", "false", "true"})
_SIGNS = re.compile(r"[\W_]+")
_LEAST_ZEROS = 16  # an id of as many zeros and nothing else is that of an invalid span, or trace
UNITS = {"s": 9, "ms": 6, "us": 3, "ns": 0}  # powers of ten to nanoseconds
UNIT_WORDS = {"s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}
_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s?(Z|UTC|[+-]\d\d:?\d\d)?",
    re.ASCII | re.IGNORECASE,
)
_PLAIN_SECONDS = re.compile(r"([0-3]?\d{1,9})(?:\.(\d{1,30}))?", re.ASCII)  # up to 3,999,999,999
_WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
_POINT_ZERO = re.compile(r"(-?\d+)\.0+", re.ASCII)  # as pandas writes ids once one is missing
_THOUSANDS = re.compile(
    r"[+-]?\d{1,3}(?:(?:[,'_ \u00a0\u2009\u202f]\d{3})+|(?:\.\d{3}){2,}|\.000)", re.ASCII
)
ZONED, LOCAL = "a date and time with a zone", "a date and time without a zone"
SECONDS, MILLISECONDS = "a number of seconds", "a number of milliseconds"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NS = 1_000_000_000
_MAX_TIME_S = 4_000_000_000  # the year 2096: differences fit 64 bits of ns
_IN_SECONDS = ("elapsed time", "api_time")  # BurstGPT's, kv-cache-tester's
MISSING = "the value is missing"
UNKNOWN = -(1 << 63)  # a time in ns that the file does not have


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be read, and the reason."""

    reason: str


@dataclass(frozen=True)
class NoCall(BadRow):
    """An entry that is not replayed, and the reason; with reason "" only its unused ``fields``.

    ``span`` and ``parent_span`` keep the span tree complete between a model call and its agent.
    """

    fields: tuple[str, ...] = ()
    span: str | None = None
    parent_span: str | None = None


NO_CALL = "entries are no calls of a model (spans, steps of an agent): they are not played"
NO_TEXT = "entries are calls that write no text (embeddings and the like): they are not played"
_NO_TEXT = re.compile(
    r".*embeddings?|(?:.*/|a)?(?:rerank|moderations?|image_\w+|images/\w+|speech|transcriptions?)"
)


def has(record: Mapping[str, Any], column: str) -> bool:
    """Return whether the row has a value in the column ("": no such column)."""
    return bool(column) and not is_missing(record.get(column))


def writes_no_text(call: object) -> bool:
    """Return whether a kind of call, or the path of one, is that of embeddings and the like."""
    return _NO_TEXT.fullmatch(str(call).lower().partition("?")[0].strip(" /")) is not None


class CellError(ValueError):
    """A value that cannot be used, and its column."""

    def __init__(self, column: str, reason: object) -> None:
        super().__init__(str(reason))
        self.column = column


def cell(
    record: Mapping[str, Any], column: str, read: Callable[[Any], Any], missing: Any = None
) -> Any:
    """Return ``read(value)`` of a row's value, ``missing`` without one. Raises CellError."""
    if not has(record, column):
        return missing
    try:
        return read(record[column])
    except ValueError as error:
        raise CellError(column, error) from None


def is_missing(value: object) -> bool:
    """Return whether a cell has no value: empty, NaN, or a word such as None, null, N/A or "-"."""
    if not isinstance(value, str):
        return value is None or value != value or value in ([], {})
    if value[:1].isdigit():  # fast path
        return False
    text = value.strip()
    return len(text) < 16 and (
        not text.strip("-") or text == r"\N" or _SIGNS.sub("", text).lower() in _NO_VALUE
    )


def is_placeholder(value: object) -> bool:
    """Return whether an id is missing or is none: "-1", signs alone, unknown, a zero UUID."""
    if isinstance(value, bool) or is_missing(value) or str(value).strip() == "-1":
        return True
    core = _SIGNS.sub("", str(value)).lower()
    return core in _NO_ID or (len(core) >= _LEAST_ZEROS and not core.strip("0"))


def id_text(value: object) -> str:
    """Return the text of an id, without spaces; a whole number written as 5.0 is that number."""
    text = str(value).strip()
    whole = _POINT_ZERO.fullmatch(text)
    return whole[1] if whole else text


def tokens(value: object) -> int:
    """Parse a whole number of tokens from a CSV cell or a JSON value. Raises ValueError."""
    if type(value) is str and value.isdecimal() and value.isascii() and len(value) < 10:
        return int(value)  # fast path: nearly every cell of a large file
    if value is None or value == "":
        raise ValueError(MISSING)
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
    """Parse a time as (nanoseconds, its notation: a date with or without zone, or number and unit).

    ``unit`` (s, ms, us, ns) is that of a number. Without it the size of a Unix time gives the unit,
    and small numbers are seconds. Digits beyond nanoseconds are truncated. Raises ValueError.
    """
    if value is None or value == "":
        raise ValueError(MISSING)
    text = str(value).strip()
    stamp = _STAMP.fullmatch(text) if len(text) > 18 else None
    if stamp:
        return _stamp_ns(stamp, text)
    plain = _PLAIN_SECONDS.fullmatch(text) if unit in (None, "s") else None
    if plain:  # fast path: nearly every number of a large file
        return int(plain[1]) * _NS + _fraction_ns(plain[2]), SECONDS
    number = _decimal(text) if text.isascii() and "_" not in text else Decimal("NaN")
    if not number.is_finite():
        raise ValueError(
            f"{text[:40]!r} is not a time (a number with a decimal point, "
            "or YYYY-MM-DD HH:MM:SS.fff)"
        )
    unit = unit or _unit_by_size(number)
    shift, clock = UNITS[unit], f"a number of {UNIT_WORDS[unit]}"
    if number.adjusted() + shift < 0 or not number:
        return 0, clock
    if number.adjusted() + shift > 19 or abs(number.scaleb(shift)) > _MAX_TIME_S * _NS:
        raise ValueError(
            f"{text[:40]!r} is too large for a time in {UNIT_WORDS[unit]}; see --time-unit"
        )
    return int(number.scaleb(shift)), clock


def span_unit(column: str) -> tuple[str, bool]:
    """Return (the unit of a column of durations, whether its name or its format gives it).

    Else it is s (``delay``: ms, as aiperf defines it).
    """
    name = column.strip().lower()
    ending = name.rpartition("_")[2]
    if ending in UNITS:
        return ending, True
    return ("ms", False) if name == "delay" else ("s", name in _IN_SECONDS)


def span_ns(value: object, column: str) -> int:
    """Parse a duration as nanoseconds, in the unit of ``span_unit``. Raises ValueError."""
    unit, _ = span_unit(column)
    duration = _decimal(str(value).strip())
    if not duration.is_finite() or duration < 0 or duration.adjusted() + UNITS[unit] > 18:
        raise ValueError(f"{str(value)[:40]!r} is no length of time in {UNIT_WORDS[unit]}")
    return int(duration.scaleb(UNITS[unit]))


def _decimal(text: str) -> Decimal:
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal("NaN")


def _fraction_ns(digits: str | None) -> int:
    return int(((digits or "") + "0" * 9)[:9])


def _unit_by_size(number: Decimal) -> str:
    digits = number.adjusted()  # 10**digits <= |number|
    for unit, shift in (("ms", 11), ("us", 14), ("ns", 17)):
        if shift <= digits < shift + 3:
            return unit
    return "s"


def _stamp_ns(stamp: re.Match[str], text: str) -> tuple[int, str]:
    day, clock, fraction, zone = stamp.groups()
    try:
        seconds = _unix_seconds(day, clock)
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} is not a time: {error}") from None
    if abs(seconds) > _MAX_TIME_S:
        raise ValueError(f"{text[:40]!r} is not a time of our age")
    ns = seconds * _NS + _fraction_ns(fraction)
    if zone is None:
        return ns, LOCAL
    if zone.upper() in ("Z", "UTC"):
        return ns, ZONED
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"{text[:40]!r} is not a time: the zone {zone} does not exist")
    offset = (hours * 3600 + minutes * 60) * _NS
    return (ns + offset if zone[0] == "-" else ns - offset), ZONED


@lru_cache(maxsize=1024)  # rows of the same second are adjacent in most files
def _unix_seconds(day: str, clock: str) -> int:
    since = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC) - _EPOCH
    return since.days * 86_400 + since.seconds
