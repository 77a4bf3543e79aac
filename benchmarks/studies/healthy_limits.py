"""How often does a rule of diagnosis hold for a healthy engine? Predicted runs at 30 to 85 % of
capacity.

    python -m benchmarks.studies.healthy_limits --runs 25

A capacity is found first by a long search; each run then has stages at 0.3, 0.6 and 0.85 of it.
Near the knee `queueing` may hold; any other rule is a false alarm.
"""

import asyncio
import collections
import io
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.summary import summarise
from ampacity.config import make_settings
from ampacity.experiments.virtual.predict import predict
from ampacity.loadgen.rundir.files import load_run
from ampacity.progress import Progress
from ampacity.simulator.models.hardware import find_deployment
from benchmarks.options import parser

HEALTHY: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("llama3-8b-h100", {"workload": "chat", "slo": ["ttft_p95=1s", "tpot_p95=50ms"]}),
    "short": (
        "llama3-8b-a100",
        {"workload": "chat-short", "slo": ["ttft_p95=300ms", "tpot_p95=40ms"]},
    ),
    "70b": ("llama3-70b-4xh100", {"workload": "chat", "slo": ["ttft_p95=2s", "tpot_p95=80ms"]}),
    "code": ("llama3-8b-h100", {"workload": "code", "slo": ["ttft_p95=1s"]}),
}
SHARES = (0.3, 0.6, 0.85)


def run(engine: str, load: dict[str, Any], rates: str | None, seed: int) -> Summary:
    with tempfile.TemporaryDirectory() as folder:
        given = {"url": "http://predicted.invalid/v1", "duration": "60s", "seed": seed}
        given |= {"out": str(Path(folder) / "run")} | load | ({"rates": rates} if rates else {})
        quiet = Progress(Console(file=io.StringIO()))
        settings = make_settings(given)
        path = asyncio.run(predict(settings, find_deployment(engine), ["ampacity"], quiet))
        return summarise(load_run(path))


def main() -> None:
    made = parser(__doc__, runs=25, first_seed=1)
    given = made.parse_args()
    for name, (engine, load) in HEALTHY.items():
        capacity = run(engine, load | {"duration": "3m"}, None, 1).capacity.capacity_rps
        assert capacity is not None
        rates = ",".join(f"{share * capacity:.4g}" for share in SHARES)
        held: collections.Counter[str] = collections.Counter()
        for seed in range(given.first_seed, given.first_seed + given.runs):
            limits = run(engine, load, rates, seed).limits
            held.update(limit.rule for limit in limits if limit.holds)
        print(
            f"{name}: {given.runs} runs at {rates} req/s: {dict(held) or 'no rule holds'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
