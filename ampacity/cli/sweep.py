"""``ampacity sweep``: the latency-throughput curve of an endpoint, and what it means."""

from __future__ import annotations

from typing import Any

from ampacity.cli import options as o


def sweep(
    url: o.Url,
    model: o.Model = None,
    workload: o.WorkloadName = None,
    slo: o.SloTexts = None,
    rates: o.Rates = None,
    concurrency: o.Concurrency = None,
    duration: o.Duration = None,
    arrivals: o.Arrivals = None,
    think_time: o.ThinkTime = None,
    warmup: o.Warmup = None,
    input_tokens: o.InputTokens = None,
    output_tokens: o.OutputTokens = None,
    tokenizer: o.Tokenizer = "words",
    api: o.ApiName = "chat",
    api_key_env: o.ApiKeyEnv = None,
    header: o.Header = None,
    extra_body: o.ExtraBody = None,
    lock: o.Lock = None,
    max_requests: o.MaxRequests = None,
    max_tokens: o.MaxTokens = None,
    timeout: o.Timeout = None,
    idle_timeout: o.IdleTimeout = None,
    max_in_flight: o.MaxInFlight = None,
    retries: o.Retries = None,
    workers: o.Workers = None,
    connections: o.Connections = "pool",
    timestamps: o.Timestamps = "read",
    seed: o.Seed = 1,
    peak_rps: o.PeakRps = None,
    tp: o.TensorParallel = 1,
    safety: o.Safety = 1.2,
    gpu_hour: o.GpuHour = None,
    out: o.Out = None,
    json: o.Json = False,
) -> None:
    """Load an endpoint stage by stage, from low load to past saturation, and find its operating point.

    ampacity sweep http://127.0.0.1:8000/v1 --model M --workload chat --slo ttft_p99=2s --slo itl_p99=50ms
    """
    raw: dict[str, Any] = {k: v for k, v in locals().items() if k != "json"}
    from ampacity.cli.experiment import run_experiment
    from ampacity.experiments import sweep as experiment

    run_experiment(raw, experiment="sweep", drive=experiment.sweep, as_json=json)
