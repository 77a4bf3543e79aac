"""What a log says of arrivals: rates and their peaks, burstiness, clients."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from workloads.fit_lengths import rounded

Floats = NDArray[np.float64]
_WINDOWS_S = (1, 10, 60)


def fit_arrivals(arrival_s: Floats) -> dict[str, Any] | None:
    """Rate, coefficient of variation of the gaps, index of dispersion, peaks; None where nothing can be said.

    ``arrival_s`` sorted, from 0. Windows are aligned to 0 and the last, partial one is left out (unless it is the
    only one). ``rps_p95`` and ``rps_p99`` are over seconds, ``p99_rps`` is by window, idle ones included.
    The index of dispersion is variance / mean of the counts, 1 for a Poisson process (Cox and Lewis 1966).
    """
    span_s = float(arrival_s[-1])
    if len(arrival_s) < 3 or span_s <= 0:
        return None
    gaps = np.diff(arrival_s)
    rate = (len(arrival_s) - 1) / span_s
    seconds = counts(arrival_s, 1)
    found: dict[str, Any] = {
        "span_s": rounded(span_s),
        "mean_rps": rounded(rate),
        "gap_cv": rounded(gaps.std() / gaps.mean()),
        "gap_p99_s": rounded(np.quantile(gaps, 0.99)),
        "gap_max_s": rounded(gaps.max()),
        "rps_p50": float(np.quantile(seconds, 0.5, method="inverted_cdf")),
        "rps_p95": float(np.quantile(seconds, 0.95, method="inverted_cdf")),
        "rps_p99": float(np.quantile(seconds, 0.99, method="inverted_cdf")),
        "rps_max": float(seconds.max()),
        "dispersion": {},
        "peak_to_mean": {},
        "p99_rps": {},
    }
    for width in _WINDOWS_S:
        windows = counts(arrival_s, width)
        if len(windows) >= 5:
            found["dispersion"][f"{width}s"] = rounded(windows.var() / windows.mean())
            found["peak_to_mean"][f"{width}s"] = rounded(windows.max() / windows.mean())
            found["p99_rps"][f"{width}s"] = rounded(np.quantile(windows, 0.99, method="inverted_cdf") / width)
    hours = counts(arrival_s, 3600)
    if len(hours) >= 24:
        days = hours[: len(hours) // 24 * 24].reshape(-1, 24).mean(axis=0)
        found["hourly_weights"] = [rounded(w) for w in days / days.mean()]
    return found


def counts(arrival_s: Floats, width_s: float) -> NDArray[np.int64]:
    """Requests in each whole window of ``width_s`` seconds from 0."""
    whole = int(arrival_s[-1] // width_s)
    index = (arrival_s // width_s).astype(np.int64)
    found: NDArray[np.int64] = np.bincount(index)
    return found[:whole] if whole else found


def fit_clients(client: NDArray[np.int64], arrival_s: Floats | None) -> dict[str, Any]:
    """How the traffic divides over clients, without their names: shares of the largest, gaps of each."""
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
    order = np.lexsort((arrival_s, client))
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
