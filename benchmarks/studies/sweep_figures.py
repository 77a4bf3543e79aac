"""Are the figures of a sweep right? Seeded sweeps in virtual time on servers with a known law.

    python -m benchmarks.studies.sweep_figures --runs 600 [--servers mm8,batch] [--duration 60]

Without --duration a sweep is as the command line's: ten minutes, stages of 30 s, longer ones near
the limit.

The TTFT limit is put where it is just kept at 0.5, 0.7 and 0.85 of saturation, by long runs. Each
sweep finds its own loads (``ampacity.experiments.sweep``) and is judged as a run is. Printed for
each cell: of how many sweeps the usable rate is an estimate, its median error, how often the 95 %
interval holds the truth, its median half width; the same of C_max; the highest load verified, over
the truth; the goodput peak against the highest of long runs.
"""

import asyncio
import math
from functools import cache
from typing import Any

import numpy as np

from ampacity.analysis.capacity.goodput_peak import peak_goodput
from ampacity.analysis.capacity.levels import open_levels, surely_violated
from ampacity.analysis.capacity.limit import find_capacity
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo
from ampacity.experiments.sweep import MAX_DURATION_S, STAGE_SHARE, sweep
from benchmarks.options import parser
from benchmarks.servers import SERVERS, Floats, limit_at, truth_at
from benchmarks.studies.search_cost import ServerRig

LOADS = (0.5, 0.7, 0.85)  # of saturation: where the limit is put
PEAK_LOADS = np.arange(0.4, 1.0, 0.05)  # where the goodput is looked for
PEAK_REQUESTS = 200_000


@cache
def true_peak_rps(name: str, slo: Slo) -> float:
    """Return the highest rate x P[TTFT within the limit], by a parabola through the best loads."""
    at = [truth_at(name, round(float(load), 3), PEAK_REQUESTS, 2) for load in PEAK_LOADS]
    good = np.array([t.rate_rps * (1 - t.missed(slo.limit_s)) for t in at])
    best = int(np.clip(good.argmax(), 1, len(good) - 2))
    a, b, _ = np.polyfit([-1, 0, 1], good[best - 1 : best + 2], 2)
    return float(good[best] - b * b / (4 * a)) if a < 0 else float(good.max())


def one_sweep(name: str, slo: Slo, duration_s: float | None, seed: int) -> ServerRig:
    rig = ServerRig(SERVERS[name](), slo, seed, duration_s or STAGE_SHARE * MAX_DURATION_S)
    limit_s = None if duration_s else MAX_DURATION_S
    asyncio.run(sweep(rig, max_duration_s=limit_s))  # type: ignore[arg-type]
    return rig


def row_of(stages: list[Stage], slos: list[Slo]) -> dict[str, float]:
    """Return the figures that a user reads, nan where there is none."""
    c, g = find_capacity(stages, slos), peak_goodput(stages, slos)
    none, violated = (None, None), surely_violated(open_levels(stages))
    row = {
        "usable": c.capacity_rps,
        "low": (c.capacity_rps_ci or none)[0],
        "high": (c.capacity_rps_ci or none)[1],
        "c_max": c.c_max,
        "c_low": (c.c_max_ci or none)[0],
        "c_high": (c.c_max_ci or none)[1],
        "verified": c.verified_rps,
        "violated": violated and math.exp(violated),
        "peak": g.peak_rps,
        "p_low": (g.peak_rps_ci or none)[0],
        "p_high": (g.peak_rps_ci or none)[1],
    }
    return {k: np.nan if v is None else float(v) for k, v in row.items()} | {
        "pooled": c.crossing == "pooled"
    }


def line(rows: list[dict[str, float]], usable: float, in_flight: float, peak: float) -> str:
    def of(key: str) -> Floats:
        return np.array([row[key] for row in rows], dtype=float)

    def part(figure: str, low: str, high: str, truth: float, kept: Any) -> str:
        x, a, b = of(figure)[kept] / truth, of(low)[kept] / truth, of(high)[kept] / truth
        known = np.isfinite(x)
        a, b = np.nan_to_num(a, nan=0.0), np.where(np.isnan(b), np.inf, b)
        if not known.any():
            return "none"
        return (
            f"{np.median(x[known]) - 1:+6.1%} (p5 {np.quantile(x[known], 0.05) - 1:+.0%}, p95 "
            f"{np.quantile(x[known], 0.95) - 1:+.0%}) "
            f"holds {np.mean((a <= 1) & (b >= 1)):.1%} ± {np.median((b - a)[known]) / 2:.0%}"
        )

    pooled, most, violated = of("pooled") > 0, of("high"), of("violated")
    verified, figures = of("verified"), of("usable")
    off, of_all = (
        np.nanmedian(v) / usable - 1 if np.isfinite(v).any() else np.nan
        for v in (verified, figures)
    )
    return (
        f"pooled {pooled.mean():.0%}; usable {part('usable', 'low', 'high', usable, pooled)}; "
        f"C_max {part('c_max', 'c_low', 'c_high', in_flight, pooled)}; verified "
        f"{np.isfinite(verified).mean():.0%} "
        f"{off:+.0%}, "
        f"above the truth {np.mean(verified > usable):.1%}; "
        f"all usable {of_all:+.1%}; "
        "reaches above a load that was surely violated "
        f"{np.mean(most > violated * (1 + 1e-9)):.1%}; "
        f"peak {part('peak', 'p_low', 'p_high', peak, slice(None))} of "
        f"{np.isfinite(of('peak')).mean():.0%}"
    )


def main() -> None:
    made = parser(
        __doc__, runs=100, first_seed=0, servers="mm1,mg1,mm8,batch", quantiles="0.95,0.99"
    )
    made.add_argument("--loads", default=",".join(map(str, LOADS)))
    made.add_argument("--duration", type=float, help="of a stage, s; no limit in time then")
    given = made.parse_args()
    for name in given.servers.split(","):
        for load in map(float, given.loads.split(",")):
            for quantile in map(float, given.quantiles.split(",")):
                slo, truth = limit_at(name, load, quantile), truth_at(name, load)
                rows, sent, spent = [], [], []
                for seed in range(given.first_seed, given.first_seed + given.runs):
                    rig = one_sweep(name, slo, given.duration, seed)
                    rows.append(row_of(rig.stages, [slo]))
                    sent.append(rig.sent)
                    spent.append(rig.lasted_s)
                length = f"stages of {given.duration:g} s" if given.duration else "10 min"
                print(
                    f"{name} {load:g} p{100 * quantile:g} ({length}, {np.median(sent):,.0f} "
                    f"requests, {np.median(spent):,.0f} s): "
                    + line(rows, truth.rate_rps, truth.in_flight, true_peak_rps(name, slo)),
                    flush=True,
                )


if __name__ == "__main__":
    main()
