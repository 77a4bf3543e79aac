"""Redact secrets in everything that is written to disk or shown."""

import html
import json
import re
from base64 import b32encode, b64encode, urlsafe_b64encode
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile
from string import ascii_lowercase, ascii_uppercase
from urllib.parse import quote

from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send import protocols

SECRET_MIN = 4  # characters; shorter header values are no secrets
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
KNOWN: set[str] = set()  # of this process, for its own tracebacks


@lru_cache
def _forms(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Return the secrets as text may hold them, in any usual encoding, in lower case; longest first."""
    found: set[str] = set()
    for s in secrets:
        escaped, data = json.dumps(s)[1:-1], s.encode()
        found |= {s, escaped, json.dumps(escaped)[1:-1], json.dumps(s, ensure_ascii=False)[1:-1]}
        found |= {quote(s, safe=""), quote(s), quote(quote(s, safe=""), safe=""), html.escape(s)}
        found |= {"".join(f"&#{ord(c)};" for c in s), "".join(f"&#x{ord(c):x};" for c in s)}
        found |= {"".join(f"%{byte:02x}" for byte in data), " ".join(s), b32encode(data).decode()}
        found |= {data.hex(gap) if gap else data.hex() for gap in ("", ":", " ")}
        found.add(b64encode(b64encode(data)).decode())
        for encode in (b64encode, urlsafe_b64encode):
            found |= {encode(text.encode()).decode() for text in (s, f"Bearer {s}")}
            found |= {_within(encode, data, before) for before in range(3)}
    found |= {protocols.printable(form, len(form)) for form in found}
    kept = {_lower(form) for form in found if len(form) >= SECRET_MIN}
    return tuple(sorted(kept, key=len, reverse=True))


def _within(encode: Callable[[bytes], bytes], data: bytes, before: int) -> str:
    """Return the characters of Base64 that stand for ``data`` alone, behind ``before`` bytes."""
    coded = encode(b"\0" * before + data).decode()
    return coded[-(-8 * before // 6) : 8 * (before + len(data)) // 6]


def _lower(text: str) -> str:
    return text.translate(_LOWER)  # lower() may change the length


@lru_cache
def _pieces(secrets: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that finds a part of any run of more than half of a secret."""
    pieces = {piece for form in _forms(secrets) for _, piece in _cut(form)}
    return re.compile("|".join(map(re.escape, sorted(pieces))) or "(?!)")


@lru_cache
def _ends(secrets: tuple[str, ...]) -> frozenset[str]:
    """Return the last characters of texts that may end with the beginning of a secret."""
    forms, n = _forms(secrets), SECRET_MIN
    return frozenset(form[i : i + n] for form in forms for i in range(len(form) - n + 1))


@lru_cache(10_000)
def _cut(form: str) -> tuple[tuple[int, str], ...]:
    """Return pieces of half of what gives a secret away, with their places."""
    size = (_revealing(form) + 1) // 2
    return tuple((at, form[at : at + size]) for at in range(0, len(form) - size + 1, size))


def _revealing(secret: str) -> int:
    """Return how many characters in a row give a secret away."""
    return max(SECRET_MIN, len(secret) // 2 + 1)


def redact(text: str, secrets: tuple[str, ...]) -> str:
    """Redact secrets in any case, more than half of one, and the beginning of one at the end."""
    forms, low = _forms(secrets), _lower(text)
    if _pieces(secrets).search(low):
        for least in (len, _revealing):  # whole ones first: forms have parts in common
            for form in forms:
                text = _without_runs(text, form, least(form))
    if _lower(text.removesuffix("…")[-SECRET_MIN:]) in _ends(secrets):
        for form in forms:
            text = _without_end(text, form)
    return text


def redact_record(record: RequestRecord, secrets: tuple[str, ...]) -> None:
    """Redact secrets in what a server may have put into a record."""
    for name in ("error", "finish_reason", "server_request_id", "answered_by") if secrets else ():
        text = getattr(record, name)
        if text is not None:
            setattr(record, name, redact(text, secrets))


def _without_runs(text: str, secret: str, least: int) -> str:
    """Replace each run of at least this many characters of a secret."""
    low, runs = _lower(text), list[tuple[int, int]]()
    for at, piece in _cut(secret):
        begin = low.find(piece)
        while begin >= 0:
            ahead = _alike(reversed(low[:begin]), reversed(secret[:at]))
            end = begin + _alike(low[begin:], secret[at:])
            if end - begin + ahead >= least:
                runs.append((begin - ahead, end))
            begin = low.find(piece, begin + 1)
    kept, until = list[str](), 0
    for begin, end in sorted(runs):
        if begin >= until:
            kept += [text[until:begin], "***"]
        until = max(until, end)
    return "".join([*kept, text[until:]])


def _alike(one: Iterable[str], other: Iterable[str]) -> int:
    """Return how many leading characters of two texts are equal."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _without_end(text: str, secret: str) -> str:
    body = text.removesuffix("…")
    if _lower(body[-SECRET_MIN:]) not in secret:
        return text
    for length in range(min(_revealing(secret), len(body)), SECRET_MIN - 1, -1):
        if _lower(body[-length:]) == secret[:length]:
            return f"{body[:-length]}***"
    return text
