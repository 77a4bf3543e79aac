"""How the value of a setting is read, from the text of a flag or from a run file. ``name`` is what a message calls it."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ampacity.analysis.slo import duration_text as in_seconds
from ampacity.loadgen.send.endpoint import EndpointError, parse_endpoint, shown_url
from ampacity.workloads.class_spec import refuse_several_choices

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
SECONDS_MAX = 30 * _UNITS_S["d"]
LARGEST = 1e12  # of a rate, a factor, a price: more is a slip of the finger
RESERVED_BODY_FIELDS = ("messages", "prompt", "stream")
T = TypeVar("T")


class ConfigError(ValueError):
    """A setting that cannot be used; one line that names the setting and the mend."""


def text(value: Any, name: str) -> None:
    """Raises ConfigError unless ``value`` is text, or a path, that can be written down."""
    flag = f"--{name.replace('_', '-')}" if name != "url" else "url"
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"{flag}: give text, not {type(value).__name__}")
    if not str(value).isprintable():
        raise ConfigError(f"{flag}: it holds a character that cannot be printed")


def parse_duration(text: str | float, name: str) -> float:
    """Seconds of ``500ms``, ``30s``, ``2m``, ``1h``, ``2d``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m|min|h|d)\s*", str(text))
    if not match:
        raise ConfigError(
            f"{name} {text}: write a duration with its unit and above 0, as 500ms, 30s or 2m"
        )
    seconds = float(match[1]) * _UNITS_S[match[2]]
    if not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"{name} {text}: give more than 0 and at most 30 days")
    return seconds


def duration_text(seconds: float) -> str:
    """Exactly ``seconds``, as ``parse_duration`` reads it: ``110s``, ``2m``, ``1.5h``, ``500ms``."""
    for unit, parts in (("d", 10), ("h", 10), ("m", 1)):
        number = parts * seconds / _UNITS_S[unit]
        if seconds > 1.5 * _UNITS_S[unit] and abs(number - round(number)) < 1e-9 * number:
            return f"{round(number) / parts:g}{unit}"
    return in_seconds(seconds)


def rounded_up(seconds: float) -> float:
    """An estimate in seconds as it is recommended: whole s below 1.5 min, whole min below 1.5 h, then 0.1 h or d."""
    unit = next((unit for unit in "dhm" if seconds > 1.5 * _UNITS_S[unit]), "s")
    step_s = _UNITS_S[unit] / (10 if unit in "dh" else 1)
    return math.ceil(round(seconds / step_s, 6)) * step_s


def given(raw: dict[str, Any], name: str, read: Callable[[Any, str], T]) -> T | None:
    """The setting as ``read(value, flag)`` reads it; None where it is not given."""
    return read(raw[name], f"--{name.replace('_', '-')}") if name in raw else None


def flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {value!r}: write true or false")
    return value


def items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def choice(value: Any, allowed: tuple[Any, ...], name: str) -> Any:
    if value not in allowed:
        raise ConfigError(f"{name} {value}: choose one of {', '.join(map(str, allowed))}")
    return value


def positive(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not number > 0:
        raise ConfigError(f"{name} {value}: give a number above 0")
    if number > LARGEST:
        raise ConfigError(f"{name} {value}: at most {LARGEST:g}")
    return number


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


def cores(value: Any, name: str) -> tuple[int, ...]:
    """Numbers of this machine's cores, from ``2,3`` or ``2-5``. Raises ConfigError."""
    found: set[int] = set()
    for part in filter(None, _split(value)):
        first, dash, last = str(part).partition("-")
        low = whole(first, name, at_least=0)
        found.update(
            range(low, whole(last, name, at_least=low, at_most=low + 4095) + 1) if dash else [low]
        )
    if found and not hasattr(os, "sched_setaffinity"):
        raise ConfigError(f"{name}: this system pins no process to cores")
    if lacking := sorted(found - os.sched_getaffinity(0)) if found else []:
        raise ConfigError(f"{name} {value}: core {lacking[0]} is none that this process may use")
    return tuple(sorted(found))


def _split(value: Any) -> list[Any]:
    """A list, or text comma-separated; without the blanks around its texts."""
    parts = value if isinstance(value, list | tuple) else str(value).split(",")
    return [part.strip() if isinstance(part, str) else part for part in parts]


def levels(value: Any, name: str, convert: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    found = tuple(convert(item, name) for item in _split(value))
    if len(set(found)) != len(found):
        raise ConfigError(f"{name} {value}: a level stands there twice")
    return tuple(sorted(found))


def quantile_names(value: Any) -> tuple[str, ...]:
    names = [str(part) for part in _split(value)]
    for name in names:
        if name != "mixed" and (
            not re.fullmatch(r"p\d{1,2}(\.\d+)?", name) or float(name[1:]) == 0
        ):
            raise ConfigError(
                f"--lengths {name or repr(value)}: write quantiles of the workload's lengths, as p50,p99"
            )
    # "mixed" is the workload itself, which is always the first
    return tuple(name for name in dict.fromkeys(names) if name != "mixed")


def headers(items: list[Any]) -> tuple[tuple[str, str], ...]:
    found = []
    for item in items:
        name, colon, content = str(item).partition(":")
        if not colon:
            raise ConfigError(
                "--header: there is no colon: write it as 'Name: value'"
            )  # never the value
        found.append((name.strip(), content.strip()))
    return tuple(found)


def metrics_urls(items: list[Any]) -> tuple[str, ...]:
    for item in map(str, items):
        if "@" in item:
            raise ConfigError(
                "--metrics-url: the address holds a user name or password: leave them out"
            )
        try:
            parse_endpoint(
                shown_url(item) if re.match("(?i)https?://", item) and item.isprintable() else ""
            )
        except EndpointError:
            raise ConfigError(
                f"--metrics-url {shown_url(item)!a}: give the whole address, as in http://127.0.0.1:9400/metrics"
            ) from None
    return tuple(map(str, items))


def extra_body(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--extra-body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError("--extra-body must be a JSON object, as in '{\"temperature\": 0}'")
    try:
        json.dumps(value, allow_nan=False).encode()
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"--extra-body cannot be sent as JSON: {error}") from error
    for name in RESERVED_BODY_FIELDS:
        if name in value:
            raise ConfigError(f"--extra-body sets {name!r}, which the workload decides: drop it")
    refuse_several_choices(value, "--extra-body")
    return value


def locked(items: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    if len(items) == 1 and isinstance(items[0], dict):  # a mapping in a run file
        if any(isinstance(content, dict | list | type(None)) for content in items[0].values()):
            raise ConfigError(f"lock: give text for each name, not {items[0]!r:.100}")
        items = [f"{name}={content}" for name, content in items[0].items()]
    for item in items:
        name, equals, content = (part.strip() for part in str(item).partition("="))
        if not equals or not name or not content or not str(item).isprintable():
            raise ConfigError(
                f"--lock {str(item)!a}: write it as name=value, as in quantization=fp8"
            )
        if found.setdefault(name, content) != content:
            raise ConfigError(f"--lock {name}: it stands there twice with different values")
    return found
