"""``ampacity demo``: a sweep of the embedded simulator, with a report."""

from functools import partial
from typing import Any

from ampacity.cli import options as o

# short stages up to saturation leave most of the time for loads near the limit
PRESET, WORKLOAD, DURATION, START_RPS = "demo-l40s", "chat-short", "8s", 180.0
MAX_DURATION_S = 100.0  # with the waits for answers after each stage
SLOS = ["ttft_p95=150ms", "itl_p99=50ms"]


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
            "lock": ["hardware=simulated L40S", "engine=ampacity simulator"],
            "peak_rps": 1000,
            "gpu_hour": 1.0,
        }
        limit_s = None if "rates" in raw else MAX_DURATION_S
        drive = partial(sweep, start_rps=START_RPS, max_duration_s=limit_s)
        run_experiment(raw, experiment="demo", drive=drive, as_json=json)
