"""How long does the analysis of a large run take? 1,000,000 requests of 200 tokens each, on two
cores.

    python -m benchmarks.load.million [--requests 1000000] [--tokens 200] [--stages 4] [--counted]

Writes a run directory into a temporary folder, reads it back and summarises it; prints seconds and
the peak of resident memory of the reading and summarising process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.servers.runs import requests_table

SLOS = ("ttft_p99=2s", "itl_p99=50ms", "e2e_p99=30s")


def write_run(
    path: Path, requests: int, tokens: int, stages: int, *, counted: bool = False
) -> None:
    """Write a run: Poisson arrivals at 100, 200, ... requests/s, log-normal TTFT and gaps.

    ``counted``: the server says of every chunk how many tokens it holds, one.
    """
    from ampacity.analysis.slo import parse_slos

    rng, each, start_s, metas, parts = np.random.default_rng(1), requests // stages, 0.0, [], []
    for stage in range(stages):
        rate = 100.0 * (stage + 1)
        scheduled = start_s + np.cumsum(rng.exponential(1 / rate, each))
        parts.append(_table(rng, scheduled, stage, stage * each, tokens, counted))
        end_s = float(scheduled[-1]) + 1e-3
        metas.append(
            {
                "index": stage,
                "kind": "open",
                "offered_rps": rate,
                "concurrency": None,
                "start_ns": int(start_s * 1e9),
                "end_ns": int(end_s * 1e9),
                "scheduled_requests": each,
                "drained_ns": int((end_s + 60) * 1e9),
                "ended_early": None,
                "audit": {"client_limited": False},
            }
        )
        start_s = end_s + 60
    path.mkdir()
    pq.write_table(pa.concat_tables(parts), path / "requests.parquet", compression="zstd")
    meta = {
        "schema_version": 1,
        "run_id": "made-up",
        "name": "million",
        "experiment": "sweep",
        "status": "complete",
        "workload": {"name": "made-up", "prompts": "unique"},
        "slos": [s.as_dict() for s in parse_slos(SLOS)],
        "stages": metas,
        "fleet_inputs": {},
    }
    (path / "run.json").write_text(json.dumps(meta))


def _table(
    rng: np.random.Generator,
    scheduled: np.ndarray,
    stage: int,
    first_id: int,
    tokens: int,
    counted: bool,
) -> pa.Table:
    n = len(scheduled)
    gaps = rng.lognormal(np.log(0.02), 0.3, (n, tokens)).astype(np.float32)
    gaps[:, 0] = rng.lognormal(np.log(0.2), 0.5, n)
    at_us = (np.cumsum(gaps, axis=1) * 1e6).astype(np.uint32)
    started = (scheduled * 1e9).astype(np.int64)
    last = started + at_us[:, -1].astype(np.int64) * 1000
    first = started + at_us[:, 0].astype(np.int64) * 1000
    at_first = ("headers_ns", "first_event_ns", "first_token_ns", "first_answer_ns")
    at_start = ("scheduled_ns", "dispatched_ns", "connected_ns", "started_ns", "sent_ns")
    offsets = np.arange(0, (n + 1) * tokens, tokens, dtype=np.int32)
    known: dict[str, Any] = {
        **dict.fromkeys(at_start, started),
        **dict.fromkeys(at_first, first),
        **dict.fromkeys(("last_token_ns", "ended_ns"), last),
        "request_id": np.arange(first_id, first_id + n),
        "class": "default",
        "stage": stage,
        **dict.fromkeys(("input_tokens_planned", "input_tokens"), 500),
        **dict.fromkeys(("output_tokens_planned", "output_tokens"), tokens),
        **dict.fromkeys(("finish_reason", "token_source")),
        "chunk_at_us": pa.ListArray.from_arrays(offsets, at_us.ravel()),
    }
    if counted:
        ones = np.ones(n * tokens, dtype=np.int32)
        known["chunk_tokens"] = pa.ListArray.from_arrays(offsets, ones)
    return requests_table(n, known)


def analyse(path: Path) -> None:
    """Summarise a run and print what it took."""
    from ampacity.analysis.summary import summarise
    from ampacity.loadgen.rundir.files import load_run

    start, cpu = time.perf_counter(), time.process_time()
    run = load_run(path)
    read = time.perf_counter() - start
    summary = summarise(run)
    # ru_maxrss would hold the peak of the process that began this one
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 2**20
    print(
        f"{summary.requests} requests: {time.perf_counter() - start:.1f} s ({read:.1f} to read), "
        f"{time.process_time() - cpu:.1f} s of CPU, peak {peak:.2f} GiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument(
        "--counted", action="store_true", help="tokens of every chunk are in the records"
    )
    parser.add_argument("--analyse", type=Path, help="only summarise this run directory")
    args = parser.parse_args()
    if args.analyse:
        analyse(args.analyse)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        write_run(path, args.requests, args.tokens, args.stages, counted=args.counted)
        subprocess.run(
            [sys.executable, "-m", "benchmarks.load.million", "--analyse", str(path)], check=True
        )


if __name__ == "__main__":
    main()
