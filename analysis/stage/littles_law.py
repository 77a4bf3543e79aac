"""Little's law, twice: as a check of the measurement, and as the gap between a ceiling and what was
carried.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ampacity.analysis.metrics.percentiles import finite
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import Slo

REPRESENTATIVE_GAP = 2.0
_TOLERANCE_FLOOR = 0.01
_TOLERANCE_Z = 2.0
_SPANS = 50
_GOLDEN = (5**0.5 - 1) / 2


def consistency(
    start_s: float, end_s: float, concurrency: float, begin_s: Floats, finish_s: Floats
) -> dict[str, Any]:
    """Return the ``littles_law`` object of a stage: L against lambda W over [start, end].

    lambda counts the requests that began in the window, W is their mean time in flight. With V(t)
    the sum of the times that the requests in flight at t have still to go, L T - lambda W T =
    V(start) - V(end) exactly. Requests in one queue wait for one another, so V varies far more than
    independent requests would: its own steps d over ``_SPANS`` spans of the window give the
    tolerance 2 sqrt(sum d^2) / (lambda W T), at least 1 %. That is two standard errors of a sum of
    uncorrelated steps (self-normalised: de la Pena, Lai, Shao 2009), more than that of steps which
    turn back, as in a steady state; one jump, as from an idle server, stays below it, steps that go
    one way do not. Spans are of unequal length (multiples of the golden ratio), lest they keep time
    with equal requests.
    """
    known = (finish_s > start_s) & (begin_s < end_s)  # neither is NaN
    begin, finish = begin_s[known], finish_s[known]
    inside = begin >= start_s
    total = float(np.sum(finish[inside] - begin[inside]))
    result: dict[str, Any] = dict.fromkeys(("lambda_w", "consistency", "tolerance", "ok")) | {
        "l": concurrency
    }
    length = end_s - start_s
    if total <= 0 or length <= 0:
        return result | {"reason": "no request began in the window"}
    inner = np.arange(1, _SPANS)
    share = np.concatenate([[0.0], (inner + inner * _GOLDEN % 1 - 0.5) / _SPANS, [1.0]])
    to_go = [
        float(np.sum(np.maximum(finish - t, 0.0)[begin < t])) for t in start_s + length * share
    ]
    steps = np.diff(to_go)
    tolerance = max(_TOLERANCE_FLOOR, _TOLERANCE_Z * float(np.sqrt(steps @ steps)) / total)
    ratio = concurrency * length / total
    return result | {
        "lambda_w": total / length,
        "consistency": ratio,
        "tolerance": tolerance,
        "ok": bool(abs(ratio - 1) <= tolerance),
        "reason": None,
    }


SERVER_TOLERANCE = 0.2  # of the mean in flight: gauges are sampled once a second
SERVER_FEW = 2.0  # requests by which they may differ in any case


def against_server(concurrency: float, server: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Compare requests in flight with the server's running + waiting; None without gauges.

    ``ok`` is False where they differ by more than ``SERVER_TOLERANCE`` and ``SERVER_FEW`` requests;
    ``reason`` says what is likely then.
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
        why = (
            "somebody else is using it, or it still works on requests that this client has given up"
        )
    else:
        why = (
            "requests wait before it counts them (a gateway, a connection limit, tokenizing), or "
            "its gauges show one of "
            "several replicas only"
        )
    said = (
        f"the server counts {level:.3g} running and waiting, this client {concurrency:.3g} in "
        f"flight: {why}"
    )
    return result | {"ok": False, "reason": said}


def gap(c_max: float, limit_s: float, capacity_rps: float) -> dict[str, Any]:
    """Return the ceiling C_max / limit in requests/s, and the gap ceiling / capacity.

    Up to 2 the measured rate is representative of the limit, above it is not. gap = C_max / (limit
    usable) is, in an open loop, the mean time in flight over the limit: below 1 the answers are
    shorter than the limit, so that the ceiling is no upper bound, and the rate that was measured
    stands.
    """
    ceiling = c_max / limit_s
    value = ceiling / capacity_rps
    found = {
        "ceiling_rps": ceiling,
        "gap": value,
        "representative": value <= REPRESENTATIVE_GAP + 1e-9,
    }
    if not found["representative"]:
        reason = (
            f"not representative: requests last {value:.3g} times the limit on average (a queue "
            "before the batch, a slow batch, "
            "or longer answers than the limit is made for)"
        )
    elif value < 1 - 1e-9:
        reason = (
            f"representative: requests last {value:.3g} of the limit on average, so the server "
            "carries more than the ceiling"
        )
    else:
        reason = None
    return found | {"reason": reason}


def summarise_gap(
    capacity: Mapping[str, Any], slos: Sequence[Slo], shares: Sequence[float]
) -> dict[str, Any]:
    """Return the top-level ``littles_law`` object.

    ``shares`` are the consistencies of the stable stages. The gap is null where C_max is a bound,
    or where the SLO that binds is no limit on every whole request.
    """
    binding = next((s for s in slos if s.text == capacity["binding_slo"]), None)
    result: dict[str, Any] = dict.fromkeys(
        ("ceiling_rps", "limit_s", "limit_metric", "gap", "representative")
    )
    result["consistency"] = finite(float(np.median(shares))) if shares else None
    if binding is not None:
        result |= {"limit_s": binding.limit_s, "limit_metric": binding.metric}
    if (bound := _BOUNDS.get(capacity["crossing"])) is not None:
        return result | {"reason": bound}
    if capacity["c_max"] is None or not capacity["capacity_rps"] or binding is None:
        return result | {"reason": "no capacity within the SLOs was found"}
    if binding.metric != "e2e" or binding.class_:
        return result | {
            "reason": f"void: {binding.text} does not limit how long every request is in the system"
        }
    return result | gap(capacity["c_max"], binding.limit_s, capacity["capacity_rps"])


_BOUNDS = {
    "lower_bound": "void: C_max is a lower bound, as no stage violated an SLO",
    "saturated": (
        "void: the closed loop is saturated, so that C_max is the number of users that was set"
    ),
    "none": "no capacity within the SLOs was found",
}
