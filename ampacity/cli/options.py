"""The options that the experiments share, each declared once.

``@shares(...)`` gives a command the named ones; it gets them back as one dict ``raw`` of settings.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any

import typer

_TARGET, _LOAD, _WORKLOAD, _LIMITS, _OUT = "Endpoint", "Load", "Workload", "Limits", "Judgement and output"

Url = Annotated[
    str,
    typer.Argument(
        help="Base URL of an OpenAI-compatible server, as http://127.0.0.1:8000/v1", show_default=False
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="Model to ask for. Default: the only one that is served.", rich_help_panel=_TARGET
    ),
]
ApiName = Annotated[
    str | None,
    typer.Option(
        "--api",
        help="chat, completions, responses, messages (Anthropic) or embeddings. Default: chat.",
        rich_help_panel=_TARGET,
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        "--api-key-env",
        metavar="NAME",
        help="Environment variable that holds the API key.",
        rich_help_panel=_TARGET,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        "--header",
        metavar="'NAME: VALUE'",
        help="Further request header; repeatable.",
        rich_help_panel=_TARGET,
    ),
]
ExtraBody = Annotated[
    str | None,
    typer.Option(
        "--extra-body", metavar="JSON", help="Further fields of the request body.", rich_help_panel=_TARGET
    ),
]
Lock = Annotated[
    list[str] | None,
    typer.Option(
        "--lock",
        metavar="NAME=VALUE",
        help="A fact about the deployment for the report, as quantization=fp8 or hardware=4xH100; repeatable.",
        rich_help_panel=_TARGET,
    ),
]
MetricsUrl = Annotated[
    list[str] | None,
    typer.Option(
        "--metrics-url",
        metavar="URL",
        help="Further Prometheus page to sample, as of a DCGM exporter or Triton's :8002/metrics; repeatable.",
        rich_help_panel=_TARGET,
    ),
]

Rates = Annotated[
    str | None,
    typer.Option(
        "--rates",
        metavar="R,R,...",
        help="Offered requests/s, open loop. Default: the grid finds itself.",
        rich_help_panel=_LOAD,
    ),
]
Concurrency = Annotated[
    str | None,
    typer.Option(
        "--concurrency",
        metavar="N,N,...",
        help="Requests in flight, closed loop (the classical procedure).",
        rich_help_panel=_LOAD,
    ),
]
Arrivals = Annotated[
    str | None,
    typer.Option(
        "--arrivals",
        metavar="SPEC",
        help="poisson, constant, gamma:cv=3, weibull:cv=2, onoff:on=10s,off=50s, ramp:from=0.2,to=1.8, steps:rates=1/2/4, diurnal or burst:factor=5,length=10s. Default: the workload's.",
        rich_help_panel=_LOAD,
    ),
]
Duration = Annotated[
    str | None,
    typer.Option(
        "--duration",
        help="Length of each stage, as 30s or 2m. Default: 30s; of predict 5m, and 2,000 requests at least.",
        rich_help_panel=_LOAD,
        show_default=False,
    ),
]
Warmup = Annotated[
    int | None,
    typer.Option(
        "--warmup",
        metavar="N",
        help="Requests at the beginning of each stage that do not count. Default: found from the data; 0 with --trace.",
        rich_help_panel=_LOAD,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Replay a trace, a log or a schedule (CSV, JSONL, Parquet): its arrivals and token counts.",
        rich_help_panel=_LOAD,
    ),
]
TimeScale = Annotated[
    float | None,
    typer.Option(
        "--time-scale", metavar="X", help="Replay the trace X times as fast.", rich_help_panel=_LOAD
    ),
]
TraceFrom = Annotated[
    str | None,
    typer.Option(
        "--trace-from", metavar="T", help="Begin at this time of the trace, as 10m.", rich_help_panel=_LOAD
    ),
]
TraceTo = Annotated[
    str | None,
    typer.Option("--trace-to", metavar="T", help="End before this time of the trace.", rich_help_panel=_LOAD),
]
TraceKeep = Annotated[
    float | None,
    typer.Option(
        "--trace-keep",
        metavar="SHARE",
        help="Play a random share of the trace, as 0.1; sessions as a whole.",
        rich_help_panel=_LOAD,
    ),
]
TraceLoop = Annotated[
    int | None,
    typer.Option("--trace-loop", metavar="N", help="Play the trace N times over.", rich_help_panel=_LOAD),
]
TraceAsWritten = Annotated[
    bool | None,
    typer.Option(
        "--trace-as-written",
        help="Keep the bursts of a trace whose clock is coarse. Default: spread over the clock's step.",
        rich_help_panel=_LOAD,
    ),
]
SkipBadRows = Annotated[
    bool | None,
    typer.Option(
        "--skip-bad-rows",
        help="Leave out rows of the trace that cannot be read, and count them.",
        rich_help_panel=_LOAD,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="Fixes lengths and arrival times. Default: 1.", rich_help_panel=_LOAD),
]

WorkloadName = Annotated[
    str | None,
    typer.Option(
        "--workload",
        metavar="NAME|FILE",
        help="chat, rag, code, chat-short (see: ampacity workload list) or a YAML file. Default: chat.",
        rich_help_panel=_WORKLOAD,
    ),
]
InputTokens = Annotated[
    str | None,
    typer.Option(
        "--input-tokens",
        metavar="N|SPEC",
        help="Prompt length: a number, or lognormal:p50=200,p99=800",
        rich_help_panel=_WORKLOAD,
    ),
]
OutputTokens = Annotated[
    str | None,
    typer.Option(
        "--output-tokens", metavar="N|SPEC", help="Answer length, likewise.", rich_help_panel=_WORKLOAD
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        help="words or none (no vocabulary; calibrated by the server's usage), server (its own /tokenize), cl100k_base, o200k_base or hf:PATH. Default: words.",
        rich_help_panel=_WORKLOAD,
    ),
]

MaxRequests = Annotated[
    int | None,
    typer.Option(
        "--max-requests", metavar="N", help="End the run cleanly after N requests.", rich_help_panel=_LIMITS
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="End the run cleanly after N planned tokens, input and output together.",
        rich_help_panel=_LIMITS,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--timeout",
        metavar="T",
        help="Give a request up after this time. Default: none.",
        rich_help_panel=_LIMITS,
    ),
]

SloTexts = Annotated[
    list[str] | None,
    typer.Option(
        "--slo",
        metavar="METRIC_pQ=LIMIT",
        help="As ttft_p99=2s, itl_p99=50ms, e2e_p95=10s; repeatable.",
        rich_help_panel=_OUT,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Run directory; new or empty. Default: runs/<time>-<name>",
        rich_help_panel=_OUT,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print summary.json to stdout, and nothing else.", rich_help_panel=_OUT)
]
PeakRps = Annotated[
    float | None,
    typer.Option(
        "--peak-rps", metavar="R", help="Peak load that a fleet has to carry.", rich_help_panel=_OUT
    ),
]
TensorParallel = Annotated[
    int | None, typer.Option("--tp", metavar="N", help="GPUs per instance. Default: 1.", rich_help_panel=_OUT)
]
Safety = Annotated[
    float | None,
    typer.Option(
        "--safety",
        metavar="F",
        help="Safety factor on the number of instances. Default: 1.2.",
        rich_help_panel=_OUT,
    ),
]
GpuHour = Annotated[
    float | None,
    typer.Option("--gpu-hour", metavar="USD", help="Price of one GPU for one hour.", rich_help_panel=_OUT),
]

Timestamps = Annotated[
    str | None,
    typer.Option(
        "--timestamps",
        help="read (default): the moment of the read. kernel: the kernel's own (plain TCP on Linux), right even while the client is busy.",
        rich_help_panel=_LIMITS,
    ),
]
Connections = Annotated[
    str | None,
    typer.Option(
        "--connections",
        help="pool (default): kept alive and used again. new: one for each request.",
        rich_help_panel=_LIMITS,
    ),
]
MaxInFlight = Annotated[
    int | None,
    typer.Option(
        "--max-in-flight",
        metavar="N",
        help="Shed (record, never send) what would be in flight beyond N. Default: no limit.",
        rich_help_panel=_LIMITS,
    ),
]
IdleTimeout = Annotated[
    str | None,
    typer.Option(
        "--idle-timeout",
        metavar="T",
        help="Give a request up after so long without a byte from the server. Default: 2m.",
        rich_help_panel=_LIMITS,
        show_default=False,
    ),
]
ThinkTime = Annotated[
    str | None,
    typer.Option(
        "--think-time",
        metavar="T",
        help="Closed loop: pause of a user between an answer and the next request.",
        rich_help_panel=_LOAD,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Processes that generate the load. Default: one, and more as soon as it is half busy and cores are free.",
        rich_help_panel=_LIMITS,
    ),
]
Retries = Annotated[
    int | None,
    typer.Option(
        "--retries",
        metavar="N",
        help="Try again up to N times after 429, 502, 503, 504, no connection or a reset, honouring Retry-After; each attempt is a row, and the first one counts. Default: never.",
        rich_help_panel=_LIMITS,
    ),
]

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Real prompts: JSONL with messages, OpenAI batch lines or ShareGPT conversations, or a .txt with one a line.",
        rich_help_panel=_WORKLOAD,
    ),
]
Salt = Annotated[
    str | None,
    typer.Option(
        "--salt",
        metavar="TEXT",
        help="Fixes the texts of the prompts. Default: others in each run, so that no cache knows them.",
        rich_help_panel=_WORKLOAD,
    ),
]
Sticky = Annotated[
    bool | None,
    typer.Option(
        "--sticky",
        help="With several URLs, parted by commas: a session stays with one. Default: requests go round.",
        rich_help_panel=_TARGET,
    ),
]

SHARED: dict[str, tuple[Any, None]] = {  # defaults are those of make_settings, so that a flag beats a run file
    "model": (Model, None), "api": (ApiName, None), "api_key_env": (ApiKeyEnv, None), "header": (Header, None),
    "extra_body": (ExtraBody, None), "lock": (Lock, None), "metrics_url": (MetricsUrl, None),
    "workload": (WorkloadName, None), "input_tokens": (InputTokens, None), "output_tokens": (OutputTokens, None),
    "tokenizer": (Tokenizer, None), "prompts": (Prompts, None), "salt": (Salt, None), "sticky": (Sticky, None),
    "rates": (Rates, None), "concurrency": (Concurrency, None), "duration": (Duration, None), "arrivals": (Arrivals, None),
    "think_time": (ThinkTime, None), "warmup": (Warmup, None), "seed": (Seed, None),
    "max_requests": (MaxRequests, None), "max_tokens": (MaxTokens, None), "timeout": (Timeout, None),
    "idle_timeout": (IdleTimeout, None), "max_in_flight": (MaxInFlight, None), "retries": (Retries, None),
    "workers": (Workers, None), "connections": (Connections, None), "timestamps": (Timestamps, None),
    "slo": (SloTexts, None), "peak_rps": (PeakRps, None), "tp": (TensorParallel, None), "safety": (Safety, None),
    "gpu_hour": (GpuHour, None), "out": (Out, None),
}  # fmt: skip
ALL = tuple(SHARED)
VIRTUAL = (  # what a run without a wire has use for
    "workload", "input_tokens", "output_tokens", "rates", "concurrency", "think_time", "duration", "arrivals", "warmup", "seed", "max_requests", "max_tokens",
    "slo", "peak_rps", "tp", "safety", "gpu_hour", "out",
)  # fmt: skip


def shares(names: tuple[str, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the shared options ``names``; its parameter ``raw`` gets all that were given another value."""
    return gathers(
        "raw",
        [
            Parameter(name, Parameter.KEYWORD_ONLY, annotation=SHARED[name][0], default=SHARED[name][1])
            for name in names
        ],
    )


def gathers(into: str, options: list[Parameter]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command further options; its parameter ``into`` gets a dict of those that have a value.

    Typer reads the options from the signature, hence the new one.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [p for p in signature(command, eval_str=True).parameters.values() if p.name != into]

        @wraps(command)
        def with_options(**given: Any) -> None:
            gathered = {p.name: given[p.name] for p in options if given[p.name] not in (None, [])}
            command(**{into: gathered}, **{p.name: given[p.name] for p in own})

        parameters = [*(p.replace(kind=Parameter.KEYWORD_ONLY) for p in own), *options]
        with_options.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate
