"""Measure a log's traffic: rates, peaks, burstiness, clients, prefix sharing and sessions."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.fit.busy_hour import busy_hour
from ampacity.workloads.fit.lengths import rounded
from ampacity.workloads.traces.trace import Blocks, Trace

Floats = NDArray[np.float64]
_WINDOWS_S = (1, 10, 60)
_QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.99)


def fit_arrivals(arrival_s: Floats) -> dict[str, Any] | None:
    """Return rate, CV of the gaps, index of dispersion and peaks; None for too few requests.

    ``arrival_s`` sorted, from 0. Windows are aligned to 0, without the last, partial one (unless it
    is the only one). ``rps_p95`` and ``rps_p99`` are over seconds, ``p99_rps`` is by window, idle
    ones included; ``busy_hour``: see ``ampacity.workloads.fit.busy_hour``. The index of dispersion
    is variance / mean of the counts, 1 for a Poisson process (Cox and Lewis 1966).
    """
    span_s = float(arrival_s[-1])
    if len(arrival_s) < 3 or span_s <= 0:
        return None
    gaps = np.diff(arrival_s)
    rate = (len(arrival_s) - 1) / span_s
    seconds = count_windows(arrival_s, 1)
    found: dict[str, Any] = {
        "span_s": rounded(span_s),
        "mean_rps": rounded(rate),
        "gap_cv": rounded(gaps.std() / gaps.mean()),
        "gap_p99_s": rounded(np.quantile(gaps, 0.99)),
        "gap_max_s": rounded(gaps.max()),
        "rps_p50": seconds.quantile(0.5),
        "rps_p95": seconds.quantile(0.95),
        "rps_p99": seconds.quantile(0.99),
        "rps_max": seconds.quantile(1),
        "dispersion": {},
        "peak_to_mean": {},
        "p99_rps": {},
    }
    for width in _WINDOWS_S:
        windows = count_windows(arrival_s, width)
        if windows.total >= 5:
            found["dispersion"][f"{width}s"] = rounded(windows.dispersion())
            found["peak_to_mean"][f"{width}s"] = rounded(windows.quantile(1) / windows.mean())
            found["p99_rps"][f"{width}s"] = rounded(windows.quantile(0.99) / width)
    if busiest := busy_hour(arrival_s):
        found["busy_hour"] = busiest
    hours = count_windows(arrival_s, 3600)
    if hours.total >= 24:
        inside = hours.places < hours.total // 24 * 24
        day = np.bincount(hours.places[inside] % 24, hours.held[inside], minlength=24)
        if day.any():  # all may lie behind the last whole day
            found["hourly_weights"] = [rounded(w) for w in day / day.mean()]
    return found


@dataclass(frozen=True, eq=False)
class Windows:
    """Requests by window of equal width; empty windows take no memory.

    ``held`` int64[k] of the windows ``places`` (int64[k], rising) out of ``total``.
    """

    places: NDArray[np.int64]
    held: NDArray[np.int64]
    total: int

    def mean(self) -> float:
        """Return requests per window, empty ones included."""
        return float(self.held.sum()) / self.total

    def dispersion(self) -> float:
        """Return the index of dispersion (variance / mean), empty windows included."""
        held, mean = self.held.astype(np.float64), self.mean()
        return float(held @ held) / self.total / mean - mean if mean else 0.0

    def quantile(self, q: float) -> float:
        """Return the smallest count not exceeded by at least a share ``q`` of the windows."""
        rank = max(int(np.ceil(q * self.total - 1e-9)), 1) - 1 - (self.total - len(self.held))
        return 0.0 if rank < 0 else float(np.sort(self.held)[rank])


def count_windows(arrival_s: Floats, width_s: float) -> Windows:
    """Count the whole windows of ``width_s`` s from 0, or one window for a shorter log."""
    whole = int(arrival_s[-1] // width_s)
    places, held = np.unique((arrival_s // width_s).astype(np.int64), return_counts=True)
    inside = places < max(whole, 1)
    return Windows(places[inside], held[inside].astype(np.int64), max(whole, 1))


def fit_clients(client: NDArray[np.int64], arrival_s: Floats | None) -> dict[str, Any]:
    """Return how traffic divides over clients: shares of the largest, CV of their gaps."""
    known = client[client >= 0]
    volume = np.sort(np.bincount(known))[::-1]
    share = volume / volume.sum()
    found: dict[str, Any] = {
        "clients": int(np.count_nonzero(volume)),
        "share_of_top": {str(n): rounded(share[:n].sum()) for n in (1, 5, 10) if n <= len(volume)},
        "clients_for_90_percent": int(np.searchsorted(np.cumsum(share), 0.9 - 1e-12) + 1),
    }
    if arrival_s is None:
        return found
    order = np.lexsort((arrival_s, client))[np.count_nonzero(client < 0) :]
    times, names = arrival_s[order], client[order]
    cvs, weights = [], []
    for part in np.split(times, np.flatnonzero(np.diff(names)) + 1):
        gaps = np.diff(part)
        if len(gaps) >= 20 and gaps.mean() > 0:
            cvs.append(gaps.std() / gaps.mean())
            weights.append(len(part))
    if cvs:  # by requests: half of the requests come from clients with at most this CV
        order = np.argsort(cvs)
        cumulated = np.cumsum(np.asarray(weights)[order]) / sum(weights)
        found["gap_cv_by_client"] = {
            f"p{q:g}": rounded(np.asarray(cvs)[order][np.searchsorted(cumulated, q / 100 - 1e-12)])
            for q in (10, 50, 90)
        }
    return found


def fit_sharing(trace: Trace) -> dict[str, Any] | None:
    """Return the token share in an infinite cache, by block ids or reported cached tokens."""
    found: dict[str, Any] = {}
    size = trace.block_tokens
    if trace.blocks is not None and size is not None:
        hit = np.minimum(leading_hits(trace.blocks) * size, trace.input_tokens)
        found = {
            "block_tokens": size,
            "cached_share_infinite": rounded(hit.sum() / trace.input_tokens.sum()),
            "requests_with_hit": rounded(np.mean(hit > 0)),
            "hit_share_by_request": _quantiles(hit / trace.input_tokens),
        }
    if trace.cached_tokens is not None:
        known = trace.cached_tokens >= 0
        cached = np.minimum(trace.cached_tokens[known], trace.input_tokens[known])
        found["cached_share_reported"] = rounded(cached.sum() / trace.input_tokens[known].sum())
    return found or None


def leading_hits(blocks: Blocks) -> NDArray[np.int64]:
    """Return int64[n]: leading blocks of each request seen before, without eviction."""
    seen: set[int] = set()
    hits = np.zeros(len(blocks.start) - 1, dtype=np.int64)
    ids, start = blocks.ids.tolist(), blocks.start.tolist()
    for i in range(len(hits)):
        mine = ids[start[i] : start[i + 1]]
        hits[i] = next((k for k, block in enumerate(mine) if block not in seen), len(mine))
        seen.update(mine)
    return hits


def fit_sessions(trace: Trace) -> dict[str, Any] | None:
    """Return turns, gaps between starts of turns, context growth and sharing between turns."""
    if trace.session is None or not (trace.session >= 0).any():
        return None
    order, turns, first, later = turns_of(trace)
    inputs = trace.input_tokens[order]
    found: dict[str, Any] = {
        "sessions": len(turns),
        "requests_in_sessions": rounded(len(order) / len(trace)),
        "turns": _quantiles(turns) | {"mean": rounded(turns.mean())},
        "first_input_tokens": _quantiles(inputs[first]),
        "context_tokens": _quantiles(inputs),
    }
    if len(later):
        found["gap_s"] = _quantiles(
            trace.arrival_s[order][later] - trace.arrival_s[order][later - 1]
        )
        found["input_growth_tokens"] = _quantiles(inputs[later] - inputs[later - 1])
        shared = _turn_to_turn(trace, order, later)
        if shared is not None:
            found["turn_to_turn_share"] = shared
    return found


def turns_of(
    trace: Trace,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (requests session by session; turns of each; indices of first and of later turns)."""
    assert trace.session is not None
    member = np.flatnonzero(trace.session >= 0)
    order = member[np.lexsort((trace.arrival_s[member], trace.session[member]))]
    _, first, counts = np.unique(trace.session[order], return_index=True, return_counts=True)
    return order, counts, first, np.delete(np.arange(len(order)), first)


def _turn_to_turn(trace: Trace, order: NDArray[np.int64], later: NDArray[np.int64]) -> float | None:
    """Return the share of later turns' blocks that are leading blocks of the previous turn."""
    if trace.shared_blocks is not None:
        pairs = trace.shared_blocks[order[later]]
        return rounded(pairs[:, 0].sum() / pairs[:, 1].sum())
    if trace.blocks is None:
        return None
    ids, start = trace.blocks.ids, trace.blocks.start
    shared = total = 0
    for place in later.tolist():
        before, here = order[place - 1], order[place]
        a, b = ids[start[before] : start[before + 1]], ids[start[here] : start[here + 1]]
        common = min(len(a), len(b))
        differ = np.flatnonzero(a[:common] != b[:common])
        shared += int(differ[0]) if len(differ) else common
        total += len(b)
    return rounded(shared / total) if total else None


def _quantiles(values: NDArray[Any]) -> dict[str, float]:
    return {f"p{q * 100:g}": rounded(np.quantile(values, q)) for q in _QUANTILES}
