"""``ampacity demo``: a sweep of the embedded simulator, with a report."""

from functools import partial
from typing import Any

from ampacity.cli import options as o

# three stages up to saturation leave most of the time for loads near the limit
PRESET, WORKLOAD, DURATION, START_RPS = "demo", "chat-short", "12s", 50.0
SLOS = ["ttft_p95=250ms", "itl_p99=100ms"]


@o.shares(("rates", "duration", "seed", "out"))
def demo(raw: dict[str, Any], json: o.Json = False) -> None:
    """Sweep an embedded simulated server and write a report. Takes about 110 s.

    ampacity demo

    ampacity demo --out runs/demo --json
    """
    from ampacity.cli.experiment import run_experiment
    from ampacity.experiments.sweep import sweep
    from ampacity.simulator.server.launch import start_in_process

    with start_in_process(PRESET) as server:
        raw = {
            "url": server.url,
            "model": server.model,
            "workload": WORKLOAD,
            "duration": DURATION,
            "slo": SLOS,
            **raw,
            "lock": ["hardware=simulated L4", "engine=ampacity simulator"],
            "peak_rps": 1000,
            "gpu_hour": 0.8,
        }
        run_experiment(
            raw, experiment="demo", drive=partial(sweep, start_rps=START_RPS), as_json=json
        )
