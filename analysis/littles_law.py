"""Little's law, twice: as a check of the measurement, and as the gap between a ceiling and what was carried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from analysis.metrics import Floats
from analysis.percentiles import finite

REPRESENTATIVE_GAP = 2.0
_TOLERANCE_FLOOR = 0.01
_TOLERANCE_Z = 3.0


def consistency(
    start_s: float, end_s: float, concurrency: float, begin_s: Floats, finish_s: Floats
) -> dict[str, Any]:
    """L against lambda W over [start, end]: the ``littles_law`` object of a stage.

    lambda counts the requests that began in the window, W is their mean time in flight. The two sides
    differ by requests that cross an edge; their residual times r make the tolerance
    3 sqrt(sum r^2) / (lambda W T), at least 1 %. A stage whose in-flight count drifts exceeds it.
    """
    known = ~np.isnan(begin_s) & ~np.isnan(finish_s)
    begin, finish = begin_s[known], finish_s[known]
    inside = (begin >= start_s) & (begin < end_s)
    total = float(np.sum(finish[inside] - begin[inside]))
    result: dict[str, Any] = {
        "l": concurrency, "lambda_w": None, "consistency": None, "tolerance": None, "ok": None,
    }  # fmt: skip
    length = end_s - start_s
    if total <= 0 or length <= 0:
        return result | {"reason": "no request began in the window"}
    brought = np.clip(finish, start_s, end_s) - start_s
    left_over = finish - end_s
    edges = np.concatenate(
        [brought[(begin < start_s) & (finish > start_s)], left_over[inside & (finish > end_s)]]
    )
    tolerance = max(_TOLERANCE_FLOOR, _TOLERANCE_Z * float(np.sqrt(edges @ edges)) / total)
    ratio = concurrency * length / total
    return result | {
        "lambda_w": total / length, "consistency": ratio, "tolerance": tolerance,
        "ok": bool(abs(ratio - 1) <= tolerance),
    }  # fmt: skip


SERVER_TOLERANCE = 0.2  # of the mean in flight: gauges are sampled once a second
SERVER_FEW = 2.0  # requests by which they may differ in any case


def against_server(concurrency: float, server: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Requests in flight by this end against the server's running + waiting; None where it shows no such gauges.

    ``ok`` is False where they differ by more than ``SERVER_TOLERANCE`` and ``SERVER_FEW`` requests; ``reason`` says what
    is likely then.
    """
    if not server or server.get("running") is None or not server.get("samples"):
        return None
    level = float(server["running"]) + float(server.get("waiting") or 0.0)
    difference = level - concurrency
    result: dict[str, Any] = {
        "server_l": level,
        "ratio": level / concurrency if concurrency > 0 else None,
        "ok": True,
        "reason": None,
    }
    if abs(difference) <= max(SERVER_TOLERANCE * concurrency, SERVER_FEW):
        return result
    if difference > 0:
        why = "somebody else is using it, or it still works on requests that this client has given up"
    else:
        why = (
            "requests wait before it counts them (a gateway, a connection limit, tokenizing), or its gauges show one of "
            "several replicas only"
        )
    said = (
        f"the server counts {level:.3g} running and waiting, this client {concurrency:.3g} in flight: {why}"
    )
    return result | {"ok": False, "reason": said}


def gap(c_max: float, limit_s: float, usable_rps: float, metric: str) -> dict[str, Any]:
    """ceiling = C_max / limit (requests/s), and the gap of the sizing guide, ceiling / usable.

    From 1 to 2 the measurement is representative of the limit, above 2 it is not (None: the figure says nothing).
    Below 1 the ceiling lies under what was carried: answers are shorter than the limit, so it is no ceiling.
    gap = C_max / (limit usable): in an open loop that is mean end-to-end time / limit, so for a limit on
    the first token and answers much longer than it the figure says nothing.
    """
    if metric in ("itl", "icl", "tpot"):
        return {"reason": f"a limit on {metric} is per token: it bounds no request's time in the system"}
    ceiling = c_max / limit_s
    value = ceiling / usable_rps
    result = {"ceiling_rps": ceiling, "gap": value, "representative": None, "reason": None}
    if value < 1 - 1e-9:
        return result | {
            "reason": "says nothing: requests last less than the limit, so that C_max / limit is no ceiling"
        }
    if value <= REPRESENTATIVE_GAP + 1e-9:
        return result | {"representative": True}
    if metric == "e2e":
        reason = (
            f"not representative: requests last {value:.3g} times the limit on average (a queue before the batch, a slow batch, "
            "or longer answers than the limit is made for)"
        )
        return result | {"representative": False, "reason": reason}
    return result | {
        "reason": f"says nothing: answers last much longer than the limit, which is on {metric.upper()} alone"
    }


def summarise_gap(
    c_max: float | None, usable_rps: float | None, limit_s: float | None, metric: str | None, shares: list[float]
) -> dict[str, Any]:  # fmt: skip
    """The top-level ``littles_law`` object; ``shares`` are the consistencies of the stable stages."""
    result: dict[str, Any] = {
        "ceiling_rps": None, "limit_s": limit_s, "limit_metric": metric, "gap": None, "representative": None,
        "reason": None, "consistency": finite(float(np.median(shares))) if shares else None,
    }  # fmt: skip
    if c_max is None or not usable_rps or limit_s is None or metric is None:
        return result | {"reason": "no usable rate inside an SLO was found"}
    return result | gap(c_max, limit_s, usable_rps, metric)
