"""Hand-made summaries and run.json dicts.

Latencies follow simple formulas (log-normal around a queueing-like rise), so that pictures look
like those of a real sweep.
"""

import copy
import json
import math
from pathlib import Path
from typing import Any

from scipy.special import ndtri

from ampacity.analysis.contract import capacity
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.stage import LittlesLaw, SloVerdict, Stage
from ampacity.analysis.contract.summary import Audit, Summary
from ampacity.loadgen.rundir.records import KINDS
from tests.support.contract import blank

DATA = Path(__file__).parents[1] / "data" / "reports"
CURVE_Q = [0.0, *[i / 100 for i in range(1, 100)], 0.995, 0.999]
LENGTH_Q = json.loads("""{"p1": 0.01, "p5": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5,
    "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 0.9995}""")


def errors(**counts: int) -> dict[str, int]:
    return {status: counts.get(status, 0) for status in KINDS if status != "ok"}


def _quantile(median: float, sigma: float, q: float) -> float:
    return float(median * math.exp(sigma * ndtri(min(max(q, 0.003), 0.9995))))


def percentiles(median: float, sigma: float, n: int, failed: int = 0) -> dict[str, Any]:
    out: dict[str, Any] = {
        p: _quantile(median, sigma, int(p[1:]) / 100) for p in ("p50", "p90", "p95", "p99")
    }
    out |= {
        "p99_ci": [out["p99"] * 0.86, out["p99"] * 1.21],
        "mean": median * math.exp(sigma**2 / 2),
    }
    out |= {"n": n, "infinite": failed}
    if n < 299:
        out |= {"p99": None, "p99_ci": None, "p99_reason": f"needs 299 requests, has {n}"}
    elif failed > 0.01 * n:
        out |= {
            "p99": None,
            "p99_ci": None,
            "p99_reason": f"infinite: {failed} of {n} requests failed",
        }
    return out


def unknown(reason: str) -> dict[str, Any]:
    return blank(Percentiles) | {"reason": reason}


def goodput(peak_rps: float | None, at_rps: float | None) -> dict[str, Any]:
    return blank(capacity.Goodput) | {"peak_rps": peak_rps, "at_offered_rps": at_rps}


def curve(median: float, sigma: float) -> dict[str, list[float]]:
    return {"q": CURVE_Q, "value": [_quantile(median, sigma, q) for q in CURVE_Q]}


def lengths(median: float, sigma: float, n: int) -> dict[str, float]:
    return {
        "n": n,
        "mean": median * math.exp(sigma**2 / 2),
        **{name: float(round(_quantile(median, sigma, q))) for name, q in LENGTH_Q.items()},
    }


def stage(
    index: int, offered: float | None, ttft: float, concurrency: float, **changes: Any
) -> dict[str, Any]:
    """One stage with a median TTFT of ``ttft`` seconds; ``changes`` override what it would hold."""
    n, failed = changes.pop("n", 600), changes.pop("failed", 0)
    wide = changes.pop("sigma", 0.45)
    achieved = changes.pop("achieved", offered)
    itl = 0.011 + 0.0006 * concurrency
    e2e = ttft + 190 * itl
    good = changes.pop("good", 1.0)
    set_ = changes.get("concurrency_set")
    base = blank(Stage) | {
        "name": f"{set_} users" if set_ else f"{offered:g} req/s",
        "index": index,
        "kind": "open",
        "offered_rps": offered,
        "concurrency_set": None,
        "arrived_rps": offered or achieved,
        "achieved_rps": achieved,
        "window": json.loads("""{"start_s": 3.1, "end_s": 63.1, "warmup_requests": 12,
            "method": "mser5", "settled": true, "reason": null}"""),
        "requests": n,
        "ok": n - failed,
        "errors": errors(timeout=failed),
        "concurrency": concurrency,
        "concurrency_max": round(2 * concurrency),
        "ttft_s": percentiles(ttft * 0.98, wide, n, failed),
        "ttft_from_schedule_s": percentiles(ttft, wide, n, failed),
        "first_answer_s": percentiles(ttft, wide, n, failed),
        "itl_s": percentiles(itl, 0.3, n * 190, 0),
        "icl_s": percentiles(itl, 0.32, n * 188, 0),
        "tpot_s": percentiles(itl * 1.02, 0.12, n, failed),
        "e2e_s": percentiles(e2e, 0.5, n, failed),
        "e2e_from_schedule_s": percentiles(e2e, 0.5, n, failed),
        "curves": {
            "ttft_from_schedule_s": curve(ttft, wide),
            "itl_s": curve(itl, 0.3),
            "e2e_s": curve(e2e, 0.5),
        },
        "output_tokens_per_s": 190.0 * (achieved or 0),
        "input_tokens_per_s": 1155.0 * (achieved or 0),
        "goodput_rps": good * (achieved or 0),
        "slo_attainment": good,
        "stable": True,
        "stable_reason": None,
        "slo_met": True,
        "slo_verdicts": [
            verdict("ttft_p99=2s", "met", _quantile(ttft, wide, 0.99), good, n // 3),
            verdict("itl_p99=100ms", "met", _quantile(itl, 0.3, 0.99), 1.0, n),
        ],
        "slip_s": {"p50": 0.00008, "p99": 0.0007},
        "client_limited": False,
        "client_limited_reason": None,
        "littles_law": blank(LittlesLaw)
        | {
            "l": concurrency,
            "lambda_w": concurrency * 0.996,
            "consistency": 1.004,
            "tolerance": 0.05,
            "ok": True,
        },
    }
    return base | changes


def verdict(
    slo: str, word: str, value_s: float | None, attainment: float, effective: int, **more: Any
) -> dict[str, Any]:
    return blank(SloVerdict) | {
        "slo": slo,
        "verdict": word,
        "value_s": value_s,
        "attainment": attainment,
        "requests_effective": effective,
        **more,
    }


def _verdicts(ttft_verdict: str, value_s: float | None, **more: Any) -> list[dict[str, Any]]:
    attainment = 0.05 if ttft_verdict == "violated" else 0.985
    return [
        verdict("ttft_p99=2s", ttft_verdict, value_s, attainment, 80) | more,
        verdict("itl_p99=100ms", "met", 0.061, 1.0, 600),
    ]


GIVEN: dict[str, Any] = json.loads((DATA / "sweep.json").read_text(encoding="utf-8"))
SLOS, WORKLOAD, WARNINGS, META = (GIVEN[name] for name in ("slos", "workload", "warnings", "meta"))
OVER_STAGES: dict[str, Any] = {
    "knee": GIVEN["knee"]
    | {"methods": {k: blank(capacity.KneeMethod) | v for k, v in GIVEN["knee"]["methods"].items()}},
    "capacity": blank(capacity.Capacity) | GIVEN["capacity"],
    "littles_law": blank(capacity.LittlesLawGap) | GIVEN["littles_law"],
    "fleet": blank(capacity.Fleet) | GIVEN["fleet"],
    "audit": blank(Audit) | GIVEN["audit"],
}

FEW = "p99 needs 299 requests"


def _open_stages() -> list[dict[str, Any]]:
    reason = "needs 299 requests, has 120"
    few = _verdicts("inconclusive", None, value_s_reason=reason, more_requests=179, cause=FEW)
    near = _verdicts("inconclusive", 2.10, more_requests=900, cause=FEW)
    over = _verdicts("violated", 41.0, reason="in flight keeps growing")
    few[0]["attainment"] = 1.0
    grows = {"stable": False, "stable_reason": "requests in flight grow by 2.0 a second"}
    wide = {"sigma": 0.51, "achieved": 6.9, "good": 0.951, "slo_met": None}
    last = {"sigma": 0.6, "achieved": 7.02, "good": 0.05, "failed": 27, "slo_met": False}
    stages = [
        stage(0, 1.0, 0.101, 2.7, n=120, slo_met=None, slo_verdicts=few),
        stage(1, 2.0, 0.112, 5.6),
        stage(2, 3.0, 0.127, 9.1),
        stage(3, 4.0, 0.150, 13.4),
        stage(4, 5.0, 0.190, 19.2, sigma=0.6),
        stage(5, 6.0, 0.310, 28.4, sigma=0.75, achieved=5.98, good=0.994),
        stage(6, 7.0, 0.640, 44.0, **wide, slo_verdicts=near),
        stage(7, 9.0, 11.5, 118.0, **last, **grows, slo_verdicts=over),
    ]
    for each in stages[6:]:
        drawn = each["curves"]["ttft_from_schedule_s"]
        drawn["value"] = [min(v, 60.0) for v in drawn["value"]]
    return stages


def open_sweep() -> dict[str, Any]:
    """Return eight offered rates from 1 to 9 requests/s; the endpoint saturates near 7."""
    realised = {
        "input_tokens": {"planned": lengths(1020, 0.602, 4320), "sent": lengths(1031, 0.597, 4293)},
        "output_tokens": {
            "planned": lengths(160, 0.575, 4320),
            "received": lengths(151, 0.56, 4293),
        },
        "cached_token_share": 0.0,
        "tokens_per_chunk": 1.02,
        "token_source": {"usage": 4293, "chunks": 27},
    }
    return blank(Summary) | {
        "schema_version": 2,
        "verdict": "The endpoint carries 6.4 requests/s (6.0 to 7.0) with ttft_p99=2s and "
        "itl_p99=100ms met: 34 requests in flight on average.",
        "warnings": copy.deepcopy(WARNINGS),
        "workload": WORKLOAD | {"realised": realised},
        "slos": copy.deepcopy(SLOS),
        "requests": 4320,
        "errors": errors(timeout=27),
        "stages": _open_stages(),
        "goodput": goodput(6.56, 7.0),
        **copy.deepcopy(OVER_STAGES),
    }


def closed_sweep() -> dict[str, Any]:
    """Concurrency 1, 2, 4, 8, 16, 32: rates level off near 6 requests/s."""
    summary = open_sweep()
    stages = []
    for index, (users, rps, ttft) in enumerate(
        [
            (1, 0.42, 0.09),
            (2, 0.82, 0.095),
            (4, 1.55, 0.11),
            (8, 2.8, 0.15),
            (16, 4.5, 0.4),
            (32, 5.9, 2.4),
        ]
    ):
        last = users == 32
        stages.append(
            stage(
                index,
                None,
                ttft,
                float(users),
                kind="closed",
                concurrency_set=users,
                achieved=rps,
                good=0.2 if last else 1.0,
                slo_met=not last,
                slo_verdicts=_verdicts("violated" if last else "met", ttft * 2.8),
            )
        )
    summary |= {
        "verdict": "The SLO holds up to 16 requests in flight (closed loop), 4.5 requests/s.",
        "warnings": [
            {"code": "closed_loop", "text": "A closed loop hides queueing: confirm with --rates."}
        ],
        "stages": stages,
        "errors": errors(),
        "capacity": summary["capacity"]
        | json.loads("""{"c_max": 16.0, "c_max_ci": [16.0, 32.0], "c_max_basis": "closed",
            "capacity_rps": 4.5, "capacity_rps_ci": [4.3, 5.9], "crossing": "measured",
            "assumption": "the set concurrency was held"}"""),
        "goodput": goodput(4.5, None),
        "knee": json.loads("""{"concurrency": 12.0, "rps": 3.9, "region": [8.0, 16.0],
            "region_rps": [2.8, 4.5], "reason": null, "methods": {}}"""),
        "fleet": blank(capacity.Fleet)
        | {
            "tensor_parallel": 1,
            "safety_factor": 1.2,
            "reason": "no peak rate was given (--peak-rps)",
        },
    }
    return summary


def one_stage() -> dict[str, Any]:
    """A single stage of 40 requests: no p99, no knee, no capacity; the ITL is not known."""
    summary = open_sweep()
    only = stage(0, 2.0, 0.12, 5.1, n=40, slo_met=None)
    no_itl = "tokens of each chunk are not known"
    only["itl_s"] = unknown(no_itl)
    del only["curves"]["itl_s"]
    only["slo_verdicts"] = [
        verdict(text, "inconclusive", None, 1.0, 40, more_requests=259, reason=why)
        for text, why in [("ttft_p99=2s", "needs 299 requests, has 40"), ("itl_p99=100ms", no_itl)]
    ]
    few = "one stage only: a knee needs at least four"
    summary |= {
        "verdict": "Inconclusive: 40 requests at 2 req/s are too few to judge ttft_p99=2s.",
        "warnings": [],
        "requests": 44,
        "errors": errors(),
        "stages": [only],
        "knee": blank(capacity.Knee) | {"reason": few},
        "capacity": blank(capacity.Capacity)
        | {"crossing": "none", "reason": "no stage could be decided"},
        "littles_law": blank(capacity.LittlesLawGap)
        | {"limit_s": 2.0, "limit_metric": "ttft", "reason": "no C_max", "consistency": 1.0},
        "goodput": goodput(2.0, 2.0),
        "fleet": closed_sweep()["fleet"],
    }
    return summary


def all_failed() -> dict[str, Any]:
    """Two stages at a wrong address: every request is a connect_error."""
    summary = one_stage()
    gone = "no request succeeded"
    names = [
        key for key in stage(0, 1.0, 0.1, 1.0) if key.endswith("_s") and key not in ("slip_s",)
    ]
    stages = []
    for index, offered in enumerate([1.0, 2.0]):
        dead = stage(
            index,
            offered,
            0.1,
            0.01,
            n=30,
            achieved=0.0,
            slo_met=False,
            ok=0,
            slo_attainment=0.0,
            errors=errors(connect_error=30),
            curves={},
        )
        for name in names:
            if isinstance(dead[name], dict):
                dead[name] = unknown(gone)
        dead["slo_verdicts"] = [verdict("ttft_p99=2s", "violated", None, 0.0, 30, reason=gone)]
        dead["littles_law"] = blank(LittlesLaw) | {"l": 0.01, "reason": gone}
        stages.append(dead)
    summary |= {
        "verdict": "No request succeeded: all 60 ended as connect_error.",
        "requests": 60,
        "errors": errors(connect_error=60),
        "stages": stages,
        "warnings": [
            {"code": "all_failed", "text": "Check the address and that the server listens."}
        ],
        "goodput": goodput(0.0, 1.0),
        "capacity": summary["capacity"] | {"reason": gone},
    }
    realised = {
        "planned": lengths(1020, 0.6, 60),
        "sent": dict.fromkeys(["n", "mean", *LENGTH_Q]) | {"n": 0},
    }
    received = {
        "planned": lengths(160, 0.57, 60),
        "received": dict.fromkeys(["n", "mean", *LENGTH_Q]) | {"n": 0},
    }
    summary["workload"] = WORKLOAD | {
        "realised": {
            "input_tokens": realised,
            "output_tokens": received,
            "cached_token_share": None,
            "cached_token_share_reason": gone,
            "tokens_per_chunk": None,
            "tokens_per_chunk_reason": gone,
            "token_source": {},
        }
    }
    return summary


def no_slos() -> dict[str, Any]:
    """The open sweep without an SLO: a knee, but neither C_max nor goodput."""
    summary = open_sweep()
    why = "no SLO was given (--slo)"
    for each in summary["stages"]:
        each |= {
            "slo_met": None,
            "slo_verdicts": [],
            "goodput_rps": None,
            "goodput_rps_reason": why,
            "slo_attainment": None,
        }
    summary |= {
        "verdict": "The knee lies at 5.4 to 6.7 requests/s; without an SLO there is no C_max.",
        "slos": [],
        "warnings": [{"code": "no_slo", "text": "Give --slo ttft_p99=2s to get a C_max."}],
        "capacity": blank(capacity.Capacity) | {"crossing": "none", "reason": why},
        "littles_law": blank(capacity.LittlesLawGap) | {"consistency": 0.99, "reason": why},
        "goodput": goodput(None, None) | {"reason": why},
    }
    return summary


def meta(summary: dict[str, Any]) -> dict[str, Any]:
    """Return a run.json that belongs to ``summary``."""
    stages = [
        {
            "index": s["index"],
            "kind": s["kind"],
            "offered_rps": s["offered_rps"],
            "concurrency": s["concurrency_set"],
            "start_ns": 70 * i * 10**9,
            "end_ns": (70 * i + 65) * 10**9,
            "scheduled_requests": s["requests"] + 12,
            "drained_ns": (70 * i + 68) * 10**9,
            "ended_early": None,
            "audit": GIVEN["audit_of_stage"],
        }
        for i, s in enumerate(summary["stages"])
    ]
    given = {"workload": WORKLOAD, "slos": SLOS, "stages": stages}
    return copy.deepcopy(META | given)


ALL = {f.__name__: f for f in (open_sweep, closed_sweep, one_stage, all_failed, no_slos)}
