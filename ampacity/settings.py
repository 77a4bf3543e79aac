# ruff: noqa: RUF009 - a setting is declared by a call that returns a dataclass field
"""The settings of an experiment. Each is declared once, with its option, check and default.

The key of a run file is the option's name. Nothing heavy is imported: ``ampacity COMMAND --help``
needs this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampacity import values as v
from ampacity.durations import duration_text

if TYPE_CHECKING:
    from ampacity.analysis.slo import Slo
    from ampacity.loadgen.net.http import Reuse, Stamps
    from ampacity.loadgen.plan import Limits
    from ampacity.loadgen.send.endpoint import Endpoint
    from ampacity.loadgen.send.protocols import Api
    from ampacity.workloads.profile import Workload

CONCURRENCY_MAX = 100_000
BLOCK_MAX = 1 << 20
WORKERS_MAX = 256
TLS_OPTIONS = ("cacert", "cert", "insecure")
OUTPUT = "Output"
GROUPS = ("Endpoint", "Load", "Workload", "SLO and fleet", OUTPUT, "Limits and client", "Trace")
"""Groups of options, in the order of use."""


@dataclass(frozen=True)
class Kind:
    """A type on the command line, and a reader of an option's text or a run file's value."""

    type: Any
    metavar: str | None = None
    read: v.Reader = v.text


@dataclass(frozen=True)
class Setting:
    """A declared setting; ``needs`` names the options of which one must be given too."""

    kind: Kind
    help: str
    default: str  # as the help shows it; "": none
    group: str
    name: str  # of the option and the run file's key, with _; "": the field's
    needs: str


def _setting(
    group: str, kind: Kind, default: Any = None, *, name: str = "", needs: str = ""
) -> Callable[..., Any]:
    """Return a function of the help text that returns a field of Settings.

    ``otherwise``: what the setting is if not given, where that is no plain value.
    """

    def declare(text: str, otherwise: str = "") -> Any:
        if not otherwise and default is not False and default not in (None, (), {}, float("inf")):
            is_time = kind.read is v.parse_duration and default
            otherwise = duration_text(default) if is_time else str(default).removesuffix(".0")
        metadata = {"setting": Setting(kind, text, otherwise, group, name, needs)}
        if isinstance(default, dict):
            return field(default_factory=dict, metadata=metadata)
        return field(default=default, metadata=metadata)

    return declare


def _whole(at_least: int = 1, at_most: int = 2**53) -> Kind:
    return Kind(int, "N", v.whole_number(at_least, at_most))


def _choice(*allowed: str) -> Kind:
    return Kind(str, "|".join(allowed), v.choice(*allowed))


_text, _list = partial(Kind, str), partial(Kind, list[str])
_number = partial(Kind, float, read=v.positive)
DURATION, COUNT, NAME = _text("T", v.parse_duration), _whole(), _text("NAME")
FILE, FLAG = Kind(Path, "FILE", v.path), Kind(bool, None, v.flag)
_endpoint, _load, _workload, _slo, _output, _limit, _trace = (partial(_setting, g) for g in GROUPS)
_TRACE = "--trace"
_of_trace = partial(_trace, needs=_TRACE)


@dataclass(frozen=True)
class Settings:
    """A validated experiment. Durations in seconds, rates per second.

    The first four fields are built from several settings; further endpoints (``replicas``) are
    used round-robin.
    """

    endpoint: Endpoint
    replicas: tuple[Endpoint, ...]
    workload: Workload
    slos: tuple[Slo, ...]

    model: str | None = _endpoint(NAME)("Name of the model.", "the only one served")
    api: Api = _endpoint(
        _text("API", v.choice("chat", "completions", "responses", "messages", "embeddings")), "chat"
    )("chat, completions, responses, messages (Anthropic) or embeddings.")
    api_key_env: str | None = _endpoint(_text("NAME"))(
        "Environment variable that holds the API key. Several, comma-separated, take turns."
    )
    api_key_file: str | None = _endpoint(_text("FILE"))(
        "File that holds the API key or one key per line. Only its owner may have access."
    )
    api_key_command: str | None = _endpoint(_text("COMMAND"))(
        "Command that prints the API key, or JSON with a key and its expiry. Run again before the "
        "expiry and after a 401."
    )
    api_key_header: str | None = _endpoint(_text("NAME[: SCHEME]"))(
        "Header that carries the API key, e.g. api-key or 'Authorization: Token'.",
        "the API's or the known provider's",
    )
    path: str | None = _endpoint(_text("PATH"))(
        "Path of the requests below the base URL.", "the API's, as /chat/completions"
    )
    header: tuple[tuple[str, str], ...] = _endpoint(_list("'NAME: VALUE'", v.headers), ())(
        "Additional request header; repeatable."
    )
    cacert: Path | None = _endpoint(FILE)(
        "Authorities that TLS trusts (PEM).", "the system's, or SSL_CERT_FILE"
    )
    cert: Path | None = _endpoint(FILE)("Client certificate for TLS, with its key (PEM).")
    insecure: bool = _endpoint(FLAG, False)("Do not check the server's certificate. Unsafe.")
    extra_body: dict[str, Any] = _endpoint(_text("JSON", v.extra_body), {})(
        "Additional fields of the request body, e.g. '{\"temperature\": 0}'."
    )
    locked: dict[str, str] = _endpoint(_list("NAME=VALUE", v.locked), {}, name="lock")(
        "Fact about the deployment for the report, e.g. quantization=fp8 or hardware=4xH100; "
        "repeatable."
    )
    metrics_urls: tuple[str, ...] = _endpoint(_list("URL", v.metrics_urls), (), name="metrics_url")(
        "Additional Prometheus page to sample, e.g. of a DCGM exporter or Triton's "
        ":8002/metrics; repeatable."
    )
    sticky: bool = _endpoint(FLAG, False)(
        "With several comma-separated URLs: keep each session on one.", "round-robin by request"
    )

    workload_name: str | None = _workload(_text("NAME|FILE"), name="workload")(
        "Built-in workload or a YAML file. See 'ampacity workload list'.", "chat"
    )
    input_tokens: Any = _workload(_text("N|SPEC", v.lengths))(
        "Prompt length in tokens: a number, or a distribution such as lognormal:p50=200,p99=800."
    )
    output_tokens: Any = _workload(_text("N|SPEC", v.lengths))(
        "Answer length in tokens, written likewise."
    )
    tokenizer: str = _workload(NAME, "words")(
        "How prompt lengths are counted. words or none: no vocabulary, calibrated by the server's"
        " /tokenize or usage. server: its /tokenize, or refuse. Or cl100k_base, o200k_base, "
        "hf:PATH."
    )
    prompts: Path | None = _workload(FILE)(
        "Real prompts: JSONL with messages, OpenAI batch lines, ShareGPT conversations, or a "
        ".txt file with one prompt per line."
    )
    skip_bad_rows: bool = _workload(FLAG, False, needs="--prompts or --trace")(
        "Skip and count rows that cannot be read. Of --prompts or --trace."
    )
    fit_context: bool = _workload(FLAG, False)(
        "Shorten requests that do not fit the model's context, and end conversations before it.",
        "refuse a workload if more than 1 % of it does not fit",
    )
    salt: str | None = _workload(_text("TEXT"))(
        "Cache-bust seed: fixes the prompts' texts.",
        "new texts in each run, so that no cache knows them",
    )

    rates: tuple[float, ...] | None = _load(_text("R,R,...", v.each(v.positive)))(
        "Offered load in requests/s (open loop).", "found automatically"
    )
    concurrency: tuple[int, ...] | None = _load(
        _text("N,N,...", v.each(v.whole_number(at_most=CONCURRENCY_MAX)))
    )("Number of requests in flight (closed loop), in place of --rates.")
    lengths: tuple[str, ...] = _load(_text("P,P,...", v.quantile_names), ())(
        "Sweep again with every request at these quantiles of the workload's lengths, e.g. "
        "p50,p99: one more curve for each."
    )
    durations_s: tuple[float, ...] = _load(
        _text("T,T,...", v.each(v.parse_duration)), (30.0,), name="duration"
    )("Length of a stage, or one each: 2m,5m.", "30s")
    arrivals: str | None = _load(_text("SPEC"))(
        "Arrival process: poisson, constant, gamma:cv=3, weibull:cv=2, onoff:on=10s,off=50s, "
        "ramp:from=0.2,to=1.8, steps:rates=1/2/4, diurnal or burst:factor=5,length=10s.",
        "the workload's",
    )
    think_s: float = _load(
        DURATION,
        0.0,
        name="think_time",
        needs="--concurrency: in an open loop nobody waits for an answer",
    )("Pause of a user between an answer and the next request, in a closed loop.")
    ramp_s: float = _load(
        DURATION,
        0.0,
        name="ramp",
        needs="--concurrency: an open loop rises with --arrivals ramp:from=0.2,to=1.8",
    )(
        "Start the users one after another over this time, in a closed loop. It is not measured. "
        "For an open loop see --arrivals ramp."
    )
    warmup_requests: int | None = _load(_whole(at_least=0), name="warmup")(
        "Requests at the start of a stage that are not counted.",
        "found from the data; 0 with --trace",
    )
    seed: int = _load(_whole(at_least=0), 1)(
        "Seed of what is random: fixes lengths and arrival times."
    )

    max_requests: int | None = _limit(COUNT)("Limit of requests. The run ends cleanly after N.")
    max_tokens: int | None = _limit(COUNT)(
        "Limit of tokens, input plus output. The run ends cleanly after N planned ones."
    )
    max_cost: float | None = _limit(_number("USD"), needs="--prices")(
        "Limit of spend. The run ends cleanly once what was answered and is in flight reaches it."
    )
    prices: Path | None = _limit(FILE)(
        "Prices of hosted APIs in USD per million tokens: CSV with the columns model, input, "
        "output and, where there are such, cached and cache_write."
    )
    max_errors: float | None = _limit(_text("SHARE", v.share))(
        "End the run when more of a stage's requests fail, e.g. 5%.",
        "only the stage, and no higher load, once most fail",
    )
    yes: bool = _limit(FLAG, False)("Do not ask before load goes to a public address.")
    timeout: float | None = _limit(DURATION)("Abandon a request after this time.", "no limit")
    idle_timeout: float = _limit(DURATION, 120.0)(
        "Abandon a request after this time without a byte from the server."
    )
    max_in_flight: int | None = _limit(COUNT)(
        "Shed requests beyond N in flight: recorded, never sent.", "no limit"
    )
    retries: int = _limit(_whole(at_least=0), 0)(
        "Retry up to N times after 408, 429, 500, 502-504, 520-524, 529, an overload event, a "
        "refused or a reset connection, never before Retry-After. Every attempt is recorded; the "
        "first one counts."
    )
    workers: int | None = _limit(_whole(at_most=WORKERS_MAX))(
        "Processes that generate the load.", "one, more once it is half busy and cores are free"
    )
    ray: str | None = _limit(_text("ADDRESS"), needs="--workers")(
        "Run the workers on this Ray cluster: auto, or the HOST:PORT of its head."
    )
    cpus: tuple[int, ...] = _limit(_text("N,N,...", v.cores), ())(
        "Cores to pin the client to, e.g. 2,3 or 2-5 (Linux).", "any"
    )
    sources: tuple[str, ...] = _limit(_text("A,A,...", v.addresses), (), name="source_address")(
        "Local addresses that connections come from in turn, e.g. 10.0.0.2,10.0.0.3 or "
        "127.0.0.2-127.0.0.9 (Linux). Each has about 28,000 ports to an endpoint.",
        "the system's choice",
    )
    connections: Reuse = _limit(_choice("pool", "new"), "pool")(
        "pool: keep connections alive and reuse them. new: one per request."
    )
    timestamps: Stamps = _limit(_choice("kernel", "read"), "kernel")(
        "kernel: time at which the kernel received the data, exact even if the client is busy "
        "(falls back to read off Linux). read: time at which the client "
        "read it. Do not compare runs across the two."
    )

    slo: Sequence[Any] = _slo(_list("METRIC_pQ=LIMIT", v.pairs), ())(
        "Service level objective, e.g. ttft_p99=2s; repeatable. A capacity is found only with one. "
        "Also itl_p99.9=50ms, e2e_max=10s, error_rate=1%, goodput=95%, or of one class: "
        "chat:ttft_p95=1s."
    )
    keep_answers_bytes: int | None = _output(Kind(int, "MIB", v.mebibytes), name="keep_answers")(
        "Keep answer texts in the run directory, up to this many MiB per process, for 'ampacity "
        "report --checker'.",
        "not kept",
    )
    peak_rps: float | None = _slo(_number("R"))("Peak load in requests/s to size the fleet for.")
    tp: int = _slo(COUNT, 1)("GPUs per instance.", "from --lock hardware=4xH100, else 1")
    safety: float | None = _slo(_number("F", read=v.safety_factor))(
        "Safety factor on the number of instances.", "1.5; see plan --profile"
    )
    gpu_hour: float | None = _slo(_number("USD"))("Price of one GPU for one hour.")
    out: Path | None = _output(Kind(Path, "DIR", v.path))(
        "Output: run directory; it must be new or empty.", "runs/<time>-<name>"
    )

    prometheus: tuple[str, int] | None = _output(_text("PORT|HOST:PORT", v.listen_at))(
        "Serve the load's counters to Prometheus at http://127.0.0.1:PORT/metrics while it runs."
    )
    otlp: str | None = _output(_text("URL", v.otlp_url))(
        "Post the same counters to an OpenTelemetry collector, e.g. http://127.0.0.1:4318 (OTLP "
        "over HTTP, JSON)."
    )

    # settings of a trace, which only 'ampacity run' plays
    trace: Path | None = _trace(FILE)(
        "Trace, log or schedule to replay. CSV, JSONL or Parquet: its arrival times, token "
        "counts, sessions and messages."
    )
    time_scale: float = _of_trace(_number("X"), 1.0)("Replay the trace X times as fast.")
    trace_from: float = _of_trace(DURATION, 0.0)("Start at this time of the trace, e.g. 10m.")
    trace_to: float | None = _of_trace(DURATION)("Stop before this time of the trace.")
    trace_keep: float = _of_trace(_number("SHARE"), 1.0)(
        "Play a random share of the trace, e.g. 0.1. Sessions are kept or dropped whole."
    )
    trace_loop: int = _of_trace(COUNT, 1)("Play the trace N times.")
    max_think: float = _of_trace(DURATION, float("inf"))(
        "Shorten pauses within the trace's sessions to at most this, e.g. 60s."
    )
    think_scale: float | None = _of_trace(_number("X"))(
        "Multiply pauses within the trace's sessions by X.", "scaled by --time-scale"
    )
    block_size: int | None = _of_trace(_whole(at_most=BLOCK_MAX))(
        "Tokens per block of the trace's hash_ids.", "from the file, else from its lengths"
    )
    trace_as_written: bool = _of_trace(FLAG, False)(
        "Keep the bursts of a trace with a coarse clock.", "spread them over a clock step"
    )
    columns: dict[str, str] = _of_trace(_list("ROLE=NAME", v.columns), {}, name="column")(
        "Column of the trace or log with this role: time, input, output, session, end, duration, "
        "pause, messages, client, cached or hash_ids. E.g. input=usage.prompt_tokens or "
        "time=events.0.at; repeatable."
    )
    time_unit: str | None = _of_trace(_choice("s", "ms", "us", "ns"))(
        "Unit of the trace's times.", "from the column's name or the size of the numbers"
    )

    @property
    def duration_s(self) -> float:
        """Return the length of a stage, the longest of several."""
        return max(self.durations_s)

    @property
    def loads(self) -> list[tuple[float, float]]:
        """Return (rate or users, length of its stage in s) of each load that was given."""
        loads = self.concurrency or self.rates or ()
        lengths = self.durations_s * (1 if len(self.durations_s) > 1 else len(loads))
        return list(zip(loads, lengths, strict=True))

    @property
    def limits(self) -> Limits:
        from ampacity.loadgen.plan import Limits

        return Limits(
            self.timeout, self.idle_timeout, self.max_errors, self.max_in_flight, self.retries
        )

    @property
    def in_one_process(self) -> str:
        """Return the limit that only one process can keep; "" if there is none."""
        counted = [name for name in ("requests", "tokens") if getattr(self, f"max_{name}")]
        of_retries = f"--max-{counted[0]} with --retries" if counted and self.retries else ""
        return "--max-cost" if self.max_cost else of_retries


_DECLARED = [(f, f.metadata["setting"]) for f in fields(Settings) if f.metadata]
FIELDS = {setting.name or f.name: f.name for f, setting in _DECLARED}
"""The field of Settings that an option sets."""
SETTINGS: dict[str, Setting] = {setting.name or f.name: setting for f, setting in _DECLARED}
REPLAY = [name for name, setting in SETTINGS.items() if name == "trace" or setting.needs == _TRACE]
SHARED = [name for name in SETTINGS if name not in REPLAY]


def read_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, parsed and validated. Raises a ValueError of one line."""
    return {
        name: s.kind.read(raw[name], v.option(name)) for name, s in SETTINGS.items() if name in raw
    }
