"""Fit lengths: a quantile table that keeps spikes, and the distance to known families.

All functions take distinct lengths ``values`` (rising, float64[n]) and their ``weights``.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_TAIL_LEVELS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.03, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.97),
    *(0.975, 0.98, 0.985, 0.99, 0.9925, 0.995, 0.9975, 0.999, 0.9995, 1),
)
_LEVELS = np.unique(np.round([*np.arange(0, 0.9001, 0.02), *_TAIL_LEVELS], 4))
_KEPT_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
# a single length with this share of the requests gets a step of its own in the table
ATOM_SHARE = 0.003
_ATOMS_MAX = 60
SPIKE_SHARE = 0.01  # a length is called a spike from this share on, where it stands out by ...
_SPIKE_FACTOR = 5.0  # ... so much against lengths within a tenth of it
_SPIKE_REQUESTS = 10
_EM_POINTS = 2000  # more distinct lengths than these are put together by their logarithm
_FAMILY_REQUESTS = 100  # with fewer every family passes
_MIXTURE = "two lognormals"
SHOWN = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)


def fit_lengths(values: Floats, weights: Floats, requests: int) -> dict[str, Any]:
    """Return a profile's entry for one side: quantiles, mean, spikes, cap, families by distance."""
    share = weights / weights.sum()
    families = fit_families(values, weights, requests) if requests >= _FAMILY_REQUESTS else []
    fitting = [f for f in families if f["fits"]]
    # the simpler one first
    best = min(fitting, key=lambda f: (f["family"] == _MIXTURE, f["ks"]), default=None)
    return {
        "mean": rounded(values @ share),
        "min": int(values[0]),
        "max": int(values[-1]),
        "quantiles": {f"p{q * 100:g}": rounded(quantile(values, share, q)) for q in SHOWN},
        "spikes": spikes(values, share, requests),
        "share_at_max": rounded(share[-1]),
        "families": families,
        "best_family": best["family"] if best else None,
        "ks_limit": rounded(1.36 / math.sqrt(requests)),
    }


def quantile(values: Floats, share: Floats, level: float) -> float:
    """Return the smallest length with at least ``level`` of the requests at or below it."""
    cumulated = np.cumsum(share)
    return float(values[min(int(np.searchsorted(cumulated, level - 1e-12)), len(values) - 1)])


def quantile_table(values: Floats, weights: Floats) -> dict[float, int]:
    """Return {level: tokens}: linear between levels, flat at frequent lengths."""
    share = weights / weights.sum()
    after = np.cumsum(share)
    before = after - share
    table = {float(level): int(quantile(values, share, level)) for level in _LEVELS}
    atoms = np.argsort(-share, kind="stable")[:_ATOMS_MAX]
    for i in np.sort(atoms[share[atoms] >= ATOM_SHARE]):
        low, high = round(float(before[i]), 6), round(min(float(after[i]), 1.0), 6)
        for level in [level for level in table if low < level < high]:
            del table[level]
        table[low] = table[high] = int(values[i])
        if i > 0 and low > 0:  # the lengths below end where the step begins
            table[round(low - 1e-6, 6)] = int(values[i - 1])
    levels = sorted(level for level in table if 0 <= level <= 1)
    tokens = np.maximum.accumulate([table[level] for level in levels])
    frequent = set(values[share >= SPIKE_SHARE].astype(int).tolist())
    kept = _without_needless(levels, tokens.tolist(), frequent)
    return {levels[i]: int(tokens[i]) for i in kept}


def _without_needless(levels: list[float], tokens: list[int], frequent: set[int]) -> list[int]:
    """Return the indices of the table without those that interpolation gives as well."""
    kept, anchor = [0], 0
    for end in range(2, len(levels)):
        between = range(anchor + 1, end)
        slope = (tokens[end] - tokens[anchor]) / (levels[end] - levels[anchor])
        straight = not {tokens[anchor], tokens[end]} & frequent and all(
            abs(tokens[anchor] + slope * (levels[i] - levels[anchor]) - tokens[i])
            <= max(0.3, tokens[i] * 0.003)
            and tokens[i] not in frequent
            and levels[i] not in _KEPT_LEVELS
            for i in between
        )
        if not straight:
            anchor = end - 1
            kept.append(anchor)
    return [*kept, len(levels) - 1]


def spikes(values: Floats, share: Floats, requests: int) -> list[dict[str, Any]]:
    """Return frequent single lengths whose neighbours (within a tenth) are rare, largest first."""
    found = []
    for i in np.argsort(-share, kind="stable")[:_ATOMS_MAX]:
        if share[i] < max(SPIKE_SHARE, _SPIKE_REQUESTS / requests):
            break
        reach = max(values[i] * 0.1, 3.0)
        low, high = np.searchsorted(values, [values[i] - reach, values[i] + reach])
        around = (share[low:high].sum() - share[i]) / (2 * reach)
        if share[i] >= _SPIKE_FACTOR * around:
            found.append({"tokens": int(values[i]), "share": rounded(share[i])})
    return found


def fit_families(values: Floats, weights: Floats, requests: int) -> list[dict[str, Any]]:
    """Fit log-normal, gamma, Weibull and a mixture of two log-normals by maximum likelihood.

    ``ks``: Kolmogorov-Smirnov distance with continuity correction (F at k + 1/2); ``fits``: below
    the 5 % limit 1.36/sqrt(n). ``p99_ratio``: fitted p99 over the true one. ``lengths``: in the
    form of a workload file, None for Weibull, which has none. Empty for fewer than three lengths.
    """
    if len(values) < 3:
        return []
    share = weights / weights.sum()
    true_p99, cumulated = quantile(values, share, 0.99), np.cumsum(share)
    grid = np.geomspace(0.5, values[-1] * 100, 20_000)
    found = []
    for name, cdf, lengths in _families(values, share):
        above = np.abs(cdf(values + 0.5) - cumulated).max()
        below = np.abs(cdf(values - 0.5) - cumulated + share).max()
        ks = float(max(above, below))
        p99 = float(grid[min(int(np.searchsorted(cdf(grid), 0.99)), len(grid) - 1)])
        found.append(
            {
                "family": name,
                "ks": rounded(ks),
                "fits": ks <= 1.36 / math.sqrt(requests),
                "p99_ratio": rounded(p99 / true_p99),
                "lengths": lengths,
            }
        )
    return found


def _families(
    values: Floats, share: Floats
) -> list[tuple[str, Callable[[Floats], Floats], dict[str, Any] | None]]:
    """Return (name, fitted distribution function, form in a workload file) of each family."""
    from scipy import special

    logs = np.log(values)
    mean, mean_log = float(values @ share), float(logs @ share)
    sigma = math.sqrt(float((logs - mean_log) ** 2 @ share))
    shape = _gamma_shape(math.log(mean) - mean_log)
    k, scale = _weibull(logs, share)
    part, mus, sigmas = _two_lognormals(logs, share)
    mixture = [
        {"weight": rounded(w), "lognormal": _p50_p99(float(m), float(s))}
        for w, m, s in zip(part, mus, sigmas, strict=True)
    ]
    gamma = {"mean": rounded(mean), "cv": rounded(1 / math.sqrt(shape))}

    def mixture_cdf(x: Floats) -> Floats:
        return np.asarray(special.ndtr((np.log(x)[:, None] - mus) / sigmas) @ part)

    return [
        (
            "lognormal",
            lambda x: special.ndtr((np.log(x) - mean_log) / sigma),
            {"lognormal": _p50_p99(mean_log, sigma)},
        ),
        ("gamma", lambda x: special.gammainc(shape, x * shape / mean), {"gamma": gamma}),
        ("weibull", lambda x: -np.expm1(-((x / scale) ** k)), None),
        (_MIXTURE, mixture_cdf, {"mixture": mixture}),
    ]


def _p50_p99(mu: float, sigma: float) -> dict[str, float]:
    return {"p50": rounded(math.exp(mu)), "p99": rounded(math.exp(mu + 2.3263478740408408 * sigma))}


def _gamma_shape(gap: float) -> float:
    """Solve ln k - digamma(k) = ``gap`` (log of mean less mean of logs); 1/2k < gap < 1/k."""
    from scipy.optimize import brentq
    from scipy.special import psi

    if gap <= 1e-12:
        return 1e12
    return float(brentq(lambda k: math.log(k) - psi(k) - gap, 0.49 / gap, 1.01 / gap, rtol=1e-12))


def _weibull(logs: Floats, share: Floats) -> tuple[float, float]:
    """Solve sum w x^k ln x / sum w x^k - 1/k = mean of logs by bisection: return (shape, scale)."""
    mean_log, top = float(logs @ share), float(logs[-1])
    low, high = math.log(1e-3), math.log(1e3)
    for _ in range(80):
        k = math.exp((low + high) / 2)
        powers = share * np.exp(k * (logs - top))
        if float(powers @ logs) / float(powers.sum()) - 1 / k < mean_log:
            low = math.log(k)
        else:
            high = math.log(k)
    return k, math.exp(top + math.log(float((share * np.exp(k * (logs - top))).sum())) / k)


def _two_lognormals(logs: Floats, share: Floats) -> tuple[Floats, Floats, Floats]:
    """Return (weights, mu, sigma), float64[2] each, by EM; the best of three starts."""
    if len(logs) > _EM_POINTS:
        place = np.minimum(
            (logs - logs[0]) / (logs[-1] - logs[0]) * _EM_POINTS, _EM_POINTS - 1
        ).astype(int)
        logs, share = (np.bincount(place, w).astype(np.float64) for w in (logs * share, share))
        logs, share = logs[share > 0] / share[share > 0], share[share > 0]
    cumulated = np.cumsum(share)
    spread = max(math.sqrt(float((logs - logs @ share) ** 2 @ share)), 1e-3)
    best: tuple[float, Floats, Floats, Floats] | None = None
    for split in (0.3, 0.5, 0.8):
        cut = float(logs[min(int(np.searchsorted(cumulated, split)), len(logs) - 1)])
        weight = np.array([split, 1 - split])
        mu = np.array([_mean(logs, share, logs <= cut), _mean(logs, share, logs > cut)])
        sigma = np.full(2, spread / 2)
        score = -math.inf
        for _ in range(500):
            density = weight * np.exp(-0.5 * ((logs[:, None] - mu) / sigma) ** 2) / sigma
            total = np.maximum(density.sum(axis=1), 1e-300)
            new_score = float(np.log(total) @ share)
            part = density / total[:, None] * share[:, None]
            weight = np.maximum(part.sum(axis=0), 1e-9)
            mu = (part * logs[:, None]).sum(axis=0) / weight
            sigma = np.sqrt(
                np.maximum((part * (logs[:, None] - mu) ** 2).sum(axis=0) / weight, 1e-4)
            )
            if new_score - score < 1e-9:
                break
            score = new_score
        if best is None or score > best[0]:
            best = score, weight / weight.sum(), mu, sigma
    assert best is not None
    order = np.argsort(best[2])
    return best[1][order], best[2][order], best[3][order]


def _mean(logs: Floats, share: Floats, chosen: NDArray[np.bool_]) -> float:
    total = float(share[chosen].sum())
    return float(logs[chosen] @ share[chosen]) / total if total > 0 else float(logs[-1])


def rounded(value: Any) -> float:
    """Round to five significant digits."""
    return float(f"{value:.5g}")
