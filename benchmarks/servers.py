"""Servers with a known law, none of them our simulator: what the studies of the analysis are run on.

``SERVERS[name]`` gives arrivals, TTFT and E2E of n requests in virtual time; ``run_of`` makes a ``Run`` of stages
out of them, as ``load_run`` would give it back, so that ``ampacity.analysis.summary.summarise`` judges what a user would see.
"""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampacity.analysis.slo import Slo, parse_slo
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import SCHEMA

Floats = npt.NDArray[np.float64]
Times = tuple[Floats, Floats, Floats]
ORIGIN_NS = 5_000_000_000_000
TRUTH_REQUESTS = 1_000_000
TRUTH_PARTS = 4
TRUTH_SKIPPED = 50_000


@dataclass(frozen=True)
class Server:
    """``run(rate, n, rng)`` gives (arrivals, TTFT, E2E) of n Poisson requests in s; saturated at ``most_rps``.

    The server is idle before the first request. ``serve(arrivals, rng)`` is the same for arrivals that are given.
    """

    name: str
    most_rps: float
    serve: Callable[[Floats, np.random.Generator], tuple[Floats, Floats]]

    def run(self, rate_rps: float, n: int, rng: np.random.Generator) -> Times:
        arrival = np.cumsum(rng.exponential(1 / rate_rps, n))
        return (arrival, *self.serve(arrival, rng))


def one_server(
    name: str, draw: Callable[[int, np.random.Generator], Floats], mean_s: float, decode_s: float
) -> Server:
    """M/G/1, first come, first served: TTFT is the time in the queue and in service, then ``decode_s`` of answer."""

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        done = np.cumsum(draw(len(arrival), rng))
        before = np.concatenate([[0.0], done[:-1]])
        ttft = done + np.maximum.accumulate(arrival - before) - arrival  # Lindley 1952
        return ttft, ttft + decode_s

    return Server(name, 1 / mean_s, serve)


def many_servers(name: str, servers: int, mean_s: float, decode_s: float) -> Server:
    """M/M/c: TTFT is the time in the queue and in service."""

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        free = [0.0] * servers
        ttft = []
        for at, takes in zip(
            arrival.tolist(), rng.exponential(mean_s, len(arrival)).tolist(), strict=True
        ):
            end = max(at, free[0]) + takes
            heapq.heapreplace(free, end)
            ttft.append(end - at)
        found = np.array(ttft)
        return found, found + decode_s

    return Server(name, servers / mean_s, serve)


def batch_server(name: str, slots: int, heavy: bool) -> Server:
    """b requests decode together, one step takes 10 + b ms and gives each a token; the others wait in turn.

    Answers have 100 tokens in the mean, exponential or (heavy) log-normal with sigma 1. A prefill of 50 ms,
    sigma 0.3, is added to every TTFT and stops nobody. Saturates at 1/(m (alpha/B + beta)).
    """
    step_s = [0.010 + 0.001 * b for b in range(slots + 1)]

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        n = len(arrival)
        tokens = rng.lognormal(np.log(100) - 0.5, 1.0, n) if heavy else rng.exponential(100, n)
        start, end = _decode(arrival, tokens, slots, step_s)
        ttft = start - arrival + step_s[1] + 0.05 * rng.lognormal(0, 0.3, n)
        return ttft, np.maximum(end - arrival, ttft)

    return Server(name, 1 / (100 * (0.010 / slots + 0.001)), serve)


def _decode(
    arrival: Floats, tokens: Floats, slots: int, step_s: list[float]
) -> tuple[Floats, Floats]:
    """Start and end of each request; in flight they are known by the count of steps at which they end."""
    need = tokens.tolist()
    start, end = [0.0] * len(need), [0.0] * len(need)
    running: list[tuple[float, int]] = []
    now = steps = 0.0
    waiting, busy = 0, 0  # the first that has not begun
    for i, at in enumerate([*arrival.tolist(), np.inf]):
        while busy:
            due = now + (running[0][0] - steps) * step_s[busy]
            if due > at:
                break
            steps, done = running[0]
            now = end[done] = due
            if waiting < i:
                start[waiting] = now
                heapq.heapreplace(running, (steps + need[waiting], waiting))
                waiting += 1
            else:
                heapq.heappop(running)
                busy -= 1
        if at == np.inf:
            break
        if busy:
            steps += (at - now) / step_s[busy]
        now = at
        if busy < slots:
            busy += 1
            heapq.heappush(running, (steps + need[i], i))
            start[i], waiting = at, i + 1
    return np.array(start), np.array(end)


def preset_server() -> Server:
    """Llama 3 8B on an A100 as our simulator has it, prompts of 512 tokens and answers of 128 in the median."""
    from ampacity.simulator.engine.truth import saturation_rps, simulate
    from ampacity.simulator.models.hardware import find_config

    config = find_config("llama3-8b-a100")

    def lengths(
        n: int, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        inputs, outputs = rng.lognormal(np.log(512), 0.6, n), rng.lognormal(np.log(128), 0.6, n)
        return np.clip(inputs, 1, 4000).astype(np.int64), np.clip(outputs, 1, 2000).astype(np.int64)

    def serve(arrival: Floats, rng: np.random.Generator) -> tuple[Floats, Floats]:
        out = simulate(config, arrival, *lengths(len(arrival), rng))
        return out.ttft_s, out.e2e_s

    def make(
        rate_rps: float, seed: int
    ) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        rng = np.random.default_rng(seed)
        return np.cumsum(rng.exponential(1 / rate_rps, 8000)), *lengths(8000, rng)

    return Server("preset", saturation_rps(config, make), serve)


SERVERS: dict[str, Callable[[], Server]] = {
    "mm1": lambda: one_server("mm1", lambda n, rng: rng.exponential(0.1, n), 0.1, 0.5),
    "mg1": lambda: one_server(
        "mg1", lambda n, rng: rng.lognormal(np.log(0.1) - 0.5, 1.0, n), 0.1, 0.5
    ),
    "mm8": lambda: many_servers("mm8", 8, 0.5, 0.5),
    "batch": lambda: batch_server("batch", 16, heavy=False),
    "heavy": lambda: batch_server("heavy", 32, heavy=True),
    "preset": preset_server,
}


@dataclass(frozen=True)
class Truth:
    """Of a server in its steady state at one load, from TRUTH_PARTS runs of TRUTH_REQUESTS."""

    rate_rps: float
    in_flight: float
    ttft_s: Floats  # sorted sample

    def quantile_s(self, q: float) -> float:
        return float(np.quantile(self.ttft_s, q))

    def missed(self, limit_s: float) -> float:
        """Share of requests whose TTFT is above the limit."""
        return 1 - float(np.searchsorted(self.ttft_s, limit_s, side="right")) / len(self.ttft_s)


@cache
def truth_at(
    name: str, load: float, requests: int = TRUTH_REQUESTS, parts: int = TRUTH_PARTS
) -> Truth:
    """The steady state at ``load`` of saturation."""
    server = SERVERS[name]()
    rate = load * server.most_rps
    runs = [
        server.run(
            rate, requests + TRUTH_SKIPPED, np.random.default_rng([98, part, round(load * 1e6)])
        )
        for part in range(parts)
    ]
    ttft = np.sort(np.concatenate([ttft[TRUTH_SKIPPED:] for _, ttft, _ in runs]))
    return Truth(
        rate, rate * float(np.mean([e2e[TRUTH_SKIPPED:].mean() for *_, e2e in runs])), ttft
    )


def limit_at(name: str, load: float, quantile: float) -> Slo:
    """The TTFT SLO that is just kept at ``load`` of saturation."""
    limit_s = truth_at(name, load).quantile_s(quantile)
    return parse_slo(f"ttft_p{100 * quantile:g}={1e3 * limit_s:.4f}ms")


@dataclass(frozen=True)
class Sent:
    """A stage as it was measured: its load, its length, and what became of each request (s after its start)."""

    offered_rps: float
    duration_s: float
    arrival_s: Floats
    ttft_s: Floats
    e2e_s: Floats


def stage_of(server: Server, rate_rps: float, duration_s: float, rng: np.random.Generator) -> Sent:
    """One open stage on an idle server, waited for to the end."""
    n = rng.poisson(rate_rps * duration_s)
    arrival = np.sort(rng.uniform(0, duration_s, n))
    ttft, e2e = server.serve(arrival, rng)
    return Sent(rate_rps, duration_s, arrival, ttft, e2e)


OUTPUT_TOKENS = 5


def table_of(stages: Sequence[Sent]) -> tuple[pa.Table, list[dict[str, Any]]]:
    """(requests.parquet, the entries of run.json's stages). Each stage begins when the one before has drained."""
    tables, metas, start_s, first = [], [], 0.0, 0
    for index, stage in enumerate(stages):
        n = len(stage.arrival_s)
        scheduled = ORIGIN_NS + np.round((start_s + stage.arrival_s) * 1e9).astype(np.int64)
        token = scheduled + np.round(stage.ttft_s * 1e9).astype(np.int64)
        ended = scheduled + np.round(stage.e2e_s * 1e9).astype(np.int64)
        chunks = np.linspace(stage.ttft_s, stage.e2e_s, OUTPUT_TOKENS, axis=1) * 1e6
        offsets = np.arange(0, n * OUTPUT_TOKENS + 1, OUTPUT_TOKENS, dtype=np.int32)
        columns: dict[str, Any] = {
            "request_id": first + np.arange(n),
            "stage": np.full(n, index),
            "attempt": np.zeros(n),
            "class": ["default"] * n,
            "status": ["ok"] * n,
            "worker": np.zeros(n),
            "finish_reason": ["length"] * n,
            "token_source": ["usage"] * n,
            "scheduled_ns": scheduled,
            "dispatched_ns": scheduled,
            "connected_ns": scheduled,
            "started_ns": scheduled,
            "sent_ns": scheduled,
            "headers_ns": scheduled,
            "first_event_ns": token,
            "first_token_ns": token,
            "first_answer_ns": token,
            "last_token_ns": ended,
            "ended_ns": ended,
            "http_status": np.full(n, 200),
            "input_tokens_planned": np.full(n, 100),
            "input_tokens": np.full(n, 100),
            "output_tokens_planned": np.full(n, OUTPUT_TOKENS),
            "output_tokens": np.full(n, OUTPUT_TOKENS),
            "chunk_at_us": pa.ListArray.from_arrays(
                offsets, pa.array(chunks.ravel().round().astype(np.uint32))
            ),
        }
        tables.append(
            pa.table(
                {
                    f.name: pa.nulls(n, f.type)
                    if f.name not in columns
                    else columns[f.name]
                    if isinstance(columns[f.name], pa.ListArray)
                    else pa.array(columns[f.name]).cast(f.type)
                    for f in SCHEMA
                },
                schema=SCHEMA,
            )
        )
        drained_s = start_s + max(
            stage.duration_s, float((stage.arrival_s + stage.e2e_s).max(initial=0.0))
        )
        audit = {
            "slip_p50_s": 1e-4,
            "slip_p99_s": 2e-4,
            "slip_max_s": 5e-4,
            "loop_lag_p99_s": 2e-4,
            "cpu_fraction": 0.1,
            "client_limited": False,
        }
        metas.append(
            {
                "index": index,
                "kind": "open",
                "offered_rps": stage.offered_rps,
                "concurrency": None,
                "start_ns": ORIGIN_NS + round(start_s * 1e9),
                "end_ns": ORIGIN_NS + round((start_s + stage.duration_s) * 1e9),
                "drained_ns": ORIGIN_NS + round(drained_s * 1e9),
                "scheduled_requests": n,
                "ended_early": None,
                "audit": audit,
            }
        )
        start_s, first = drained_s + 1.0, first + n
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table(), metas


def run_of(stages: Sequence[Sent], slos: Sequence[Slo], **changes: Any) -> Run:
    """A complete run of these stages; ``changes`` override entries of run.json."""
    table, metas = table_of(stages)
    meta: dict[str, Any] = {
        "run_id": "study",
        "name": "study",
        "experiment": "sweep",
        "status": "complete",
        "status_reason": None,
        "tool": {"name": "ampacity", "version": "0"},
        "command_line": [],
        "started_utc": "2026-01-01T00:00:00Z",
        "ended_utc": "2026-01-01T00:10:00Z",
        "endpoint": {"url": "http://127.0.0.1:1/v1", "api": "chat", "model": "M", "server": None},
        "locked": {},
        "workload": {"name": "study", "arrivals": "poisson", "prompts": "unique"},
        "slos": [slo.as_dict() for slo in slos],
        "seed": 1,
        "workers": 1,
        "warmup_requests": None,
        "stages": metas,
        "host": {},
        "fleet_inputs": {
            "peak_rps": None,
            "tensor_parallel": 1,
            "safety_factor": None,
            "gpu_hour_usd": None,
        },
    }
    return Run(Path("study"), copy.deepcopy(meta) | changes, table, None, True)


def judged(stages: Sequence[Sent], slos: Sequence[Slo]) -> Mapping[str, Any]:
    """The summary that a user would read."""
    from ampacity.analysis.contract.summary import to_json
    from ampacity.analysis.summary import summarise

    return to_json(summarise(run_of(stages, slos)))
