"""Readers: from the text of an option, or a value of a run file, to a checked value.

A reader takes ``(value, name)``; ``name`` is the option that a message names. Heavy modules are
imported where they are needed, because ``--help`` imports this one.
"""

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ampacity.durations import read_duration

SECONDS_MAX = 30 * 86_400.0
SMALLEST, LARGEST = 1e-12, 1e12  # a rate, factor or price beyond them is a typing error
Reader = Callable[[Any, str], Any]


class ConfigError(ValueError):
    """A setting that cannot be used; one line that names the setting and the fix."""


def option(name: str) -> str:
    """Return the command-line option of the setting ``name``."""
    return "--" + name.replace("_", "-")


def text(value: Any, name: str) -> str:
    if not isinstance(value, str | Path) or not str(value).strip():
        found = "an empty one" if isinstance(value, str) else type(value).__name__
        raise ConfigError(f"{name}: give text, not {found}")
    if not str(value).isprintable():
        raise ConfigError(f"{name}: contains a character that cannot be printed")
    return str(value)


def path(value: Any, name: str) -> Path:
    return Path(text(value, name))


def parse_duration(value: Any, name: str) -> float:
    """Return the seconds of ``500ms``, ``30s``, ``2m``, ``1h`` or ``2d``. Raises ConfigError."""
    if (seconds := read_duration(str(value))) is None:
        raise ConfigError(
            f"{name} {value}: write a duration with its unit and above 0, as 500ms, 30s or 2m"
        )
    if not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"{name} {value}: give more than 0 and at most 30 days")
    return seconds


def listen_at(value: Any, name: str) -> tuple[str, int]:
    """Return (host, port) of ``9464`` or ``0.0.0.0:9464``. Raises ConfigError."""
    host, _, port = str(value).rpartition(":")
    return host.strip("[]") or "127.0.0.1", whole(port, name, at_most=65_535)


def no_key(given: str, name: str) -> None:
    """Raise ConfigError if a text that is written down holds a key by its form."""
    from ampacity.loadgen.send.endpoint import holds_key

    if holds_key(given):
        raise ConfigError(f"{name} holds a key, and is written down: leave the key out")


def otlp_url(value: Any, name: str) -> str:
    """Return where metrics are posted; a URL without a path gets ``/v1/metrics``."""
    from urllib.parse import urlsplit

    url = text(value, name).rstrip("/")
    no_key(url.partition("?")[0], name)
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a port above 65535
        usable = False
    if not usable or "@" in url:
        raise ConfigError(f"{name}: give an http(s) URL without a user name: http://127.0.0.1:4318")
    return url if parts.path else f"{url}/v1/metrics"


def flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {value!r}: write true or false")
    return value


def items(value: Any, name: str = "") -> list[Any]:
    """Return a repeatable setting as a list."""
    return list(value) if isinstance(value, list | tuple) else [value]


def pairs(value: Any, name: str, sign: str = "=") -> list[str]:
    """Return a repeatable setting as texts; a mapping of a run file gives a text for each name."""
    mappings = [item if isinstance(item, dict) else {None: item} for item in items(value)]
    found = [pair for mapping in mappings for pair in mapping.items()]
    if any(isinstance(content, dict | list | type(None)) for _, content in found):
        raise ConfigError(f"{name}: give text for each name")  # unquoted: it may be a secret
    return [str(content) if key is None else f"{key}{sign}{content}" for key, content in found]


def choice(*allowed: str) -> Reader:
    def read(value: Any, name: str) -> str:
        if value not in allowed:
            raise ConfigError(f"{name} {value}: choose one of {', '.join(allowed)}")
        return str(value)

    return read


def positive(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number > 0:
        raise ConfigError(f"{name} {value}: give a number above 0")
    if not SMALLEST <= number <= LARGEST:
        raise ConfigError(f"{name} {value}: give a number from {SMALLEST:g} to {LARGEST:g}")
    return number


def safety_factor(value: Any, name: str) -> float:
    if (factor := positive(value, name)) < 1:
        raise ConfigError(f"{name} {value}: give 1 or more (1.2 keeps 20 % in reserve)")
    return factor


def share(value: Any, name: str) -> float:
    """Return the share of ``5%`` or ``0.05``. Raises ConfigError."""
    number, percent, _ = str(value).strip().partition("%")
    try:
        found = float(number) / (100 if percent else 1)
    except ValueError:
        found = math.nan
    if not 0 <= found < 1:
        raise ConfigError(f"{name} {value}: give a share below 1, as 5% or 0.05")
    return found


def whole(value: Any, name: str, at_least: int = 1, at_most: int = 2**53) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = at_least - 1
    if isinstance(value, bool) or number < at_least:
        raise ConfigError(f"{name} {value}: give a whole number, {at_least} or more")
    if number > at_most:
        raise ConfigError(f"{name} {value}: at most {at_most}")
    return number


def whole_number(at_least: int = 1, at_most: int = 2**53) -> Reader:
    return lambda value, name: whole(value, name, at_least, at_most)


def mebibytes(value: Any, name: str) -> int:
    return whole(value, name) * 2**20


def cores(value: Any, name: str) -> tuple[int, ...]:
    """Return numbers of this machine's cores, from ``2,3`` or ``2-5``. Raises ConfigError."""
    found: set[int] = set()
    for part in filter(None, _split(value)):
        first, dash, last = str(part).partition("-")
        low = whole(first, name, at_least=0)
        high = whole(last, name, at_least=low, at_most=low + 4095) if dash else low
        found.update(range(low, high + 1))
    if found and not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"{name}: this system cannot pin a process to cores")
    if lacking := sorted(found - os.sched_getaffinity(0)) if found else []:
        raise ConfigError(f"{name} {value}: this process may not use core {lacking[0]}")
    return tuple(sorted(found))


def addresses(value: Any, name: str) -> tuple[str, ...]:
    """Return IP addresses, from ``10.0.0.2,10.0.0.3`` or ``127.0.0.2-127.0.0.9``."""
    import ipaddress

    found: dict[Any, None] = {}  # in the order given
    for part in filter(None, _split(value)):
        try:
            ends = [ipaddress.ip_address(end.strip()) for end in str(part).split("-")]
            span = range(int(ends[0]), int(ends[-1]) + 1)
            if len(ends) > 2 or len({end.version for end in ends}) > 1 or not 0 < len(span) < 4096:
                raise ValueError
            if any(e.is_multicast or e.is_unspecified or int(e) == 2**32 - 1 for e in ends):
                raise ValueError  # a socket takes them, and connects from another
        except ValueError:
            raise ConfigError(
                f"{name} {part}: give IP addresses, as 10.0.0.2,10.0.0.3 or 127.0.0.2-127.0.0.9"
            ) from None
        found.update(dict.fromkeys(map(type(ends[0]), span)))
    if not found or len({address.version for address in found}) > 1:
        raise ConfigError(f"{name} {value}: give only IPv4 or only IPv6 addresses")
    return tuple(map(str, found))


def _split(value: Any) -> list[Any]:
    """Return the parts of a list, or of comma-separated text, without surrounding blanks."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [part.strip() if isinstance(part, str) else part for part in parts]


def each(read: Reader) -> Reader:
    """Return a reader of a list, one entry for each stage, in the order of the stages."""
    return lambda value, name: tuple(read(item, name) for item in _split(value))


def quantile_names(value: Any, name: str = "--lengths") -> tuple[str, ...]:
    """Return names such as ``p99``; "mixed", the workload itself, always comes first."""
    names = dict.fromkeys(map(str, _split(value)))
    for part in names:
        is_quantile = re.fullmatch(r"p\d{1,2}(\.\d+)?", part) and float(part[1:]) > 0
        if part != "mixed" and not is_quantile:
            raise ConfigError(
                f"{name} {part or repr(value)}: write quantiles of the workload's lengths, "
                "as p50,p99"
            )
    return tuple(part for part in names if part != "mixed")


def headers(value: Any, name: str) -> tuple[tuple[str, str], ...]:
    found = []
    for item in pairs(value, name, ": "):
        header, colon, content = item.partition(":")
        if not colon:  # the value may be a secret: it is not quoted
            raise ConfigError(f"{name}: there is no colon: write it as 'Name: value'")
        found.append((header.strip(), content.strip()))
    return tuple(found)


def metrics_urls(value: Any, name: str) -> tuple[str, ...]:
    from ampacity.loadgen.send.endpoint import EndpointError, parse_endpoint, shown_url

    urls = tuple(map(str, items(value)))
    for url in urls:
        no_key(url.partition("?")[0], name)
        if "@" in url:
            raise ConfigError(
                f"{name}: the address contains a user name or password: leave them out"
            )
        is_url = re.match("(?i)https?://", url) and url.isprintable()
        try:
            parse_endpoint(shown_url(url) if is_url else "")
        except EndpointError:
            raise ConfigError(
                f"{name} {shown_url(url)!a}: give the whole address, "
                "as in http://127.0.0.1:9400/metrics"
            ) from None
    return urls


def extra_body(value: Any, name: str) -> dict[str, Any]:
    from ampacity.workloads.class_spec import RESERVED_FIELDS, refuse_several_choices

    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_once_each)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a JSON object, as in '{{\"temperature\": 0}}'")
    try:
        json.dumps(value, allow_nan=False).encode()
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{name} cannot be sent as JSON: {error}") from error
    for field in RESERVED_FIELDS:
        if field in value:
            lengths = "the workload" + " (--output-tokens)" * field.startswith("max")
            decides = "--model" if field == "model" else lengths
            raise ConfigError(f"{name} sets {field!r}, which {decides} decides: drop it")
    refuse_several_choices(value, name)
    return value


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]!r} stands there twice")
    return dict(pairs)


def lengths(value: Any, name: str) -> Any:
    from ampacity.workloads.lengths.parse import parse_lengths

    return parse_lengths(value, name)


def columns(value: Any, name: str) -> dict[str, str]:
    """Return {role: column}, from ``role=name`` texts or a mapping of a run file."""
    from ampacity.workloads.traces.columns import parse_columns

    return parse_columns(pairs(value, name))


def locked(value: Any, name: str) -> dict[str, str]:
    """Return facts about the deployment, from ``name=value`` texts or a mapping of a run file."""
    found: dict[str, str] = {}
    for item in pairs(value, name):
        no_key(item, name)
        fact, equals, content = (part.strip() for part in item.partition("="))
        if not equals or not fact or not content or not item.isprintable():
            raise ConfigError(f"{name} {item!a}: write it as name=value, as in quantization=fp8")
        if found.setdefault(fact, content) != content:
            raise ConfigError(f"{name} {fact}: given twice with different values")
    return found
