"""What does a search cost, and is it right? Seeded searches in virtual time against a known
capacity.

    P="python -m benchmarks.studies.search_cost"
    $P [--slo ttft_p99=2s]           100 searches on an M/M/1 queue, and the fixed grid
    $P --server batch --load 0.85    a server of benchmarks.servers, its limit put at that load
    $P --brackets --seeds 500        intervals of a grid and of a sweep, at four loads
    $P --engine --seeds 20           on the simulated engine; truth by its own bookkeeping
    $P --engine --output-tokens gamma:mean=5,cv=1 --slo ttft_p90=100ms --precision 0.25

M/M/1: TTFT is the sojourn time, exponential with rate mu - lambda, so the capacity is mu -
ln(1/(1-q))/limit exactly, and C_max = rho/(1-rho) + lambda x decoding time by Little's law. The
fixed grid has ten loads, evenly spaced up to saturation, with as many requests each as it takes to
be as accurate; both are judged by the same estimator.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.capacity.levels import open_levels
from ampacity.analysis.capacity.limit import find_capacity
from ampacity.analysis.capacity.next_load import Goal, cut_short
from ampacity.analysis.capacity.pooled import Estimate, estimate
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.metrics.cohort import Cohort
from ampacity.analysis.metrics.percentiles import percentiles
from ampacity.analysis.slo import Slo, parse_slo
from ampacity.analysis.stage import analyse
from ampacity.analysis.stage.analyse import analyse_stage
from ampacity.experiments.search import Search, SearchPlan
from ampacity.experiments.stages.rig import Watch
from ampacity.experiments.sweep import sweep
from ampacity.loadgen.rundir.meta import read_stage
from ampacity.workloads.profile import load_workload
from benchmarks.options import parser
from benchmarks.servers import ORIGIN_NS, SERVERS, Sent, Server, stage_of, table_of

MU = 10.0  # requests/s that the queue serves
DECODE_S = 0.5  # as benchmarks.servers has it
OUTPUT_TOKENS = "gamma:mean=20,cv=1"
GRID = np.arange(1, 11) / 10  # of saturation
GRID_REQUESTS = (5_000, 10_000, 20_000, 40_000, 80_000)
BRACKET_LOADS = (0.5, 0.7, 0.85, 0.95)  # of saturation: where the limit is put
BRACKET_REQUESTS = 5_000  # of a stage
BRACKET_REACH = 0.3  # of the limit: loads further from it are always met or broken


QUEUE = SERVERS["mm1"]()
Found = tuple[Estimate | None, int, bool, list[Stage]]


WORKLOAD = load_workload("chat-short")  # whose lengths nobody looks at


LATENCIES = (
    *("ttft_s", "ttft_from_schedule_s", "first_answer_s", "itl_s", "icl_s", "tpot_s"),
    *("e2e_s", "e2e_from_schedule_s"),
)


def only_ttft(cohort: Cohort) -> dict[str, Any]:
    """Return the parts of a stage that the SLO and the choice of loads read."""
    unread = with_nulls(Percentiles, n=0, infinite=0, censored=0)
    read = percentiles(cohort.ttft(from_schedule=True))
    return {
        **{name: read if name == "ttft_from_schedule_s" else unread for name in LATENCIES},
        "curves": {},
    }


class ServerRig:
    """A rig whose endpoint is a server of the study; its stages are judged as those of a run
    are."""

    def __init__(self, server: Server, slo: Slo, seed: int, duration_s: float = 30.0) -> None:
        self.settings: Any = SimpleNamespace(
            slos=(slo,),
            rates=None,
            concurrency=None,
            loads=[],
            trace=None,
            lengths=(),
            workload=WORKLOAD,
            seed=seed,
            duration_s=duration_s,
            durations_s=(duration_s,),
            max_requests=None,
            max_tokens=None,
        )
        self.stages: list[Stage] = []
        self.ended: tuple[str, str] | None = None
        self.lengths: str | None = None
        # of lone requests
        self.typical_e2e_s = float(server.run(1e-3, 200, np.random.default_rng(0))[2].mean())
        self.sent = 0
        self.lasted_s = 0.0  # with the drains, which no run waits for as long ...
        self.spent_s = 0.0  # ... and without, as the budget of a sweep or search counts here
        self.noted: dict[str, Any] = {}
        self.told: list[str] = []
        self._server, self._slo = server, slo

    def tell(self, text: str) -> None:
        """Return at once."""
        self.told.append(text)

    def expect(self, stages: int, length_s: float | None = None, *, about: bool = False) -> None:
        """Show no progress."""

    def stage_s(self, rate_rps: float) -> float:
        return float(self.settings.duration_s)

    def again(self, option: str, value: str) -> str:
        return f"ampacity sweep {option} {value}"

    def note_down(self, name: str, value: Any) -> None:
        self.noted[name] = value

    async def open_stage(
        self, rate_rps: float, duration_s: float | None = None, watch: Watch | None = None
    ) -> Stage | None:
        length_s = duration_s or self.stage_s(rate_rps)
        sent = stage_of(
            self._server,
            rate_rps,
            length_s,
            np.random.default_rng([self.settings.seed, len(self.stages)]),
        )
        for look in watch.looks if watch else ():
            now_s = look * length_s
            due_s = now_s - self._slo.limit_s  # what is due later may still meet its limit
            if not (sent.arrival_s < due_s).any():
                continue
            if watch and watch.enough(self._judge(until(sent, due_s), now_s)):
                sent = replace(until(sent, now_s), duration_s=now_s)
                break
        self.sent += len(sent.arrival_s)
        drained_s = float((sent.arrival_s + sent.e2e_s).max(initial=0.0))
        self.lasted_s += max(sent.duration_s, drained_s)
        self.spent_s += sent.duration_s
        self.stages.append(self._judge(sent, math.inf))
        return self.stages[-1]

    def _judge(self, sent: Sent, now_s: float) -> Stage:
        table, (meta,) = table_of([sent])
        meta["index"] = len(self.stages)
        index = pa.array(np.full(len(table), meta["index"])).cast(table.schema.field("stage").type)
        table = table.set_column(table.schema.get_field_index("stage"), "stage", index)
        if now_s < math.inf:
            now_ns = ORIGIN_NS + round(now_s * 1e9)
            table, meta["drained_ns"] = as_of(table, now_ns), now_ns
        with mock.patch.object(analyse, "_latencies", only_ttft):
            return analyse_stage(table, read_stage(meta), [self._slo], None)


def until(sent: Sent, due_s: float) -> Sent:
    """Return what was due before ``due_s`` in a stage that lasted until then."""
    seen = sent.arrival_s < due_s
    return replace(
        sent,
        duration_s=due_s,
        arrival_s=sent.arrival_s[seen],
        ttft_s=sent.ttft_s[seen],
        e2e_s=sent.e2e_s[seen],
    )


def as_of(table: pa.Table, now_ns: int) -> pa.Table:
    """Return the records as they are at ``now_ns``, with requests in flight."""
    first, ended = (table[name].to_numpy() for name in ("first_token_ns", "ended_ns"))
    for name, after in [("status", ended), ("ended_ns", ended), ("last_token_ns", ended)] + [
        (name, first)
        for name in ("headers_ns", "first_event_ns", "first_token_ns", "first_answer_ns")
    ]:
        field = table.schema.field(name)
        late = {"status": pa.scalar("unfinished"), "ended_ns": pa.scalar(now_ns)}.get(
            name, pa.scalar(None)
        )
        changed = pc.if_else(after > now_ns, late.cast(field.type), table[name].cast(field.type))
        table = table.set_column(table.schema.get_field_index(name), field, changed)
    return table


def queue_truth(slo: Slo) -> tuple[float, float]:
    rate = MU - math.log(1 / (1 - slo.quantile)) / slo.limit_s
    return rate, rate / (MU - rate) + rate * DECODE_S


def put_at(
    server: Server, load: float, quantile: float, requests: int = 1_000_000
) -> tuple[Slo, tuple[float, float]]:
    """Return an SLO whose limit is just met at ``load`` of saturation, and the truth."""
    rate = load * server.most_rps
    if server is QUEUE:
        slo = Slo("ttft", quantile, math.log(1 / (1 - quantile)) / (MU - rate))
        return slo, queue_truth(slo)
    runs = [
        server.run(rate, requests + 50_000, np.random.default_rng([98, part])) for part in range(4)
    ]
    limit_s = float(np.quantile(np.concatenate([ttft[50_000:] for _, ttft, _ in runs]), quantile))
    return Slo("ttft", quantile, limit_s), (
        rate,
        rate * float(np.mean([e2e[50_000:] for *_, e2e in runs])),
    )


def search_server(server: Server, slo: Slo, precision: float, seed: int) -> Found:
    """Return (estimate, requests, precision reached, stages)."""
    rig = ServerRig(server, slo, seed)
    asyncio.run(Search(SearchPlan(precision)).run(rig))
    return (
        estimate(open_levels(rig.stages), [slo]),
        rig.sent,
        bool(rig.noted["search"]["reached"]),
        rig.stages,
    )


def search_engine(
    slo: Slo, precision: float, seed: int, output_tokens: str = OUTPUT_TOKENS
) -> Found:

    from ampacity.experiments.stages.rig import Rig
    from ampacity.experiments.virtual.predict import predict
    from ampacity.progress import Progress

    found: list[Rig] = []
    search = Search(SearchPlan(precision))

    async def drive(rig: Rig) -> None:
        found.append(rig)
        await search.run(rig)

    settings, config = _engine(slo, output_tokens)
    with tempfile.TemporaryDirectory() as folder:
        settings = replace(settings, seed=seed, out=Path(folder) / "run")
        asyncio.run(predict(settings, config, [], Progress(quiet=True), drive, "search"))
    rig = found[0]
    sent = sum(s.requests + s.window.warmup_requests for s in rig.stages)
    found_now = estimate(open_levels(rig.stages), [slo])
    reached = found_now is not None and found_now.relative_error <= precision
    return found_now, sent, reached, rig.stages


def _engine(slo: Slo, output_tokens: str) -> tuple[Any, Any]:
    from ampacity.config import make_settings
    from ampacity.simulator.models.hardware import find_deployment

    raw = {
        "url": "http://x.invalid/v1",
        "input_tokens": 10,
        "output_tokens": output_tokens,
        "slo": [slo.text],
    }
    return make_settings(raw), find_deployment("linear:0.01,0.001,max_num_seqs=16")


def engine_truth(
    slo: Slo, output_tokens: str, requests: int = 60_000, replications: int = 8
) -> tuple[float, float]:
    from ampacity.workloads.schedule import open_schedule
    from benchmarks.servers.truth import true_capacity

    settings, config = _engine(slo, output_tokens)

    def make(rate_rps: float, seed: int) -> Any:
        s = open_schedule(
            settings.workload,
            rate_rps=rate_rps,
            duration_s=requests / rate_rps,
            seed=seed + 10_000,
            stage=0,
        )
        return s.scheduled_s, s.input_tokens, s.output_tokens

    found = true_capacity(
        config,
        make,
        [(slo.metric, slo.quantile, slo.limit_s)],
        replications=replications,
        warmup_share=0.05,
    )
    print(
        f"truth: {found.capacity_rps:.4g} ± {found.usable_rps_se:.2g}, C_max {found.c_max:.4g} "
        f"± {found.c_max_se:.2g}"
    )
    return found.capacity_rps, found.c_max


def told(stages: list[Stage], slo: Slo, precision: float) -> list[float | None]:
    """Return estimated over actual requests after each stage; None: too early to say."""
    sent = np.cumsum([s.requests + s.window.warmup_requests for s in stages])
    said = []
    for k in range(1, len(stages)):
        if estimate(open_levels(stages[:k]), [slo]) is not None:
            more = cut_short(stages[:k], Goal((slo,), precision), "").more_requests
            said.append(None if more is None else float((sent[k - 1] + more) / sent[-1]))
    return said


def study(
    search: Callable[[Slo, float, int], Found],
    truth: tuple[float, float],
    slo: Slo,
    precision: float,
    seeds: int,
    first_seed: int = 0,
) -> float:
    """Print the figures of ``seeds`` searches; gives the 95th percentile of the relative error of
    those that got there."""
    rows = []
    said: list[float | None] = []
    for seed in range(first_seed, first_seed + seeds):
        found, sent, reached, stages = search(slo, precision, seed)
        if found is None:
            continue
        said += told(stages, slo, precision) if reached else []
        (low, high), (c_low, c_high) = found.capacity_rps_ci, found.c_max_ci or (0.0, 0.0)
        rows.append(
            (
                found.capacity_rps / truth[0] - 1,
                low <= truth[0] <= high,
                c_low <= truth[1] <= c_high,
                sent,
                reached,
                len(stages),
            )
        )
        if seed % 10 == 9:
            print(f"... {seed + 1}", flush=True)
    table = np.array(rows, dtype=float)
    got = table[table[:, 4] == 1]
    error = np.abs(got[:, 0])
    print(
        f"{slo.text}, precision {precision:.0%}: {len(table)} of {seeds} searches with an "
        f"estimate, {len(got)} reached the precision\n"
        f"  of these within {precision:.0%} of the truth: {np.mean(error <= precision):.1%}; "
        f"error p50 {np.median(error):.2%}, p95 "
        f"{np.quantile(error, 0.95):.2%}, bias {got[:, 0].mean():+.2%}\n"
        f"  interval holds the truth: usable {table[:, 1].mean():.1%}, C_max "
        f"{table[:, 2].mean():.1%}\n"
        f"  requests p50 {np.median(table[:, 3]):,.0f}, mean {table[:, 3].mean():,.0f}, most "
        f"{table[:, 3].max():,.0f}; stages p50 {np.median(table[:, 5]):.0f}",
        flush=True,
    )
    factor = np.array([f for f in said if f is not None])
    print(
        f"  requests in all, said after {len(factor)} of {len(said)} stages, over what it "
        f"took: p5 {np.quantile(factor, 0.05):.2f}, p50 "
        f"{np.median(factor):.2f}, p95 {np.quantile(factor, 0.95):.2f}; within a factor of 2: "
        f"{np.mean(abs(np.log2(factor)) <= 1):.0%}, "
        f"of 3: {np.mean(abs(np.log(factor)) <= math.log(3)):.0%}",
        flush=True,
    )
    return float(np.quantile(error, 0.95))


def grid(slo: Slo, seeds: int) -> None:
    """Return the error of a fixed grid of ten loads, by the requests of each stage."""
    truth = queue_truth(slo)[0]
    for requests in GRID_REQUESTS:
        errors = []
        for seed in range(seeds):
            grid = _grid_stages(QUEUE, slo, 10_000 + seed, GRID, requests)
            found = estimate(open_levels(grid), [slo])
            errors.append(1.0 if found is None else abs(found.capacity_rps / truth - 1))
        print(
            f"grid, 10 x {requests:,}: error p50 {np.median(errors):.2%}, p95 "
            f"{np.quantile(errors, 0.95):.2%}",
            flush=True,
        )


def _grid_stages(server: Server, slo: Slo, seed: int, loads: Any, requests: int) -> list[Stage]:
    rig = ServerRig(server, slo, seed)
    for rate in np.asarray(loads) * server.most_rps:
        asyncio.run(rig.open_stage(float(rate), requests / float(rate)))
    return rig.stages


def brackets(quantile: float, seeds: int, sweeps: int = 100) -> None:
    """Print whether brackets hold the truth and how far figures are off: a grid, and a sweep."""
    for load in BRACKET_LOADS:
        slo, (truth, _) = put_at(QUEUE, load, quantile)
        ends: dict[str, list[tuple[float, float, float]]] = {"grid": [], "sweep": []}
        for seed in range(seeds):
            loads = GRID - np.random.default_rng([7, seed]).uniform(0, 0.1)
            loads = loads[np.abs(loads / load - 1) < BRACKET_REACH]
            found = {"grid": _grid_stages(QUEUE, slo, 20_000 + seed, loads, BRACKET_REQUESTS)}
            if seed < sweeps:
                swept = ServerRig(QUEUE, slo, 30_000 + seed, BRACKET_REQUESTS / truth)
                asyncio.run(sweep(swept))
                found["sweep"] = swept.stages
            for name, stages in found.items():
                capacity = find_capacity(stages, [slo])
                low, high = capacity.capacity_rps_ci or (math.nan, math.nan)
                figure = capacity.capacity_rps if capacity.crossing == "interpolated" else None
                ends[name].append((low, math.inf if high is None else high, figure or math.nan))
        for name, rows in ends.items():
            low, high, figures = np.array(rows).T
            given = np.isfinite(high)
            error = figures[np.isfinite(figures)] / truth - 1
            print(
                f"{slo.text}, limit at {load:.2f}: {name}: {given.mean():.1%} of {len(rows)} "
                "have both ends, "
                f"{np.mean((low <= truth) & (truth <= high)):.1%} hold the truth; median width "
                f"{np.median((high - low)[given]) / truth if given.any() else math.nan:.1%}; "
                f"{len(error)} interpolated"
                + (
                    f": error p50 {np.median(np.abs(error)):.1%}, p95 "
                    f"{np.quantile(np.abs(error), 0.95):.1%}, "
                    f"bias {error.mean():+.1%}"
                    if len(error)
                    else ""
                ),
                flush=True,
            )


def main() -> None:
    made = parser(__doc__, precision=0.05, seeds=100, first_seed=0)
    made.add_argument("--slo", default=None)
    made.add_argument("--engine", action="store_true")
    made.add_argument("--output-tokens", default=OUTPUT_TOKENS, help="of the engine's answers")
    made.add_argument("--grid", type=int, default=40, metavar="SEEDS")
    made.add_argument("--server", choices=[*SERVERS], default="mm1")
    made.add_argument(
        "--load", type=float, help="share of saturation at which the limit of --slo is put instead"
    )
    made.add_argument("--brackets", action="store_true")
    given = made.parse_args()
    slo = parse_slo(given.slo or ("ttft_p95=100ms" if given.engine else "ttft_p95=1s"))
    if given.engine:
        engine = partial(search_engine, output_tokens=given.output_tokens)
        study(
            engine,
            engine_truth(slo, given.output_tokens),
            slo,
            given.precision,
            given.seeds,
            given.first_seed,
        )
        return
    if given.brackets:
        brackets(slo.quantile, given.seeds)
        return
    server = QUEUE if given.server == "mm1" else SERVERS[given.server]()
    put = (slo, queue_truth(slo)) if server is QUEUE else put_at(server, 0.85, slo.quantile)
    slo, truth = put_at(server, given.load, slo.quantile) if given.load else put
    study(
        partial(search_server, server), truth, slo, given.precision, given.seeds, given.first_seed
    )
    if given.grid and server is QUEUE:
        grid(slo, given.grid)


if __name__ == "__main__":
    main()
