"""Rate-limit headers of the known families, read once per response head.

x-ratelimit-limit-requests (OpenAI, Azure, Groq, Together, Fireworks, LiteLLM), X-RateLimit-Limit
(OpenRouter, API managers), anthropic-ratelimit-requests-limit, and the IETF drafts' RateLimit-Limit
and RateLimit with RateLimit-Policy.
"""

import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime

from ampacity.loadgen.rundir.records import RequestRecord

_WHAT = rb"(limit|remaining|reset)"
_NAME = re.compile(
    rb"(?:x-|anthropic-|llm_provider-)*ratelimit"
    rb"(?:-%b(?:-(requests|tokens))?|-(requests|tokens)-%b)" % (_WHAT, _WHAT)
)
_COLUMNS = {b"limit": "", b"remaining": "_left", b"reset": "_reset_s"}
_PARTS = re.compile(r"\b(q|r|t|w|limit|remaining|reset)=(\d+)")  # of RateLimit(-Policy)
_PART_COLUMNS = {"w": "quota_window_s"}
_PART_COLUMNS |= dict.fromkeys(("q", "limit"), "quota_requests")
_PART_COLUMNS |= dict.fromkeys(("r", "remaining"), "quota_requests_left")
_PART_COLUMNS |= dict.fromkeys(("t", "reset"), "quota_requests_reset_s")
_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?)")
_UNITS_S = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|[dhms])")
CLOCKS_AGREE_S = 5.0  # a date has whole seconds, and an answer takes a while
EPOCH_S, EPOCH_MS, FURTHEST = 1e8, 1e11, 1e14  # numbers above these are times, not spans


def write_limits(
    headers: Iterable[tuple[bytes, bytes]], record: RequestRecord, date: bytes = b""
) -> None:
    """Write what (lower-case name, value) pairs state about limits into a record.

    That is ``quota_*`` and ``retry_after_s``. The server's own headers win over those that a
    gateway passes on. ``date``: its Date header, from which its other dates count.
    """
    found: dict[str, float | None] = {}
    now_s = _now_s(date.decode("latin-1"))
    for name, value in sorted(headers, key=lambda h: not h[0].startswith(b"llm_provider-")):
        text = value.decode("latin-1")
        if name.startswith(b"retry-after"):
            in_ms, seconds = name.endswith(b"-ms"), _span_s(text, now_s)
            if seconds is not None and (in_ms or record.retry_after_s is None):
                record.retry_after_s = seconds / 1e3 if in_ms else seconds  # ms: more exact
        elif name in (b"ratelimit", b"ratelimit-policy"):
            if name == b"ratelimit-policy" and (limit := _number(text)):  # 100;w=60
                found["quota_requests"] = limit
            for part, number in reversed(_PARTS.findall(text)):  # of several policies the first
                found[_PART_COLUMNS[part]] = float(number)
        elif match := _NAME.fullmatch(name):
            what, of = match[1] or match[4], (match[2] or match[3] or b"requests").decode()
            number = _span_s(text, now_s) if what == b"reset" else _number(text)
            found[f"quota_{of}{_COLUMNS[what]}"] = number
    for column, number in found.items():
        setattr(record, column, number)


def _number(text: str) -> float | None:
    found = _NUMBER.match(text)
    return float(found[1]) if found else None


def _now_s(date: str) -> float:
    """Return the Unix time by the server's clock, by ours where the two agree."""
    now_s = time.time()
    server_s = _time_s(date)
    return now_s if server_s is None or abs(server_s - now_s) < CLOCKS_AGREE_S else server_s


def _time_s(text: str) -> float | None:
    """Parse a date as ISO 8601 or HTTP write it."""
    from email.utils import parsedate_to_datetime  # few answers need it

    for read in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            due = read(text.strip())
            return due.replace(tzinfo=due.tzinfo or UTC).timestamp()
        except (ValueError, OverflowError):
            continue
    return None


def _span_s(text: str, now_s: float) -> float | None:
    """Return the seconds that a time is away: ``1m2.5s``, ``20ms``, ``3``, a time, or a date."""
    parts = _DURATION.findall(text)
    if parts and "".join(map("".join, parts)) == text.strip():
        return sum(float(n) * _UNITS_S[unit] for n, unit in parts)
    try:
        number = float(text)
    except ValueError:
        at_s = _time_s(text)
        return None if at_s is None else max(at_s - now_s, 0.0)
    if not 0 <= number < FURTHEST:
        return None
    at_s = number / 1e3 if number > EPOCH_MS else number
    return max(at_s - now_s, 0.0) if number > EPOCH_S else number
