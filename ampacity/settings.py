"""The settings of an experiment, each declared once: an option, a key of the run file, its check.

Nothing heavy is imported: ``ampacity COMMAND --help`` needs this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ampacity import values as v

TARGET, LOAD, WORKLOAD, LIMITS = "Endpoint", "Load", "Workload", "Limits"
OUT = "Judgement and output"
CONCURRENCY_MAX = 100_000
BLOCK_MAX = 1 << 20
WORKERS_MAX = 256
COMBINED = "-"  # several settings make one field of ``config.Settings``


@dataclass(frozen=True)
class Kind:
    """A type on the command line, and a reader of an option's text or a run file's value."""

    type: Any
    metavar: str | None
    read: v.Reader


@dataclass(frozen=True)
class Setting:
    """``field`` of ``config.Settings`` gets the value ("limits.x", "replay.x": of that part)."""

    kind: Kind
    help: str
    field: str = ""  # "": has the setting's name
    group: str = ""


def _whole(at_least: int = 1, at_most: int = 2**53) -> Kind:
    return Kind(int, "N", v.whole_number(at_least, at_most))


def _number(metavar: str, read: v.Reader = v.positive) -> Kind:
    return Kind(float, metavar, read)


def _text(metavar: str | None, read: v.Reader = v.text) -> Kind:
    return Kind(str, metavar, read)


def _choice(*allowed: str) -> Kind:
    return Kind(str, "|".join(allowed), v.choice(*allowed))


def _list(metavar: str, read: v.Reader) -> Kind:
    return Kind(list[str], metavar, read)


def _in(group: str, settings: dict[str, Setting]) -> dict[str, Setting]:
    return {name: replace(setting, group=group) for name, setting in settings.items()}


DURATION, COUNT, TEXT = _text("T", v.parse_duration), _whole(), _text(None)
FILE, FLAG = Kind(Path, "FILE", v.path), Kind(bool, None, v.flag)

# settings of a trace, which only 'ampacity run' plays
_TRACE = {
    "trace": Setting(
        FILE,
        "Trace, log or schedule to replay (CSV, JSONL, Parquet): its arrival times, token "
        "counts, sessions and messages.",
    ),
    "time_scale": Setting(_number("X"), "Replay the trace X times as fast.", "replay.time_scale"),
    "trace_from": Setting(DURATION, "Start at this time of the trace, e.g. 10m.", "replay.from_s"),
    "trace_to": Setting(DURATION, "Stop before this time of the trace.", "replay.to_s"),
    "trace_keep": Setting(
        _number("SHARE"),
        "Play a random share of the trace, e.g. 0.1. Sessions are kept or dropped whole.",
        "replay.keep",
    ),
    "trace_loop": Setting(COUNT, "Play the trace N times.", "replay.loops"),
    "max_think": Setting(
        DURATION,
        "Shorten pauses within the trace's sessions to at most this, e.g. 60s.",
        "replay.max_think_s",
    ),
    "think_scale": Setting(
        _number("X"),
        "Multiply pauses within the trace's sessions by X. Default: scaled by --time-scale.",
        "replay.think_scale",
    ),
    "block_size": Setting(
        _whole(at_most=BLOCK_MAX),
        "Tokens per block of the trace's hash_ids. Default: from the file, else from its lengths.",
        "replay.block_tokens",
    ),
    "trace_as_written": Setting(
        FLAG,
        "Keep the bursts of a trace with a coarse clock. Default: spread them over a clock step.",
        "replay.as_written",
    ),
    "column": Setting(
        _list("ROLE=NAME", v.columns),
        "Column of the trace with this role: time, input, output, session, end, duration, "
        "pause, messages, client, cached or hash_ids. E.g. input=usage.prompt_tokens or "
        "time=events.0.at; repeatable.",
        "columns",
    ),
    "time_unit": Setting(
        _choice("s", "ms", "us", "ns"),
        "Unit of the trace's times. Default: from the column's name or the size of the numbers.",
    ),
}
_ENDPOINT = {
    "model": Setting(TEXT, "Model to request. Default: the only one that is served."),
    "api": Setting(
        _text("API", v.choice("chat", "completions", "responses", "messages", "embeddings")),
        "chat, completions, responses, messages (Anthropic) or embeddings. Default: chat.",
    ),
    "api_key_env": Setting(_text("NAME"), "Environment variable that holds the API key.", COMBINED),
    "header": Setting(
        _list("'NAME: VALUE'", v.headers), "Additional request header; repeatable.", COMBINED
    ),
    "extra_body": Setting(
        _text("JSON", v.extra_body),
        "Additional fields of the request body, e.g. '{\"temperature\": 0}'.",
    ),
    "lock": Setting(
        _list("NAME=VALUE", v.locked),
        "Fact about the deployment for the report, e.g. quantization=fp8 or hardware=4xH100; "
        "repeatable.",
        "locked",
    ),
    "metrics_url": Setting(
        _list("URL", v.metrics_urls),
        "Additional Prometheus page to sample, e.g. of a DCGM exporter or Triton's "
        ":8002/metrics; repeatable.",
        "metrics_urls",
    ),
    "sticky": Setting(
        FLAG,
        "With several comma-separated URLs: keep each session on one. Default: round-robin by "
        "request.",
    ),
}
_WORKLOAD = {
    "workload": Setting(
        _text("NAME|FILE"),
        "Built-in workload (see 'ampacity workload list') or a YAML file. Default: chat.",
        COMBINED,
    ),
    "input_tokens": Setting(
        _text("N|SPEC", v.lengths),
        "Prompt length in tokens: a number, or a distribution such as lognormal:p50=200,p99=800.",
        COMBINED,
    ),
    "output_tokens": Setting(
        _text("N|SPEC", v.lengths), "Answer length in tokens, written likewise.", COMBINED
    ),
    "tokenizer": Setting(
        TEXT,
        "How prompt lengths are counted. words or none: no vocabulary, calibrated by the "
        "server's /tokenize or usage. server: its /tokenize, or refuse. Or cl100k_base, "
        "o200k_base, hf:PATH. Default: words.",
    ),
    "prompts": Setting(
        FILE,
        "Real prompts: JSONL with messages, OpenAI batch lines, ShareGPT conversations, or a "
        ".txt file with one prompt per line.",
        COMBINED,
    ),
    "skip_bad_rows": Setting(
        FLAG, "Skip and count rows of --prompts or --trace that cannot be read."
    ),
    "fit_context": Setting(
        FLAG,
        "Shorten requests that do not fit the model's context, and end conversations before it. "
        "Default: refuse a workload if more than 1 % of it does not fit.",
    ),
    "salt": Setting(
        _text("TEXT"),
        "Cache-bust seed: fixes the prompts' texts. Default: new texts in each run, so that no "
        "cache knows them.",
    ),
}
_LOAD = {
    "rates": Setting(
        _text("R,R,...", v.rates),
        "Offered load in requests/s, open loop. Default: found automatically.",
    ),
    "concurrency": Setting(
        _text("N,N,...", v.levels(v.whole_number(at_most=CONCURRENCY_MAX))),
        "Number of requests in flight, closed loop.",
    ),
    "lengths": Setting(
        _text("P,P,...", v.quantile_names),
        "Sweep again with every request at these quantiles of the workload's lengths, e.g. "
        "p50,p99: one more curve for each.",
    ),
    "duration": Setting(
        DURATION, "Length of each stage, e.g. 30s or 2m. Default: 30s (predict: 5m).", "duration_s"
    ),
    "arrivals": Setting(
        _text("SPEC"),
        "Arrival process: poisson, constant, gamma:cv=3, weibull:cv=2, onoff:on=10s,off=50s, "
        "ramp:from=0.2,to=1.8, steps:rates=1/2/4, diurnal or burst:factor=5,length=10s. "
        "Default: the workload's.",
        COMBINED,
    ),
    "think_time": Setting(
        DURATION, "Closed loop: pause of a user between an answer and the next request.", "think_s"
    ),
    "ramp": Setting(
        DURATION,
        "Closed loop: start the users one after another over this time, which is not measured. "
        "For an open loop see --arrivals ramp.",
        "ramp_s",
    ),
    "warmup": Setting(
        _whole(at_least=0),
        "Requests at the start of each stage that are not counted. Default: found from the "
        "data; 0 with --trace.",
        "warmup_requests",
    ),
    "seed": Setting(_whole(at_least=0), "Fixes lengths and arrival times. Default: 1."),
}
_LIMITS = {
    "max_requests": Setting(COUNT, "End the run cleanly after N requests."),
    "max_tokens": Setting(COUNT, "End the run cleanly after N planned tokens, input plus output."),
    "timeout": Setting(
        DURATION, "Abandon a request after this time. Default: no limit.", "limits.total_s"
    ),
    "idle_timeout": Setting(
        DURATION,
        "Abandon a request after this time without a byte from the server. Default: 2m.",
        "limits.idle_s",
    ),
    "max_in_flight": Setting(
        COUNT,
        "Shed requests beyond N in flight: recorded, never sent. Default: no limit.",
        "limits.in_flight",
    ),
    "retries": Setting(
        _whole(at_least=0),
        "Retry up to N times after 429, 502, 503, 504, a refused or a reset connection, "
        "honouring Retry-After. Every attempt is recorded; the first one counts. Default: 0.",
        "limits.retries",
    ),
    "workers": Setting(
        _whole(at_most=WORKERS_MAX),
        "Processes that generate the load. Default: one, more once it is half busy and cores "
        "are free.",
    ),
    "cpus": Setting(
        _text("N,N,...", v.cores),
        "Cores to pin the client to, e.g. 2,3 or 2-5 (Linux). Default: any.",
    ),
    "connections": Setting(
        _choice("pool", "new"),
        "pool: keep connections alive and reuse them. new: one per request. Default: pool.",
    ),
    "timestamps": Setting(
        _choice("kernel", "read"),
        "kernel: time at which the kernel received the data, exact even if the client is busy "
        "(falls back to read with TLS, a proxy, or off Linux). read: time at which the client "
        "read it. Do not compare runs across the two. Default: kernel.",
    ),
}
_OUTPUT = {
    "slo": Setting(
        _list("METRIC_pQ=LIMIT", v.items),
        "Service level objective, e.g. ttft_p99=2s, itl_p99=50ms, e2e_p95=10s, error_rate=1%; "
        "repeatable.",
        COMBINED,
    ),
    "keep_answers": Setting(
        Kind(int, "MIB", v.mebibytes),
        "Keep answer texts in the run directory, up to this many MiB per process, for 'ampacity "
        "report --checker'. Default: not kept.",
        "keep_answers_bytes",
    ),
    "peak_rps": Setting(_number("R"), "Peak load in requests/s to size the fleet for.", COMBINED),
    "tp": Setting(
        COUNT, "GPUs per instance. Default: from --lock hardware=4xH100, else 1.", COMBINED
    ),
    "safety": Setting(
        _number("F", v.safety_factor),
        "Safety factor on the number of instances. Default: 1.2.",
        COMBINED,
    ),
    "gpu_hour": Setting(_number("USD"), "Price of one GPU for one hour.", COMBINED),
    "out": Setting(
        Kind(Path, "DIR", v.path), "Run directory; new or empty. Default: runs/<time>-<name>."
    ),
}
SHARED = (
    _in(TARGET, _ENDPOINT)
    | _in(WORKLOAD, _WORKLOAD)
    | _in(LOAD, _LOAD)
    | _in(LIMITS, _LIMITS)
    | _in(OUT, _OUTPUT)
)
REPLAY = _in(LOAD, _TRACE)
ALL = SHARED | REPLAY
# settings that a run without a network has
VIRTUAL = [
    "workload",
    "input_tokens",
    "output_tokens",
    "rates",
    "concurrency",
    "lengths",
    "think_time",
    "ramp",
    "duration",
    "arrivals",
    "warmup",
    "seed",
    "max_requests",
    "max_tokens",
    "slo",
    "peak_rps",
    "tp",
    "safety",
    "gpu_hour",
    "out",
]


def read_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, parsed and validated. Raises a ValueError of one line."""
    return {name: s.kind.read(raw[name], v.option(name)) for name, s in ALL.items() if name in raw}
