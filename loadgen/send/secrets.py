"""Redact secrets in everything that is written to disk or shown."""

import html
import json
import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from functools import lru_cache
from itertools import takewhile
from urllib.parse import quote

from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send import protocols

SECRET_MIN = 4  # characters; shorter header values are no secrets
KNOWN: set[str] = set()  # of this process, for its own tracebacks


@lru_cache
def _forms(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the secrets as text may hold them, in any usual encoding; longest first."""
    found: set[str] = set()
    for s in secrets:
        escaped = json.dumps(s)[1:-1]
        found |= {s, escaped, json.dumps(escaped)[1:-1], json.dumps(s, ensure_ascii=False)[1:-1]}
        found |= {quote(s, safe=""), quote(s), html.escape(s), s.encode().hex()}
        for encode in (b64encode, urlsafe_b64encode):
            found |= {encode(text.encode()).decode() for text in (s, f"Bearer {s}")}
            found |= {_within(encode, s.encode(), before) for before in range(3)}
    found |= {protocols.printable(form, len(form)) for form in found}
    return tuple(sorted((s for s in found if len(s) >= SECRET_MIN), key=len, reverse=True))


def _within(encode: Callable[[bytes], bytes], data: bytes, before: int) -> str:
    """Return the characters of Base64 that stand for ``data`` alone, behind ``before`` bytes."""
    coded = encode(b"\0" * before + data).decode()
    return coded[-(-8 * before // 6) : 8 * (before + len(data)) // 6]


@lru_cache
def _beginnings(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds more than half of any secret: a fast test for every request."""
    beginnings = (re.escape(form[: _revealing(form)]) for form in _forms(secrets))
    return re.compile("|".join(beginnings) or "(?!)", re.IGNORECASE)


def _revealing(secret: str) -> int:
    """Return how many leading characters give a secret away."""
    return max(SECRET_MIN, len(secret) // 2 + 1)


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Redact secrets in any case, more than half of one, and the beginning of one at the end."""
    forms = _forms(secrets)
    if _beginnings(secrets).search(text):
        for form in forms:
            text = re.sub(re.escape(form), "***", text, flags=re.IGNORECASE)
        for form in forms:
            text = _without_beginnings(text, form.lower())
    for form in forms:
        text = _without_end(text, form.lower())
    return text


def redact_record(record: RequestRecord, secrets: tuple[str, ...]) -> None:
    """Redact secrets in what a server may have put into a record."""
    for name in ("error", "finish_reason", "server_request_id", "answered_by") if secrets else ():
        text = getattr(record, name)
        if text is not None:
            setattr(record, name, redact(text, secrets))


def _without_beginnings(text: str, secret: str) -> str:
    most = _revealing(secret)
    beginning, at = re.compile(re.escape(secret[:most]), re.IGNORECASE), 0
    while found := beginning.search(text, at):
        rest = zip(text[found.end() :].lower(), secret[most:], strict=False)
        more = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))
        text = f"{text[: found.start()]}***{text[found.end() + more :]}"
        at = found.start() + 3
    return text


def _without_end(text: str, secret: str) -> str:
    body = text.removesuffix("…")
    if body[-SECRET_MIN:].lower() not in secret:
        return text
    for length in range(min(_revealing(secret), len(body)), SECRET_MIN - 1, -1):
        if body[-length:].lower() == secret[:length]:
            return f"{body[:-length]}***"
    return text
