"""Little's Law: a check of the measurement, and the gap between a ceiling and the capacity."""

import math
from collections.abc import Sequence

import numpy as np
from msgspec import structs

from ampacity.analysis.contract.capacity import Capacity, LittlesLawGap
from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import LittlesLaw, Server, ServerLaw, Stage
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
) -> LittlesLaw:
    """Compare L with lambda W over [start, end] of a stage.

    lambda counts the requests that began in the window, W is their mean time in flight. With V(t)
    the sum of the remaining times of the requests in flight at t, L T - lambda W T = V(start) -
    V(end) exactly. Requests in one queue wait for one another, so V varies far more than
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
    length = end_s - start_s
    if total <= 0 or length <= 0:
        return LittlesLaw(
            l=concurrency,
            lambda_w=None,
            consistency=None,
            tolerance=None,
            ok=None,
            reason="no request began in the window",
            server=None,
        )
    inner = np.arange(1, _SPANS)
    share = np.concatenate([[0.0], (inner + inner * _GOLDEN % 1 - 0.5) / _SPANS, [1.0]])
    to_go = [
        float(np.sum(np.maximum(finish - t, 0.0)[begin < t])) for t in start_s + length * share
    ]
    steps = np.diff(to_go)
    tolerance = max(_TOLERANCE_FLOOR, _TOLERANCE_Z * float(np.sqrt(steps @ steps)) / total)
    ratio = concurrency * length / total
    return LittlesLaw(
        l=concurrency,
        lambda_w=total / length,
        consistency=ratio,
        tolerance=tolerance,
        ok=bool(abs(ratio - 1) <= tolerance),
        reason=None,
        server=None,
    )


SERVER_TOLERANCE = 0.2  # of the mean in flight: gauges are sampled once a second
SERVER_FEW = 2.0  # requests by which they may differ in any case
FOREIGN_SHARE, FOREIGN_FEW = 1.5, 5.0  # beyond so many times ours and so many, it is no error


def against_server(concurrency: float, server: Server | None) -> ServerLaw | None:
    """Compare requests in flight with the server's running + waiting; None without gauges.

    ``ok`` is False where they differ by more than ``SERVER_TOLERANCE`` and ``SERVER_FEW`` requests;
    ``reason`` then has the likely cause.
    """
    if server is None or server.running is None or not server.samples:
        return None
    level = server.running + (server.waiting or 0.0)
    ratio = level / concurrency if concurrency > 0 else None
    if abs(level - concurrency) <= max(SERVER_TOLERANCE * concurrency, SERVER_FEW):
        return ServerLaw(server_l=level, ratio=ratio, ok=True, reason=None)
    why = (
        "another client is using it, or it still works on requests that this client has given up"
        if level > concurrency
        else "requests wait before it counts them (a gateway, a connection limit, tokenizing), or "
        "its gauges cover only one of several replicas"
    )
    reason = (
        f"the server counts {level:.3g} running and waiting, this client {concurrency:.3g} in "
        f"flight: {why}"
    )
    return ServerLaw(server_l=level, ratio=ratio, ok=False, reason=reason)


def foreign_requests(law: LittlesLaw) -> str | None:
    """Return how much more the server runs than a stage has in flight, where that is far more."""
    own = max(law.l or 0.0, law.lambda_w or 0.0)  # which counts what began before the window
    level = law.server.server_l if law.server and law.server.server_l else 0.0
    if level <= FOREIGN_SHARE * own + FOREIGN_FEW:
        return None
    return f"the server runs {level - own:,.0f} more requests than this run sends"


def gap(c_max: float, limit_s: float, capacity_rps: float) -> LittlesLawGap:
    """Return the ceiling C_max / limit in requests/s, and the gap ceiling / capacity.

    gap = C_max / (limit capacity) is, in an open loop, the mean time in flight over the limit. Up
    to 2 the capacity is representative of the limit. Below 1 the answers are shorter than the
    limit, so the ceiling is no upper bound and the measured capacity may exceed it.
    """
    ceiling = c_max / limit_s
    value = ceiling / capacity_rps
    representative, reason = value <= REPRESENTATIVE_GAP + 1e-9, None
    if not representative:
        reason = (
            f"not representative: requests last {value:.3g} times the limit on average (a queue "
            "before the batch, a slow batch, or longer answers than the limit is made for)"
        )
    elif value < 1 - 1e-9:
        reason = (
            f"representative: requests last {value:.3g} of the limit on average, so the server "
            "carries more than the ceiling"
        )
    return with_nulls(
        LittlesLawGap,
        ceiling_rps=ceiling,
        gap=value,
        representative=representative,
        reason=reason,
    )


def gap_of_run(capacity: Capacity, stages: Sequence[Stage], slos: Sequence[Slo]) -> LittlesLawGap:
    """Return the gap with the figures of the steady stages, and the server's count furthest off."""
    laws = [s.littles_law for s in stages if s.stable and not s.client_limited]
    shares = [law.consistency for law in laws if law.consistency]
    counts = [law.server for law in laws if law.server and law.server.ratio]
    worst = max(counts, key=lambda law: abs(math.log(max(law.ratio or 0.0, 1e-3))), default=None)
    return summarise_gap(capacity, slos, shares, worst)


def summarise_gap(
    capacity: Capacity,
    slos: Sequence[Slo],
    shares: Sequence[float],
    server: ServerLaw | None = None,
) -> LittlesLawGap:
    """Return the top-level ``littles_law`` object.

    ``shares`` are the consistencies of the stable stages. The gap is null where C_max is a bound,
    or where the binding SLO does not limit every whole request.
    """
    binding = next((s for s in slos if s.text == capacity.binding_slo), None)
    if (bound := _BOUNDS.get(capacity.crossing)) is not None:
        found = with_nulls(LittlesLawGap, reason=bound)
    elif capacity.c_max is None or not capacity.capacity_rps or binding is None:
        found = with_nulls(LittlesLawGap, reason=_BOUNDS["none"])
    elif binding.metric != "e2e" or binding.class_:
        reason = f"no gap: {binding.text} is no limit on all whole requests"
        found = with_nulls(LittlesLawGap, reason=reason)
    else:
        found = gap(capacity.c_max, binding.limit_s, capacity.capacity_rps)
    return structs.replace(
        found,
        limit_s=binding.limit_s if binding else None,
        limit_metric=binding.metric if binding else None,
        consistency=finite(float(np.median(shares))) if shares else None,
        server=server,
    )


_BOUNDS = {
    "lower_bound": "no verdict: C_max is a lower bound, as no stage violated an SLO",
    "saturated": (
        "no verdict: the closed loop is saturated, so that C_max is the number of users that was set"
    ),
    "none": "no capacity within the SLOs was found",
}
