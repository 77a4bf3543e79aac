"""One description of an experiment, from flags or from a run file with the same names."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import yaml

from ampacity import values as v
from ampacity.analysis.slo import Slo, parse_slos
from ampacity.loadgen.net.http import Reuse, Stamps
from ampacity.loadgen.plan import Limits
from ampacity.loadgen.send.endpoint import Endpoint, parse_endpoint
from ampacity.loadgen.send.protocols import Api
from ampacity.settings import REPLAY, SHARED
from ampacity.values import ConfigError
from ampacity.workloads.arrivals.processes import arrivals_text, check_stage, shaped
from ampacity.workloads.lengths.parse import parse_lengths
from ampacity.workloads.profile import PlainYaml, Workload, load_workload, read_yaml
from ampacity.workloads.prompts.files import load_prompts
from ampacity.workloads.prompts.tokenizers import load_tokenizer
from ampacity.workloads.trace_cuts import Replay
from ampacity.workloads.traces.columns import parse_columns
from ampacity.workloads.traces.values import UNITS

DEFAULT_WORKLOAD = "chat"


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
    replay: Replay = field(default_factory=Replay)
    skip_bad_rows: bool = False
    fit_context: bool = False  # shorten what does not fit the model's context
    columns: dict[str, str] = field(default_factory=dict)  # of the trace, by role
    time_unit: str | None = None  # of the trace
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
    ramp_s: float = (
        0.0  # closed loop: over which the virtual users begin; duration_s counts from its end
    )
    connections: Reuse = "pool"
    timestamps: Stamps = "kernel"
    workers: int | None = None  # None: as many as the load turns out to need
    cpus: tuple[int, ...] = ()  # cores that the client is pinned to
    out: Path | None = None
    keep_answers_bytes: int | None = (
        None  # of their texts, of each process; None: they are not kept
    )
    locked: dict[str, str] = field(default_factory=dict)
    metrics_urls: tuple[str, ...] = ()  # pages of exporters beside the server's own /metrics
    fleet_inputs: dict[str, Any] = field(default_factory=dict)


def make_settings(raw: dict[str, Any]) -> Settings:
    """Settings from the flags' own names (``input_tokens``, ``slo``, ...). Raises a ValueError of one line.

    Values may be text, as from the command line, or lists and numbers, as from a run file.
    """
    raw = {name: value for name, value in raw.items() if value not in (None, [], (), {})}
    known = {"url", *SHARED, *REPLAY}
    for name in raw:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"unknown setting {name!r}; {hint}")
    if "url" not in raw:
        raise ConfigError("give the endpoint's base URL, as http://127.0.0.1:8000/v1")
    for name in _TEXTS & raw.keys():
        v.text(raw[name], name)
    endpoints = _endpoints(raw)
    workload = _workload(raw)
    of_classes = [f"{kind.name}:{text}" for kind in workload.classes for text in kind.slos]
    slos = tuple(parse_slos([str(text) for text in [*v.items(raw.get("slo", ())), *of_classes]]))
    locked = v.locked(v.items(raw.get("lock", ())))
    settings = Settings(
        endpoint=endpoints[0],
        replicas=endpoints[1:],
        sticky=v.flag(raw, "sticky"),
        salt=raw.get("salt"),
        workload=workload,
        model=raw.get("model"),
        api=v.choice(raw.get("api", "chat"), get_args(Api), "--api"),
        extra_body=v.extra_body(raw.get("extra_body", {})),
        tokenizer=str(raw.get("tokenizer", "words")),
        trace=Path(raw["trace"]) if "trace" in raw else None,
        replay=_replay(raw),
        skip_bad_rows=v.flag(raw, "skip_bad_rows"),
        fit_context=v.flag(raw, "fit_context"),
        columns=parse_columns(_pairs(raw.get("column", ()))),
        time_unit=v.given(raw, "time_unit", lambda unit, name: v.choice(unit, tuple(UNITS), name)),
        rates=v.levels(raw.get("rates"), "--rates", v.positive),
        concurrency=v.levels(
            raw.get("concurrency"), "--concurrency", partial(v.whole, at_most=CONCURRENCY_MAX)
        ),
        lengths=v.quantile_names(raw.get("lengths", ())),
        duration_s=v.parse_duration(raw.get("duration", "30s"), "--duration"),
        # a trace is a record of what happened, its beginning included
        warmup_requests=v.given(
            {"warmup": 0, **raw} if "trace" in raw else raw, "warmup", partial(v.whole, at_least=0)
        ),
        max_requests=v.given(raw, "max_requests", v.whole),
        max_tokens=v.given(raw, "max_tokens", v.whole),
        slos=slos,
        seed=v.whole(raw.get("seed", 1), "--seed", at_least=0),
        limits=_limits(raw),
        think_s=v.given(raw, "think_time", v.parse_duration) or 0.0,
        ramp_s=v.given(raw, "ramp", v.parse_duration) or 0.0,
        connections=v.choice(raw.get("connections", "pool"), get_args(Reuse), "--connections"),
        timestamps=v.choice(raw.get("timestamps", "kernel"), get_args(Stamps), "--timestamps"),
        workers=v.given(raw, "workers", partial(v.whole, at_most=WORKERS_MAX)),
        cpus=v.cores(raw.get("cpus", ()), "--cpus"),
        out=Path(raw["out"]) if "out" in raw else None,
        locked=locked,
        metrics_urls=v.metrics_urls(v.items(raw.get("metrics_url", ()))),
        fleet_inputs=fleet_inputs({"tp": gpus_named(*map(locked.get, SAYS_GPUS)) or 1, **raw}),
        keep_answers_bytes=None
        if "keep_answers" not in raw
        else v.whole(raw["keep_answers"], "--keep-answers") * 2**20,
    )
    _check_together(settings, raw)
    for rate in settings.rates or ():  # before a server is loaded, not in the stage
        for clock in settings.workload.clocks:
            check_stage(clock, rate, settings.duration_s)
    return settings


_TEXTS = {
    "model",
    "salt",
    "prompts",
    "api_key_env",
    "tokenizer",
    "workload",
    "arrivals",
    "trace",
    "out",
}
CONCURRENCY_MAX = 100_000
BLOCK_MAX = 1 << 20
WORKERS_MAX = 256


SAYS_GPUS = ("tensor_parallel", "hardware")  # facts of --lock


def gpus_named(*texts: object) -> int | None:
    """GPUs of an instance by the first text that says them: ``4``, ``4xH100`` or ``llama3-70b@4xh100``."""
    said = (
        re.search(r"(?:^|[-@ ])([1-9]\d{0,3}) ?x ?[A-Za-z]|^([1-9]\d{0,3})$", str(text or ""))
        for text in texts
    )
    return next((int(found[1] or found[2]) for found in said if found), None)


def fleet_inputs(raw: dict[str, Any]) -> dict[str, Any]:
    """run.json's ``fleet_inputs``, checked; null: not given. Raises ConfigError."""
    safety = v.given(raw, "safety", v.positive)
    if safety is not None and safety < 1:
        raise ConfigError(f"--safety {raw['safety']}: give 1 or more (1.2 keeps 20 % in reserve)")
    return {
        "peak_rps": v.given(raw, "peak_rps", v.positive),
        "tensor_parallel": v.whole(raw.get("tp", 1), "--tp"),
        "safety_factor": safety,
        "gpu_hour_usd": v.given(raw, "gpu_hour", v.positive),
    }


def read_run_file(path: Path) -> dict[str, Any]:
    """The settings of a YAML run file, by the flags' names with ``_`` or ``-``. Raises ConfigError, WorkloadError."""
    value = read_yaml(path)
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


def in_run_file(path: Path, flags: Collection[str], message: str) -> str:
    """``message`` about a setting with the file, the line and the name under which it stands; ``flags`` do not stand there.

    The setting is the one that the message names first, or one whose value it repeats.
    """
    root = yaml.compose(path.read_text(encoding="utf-8-sig"), Loader=PlainYaml)
    found: list[tuple[int, int, str]] = []  # where in the message, line, name
    for key, value in root.value if isinstance(root, yaml.MappingNode) else ():
        name = key.value.replace("-", "_")
        named = re.search(
            rf"--{name.replace('_', '-')}(?![\w-])|^{name}\b|'{re.escape(key.value)}'", message
        )
        values = [node for node in (value, *value.value) if isinstance(node, yaml.ScalarNode)]
        repeated = [node for node in values if len(node.value) > 1 and node.value in message]
        said = min(repeated, key=lambda node: message.find(node.value), default=None)
        if name not in flags and (named or said):
            at = named.start() if named else len(message)
            found.append((at, (said or key).start_mark.line + 1, name))
    if not found:
        return message if flags else f"{path}: {message}"
    at, line, name = min(found)
    message = re.sub(rf"--{name.replace('_', '-')}(?![\w-])", name, message)
    return f"{path}:{line}: {message}" if at < len(message) else f"{path}:{line}: {name}: {message}"


def _limits(raw: dict[str, Any]) -> Limits:
    given = {
        "total_s": v.given(raw, "timeout", v.parse_duration),
        "idle_s": v.given(raw, "idle_timeout", v.parse_duration),
        "retries": v.given(raw, "retries", partial(v.whole, at_least=0)),
        "in_flight": v.given(raw, "max_in_flight", v.whole),
    }
    return Limits(**{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]


def _replay(raw: dict[str, Any]) -> Replay:
    return Replay(
        from_s=v.given(raw, "trace_from", v.parse_duration) or 0.0,
        to_s=v.given(raw, "trace_to", v.parse_duration),
        keep=v.positive(raw.get("trace_keep", 1.0), "--trace-keep"),
        loops=v.whole(raw.get("trace_loop", 1), "--trace-loop"),
        as_written=v.flag(raw, "trace_as_written"),
        time_scale=v.positive(raw.get("time_scale", 1.0), "--time-scale"),
        think_scale=v.given(raw, "think_scale", v.positive),
        max_think_s=v.given(raw, "max_think", v.parse_duration) or math.inf,
        block_tokens=v.given(raw, "block_size", partial(v.whole, at_most=BLOCK_MAX)),
    )


def _pairs(value: Any) -> list[str]:
    """``role=name`` texts, as they are or from a mapping of a run file."""
    if isinstance(value, dict):
        return [f"{role}={name}" for role, name in value.items()]
    return [str(text) for text in v.items(value)]


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
        workload = _of_schedule(raw) or load_workload(str(raw.get("workload", DEFAULT_WORKLOAD)))
        for name in fixed:  # one side of a workload replaced
            workload = workload.with_lengths(
                name, parse_lengths(raw[name], f"--{name.replace('_', '-')}")
            )
    if "prompts" in raw:
        if workload.prefixes or (workload.sessions and workload.sessions.steps):
            raise ConfigError(
                "--prompts brings its own texts: use a workload without prefixes and steps"
            )
        prompts = load_prompts(
            Path(raw["prompts"]),
            load_tokenizer(str(raw.get("tokenizer", "words"))),
            skip_bad_rows=v.flag(raw, "skip_bad_rows"),
        )
        workload = dataclasses.replace(workload, prompts=prompts)
    return workload.with_arrivals(arrivals_text(raw["arrivals"])) if "arrivals" in raw else workload


def _of_schedule(raw: dict[str, Any]) -> Workload | None:
    """The workload whose schedule the trace is; None: it is another trace."""
    if not raw.get("trace"):
        return None
    from ampacity.workloads.schedule_file import workload_of

    return workload_of(Path(raw["trace"]))


def _check_together(settings: Settings, raw: dict[str, Any]) -> None:
    """Raises ConfigError for settings that contradict each other, or that the API or the trace has no use for."""
    workload = settings.workload
    of_trace = {"workload", "input_tokens", "output_tokens", "arrivals", "duration"}
    for wrong, message in (
        (
            settings.rates and settings.concurrency,
            "--rates (open loop) and --concurrency (closed loop) exclude each other: give one",
        ),
        (
            settings.trace and of_trace & raw.keys(),
            "--trace brings its own lengths and times: drop --workload, --input-tokens, --output-tokens, --arrivals and --duration",
        ),
        (
            settings.max_requests and max(settings.concurrency or (0,)) > settings.max_requests,
            f"--max-requests {settings.max_requests}: --concurrency {max(settings.concurrency or (0,))} would never be in flight: give more requests or fewer users",
        ),
        (
            "arrivals" in raw and settings.concurrency,
            "--arrivals goes with an open loop: with --concurrency a request follows the answer before it",
        ),
        (
            "think_time" in raw and not settings.concurrency,
            "--think-time goes with --concurrency: in an open loop nobody waits for an answer",
        ),
        (
            "ramp" in raw and not settings.concurrency,
            "--ramp goes with --concurrency: an open loop rises with --arrivals ramp:from=0.2,to=1.8",
        ),
        (
            settings.lengths and (workload.sessions or workload.prompts or settings.trace),
            "--lengths goes with lone requests whose lengths are drawn: not with sessions, --prompts or --trace",
        ),
        (
            settings.api == "embeddings" and (workload.sessions or workload.images),
            "--api embeddings has no conversation: use a workload without sessions and images",
        ),
        (
            workload.images and settings.api != "chat",
            f"--api {settings.api}: images are sent in chat messages: use --api chat",
        ),
        (
            workload.prompts and settings.trace,
            "--trace brings its own lengths, --prompts its own texts: give one of them",
        ),
        (
            settings.sticky and not settings.replicas,
            "--sticky goes with several URLs, comma-separated",
        ),
        (
            settings.skip_bad_rows and not (settings.trace or workload.prompts),
            "--skip-bad-rows goes with --prompts or --trace",
        ),
        *(
            (name in raw and not settings.trace, f"--{name.replace('_', '-')} goes with --trace")
            for name in REPLAY
        ),
    ):
        if wrong:
            raise ConfigError(message)
    names = [kind.name for kind in workload.classes] or ["default"]
    for slo in settings.slos if settings.trace is None else ():  # a trace names its own classes
        if slo.class_ not in (None, *names):
            raise ConfigError(
                f"--slo {slo.text}: the workload has no class {slo.class_!r}; it has {', '.join(names)}"
            )


def check_steady(workload: Workload, command: str) -> None:
    """Raises ConfigError where the rate changes within a stage: of such a stage no one rate can be found."""
    for clock in workload.clocks:
        if shaped(clock):
            raise ConfigError(
                f"arrivals {clock:.60}: {command} looks for one steady rate; give it --arrivals poisson (or gamma:cv=...), or use "
                "'ampacity run' for a rate that changes"
            )


def _endpoints(raw: dict[str, Any]) -> tuple[Endpoint, ...]:
    """The base URLs, a list or comma-separated; they share key and headers."""
    headers = v.headers(v.items(raw.get("header", ())))
    for item in v.items(raw["url"]):
        v.text(item, "url")
        if "@" in item:  # before it is parted: a password may hold a comma
            parse_endpoint(item)
    urls = [part.strip() for item in v.items(raw["url"]) for part in str(item).split(",")]
    found = tuple(
        parse_endpoint(url, api_key_env=raw.get("api_key_env"), headers=headers)
        for url in urls
        if url
    )
    if not found or len({e.url for e in found}) < len(found):
        raise ConfigError(
            f"url {raw['url']}: give base URLs that differ, as http://a:8000/v1,http://b:8000/v1"
        )
    return found
