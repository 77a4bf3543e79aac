"""``ampacity sweep``: the latency-throughput curve of an endpoint, and what it means."""

from __future__ import annotations

from typing import Any

from ampacity.cli import options as o


@o.shares()
def sweep(url: o.Url, raw: dict[str, Any], json: o.Json = False) -> None:
    """Load an endpoint stage by stage, from low load to past saturation, and find its operating point.

    ampacity sweep http://127.0.0.1:8000/v1 --model M --workload chat --slo ttft_p99=2s --slo itl_p99=50ms
    """
    from ampacity.cli.experiment import run_experiment
    from ampacity.experiments import sweep as experiment

    run_experiment({"url": url, **raw}, experiment="sweep", drive=experiment.sweep, as_json=json)
