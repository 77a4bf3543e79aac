"""How long does the analysis of a large run take, and how much memory?

    python -m benchmarks.load.million [--requests 1000000 ...] [--tokens 200] [--stages 10]
        [--slo ttft_p99=2s ...] [--counted] [--report]

For each size: writes a sweep into a temporary folder, reads it back and summarises it in a process
of its own; prints seconds and the peak of that process's resident memory.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ampacity.loadgen.rundir.records import SCHEMA
from ampacity.loadgen.rundir.write import GROUP_ROWS, PARQUET
from benchmarks.options import parser
from benchmarks.servers.laws import Floats
from benchmarks.servers.runs import META, requests_table, stage_meta

SLOS = ("ttft_p99=2s", "itl_p99=50ms", "e2e_p99=30s")
FAILED = 0.002  # of the requests
SPREAD = 0.5  # standard deviation of the log-normal lengths


def write_run(
    path: Path,
    requests: int,
    tokens: int,
    stages: int,
    *,
    counted: bool = False,
    slos: Sequence[str] = SLOS,
) -> None:
    """Write a run: Poisson arrivals at 100, 200, ... requests/s; log-normal lengths, TTFT and gaps.

    ``tokens``: the mean of an answer. ``counted``: the server says of every chunk how many tokens
    it holds, one."""
    from ampacity.analysis.slo import parse_slos

    rng, each, start_s, metas = np.random.default_rng(1), requests // stages, 0.0, []
    path.mkdir()
    with pq.ParquetWriter(path / "requests.parquet", SCHEMA, **PARQUET) as file:
        for stage in range(stages):
            rate = 100.0 * (stage + 1)
            scheduled = start_s + np.cumsum(rng.exponential(1 / rate, each))
            for part in _tables(rng, scheduled, stage, tokens, counted=counted):
                file.write_table(part)
            end_s = float(scheduled[-1]) + 1e-3
            times_ns = (int(at_s * 1e9) for at_s in (start_s, end_s, end_s + 60))
            metas.append(stage_meta(stage, rate, each, *times_ns))
            start_s = end_s + 60
    described = {"schema_version": 1, "slos": [s.as_dict() for s in parse_slos(slos)]}
    (path / "run.json").write_text(json.dumps(META | described | {"stages": metas}))


def _tables(
    rng: np.random.Generator, scheduled_s: Floats, stage: int, tokens: int, *, counted: bool
) -> Iterator[pa.Table]:
    first_id = stage * len(scheduled_s)
    for low in range(0, len(scheduled_s), GROUP_ROWS):
        part_s = scheduled_s[low : low + GROUP_ROWS]
        ids = first_id + low + np.arange(len(part_s))
        yield _table(rng, part_s, {"request_id": ids, "stage": stage}, tokens, counted)


def _table(
    rng: np.random.Generator,
    scheduled_s: Floats,
    known: dict[str, Any],
    tokens: int,
    counted: bool,
) -> pa.Table:
    n = len(scheduled_s)
    planned = np.maximum(1, rng.lognormal(np.log(tokens) - SPREAD**2 / 2, SPREAD, n)).astype(int)
    failed = rng.random(n) < FAILED
    count = np.where(failed, 0, planned)
    starts = np.concatenate([[0], np.cumsum(count)])
    gaps_us = rng.lognormal(np.log(2e4), 0.3, starts[-1])
    has = np.flatnonzero(~failed)
    gaps_us[starts[has]] = rng.lognormal(np.log(2e5), 0.5, len(has))
    sums = np.concatenate([[0.0], np.cumsum(gaps_us)])
    at_us = (sums[1:] - np.repeat(sums[starts[:-1]], count)).astype(np.uint32)
    started = (scheduled_s * 1e9).astype(np.int64)
    first, last = np.zeros((2, n), dtype=np.int64)
    first[has] = started[has] + at_us[starts[has]].astype(np.int64) * 1000
    last[has] = started[has] + at_us[starts[has + 1] - 1].astype(np.int64) * 1000
    offsets = pa.array(starts, pa.int32())
    at_first = ("headers_ns", "first_event_ns", "first_token_ns", "first_answer_ns")
    at_start = ("scheduled_ns", "dispatched_ns", "connected_ns", "started_ns", "sent_ns")
    known |= {
        **dict.fromkeys(at_start, started),
        **dict.fromkeys(at_first, pa.array(first, mask=failed)),
        "last_token_ns": pa.array(last, mask=failed),
        "ended_ns": np.where(failed, started + 10**8, last),
        "status": np.where(failed, "http_error", "ok"),
        "http_status": np.where(failed, 503, 200),
        "class": "default",
        "worker": 0,
        "answered_by": "M",
        "input_tokens_planned": 500,
        "input_tokens": pa.array(np.full(n, 500), pa.int32(), mask=failed),
        "output_tokens_planned": planned,
        "output_tokens": pa.array(planned, pa.int32(), mask=failed),
        "finish_reason": pa.array(np.full(n, "length"), mask=failed),
        "token_source": pa.array(np.full(n, "usage"), mask=failed),
        "chunk_at_us": pa.ListArray.from_arrays(offsets, at_us),
    }
    if counted:
        ones = np.ones(len(at_us), dtype=np.int32)
        known["chunk_tokens"] = pa.ListArray.from_arrays(offsets, ones)
    return requests_table(n, known)


def analyse(path: Path, *, report: bool) -> None:
    """Summarise a run and print what it took."""
    from ampacity.analysis.summary import summarise
    from ampacity.analysis.timeline import timeline_of
    from ampacity.loadgen.rundir.files import load_run
    from ampacity.reports.pages.run_report import Beyond, write_report

    start, cpu = time.perf_counter(), time.process_time()

    def say(what: str) -> None:
        # ru_maxrss would hold the peak of the process that began this one
        status = Path("/proc/self/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) / 1e6
        took, own = time.perf_counter() - start, time.process_time() - cpu
        print(f"{what}: {took:.1f} s, {own:.1f} s of CPU, peak {peak:.2f} GB", flush=True)

    run = load_run(path)
    summary = summarise(run)
    say(f"{summary.requests:,} requests")
    if report:
        write_report(path / "report.html", summary, run.meta, Beyond(timeline_of(run)))
        say(f"and a report of {(path / 'report.html').stat().st_size / 1e6:.2f} MB")


def main() -> None:
    given = parser(__doc__, stages=10)
    given.add_argument("--requests", type=int, nargs="+", default=[1_000_000])
    given.add_argument("--tokens", type=int, default=200, help="mean of an answer")
    given.add_argument("--slo", nargs="+", default=SLOS)
    given.add_argument(
        "--counted", action="store_true", help="tokens of every chunk are in the records"
    )
    given.add_argument("--report", action="store_true", help="also write the report")
    given.add_argument("--analyse", type=Path, help="only summarise this run directory")
    args = given.parse_args()
    if args.analyse:
        analyse(args.analyse, report=args.report)
        return
    for requests in args.requests:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run"
            write_run(path, requests, args.tokens, args.stages, counted=args.counted, slos=args.slo)
            size = (path / "requests.parquet").stat().st_size
            print(f"requests.parquet: {size / 1e9:.2f} GB")
            again = ["--analyse", str(path), *["--report"] * args.report]
            subprocess.run([sys.executable, "-m", "benchmarks.load.million", *again], check=True)


if __name__ == "__main__":
    main()
