"""One description of an experiment, from flags or from a run file with the same names."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args
from urllib.parse import urlsplit

import yaml

from ampacity.settings import REPLAY, SHARED
from analysis.slo import Slo, parse_slos
from loadgen.endpoint import Endpoint, parse_endpoint
from loadgen.http import Reuse, Stamps
from loadgen.plan import Limits
from loadgen.protocols import Api
from workloads.arrivals import arrivals_text, check_stage, shaped
from workloads.lengths import parse_lengths
from workloads.profile import UniqueKeys, Workload, load_workload
from workloads.prompt_files import load_prompts
from workloads.replay import Replay
from workloads.tokenizers import load_tokenizer

T = TypeVar("T")
RESERVED_BODY_FIELDS = ("messages", "prompt", "stream")
DEFAULT_WORKLOAD = "chat"


class ConfigError(ValueError):
    """A setting that cannot be used; one line that names the setting and the mend."""


@dataclass(frozen=True)
class Settings:
    """Everything an experiment needs to know, validated. Durations in seconds, rates per second."""

    endpoint: Endpoint
    workload: Workload
    model: str | None = None
    api: Api = "chat"
    extra_body: dict[str, Any] = field(default_factory=dict)
    tokenizer: str = "words"
    replicas: tuple[Endpoint, ...] = ()  # further endpoints that requests go round
    sticky: bool = False  # a session stays with one of them
    salt: str | None = None  # of the prompts' texts; None: a new one for each run
    trace: Path | None = None
    time_scale: float = 1.0
    replay: Replay = field(default_factory=Replay)
    skip_bad_rows: bool = False
    rates: tuple[float, ...] | None = None
    concurrency: tuple[int, ...] | None = None
    lengths: tuple[str, ...] = ()  # quantiles, as "p99": further curves with every request as long
    duration_s: float = 30.0
    warmup_requests: int | None = None
    max_requests: int | None = None
    max_tokens: int | None = None
    slos: tuple[Slo, ...] = ()
    seed: int = 1
    limits: Limits = field(default_factory=Limits)
    think_s: float = 0.0
    ramp_s: float = 0.0  # closed loop: over which the virtual users begin; duration_s counts from its end
    connections: Reuse = "pool"
    timestamps: Stamps = "read"
    workers: int | None = None  # None: as many as the load turns out to need
    out: Path | None = None
    keep_answers_bytes: int | None = None  # of their texts, of each process; None: they are not kept
    locked: dict[str, str] = field(default_factory=dict)
    metrics_urls: tuple[str, ...] = ()  # pages of exporters beside the server's own /metrics
    fleet_inputs: dict[str, Any] = field(default_factory=dict)


def _text(value: Any, name: str) -> None:
    """Raises ConfigError unless ``value`` is text, or a path, that can be written down."""
    flag = f"--{name.replace('_', '-')}" if name != "url" else "url"
    if not isinstance(value, str | Path) or not str(value).strip():
        raise ConfigError(f"{flag}: give text, not {value!r}")
    if not str(value).isprintable():
        raise ConfigError(f"{flag} {str(value)!a}: it holds a character that cannot be printed")


def parse_duration(text: str | float, name: str) -> float:
    """Seconds of ``500ms``, ``30s``, ``2m``, ``1h``. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(us|ms|s|m|min|h)\s*", str(text))
    if not match:
        raise ConfigError(f"{name} {text}: write a duration with its unit, as 500ms, 30s or 2m")
    unit_s = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2]]
    seconds = float(match[1]) * unit_s
    if not 0 < seconds <= SECONDS_MAX:
        raise ConfigError(f"{name} {text}: give more than 0 and at most 30 days")
    return seconds


def make_settings(raw: dict[str, Any]) -> Settings:
    """Settings from the flags' own names (``input_tokens``, ``slo``, ...). Raises a ValueError of one line.

    Values may be text, as from the command line, or lists and numbers, as from a run file.
    """
    raw = {name: value for name, value in raw.items() if value not in (None, [], (), {})}
    known = {"url", *SHARED, *REPLAY}
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    if "url" not in raw:
        raise ConfigError("give the endpoint's base URL, as http://127.0.0.1:8000/v1")
    for name in _TEXTS & raw.keys():
        _text(raw[name], name)
    endpoints = _endpoints(raw)
    workload = _workload(raw)
    of_classes = [f"{kind.name}:{text}" for kind in workload.classes for text in kind.slos]
    slos = tuple(parse_slos([str(text) for text in [*_items(raw.get("slo", ())), *of_classes]]))
    settings = Settings(
        endpoint=endpoints[0],
        replicas=endpoints[1:],
        sticky=_flag(raw, "sticky"),
        salt=raw.get("salt"),
        workload=workload,
        model=raw.get("model"),
        api=_choice(raw.get("api", "chat"), get_args(Api), "--api"),
        extra_body=_extra_body(raw.get("extra_body", {})),
        tokenizer=str(raw.get("tokenizer", "words")),
        trace=Path(raw["trace"]) if "trace" in raw else None,
        time_scale=_positive(raw.get("time_scale", 1.0), "--time-scale"),
        replay=_replay(raw),
        skip_bad_rows=_flag(raw, "skip_bad_rows"),
        rates=_list(raw.get("rates"), "--rates", _positive),
        concurrency=_list(raw.get("concurrency"), "--concurrency", partial(_whole, at_most=CONCURRENCY_MAX)),
        lengths=_lengths(raw.get("lengths", ())),
        duration_s=parse_duration(raw.get("duration", "30s"), "--duration"),
        # a trace is a record of what happened, its beginning included
        warmup_requests=_given(
            {"warmup": 0, **raw} if "trace" in raw else raw, "warmup", partial(_whole, at_least=0)
        ),
        max_requests=_given(raw, "max_requests", _whole),
        max_tokens=_given(raw, "max_tokens", _whole),
        slos=slos,
        seed=_whole(raw.get("seed", 1), "--seed", at_least=0),
        limits=_limits(raw),
        think_s=_given(raw, "think_time", parse_duration) or 0.0,
        ramp_s=_given(raw, "ramp", parse_duration) or 0.0,
        connections=_choice(raw.get("connections", "pool"), get_args(Reuse), "--connections"),
        timestamps=_choice(raw.get("timestamps", "read"), get_args(Stamps), "--timestamps"),
        workers=_given(raw, "workers", partial(_whole, at_most=WORKERS_MAX)),
        out=Path(raw["out"]) if "out" in raw else None,
        locked=_locked(_items(raw.get("lock", ()))),
        metrics_urls=_metrics_urls(_items(raw.get("metrics_url", ()))),
        fleet_inputs=fleet_inputs(raw),
        keep_answers_bytes=None
        if "keep_answers" not in raw
        else _whole(raw["keep_answers"], "--keep-answers") * 2**20,
    )
    _check_together(settings, raw)
    for rate in settings.rates or ():  # before a server is loaded, not in the stage
        for clock in settings.workload.clocks:
            check_stage(clock, rate, settings.duration_s)
    return settings


_TEXTS = {"model", "salt", "prompts", "api_key_env", "tokenizer", "workload", "arrivals", "trace", "out"}
CONCURRENCY_MAX = 100_000
WORKERS_MAX = 256
SECONDS_MAX = 30 * 86_400.0


def fleet_inputs(raw: dict[str, Any]) -> dict[str, Any]:
    """run.json's ``fleet_inputs``, checked. Raises ConfigError."""
    safety = _positive(raw.get("safety", 1.2), "--safety")
    if safety < 1:
        raise ConfigError(f"--safety {raw['safety']}: give 1 or more (1.2 keeps 20 % in reserve)")
    return {
        "peak_rps": _given(raw, "peak_rps", _positive),
        "tensor_parallel": _whole(raw.get("tp", 1), "--tp"),
        "safety_factor": safety,
        "gpu_hour_usd": _given(raw, "gpu_hour", _positive),
    }


def read_run_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML run file, by the flags' names with ``_`` or ``-``. Raises ConfigError."""
    try:
        value = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ConfigError(
            f"{path}: a run file is a mapping of settings, as in 'url: http://127.0.0.1:8000/v1'"
        )
    found: dict[str, Any] = {}
    for name, content in value.items():
        plain = name.replace("-", "_")
        if plain in found:
            raise ConfigError(f"{path}: {name} stands there twice")
        found[plain] = content
    return found


def _given(raw: dict[str, Any], name: str, read: Callable[[Any, str], T]) -> T | None:
    """The setting as ``read(value, flag)`` reads it; None where it is not given."""
    return read(raw[name], f"--{name.replace('_', '-')}") if name in raw else None


def _limits(raw: dict[str, Any]) -> Limits:
    given = {
        "total_s": _given(raw, "timeout", parse_duration),
        "idle_s": _given(raw, "idle_timeout", parse_duration),
        "retries": _given(raw, "retries", partial(_whole, at_least=0)),
        "in_flight": _given(raw, "max_in_flight", _whole),
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _replay(raw: dict[str, Any]) -> Replay:
    return Replay(
        from_s=_given(raw, "trace_from", parse_duration) or 0.0,
        to_s=_given(raw, "trace_to", parse_duration),
        keep=_positive(raw.get("trace_keep", 1.0), "--trace-keep"),
        loops=_whole(raw.get("trace_loop", 1), "--trace-loop"),
        as_written=_flag(raw, "trace_as_written"),
    )


def _flag(raw: dict[str, Any], name: str) -> bool:
    value = raw.get(name, False)
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {value!r}: write true or false")
    return value


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _workload(raw: dict[str, Any]) -> Workload:
    fixed = [name for name in ("input_tokens", "output_tokens") if name in raw]
    if len(fixed) == 1 and "workload" not in raw and "prompts" not in raw:
        other = "--output-tokens" if fixed == ["input_tokens"] else "--input-tokens"
        raise ConfigError(
            f"--{fixed[0].replace('_', '-')} alone is half a workload: give {other} too, or a --workload"
        )
    if len(fixed) == 2 and "workload" in raw:
        raise ConfigError(
            "--workload and --input-tokens with --output-tokens exclude each other: give one of them"
        )
    if len(fixed) == 2:
        workload = Workload(
            "custom",
            parse_lengths(raw["input_tokens"], "--input-tokens"),
            parse_lengths(raw["output_tokens"], "--output-tokens"),
            source="given by the user",
        )
    else:
        workload = load_workload(str(raw.get("workload", DEFAULT_WORKLOAD)))
        for name in fixed:  # one side of a workload replaced
            workload = workload.with_lengths(name, parse_lengths(raw[name], f"--{name.replace('_', '-')}"))
    if "prompts" in raw:
        if workload.prefixes or (workload.sessions and workload.sessions.steps):
            raise ConfigError("--prompts brings its own texts: use a workload without prefixes and steps")
        prompts = load_prompts(Path(raw["prompts"]), load_tokenizer(str(raw.get("tokenizer", "words"))))
        workload = dataclasses.replace(workload, prompts=prompts)
    return workload.with_arrivals(arrivals_text(raw["arrivals"])) if "arrivals" in raw else workload


def _check_together(settings: Settings, raw: dict[str, Any]) -> None:
    """Raises ConfigError for settings that contradict each other, or that the API or the trace has no use for."""
    workload, levels = settings.workload, settings.rates or settings.concurrency
    of_trace = {"workload", "input_tokens", "output_tokens", "arrivals", "duration"}
    for wrong, message in (
        (settings.rates and settings.concurrency, "--rates (open loop) and --concurrency (closed loop) exclude each other: give one"),
        (settings.trace and levels, "--trace brings its own arrival times: drop --rates or --concurrency, or use --time-scale"),
        (settings.trace and of_trace & raw.keys(), "--trace brings its own lengths and times: drop --workload, --input-tokens, --output-tokens, --arrivals and --duration"),
        ("arrivals" in raw and settings.concurrency, "--arrivals goes with an open loop: with --concurrency a request follows the answer before it"),
        ("think_time" in raw and not settings.concurrency, "--think-time goes with --concurrency: in an open loop nobody waits for an answer"),
        ("ramp" in raw and not settings.concurrency, "--ramp goes with --concurrency: an open loop rises with --arrivals ramp:from=0.2,to=1.8"),
        (settings.lengths and (workload.sessions or workload.prompts or settings.trace), "--lengths goes with lone requests whose lengths are drawn: not with sessions, --prompts or --trace"),
        (settings.api == "embeddings" and (workload.sessions or workload.images), "--api embeddings has no conversation: use a workload without sessions and images"),
        (workload.images and settings.api != "chat", f"--api {settings.api}: images are sent in chat messages: use --api chat"),
        (workload.prompts and settings.trace, "--trace brings its own lengths, --prompts its own texts: give one of them"),
        (settings.sticky and not settings.replicas, "--sticky goes with several URLs, parted by commas"),
        *((name in raw and not settings.trace, f"--{name.replace('_', '-')} goes with --trace") for name in REPLAY),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(message)


def check_steady(workload: Workload, command: str) -> None:
    """Raises ConfigError where the rate changes within a stage: of such a stage no one rate can be found."""
    for clock in workload.clocks:
        if shaped(clock):
            raise ConfigError(
                f"arrivals {clock}: {command} looks for one steady rate; use 'ampacity run' for a rate that changes"
            )


def _endpoints(raw: dict[str, Any]) -> tuple[Endpoint, ...]:
    """The base URLs, a list or parted by commas; they share key and headers."""
    headers = _headers(_items(raw.get("header", ())))
    for item in _items(raw["url"]):
        _text(item, "url")
    urls = [part.strip() for item in _items(raw["url"]) for part in str(item).split(",")]
    found = tuple(
        parse_endpoint(url, api_key_env=raw.get("api_key_env"), headers=headers) for url in urls if url
    )
    if not found or len({e.url for e in found}) < len(found):
        raise ConfigError(
            f"url {raw['url']}: give base URLs that differ, as http://a:8000/v1,http://b:8000/v1"
        )
    return found


def _choice(value: Any, allowed: tuple[Any, ...], name: str) -> Any:
    if value not in allowed:
        raise ConfigError(f"{name} {value}: choose one of {', '.join(map(str, allowed))}")
    return value


def _positive(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not (0 < number < math.inf):
        raise ConfigError(f"{name} {value}: give a number above 0")
    return number


def _whole(value: Any, name: str, at_least: int = 1, at_most: int = 2**53) -> int:
    try:
        number = int(str(value))
    except ValueError:
        number = at_least - 1
    if isinstance(value, bool) or number < at_least:
        raise ConfigError(f"{name} {value}: give a whole number, {at_least} or more")
    if number > at_most:
        raise ConfigError(f"{name} {value}: at most {at_most}")
    return number


def _list(value: Any, name: str, convert: Any) -> tuple[Any, ...] | None:
    if value is None:
        return None
    items = value if isinstance(value, list | tuple) else str(value).split(",")
    found = tuple(convert(item.strip() if isinstance(item, str) else item, name) for item in items)
    if len(set(found)) != len(found):
        raise ConfigError(f"{name} {value}: a level stands there twice")
    return tuple(sorted(found))


def _lengths(value: Any) -> tuple[str, ...]:
    names = [
        str(item).strip() for item in (value if isinstance(value, list | tuple) else str(value).split(","))
    ]
    for name in names:
        if name != "mixed" and (not re.fullmatch(r"p\d{1,2}(\.\d+)?", name) or float(name[1:]) == 0):
            raise ConfigError(f"--lengths {name}: write quantiles of the workload's lengths, as p50,p99")
    return tuple(
        name for name in dict.fromkeys(names) if name != "mixed"
    )  # the workload itself: always the first


def _headers(items: list[Any]) -> tuple[tuple[str, str], ...]:
    found = []
    for item in items:
        name, colon, content = str(item).partition(":")
        if not colon:
            raise ConfigError(f"--header {item!r}: write it as 'Name: value'")
        found.append((name.strip(), content.strip()))
    return tuple(found)


def _metrics_urls(items: list[Any]) -> tuple[str, ...]:
    for item in items:
        url = urlsplit(str(item))
        if (
            url.scheme not in ("http", "https")
            or not url.hostname
            or url.username
            or url.password
            or not str(item).isprintable()
        ):
            raise ConfigError(
                f"--metrics-url {str(item)!a}: give the whole address, as in http://127.0.0.1:9400/metrics"
            )
    return tuple(map(str, items))


def _extra_body(value: Any) -> dict[str, Any]:
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
    return value


def _locked(items: list[Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    if len(items) == 1 and isinstance(items[0], dict):  # a mapping in a run file
        if any(isinstance(content, dict | list | type(None)) for content in items[0].values()):
            raise ConfigError(f"lock: give text for each name, not {items[0]!r:.100}")
        items = [f"{name}={content}" for name, content in items[0].items()]
    for item in items:
        name, equals, content = (part.strip() for part in str(item).partition("="))
        if not equals or not name or not content or not str(item).isprintable():
            raise ConfigError(f"--lock {str(item)!a}: write it as name=value, as in quantization=fp8")
        if found.setdefault(name, content) != content:
            raise ConfigError(f"--lock {name}: it stands there twice with different values")
    return found
