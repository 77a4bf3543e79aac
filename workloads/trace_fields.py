"""One field of a trace: which column it is, and what its text means. Exact: times are integer nanoseconds."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation

from workloads.errors import WorkloadError
from workloads.lengths import MAX_TOKENS

_TIME_NAMES = ("timestamp", "timestamp_s", "arrival_s", "arrived_at", "timestamp_ms")
_INPUT_NAMES = (
    "contexttokens", "input_length", "request tokens", "input_tokens", "prompt_tokens", "num_prefill_tokens",
)  # fmt: skip
_OUTPUT_NAMES = (
    "generatedtokens", "output_length", "response tokens", "output_tokens", "completion_tokens", "num_decode_tokens",
)  # fmt: skip
_FORMATS = {"contexttokens": "Azure", "input_length": "Mooncake", "request tokens": "BurstGPT"}

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d+))?\s?(Z|UTC|[+-]\d\d:?\d\d)?", re.ASCII | re.IGNORECASE
)
_WHOLE = re.compile(r"[+-]?\d{1,18}(?:\.0*)?", re.ASCII)
NUMBER, ZONED, LOCAL = "a number", "a stamp with a zone", "a stamp without a zone"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MAX_TIME_S = (
    4_000_000_000  # the year 2096: larger numbers are milliseconds, and differences fit 64 bits of ns
)


@dataclass(frozen=True)
class Columns:
    """The three columns of a trace by their names in the file, and how the times are written."""

    time: str
    input: str
    output: str
    milliseconds: bool
    format: str


def find_columns(names: Sequence[str], where: str) -> Columns:
    """Recognise the columns, whatever their case. Raises WorkloadError that lists what would be recognised."""
    by_name = {name.strip().lower(): name for name in names}
    found: list[str] = []
    for what, known in (
        ("arrival time", _TIME_NAMES),
        ("input tokens", _INPUT_NAMES),
        ("output tokens", _OUTPUT_NAMES),
    ):
        hit = next((name for name in known if name in by_name), None)
        if hit is None:
            have = ", ".join(repr(name[:40]) for name in names[:12])
            raise WorkloadError(
                f"{where}: no column with the {what}; known names: {', '.join(known)}; the file has {have}"
            )
        if sum(name.strip().lower() == hit for name in names) > 1:
            raise WorkloadError(f"{where}: the column {hit} stands there twice: keep one")
        found.append(hit)
    time, input_, output = found
    # Mooncake counts milliseconds; Qwen-Bailian has its length columns, a chat_id, and seconds.
    mooncake = time == "timestamp" and input_ == "input_length" and "chat_id" not in by_name
    generic = input_ == "input_length" and not mooncake
    return Columns(
        by_name[time],
        by_name[input_],
        by_name[output],
        milliseconds=mooncake or time == "timestamp_ms",
        format="generic" if generic else _FORMATS.get(input_, "generic"),
    )


def tokens(value: object) -> int:
    """A whole number of tokens from a CSV cell or a JSON value. Raises ValueError that says what it is instead."""
    if value is None or value == "":
        raise ValueError("the value is missing")
    text = str(value).strip()
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a whole number of tokens")
    count = int(text.partition(".")[0])
    if count < 0:
        raise ValueError(f"{count} is a negative number of tokens")
    if count > MAX_TOKENS:
        raise ValueError(f"{count} tokens are more than {MAX_TOKENS}")
    return count


def time_ns(value: object, *, milliseconds: bool) -> tuple[int, str]:
    """Nanoseconds, and how it is written: a number, or a stamp with or without a zone.

    Digits beyond nanoseconds are cut. Raises ValueError that says what is wrong.
    """
    if value is None or value == "":
        raise ValueError("the value is missing")
    text = str(value).strip()
    stamp = _STAMP.fullmatch(text)
    if stamp:
        return _stamp_ns(stamp, text)
    try:
        number = Decimal(text) if text.isascii() and "_" not in text else Decimal("NaN")
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        raise ValueError(f"{text[:40]!r} is not a time (a number, or YYYY-MM-DD HH:MM:SS.fff)")
    shift = 6 if milliseconds else 9  # to nanoseconds; look at the exponent before writing the number out
    if number.adjusted() + shift < 0 or not number:
        return 0, NUMBER
    if number.adjusted() + shift > 19 or abs(number.scaleb(shift)) > _MAX_TIME_S * 1_000_000_000:
        hint = "" if milliseconds else "; if these are milliseconds, name the column timestamp_ms"
        raise ValueError(f"{text[:40]!r} is too large for a time{hint}")
    return int(number.scaleb(shift)), NUMBER


def _stamp_ns(stamp: re.Match[str], text: str) -> tuple[int, str]:
    day, clock, fraction, zone = stamp.groups()
    try:
        moment = datetime.fromisoformat(f"{day}T{clock}").replace(tzinfo=UTC)
    except ValueError as error:
        raise ValueError(f"{text[:40]!r} is not a time: {error}") from None
    since = moment - _EPOCH
    if abs(since.total_seconds()) > _MAX_TIME_S:
        raise ValueError(f"{text[:40]!r} is not a time of our age")
    ns = (since.days * 86_400 + since.seconds) * 1_000_000_000 + int(((fraction or "") + "0" * 9)[:9])
    if zone is None:
        return ns, LOCAL
    if zone.upper() in ("Z", "UTC"):
        return ns, ZONED
    hours, minutes = int(zone[1:3]), int(zone[-2:])
    if hours > 23 or minutes > 59:
        raise ValueError(f"{text[:40]!r} is not a time: the zone {zone} does not exist")
    offset = timedelta(hours=hours, minutes=minutes) // timedelta(seconds=1) * 1_000_000_000
    return (ns + offset if zone[0] == "-" else ns - offset), ZONED
