"""How often does the gate cry wolf, and how often does it find a change of 10 %? In virtual time.

    .venv/bin/python -m benchmarks.gate_rates --pairs 200 --load 0.6 --json rates.json

Every pair has its own seed. Engine steps take their time times a log-normal factor (3 % by default) that is
drawn anew in each run, and each run is faster or slower as a whole by --run-noise. "same schedule" pairs sent
the same requests at the same times, "other schedule" pairs share nothing but the workload.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from ampacity.config import make_settings
from ampacity.experiments.predict import predict
from ampacity.progress import Progress
from analysis.baseline import make_baseline
from analysis.baseline_file import write_baseline
from analysis.comparable import Judged, prepare
from analysis.gate import judge_gate
from loadgen.records import SCHEMA
from loadgen.rundir import Run, load_run
from simulator.hardware import find_config
from simulator.outcome import simulate as simulate_engine
from simulator.steptime import Roofline, StepTime
from workloads.profile import load_workload
from workloads.schedule import open_schedule

URL = "http://predicted.invalid/v1"
SLO = "ttft_p99=2s"
ORIGIN_NS = 1_000_000_000


class Unsteady:
    """A step time with noise of its own; ``speed`` 1.1 makes every step 10 % longer."""

    def __init__(self, inner: StepTime, speed: float, jitter: float, seed: int) -> None:
        self._inner, self._speed, self._jitter, self._random = inner, speed, jitter, random.Random(seed)

    def seconds(
        self, sequences: int, tokens: int, kv_tokens: int, attended_pairs: float, prompts: int
    ) -> float:
        factor = self._speed * math.exp(self._random.gauss(0.0, self._jitter))
        return factor * self._inner.seconds(sequences, tokens, kv_tokens, attended_pairs, prompts)


def simulate(options: argparse.Namespace, seed: int, noise_seed: int, slower: str | None = None) -> Judged:
    """One run, without a disk; ``slower``: "steps" (all of them by 10 %) or "prefill" (10 % less compute)."""
    config = find_config(options.preset)
    step = config.step_time
    if slower == "prefill":
        assert isinstance(step, Roofline)
        step = replace(step, compute_flops=step.compute_flops / (1 + options.change))
    speed = math.exp(random.Random(noise_seed + 10**6).gauss(0.0, options.run_noise))
    speed *= 1 + options.change if slower == "steps" else 1.0
    config = replace(config, step_time=Unsteady(step, speed, options.jitter, noise_seed))
    duration_s = options.requests / options.rate
    workload = load_workload(options.workload)
    schedule = open_schedule(workload, rate_rps=options.rate, duration_s=duration_s, seed=seed, stage=0)
    outputs = np.minimum(schedule.output_tokens, config.max_model_len // 2)
    inputs = np.minimum(schedule.input_tokens, config.max_model_len - outputs)
    tokens = simulate_engine(replace(config, seed=noise_seed), schedule.scheduled_s, inputs, outputs)
    stage = {
        "index": 0, "kind": "open", "offered_rps": options.rate, "concurrency": None, "start_ns": ORIGIN_NS,
        "end_ns": ORIGIN_NS + int(duration_s * 1e9), "scheduled_requests": len(schedule),
        "drained_ns": int(_ns(tokens.finish_s).max()), "ended_early": None, "audit": None,
    }  # fmt: skip
    meta = {
        "run_id": f"{seed}-{noise_seed}", "started_utc": "", "status": "complete", "predicted": True, "seed": seed,
        "stages": [stage], "slos": [], "workload": workload.describe(), "warmup_requests": None,
    }  # fmt: skip
    return prepare(Run(Path(meta["run_id"]), meta, _table(tokens, inputs), None, True))


def _ns(seconds: Any) -> Any:
    return ORIGIN_NS + np.round(seconds * 1e9).astype(np.int64)


def _table(tokens: Any, inputs: Any) -> pa.Table:
    """The records of a predicted stage, one token a chunk, as ``ampacity predict`` would write them."""
    n = len(tokens.arrival_s)
    due, first, last = _ns(tokens.arrival_s), _ns(tokens.first_token_s), _ns(tokens.finish_s)
    times = [tokens.token_times_s(i) for i in range(n)]
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in times])])
    at_us = (_ns(np.concatenate(times)) - np.repeat(due, np.diff(offsets))) // 1000
    known: dict[str, Any] = {
        "request_id": np.arange(n), "stage": np.zeros(n, int), "attempt": np.zeros(n, int), "scheduled_ns": due,
        "dispatched_ns": due, "started_ns": due, "first_token_ns": first, "first_answer_ns": first, "last_token_ns": last,
        "ended_ns": last, "status": ["ok"] * n, "finish_reason": ["length"] * n, "token_source": ["usage"] * n,
        "input_tokens_planned": inputs, "input_tokens": inputs, "cached_tokens": tokens.cached_tokens,
        "output_tokens_planned": tokens.output_tokens, "output_tokens": tokens.output_tokens,
        "chunk_at_us": pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(at_us, pa.uint32())),
    }  # fmt: skip
    columns = [
        (known[f.name] if isinstance(known[f.name], pa.Array) else pa.array(known[f.name]).cast(f.type))
        if f.name in known else pa.nulls(n, f.type) for f in SCHEMA
    ]  # fmt: skip
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def capacity_rps(options: argparse.Namespace, folder: Path) -> float:
    """The usable rate of the preset for the workload under SLO, as ``ampacity predict`` finds it."""
    raw = {
        "url": URL,
        "slo": [SLO],
        "out": str(folder / "capacity"),
        "duration": "20m",
        "workload": options.workload,
    }
    config = find_config(options.preset)
    path = asyncio.run(
        predict(make_settings(raw), config, ["ampacity"], Progress(Console(file=io.StringIO())))
    )
    found: float = prepare(load_run(path)).summary["capacity"]["usable_rps"]
    return found


def study(options: argparse.Namespace, note: Callable[[str], None]) -> dict[str, Any]:
    """Verdicts of every kind of pair."""
    verdicts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}

    def count(kind: str, base: Any, candidate: Judged) -> None:
        found = judge_gate(base, [candidate], {})
        verdicts.setdefault(kind, Counter())[found["verdict"]] += 1
        for check in found["checks"]:
            if check["verdict"] != "pass":
                reasons.setdefault(kind, Counter())[f"{check['name']} {check['verdict']}"] += 1

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rate = options.rate or round(options.load * capacity_rps(options, folder), 3)
        options.rate = rate
        last = None
        for pair in range(options.pairs):
            seed = options.first_seed + pair
            runs = []
            kinds = (
                [None] * options.baseline_runs
                + [None]
                + (["steps", "prefill"] if pair < options.changed_pairs else [])
            )
            for slower in kinds:
                runs.append(simulate(options, seed, 1000 * seed + len(runs), slower))
            base = json.loads(write_baseline(make_baseline(runs[: options.baseline_runs])))
            equal, *changed = runs[options.baseline_runs :]
            for kind, earlier in (("same schedule", base), ("other schedule", last)):
                if earlier is None:
                    continue
                count(f"A/A, {kind}", earlier, equal)
                for slower, run in zip(("steps", "prefill"), changed, strict=False):
                    count(f"{slower} {options.change:.0%} slower, {kind}", earlier, run)
            last = base
            note(f"{pair + 1}: { ({k: dict(v) for k, v in verdicts.items()}) }")
    return {
        "options": vars(options), "verdicts": {k: dict(v) for k, v in verdicts.items()},
        "not_passed": {k: dict(v.most_common(12)) for k, v in reasons.items()},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--load", type=float, default=0.6, help="share of the usable rate")
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s, in place of --load")
    parser.add_argument("--requests", type=int, default=2000, help="the default length of a predicted stage")
    parser.add_argument("--baseline-runs", type=int, default=1)
    parser.add_argument("--jitter", type=float, default=0.03)
    parser.add_argument("--run-noise", type=float, default=0.0)
    parser.add_argument("--change", type=float, default=0.1)
    parser.add_argument(
        "--changed-pairs", type=int, default=200, help="so many of the pairs have changed runs too"
    )
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--preset", default="llama3-8b-a100")
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.json, target = None, options.json
    found = study(options, lambda text: print(text, flush=True))
    print(json.dumps(found, indent=1))
    if target:
        target.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
