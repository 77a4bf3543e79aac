"""The settings of an experiment, each declared once: the command line's options and the keys of a run file.

By name: the group it stands in, its type on the command line, how a value is written, what it means. Values are
read, and given their defaults, by ``ampacity.config``.
"""

from __future__ import annotations

from pathlib import Path

TARGET, LOAD, WORKLOAD, LIMITS, OUT = (
    "Endpoint",
    "Load",
    "Workload",
    "Limits",
    "Judgement and output",
)

Setting = tuple[str, type, str | None, str]
REPLAY: dict[str, Setting] = {  # of a trace, which 'ampacity run' alone plays
    "trace": (
        LOAD,
        Path,
        "FILE",
        "Replay a trace, a log or a schedule (CSV, JSONL, Parquet): its arrivals, token counts, sessions and messages.",
    ),
    "time_scale": (LOAD, float, "X", "Replay the trace X times as fast."),
    "trace_from": (LOAD, str, "T", "Begin at this time of the trace, as 10m."),
    "trace_to": (LOAD, str, "T", "End before this time of the trace."),
    "trace_keep": (
        LOAD,
        float,
        "SHARE",
        "Play a random share of the trace, as 0.1; sessions as a whole.",
    ),
    "trace_loop": (LOAD, int, "N", "Play the trace N times over."),
    "max_think": (
        LOAD,
        str,
        "T",
        "No pause within a session of the trace is longer than this, as 60s.",
    ),
    "think_scale": (
        LOAD,
        float,
        "X",
        "Multiply the pauses within sessions of the trace by X. Default: as --time-scale has it.",
    ),
    "block_size": (
        LOAD,
        int,
        "N",
        "Tokens of a block in the trace's hash_ids. Default: as the file says, else found by its lengths.",
    ),
    "trace_as_written": (
        LOAD,
        bool,
        None,
        "Keep the bursts of a trace whose clock is coarse. Default: spread over the clock's step.",
    ),
    "column": (
        LOAD,
        list[str],
        "ROLE=NAME",
        "Column of the trace that holds time, input, output, session, end, duration, pause, messages, client, cached or hash_ids, as input=usage.prompt_tokens or time=events.0.at; repeatable.",
    ),
    "time_unit": (
        LOAD,
        str,
        None,
        "Unit of the trace's times: s, ms, us or ns. Default: by the column's name or the size of the numbers.",
    ),
}
SHARED: dict[str, Setting] = {
    "model": (TARGET, str, None, "Model to ask for. Default: the only one that is served."),
    "api": (
        TARGET,
        str,
        None,
        "chat, completions, responses, messages (Anthropic) or embeddings. Default: chat.",
    ),
    "api_key_env": (TARGET, str, "NAME", "Environment variable that holds the API key."),
    "header": (TARGET, list[str], "'NAME: VALUE'", "Further request header; repeatable."),
    "extra_body": (TARGET, str, "JSON", "Further fields of the request body."),
    "lock": (
        TARGET,
        list[str],
        "NAME=VALUE",
        "A fact about the deployment for the report, as quantization=fp8 or hardware=4xH100; repeatable.",
    ),
    "metrics_url": (
        TARGET,
        list[str],
        "URL",
        "Further Prometheus page to sample, as of a DCGM exporter or Triton's :8002/metrics; repeatable.",
    ),
    "workload": (
        WORKLOAD,
        str,
        "NAME|FILE",
        "chat, rag, code, chat-short (see: ampacity workload list) or a YAML file. Default: chat.",
    ),
    "input_tokens": (
        WORKLOAD,
        str,
        "N|SPEC",
        "Prompt length: a number, or lognormal:p50=200,p99=800",
    ),
    "output_tokens": (WORKLOAD, str, "N|SPEC", "Answer length, likewise."),
    "tokenizer": (
        WORKLOAD,
        str,
        None,
        "words or none (no vocabulary; calibrated by the server's /tokenize or usage), server (its /tokenize, or refuse), cl100k_base, o200k_base or hf:PATH. Default: words.",
    ),
    "prompts": (
        WORKLOAD,
        Path,
        "FILE",
        "Real prompts: JSONL with messages, OpenAI batch lines or ShareGPT conversations, or a .txt with one a line.",
    ),
    "skip_bad_rows": (
        WORKLOAD,
        bool,
        None,
        "Leave out rows of --prompts or --trace that cannot be read, and count them.",
    ),
    "fit_context": (
        WORKLOAD,
        bool,
        None,
        "Shorten what does not fit the model's context, and end conversations before it. Default: a workload of which more than 1 % does not fit is refused.",
    ),
    "salt": (
        WORKLOAD,
        str,
        "TEXT",
        "Fixes the texts of the prompts. Default: others in each run, so that no cache knows them.",
    ),
    "sticky": (
        TARGET,
        bool,
        None,
        "With several URLs, comma-separated: a session stays with one. Default: requests go round.",
    ),
    "rates": (
        LOAD,
        str,
        "R,R,...",
        "Offered requests/s, open loop. Default: the grid finds itself.",
    ),
    "concurrency": (
        LOAD,
        str,
        "N,N,...",
        "Requests in flight, closed loop (the classical procedure).",
    ),
    "lengths": (
        LOAD,
        str,
        "P,P,...",
        "Sweep again with every request at these quantiles of the workload's input and output lengths, as p50,p99: a curve each, beside the workload's own.",
    ),
    "duration": (
        LOAD,
        str,
        None,
        "Length of each stage, as 30s or 2m. Default: 30s; of predict 5m, and 2,000 requests at least.",
    ),
    "arrivals": (
        LOAD,
        str,
        "SPEC",
        "poisson, constant, gamma:cv=3, weibull:cv=2, onoff:on=10s,off=50s, ramp:from=0.2,to=1.8, steps:rates=1/2/4, diurnal or burst:factor=5,length=10s. Default: the workload's.",
    ),
    "think_time": (
        LOAD,
        str,
        "T",
        "Closed loop: pause of a user between an answer and the next request.",
    ),
    "ramp": (
        LOAD,
        str,
        "T",
        "Closed loop: the users begin one after the other over this time, which does not count and comes before --duration; an open loop has --arrivals ramp.",
    ),
    "warmup": (
        LOAD,
        int,
        "N",
        "Requests at the beginning of each stage that do not count. Default: found from the data; 0 with --trace.",
    ),
    "seed": (LOAD, int, None, "Fixes lengths and arrival times. Default: 1."),
    "max_requests": (LIMITS, int, "N", "End the run cleanly after N requests."),
    "max_tokens": (
        LIMITS,
        int,
        "N",
        "End the run cleanly after N planned tokens, input and output together.",
    ),
    "timeout": (LIMITS, str, "T", "Give a request up after this time. Default: none."),
    "idle_timeout": (
        LIMITS,
        str,
        "T",
        "Give a request up after so long without a byte from the server. Default: 2m.",
    ),
    "max_in_flight": (
        LIMITS,
        int,
        "N",
        "Shed (record, never send) what would be in flight beyond N. Default: no limit.",
    ),
    "retries": (
        LIMITS,
        int,
        "N",
        "Try again up to N times after 429, 502, 503, 504, no connection or a reset, honouring Retry-After; each attempt is a row, and the first one counts. Default: never.",
    ),
    "workers": (
        LIMITS,
        int,
        "N",
        "Processes that generate the load. Default: one, and more as soon as it is half busy and cores are free.",
    ),
    "cpus": (
        LIMITS,
        str,
        "N,N,...",
        "Cores of this machine that the client is pinned to, as 2,3 or 2-5 (Linux). Default: any.",
    ),
    "connections": (
        LIMITS,
        str,
        None,
        "pool (default): kept alive and used again. new: one for each request.",
    ),
    "timestamps": (
        LIMITS,
        str,
        None,
        "kernel (default): when the kernel received it, right even while the client is busy; where it cannot tell (TLS, a proxy, not Linux), as read. read: when the program read it. Runs of the two are not comparable.",
    ),
    "slo": (
        OUT,
        list[str],
        "METRIC_pQ=LIMIT",
        "As ttft_p99=2s, itl_p99=50ms, e2e_p95=10s; repeatable.",
    ),
    "keep_answers": (
        OUT,
        int,
        "MIB",
        "Keep the texts of answers in the run directory, at most so many MiB of each process, for 'ampacity report --checker'. Default: no text is kept.",
    ),
    "peak_rps": (OUT, float, "R", "Peak load that a fleet has to carry."),
    "tp": (OUT, int, "N", "GPUs per instance. Default: as --lock hardware=4xH100 says, or 1."),
    "safety": (OUT, float, "F", "Safety factor on the number of instances. Default: 1.2."),
    "gpu_hour": (OUT, float, "USD", "Price of one GPU for one hour."),
    "out": (OUT, Path, "DIR", "Run directory; new or empty. Default: runs/<time>-<name>"),
}
VIRTUAL = (  # what a run without a wire has use for
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
