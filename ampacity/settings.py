"""The settings of an experiment, each declared once: an option, a key of the run file, its check.

Nothing heavy is imported: ``ampacity COMMAND --help`` needs this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ampacity import values as v

TARGET, LOAD, WORKLOAD, LIMITS, OUT = (
    "Endpoint",
    "Load",
    "Workload",
    "Limits",
    "Judgement and output",
)
CONCURRENCY_MAX = 100_000
BLOCK_MAX = 1 << 20
WORKERS_MAX = 256


@dataclass(frozen=True)
class Setting:
    """``read(value, name)`` parses a flag's text or a run file's value; it raises a ValueError.

    ``field`` of ``config.Settings`` gets the result ("limits.x" and "replay.x": of that part);
    without a field, ``config`` combines the setting with others.
    """

    group: str
    kind: Any  # type on the command line
    metavar: str | None
    help: str
    read: v.Reader
    field: str | None = None


REPLAY = {  # settings of a trace, which only 'ampacity run' plays
    "trace": Setting(
        LOAD,
        Path,
        "FILE",
        "Trace, log or schedule to replay (CSV, JSONL, Parquet): its arrival times, token counts, "
        "sessions and messages.",
        v.path,
        "trace",
    ),
    "time_scale": Setting(
        LOAD, float, "X", "Replay the trace X times as fast.", v.positive, "replay.time_scale"
    ),
    "trace_from": Setting(
        LOAD,
        str,
        "T",
        "Start at this time of the trace, e.g. 10m.",
        v.parse_duration,
        "replay.from_s",
    ),
    "trace_to": Setting(
        LOAD, str, "T", "Stop before this time of the trace.", v.parse_duration, "replay.to_s"
    ),
    "trace_keep": Setting(
        LOAD,
        float,
        "SHARE",
        "Play a random share of the trace, e.g. 0.1. Sessions are kept or dropped whole.",
        v.positive,
        "replay.keep",
    ),
    "trace_loop": Setting(LOAD, int, "N", "Play the trace N times.", v.whole, "replay.loops"),
    "max_think": Setting(
        LOAD,
        str,
        "T",
        "Shorten pauses within the trace's sessions to at most this, e.g. 60s.",
        v.parse_duration,
        "replay.max_think_s",
    ),
    "think_scale": Setting(
        LOAD,
        float,
        "X",
        "Multiply pauses within the trace's sessions by X. Default: scaled by --time-scale.",
        v.positive,
        "replay.think_scale",
    ),
    "block_size": Setting(
        LOAD,
        int,
        "N",
        "Tokens per block of the trace's hash_ids. Default: from the file, else from its lengths.",
        v.whole_number(at_most=BLOCK_MAX),
        "replay.block_tokens",
    ),
    "trace_as_written": Setting(
        LOAD,
        bool,
        None,
        "Keep the bursts of a trace with a coarse clock. Default: spread them over a clock step.",
        v.flag,
        "replay.as_written",
    ),
    "column": Setting(
        LOAD,
        list[str],
        "ROLE=NAME",
        "Column of the trace with this role: time, input, output, session, end, duration, pause, "
        "messages, client, cached or hash_ids. E.g. input=usage.prompt_tokens or "
        "time=events.0.at; repeatable.",
        v.columns,
        "columns",
    ),
    "time_unit": Setting(
        LOAD,
        str,
        "s|ms|us|ns",
        "Unit of the trace's times. Default: from the column's name or the size of the numbers.",
        v.choice("s", "ms", "us", "ns"),
        "time_unit",
    ),
}
SHARED = {
    "model": Setting(
        TARGET,
        str,
        None,
        "Model to request. Default: the only one that is served.",
        v.text,
        "model",
    ),
    "api": Setting(
        TARGET,
        str,
        None,
        "chat, completions, responses, messages (Anthropic) or embeddings. Default: chat.",
        v.choice("chat", "completions", "responses", "messages", "embeddings"),
        "api",
    ),
    "api_key_env": Setting(
        TARGET, str, "NAME", "Environment variable that holds the API key.", v.text
    ),
    "header": Setting(
        TARGET, list[str], "'NAME: VALUE'", "Additional request header; repeatable.", v.headers
    ),
    "extra_body": Setting(
        TARGET,
        str,
        "JSON",
        "Additional fields of the request body, e.g. '{\"temperature\": 0}'.",
        v.extra_body,
        "extra_body",
    ),
    "lock": Setting(
        TARGET,
        list[str],
        "NAME=VALUE",
        "Fact about the deployment for the report, e.g. quantization=fp8 or hardware=4xH100; "
        "repeatable.",
        v.locked,
        "locked",
    ),
    "metrics_url": Setting(
        TARGET,
        list[str],
        "URL",
        "Additional Prometheus page to sample, e.g. of a DCGM exporter or Triton's "
        ":8002/metrics; repeatable.",
        v.metrics_urls,
        "metrics_urls",
    ),
    "workload": Setting(
        WORKLOAD,
        str,
        "NAME|FILE",
        "Built-in workload (see 'ampacity workload list') or a YAML file. Default: chat.",
        v.text,
    ),
    "input_tokens": Setting(
        WORKLOAD,
        str,
        "N|SPEC",
        "Prompt length in tokens: a number, or a distribution such as lognormal:p50=200,p99=800.",
        v.lengths,
    ),
    "output_tokens": Setting(
        WORKLOAD, str, "N|SPEC", "Answer length in tokens, written likewise.", v.lengths
    ),
    "tokenizer": Setting(
        WORKLOAD,
        str,
        None,
        "How prompt lengths are counted. words or none: no vocabulary, calibrated by the server's "
        "/tokenize or usage. server: its /tokenize, or refuse. Or cl100k_base, o200k_base, "
        "hf:PATH. Default: words.",
        v.text,
        "tokenizer",
    ),
    "prompts": Setting(
        WORKLOAD,
        Path,
        "FILE",
        "Real prompts: JSONL with messages, OpenAI batch lines, ShareGPT conversations, or a .txt "
        "file with one prompt per line.",
        v.path,
    ),
    "skip_bad_rows": Setting(
        WORKLOAD,
        bool,
        None,
        "Skip and count rows of --prompts or --trace that cannot be read.",
        v.flag,
        "skip_bad_rows",
    ),
    "fit_context": Setting(
        WORKLOAD,
        bool,
        None,
        "Shorten requests that do not fit the model's context, and end conversations before it. "
        "Default: refuse a workload if more than 1 % of it does not fit.",
        v.flag,
        "fit_context",
    ),
    "salt": Setting(
        WORKLOAD,
        str,
        "TEXT",
        "Cache-bust seed: fixes the prompts' texts. Default: new texts in each run, so that no "
        "cache knows them.",
        v.text,
        "salt",
    ),
    "sticky": Setting(
        TARGET,
        bool,
        None,
        "With several comma-separated URLs: keep each session on one. Default: round-robin by "
        "request.",
        v.flag,
        "sticky",
    ),
    "rates": Setting(
        LOAD,
        str,
        "R,R,...",
        "Offered load in requests/s, open loop. Default: found automatically.",
        v.rates,
        "rates",
    ),
    "concurrency": Setting(
        LOAD,
        str,
        "N,N,...",
        "Number of requests in flight, closed loop.",
        v.levels(v.whole_number(at_most=CONCURRENCY_MAX)),
        "concurrency",
    ),
    "lengths": Setting(
        LOAD,
        str,
        "P,P,...",
        "Sweep again with every request at these quantiles of the workload's lengths, e.g. "
        "p50,p99: one more curve for each.",
        v.quantile_names,
        "lengths",
    ),
    "duration": Setting(
        LOAD,
        str,
        "T",
        "Length of each stage, e.g. 30s or 2m. Default: 30s (predict: 5m).",
        v.parse_duration,
        "duration_s",
    ),
    "arrivals": Setting(
        LOAD,
        str,
        "SPEC",
        "Arrival process: poisson, constant, gamma:cv=3, weibull:cv=2, onoff:on=10s,off=50s, "
        "ramp:from=0.2,to=1.8, steps:rates=1/2/4, diurnal or burst:factor=5,length=10s. "
        "Default: the workload's.",
        v.text,
    ),
    "think_time": Setting(
        LOAD,
        str,
        "T",
        "Closed loop: pause of a user between an answer and the next request.",
        v.parse_duration,
        "think_s",
    ),
    "ramp": Setting(
        LOAD,
        str,
        "T",
        "Closed loop: start the users one after another over this time, which is not measured. "
        "For an open loop see --arrivals ramp.",
        v.parse_duration,
        "ramp_s",
    ),
    "warmup": Setting(
        LOAD,
        int,
        "N",
        "Requests at the start of each stage that are not counted. Default: found from the data; "
        "0 with --trace.",
        v.whole_number(at_least=0),
        "warmup_requests",
    ),
    "seed": Setting(
        LOAD,
        int,
        "N",
        "Fixes lengths and arrival times. Default: 1.",
        v.whole_number(at_least=0),
        "seed",
    ),
    "max_requests": Setting(
        LIMITS, int, "N", "End the run cleanly after N requests.", v.whole, "max_requests"
    ),
    "max_tokens": Setting(
        LIMITS,
        int,
        "N",
        "End the run cleanly after N planned tokens, input plus output.",
        v.whole,
        "max_tokens",
    ),
    "timeout": Setting(
        LIMITS,
        str,
        "T",
        "Abandon a request after this time. Default: no limit.",
        v.parse_duration,
        "limits.total_s",
    ),
    "idle_timeout": Setting(
        LIMITS,
        str,
        "T",
        "Abandon a request after this time without a byte from the server. Default: 2m.",
        v.parse_duration,
        "limits.idle_s",
    ),
    "max_in_flight": Setting(
        LIMITS,
        int,
        "N",
        "Shed requests beyond N in flight: recorded, never sent. Default: no limit.",
        v.whole,
        "limits.in_flight",
    ),
    "retries": Setting(
        LIMITS,
        int,
        "N",
        "Retry up to N times after 429, 502, 503, 504, a refused or a reset connection, honouring "
        "Retry-After. Every attempt is recorded; the first one counts. Default: 0.",
        v.whole_number(at_least=0),
        "limits.retries",
    ),
    "workers": Setting(
        LIMITS,
        int,
        "N",
        "Processes that generate the load. Default: one, more once it is half busy and cores are "
        "free.",
        v.whole_number(at_most=WORKERS_MAX),
        "workers",
    ),
    "cpus": Setting(
        LIMITS,
        str,
        "N,N,...",
        "Cores to pin the client to, e.g. 2,3 or 2-5 (Linux). Default: any.",
        v.cores,
        "cpus",
    ),
    "connections": Setting(
        LIMITS,
        str,
        "pool|new",
        "pool: keep connections alive and reuse them. new: one per request. Default: pool.",
        v.choice("pool", "new"),
        "connections",
    ),
    "timestamps": Setting(
        LIMITS,
        str,
        "kernel|read",
        "kernel: time at which the kernel received the data, exact even if the client is busy "
        "(falls back to read with TLS, a proxy, or off Linux). read: time at which the client "
        "read it. Do not compare runs across the two. Default: kernel.",
        v.choice("read", "kernel"),
        "timestamps",
    ),
    "slo": Setting(
        OUT,
        list[str],
        "METRIC_pQ=LIMIT",
        "Service level objective, e.g. ttft_p99=2s, itl_p99=50ms, e2e_p95=10s, error_rate=1%; "
        "repeatable.",
        v.items,
    ),
    "keep_answers": Setting(
        OUT,
        int,
        "MIB",
        "Keep answer texts in the run directory, up to this many MiB per process, for "
        "'ampacity report --checker'. Default: not kept.",
        v.mebibytes,
        "keep_answers_bytes",
    ),
    "peak_rps": Setting(
        OUT, float, "R", "Peak load in requests/s to size the fleet for.", v.positive
    ),
    "tp": Setting(
        OUT, int, "N", "GPUs per instance. Default: from --lock hardware=4xH100, else 1.", v.whole
    ),
    "safety": Setting(
        OUT, float, "F", "Safety factor on the number of instances. Default: 1.2.", v.safety_factor
    ),
    "gpu_hour": Setting(OUT, float, "USD", "Price of one GPU for one hour.", v.positive),
    "out": Setting(
        OUT, Path, "DIR", "Run directory; new or empty. Default: runs/<time>-<name>.", v.path, "out"
    ),
}
ALL = SHARED | REPLAY
VIRTUAL = (  # settings that a run without a network has
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
)


def read_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, parsed and validated. Raises a ValueError of one line."""
    return {name: s.read(raw[name], v.option(name)) for name, s in ALL.items() if name in raw}
