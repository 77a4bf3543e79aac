"""``ampacity demo``: a sweep of the embedded simulator, with a report."""

from functools import partial
from typing import Any

from ampacity.cli import options as o

# short stages up to saturation leave most of the time for loads near the limit
PRESET, WORKLOAD, DURATION, START_RPS = "demo", "chat-short", "8s", 90.0
MAX_DURATION_S = 100.0  # with the waits for answers after each stage
SLOS = ["ttft_p95=250ms", "itl_p99=100ms"]


@o.shares(("rates", "duration", "seed", "out"), duration=DURATION)
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
        limit_s = None if "rates" in raw else MAX_DURATION_S
        drive = partial(sweep, start_rps=START_RPS, max_duration_s=limit_s)
        run_experiment(raw, experiment="demo", drive=drive, as_json=json)
