"""Redact secrets in everything that is written to disk or shown."""

import html
import json
import re
from base64 import b32encode, b64decode, b64encode, urlsafe_b64encode
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import takewhile
from string import ascii_lowercase, ascii_uppercase
from urllib.parse import quote, unquote

from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.send import protocols

SECRET_MIN = 4  # characters; shorter header values are no secrets
TOKEN_MIN = 8  # characters; shorter parts of a value may be ordinary text
_TOKEN = re.compile(  # between separators, with the padding of Base64; no name before a "="
    rf"""[^\s;,:=.|&?"']{{{TOKEN_MIN},}}+(?:={{1,2}}(?![^\s;,:.|&?"'])|(?!=))"""
)
_LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
KNOWN: set[str] = set()  # of this process, for its own tracebacks


@lru_cache
def told_by(value: str) -> frozenset[str]:
    """Return what a key or a header's value gives away: itself, its tokens, what Base64 in it says."""
    found = {value, *re.findall(r"^[\w-]+ (.+)", value)}  # of "Bearer x" also x alone
    for token in _TOKEN.findall(f"{value} {unquote(value)}"):
        text = _decoded(token)
        found |= {t for t in (token, *_TOKEN.findall(text)) if _is_random(t)}
        password = text.partition(":")[2]  # of Basic credentials: a short word may be ordinary text
        found |= {t for t in (text, password) if len(t) >= TOKEN_MIN or not t.isalpha()}
    return frozenset(part for part in found if len(part) >= SECRET_MIN)


def _is_random(token: str) -> bool:
    """Tell a session's id from ordinary text: words, numbers, dates and names of media types."""
    parts = re.findall("[A-Za-z0-9]+", token)
    runs = ((part, max(map(len, _RUN.findall(part)))) for part in parts)
    return sum(len(p) for p, n in runs if n <= len(p) / 2 or len(p) >= 2 * TOKEN_MIN) >= TOKEN_MIN


_RUN = re.compile("[A-Z]?[a-z]+|[A-Z]+|[0-9]+")


def _decoded(token: str) -> str:
    """Return the text that a token is the Base64 of, or an empty one."""
    bare = token.rstrip("=").replace("-", "+").replace("_", "/")
    try:
        text = b64decode(bare + "=" * (-len(bare) % 4), validate=True).decode()
    except ValueError:
        return ""
    return text if text.isprintable() else ""


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
def _pieces(secrets: tuple[str, ...]) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Return what is part of any run of more than half of a secret, with its form, by its beginning."""
    pieces = [(piece, form) for form in _forms(secrets) for _, piece in _cut(form)]
    size, found = min((len(piece) for piece, _ in pieces), default=1), defaultdict(list)
    for piece, form in pieces:
        found[piece[:size]].append((piece, form))
    return size, dict(found)


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
    low, (size, pieces) = _lower(text), _pieces(secrets)
    at = [i for i in range(len(low) - size + 1) if low[i : i + size] in pieces]
    if at:
        near = ((i, *each) for i in at for each in pieces[low[i : i + size]])
        found = dict.fromkeys(form for i, piece, form in near if low.startswith(piece, i))
        forms = sorted(found, key=len, reverse=True)
        for least in (len, _revealing):  # whole ones first: forms have parts in common
            for form in forms:
                text = _without_runs(text, form, least(form))
    if _lower(text.removesuffix("…")[-SECRET_MIN:]) in _ends(secrets):
        for form in _forms(secrets):
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
