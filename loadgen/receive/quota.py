"""Rate-limit headers of the known families, read once per response head.

x-ratelimit-limit-requests (OpenAI, Azure, Groq, Together, Fireworks, LiteLLM), X-RateLimit-Limit
(OpenRouter, API managers), anthropic-ratelimit-requests-limit, and the IETF drafts' RateLimit-Limit
and RateLimit with RateLimit-Policy.
"""

from __future__ import annotations

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
EPOCH_S, EPOCH_MS = 1e8, 1e11  # numbers above these are times, not spans


def write_limits(headers: Iterable[tuple[bytes, bytes]], record: RequestRecord) -> None:
    """Write what (lower-case name, value) pairs state about limits into ``quota_*`` of a record.

    The server's own headers win over those that a gateway passes on.
    """
    found: dict[str, float | None] = {}
    for name, value in sorted(headers, key=lambda h: not h[0].startswith(b"llm_provider-")):
        text = value.decode("latin-1")
        if name in (b"ratelimit", b"ratelimit-policy"):
            if name == b"ratelimit-policy" and (limit := _number(text)):  # 100;w=60
                found["quota_requests"] = limit
            for part, number in reversed(_PARTS.findall(text)):  # of several policies the first
                found[_PART_COLUMNS[part]] = float(number)
        elif match := _NAME.fullmatch(name):
            what, of = match[1] or match[4], (match[2] or match[3] or b"requests").decode()
            number_of = _reset_s if what == b"reset" else _number
            found[f"quota_{of}{_COLUMNS[what]}"] = number_of(text)
    for column, number in found.items():
        setattr(record, column, number)


def _number(text: str) -> float | None:
    found = _NUMBER.match(text)
    return float(found[1]) if found else None


def _reset_s(text: str) -> float | None:
    """Return the seconds that a reset is away: ``1m2.5s``, ``20ms``, ``3``, a time, or a date."""
    now_s, parts = time.time(), _DURATION.findall(text)
    if parts and "".join(map("".join, parts)) == text.strip():
        return sum(float(n) * _UNITS_S[unit] for n, unit in parts)
    try:
        number = float(text)
        at_s = number / 1e3 if number > EPOCH_MS else number
        return max(at_s - now_s, 0.0) if number > EPOCH_S else number
    except ValueError:
        pass
    try:
        due = datetime.fromisoformat(text.strip())
        return max(due.replace(tzinfo=due.tzinfo or UTC).timestamp() - now_s, 0.0)
    except ValueError:
        return None
