"""The client's account of each request against the server's, matched one to one by X-Request-Id."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.load.mock import Served

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DoctorResult:
    """What the client recorded of one request. Times are monotonic ns."""

    started_ns: int  # the first byte of the request was handed to the socket
    token_ns: npt.NDArray[np.int64]  # the receive time of each token
    scheduled_ns: int | None = None


def compare(seen: Mapping[str, DoctorResult], served: Mapping[str, list[Served]]) -> dict[str, Any]:
    """Counts and errors in ms over the requests of ``seen``; errors are absolute, client minus
    server.

    TTFT: (first token read − started) against (first token sent − arrival). ITL: each gap between
    tokens against the same gap at the server. Lag: a token's read − its send. Lateness: arrival −
    schedule."""
    ttft, itl, lag, late = [], [], [], []
    differ = 0
    for name, mine in seen.items():
        if len(found := served.get(name, [])) != 1:
            continue
        theirs = found[0]
        if mine.scheduled_ns is not None:
            late.append((theirs.arrival_ns - mine.scheduled_ns) / 1e6)
        if len(mine.token_ns) != len(theirs.token_ns):
            differ += 1
            continue
        if len(mine.token_ns):
            measured_ns = int(mine.token_ns[0]) - mine.started_ns
            ttft.append(abs(measured_ns - (int(theirs.token_ns[0]) - theirs.arrival_ns)) / 1e6)
            lag.append((mine.token_ns - theirs.token_ns) / 1e6)
            itl.append(np.abs(np.diff(mine.token_ns) - np.diff(theirs.token_ns)) / 1e6)
    return {
        "requests": len(seen),
        "never_arrived": sum(name not in served for name in seen),
        "arrived_twice": sum(len(served.get(name, [])) > 1 for name in seen),
        "tokens_differ": differ,
        **_quantiles("ttft_error_ms", ttft),
        **_quantiles("itl_error_ms", _joined(itl)),
        **_quantiles("token_lag_ms", _joined(lag)),
        **_quantiles("arrival_late_ms", late),
    }


def load_seen_by_server(served: Iterable[Served], settle_s: float) -> dict[str, Any]:
    """Rates of one load from the server's side alone, so for any client.

    Tokens per second leave out the first ``settle_s`` (streams are still adding up) and what comes
    after the last arrival (they only end), where the load is long enough for that."""
    served = list(served)
    if not served:
        return {"arrivals": 0, "tokens": 0}
    arrival_ns = np.sort(np.array([s.arrival_ns for s in served]))
    token_ns = np.concatenate([s.token_ns for s in served])
    gaps_s = np.diff(arrival_ns) / 1e9
    begin_ns, end_ns = int(arrival_ns[0]), int(arrival_ns[-1])
    if end_ns - begin_ns > 2 * settle_s * 1e9:
        begin_ns += int(settle_s * 1e9)
    inside = np.count_nonzero((token_ns >= begin_ns) & (token_ns < end_ns))
    return {
        "arrivals": len(served),
        "tokens": len(token_ns),
        "tokens_per_s": float(inside) / max((end_ns - begin_ns) / 1e9, 1e-9),
        "arrivals_per_s": len(gaps_s) / float(gaps_s.sum()) if len(gaps_s) else None,
        "arrival_gap_cv": float(gaps_s.std() / gaps_s.mean()) if len(gaps_s) > 1 else None,
        "first_arrival_ns": int(arrival_ns[0]),
        "last_token_ns": int(token_ns.max()) if len(token_ns) else int(arrival_ns[-1]),
    }


def _joined(pieces: list[Floats]) -> Floats:
    return np.concatenate(pieces) if pieces else np.empty(0)


def _quantiles(name: str, values: list[float] | Floats) -> dict[str, float | None]:
    if not len(values):
        return {f"{name}_p50": None, f"{name}_p99": None}
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {f"{name}_p50": round(float(p50), 4), f"{name}_p99": round(float(p99), 4)}
