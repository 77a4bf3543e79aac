"""Where the SLOs stop to hold, from all stages together, and which load to try next. Pure; no clock, no load.

Model: near the limit the log-odds of a miss rise linearly with the load, as they do in a queue near saturation,

    logit p(x) = logit(1 - q) + b (e^(x - x*) - 1),   x = ln(requests/s),  b > 0,

so that every stage says something about x*, where exactly a share q is within the limit. The misses of a stage
come in clusters. Flat priors on x* and ln b, summed over a grid, give the posterior of x*; of several SLOs the
lowest x* counts. An unstable stage lies above x*, unless it was taken for one by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from analysis.metrics import Floats
from analysis.slo import GAP_METRICS, Slo, parse_slo
from analysis.throughput import all_failed, is_figure

POOLED = (
    "all open stages together: near the limit the log-odds of a miss rise linearly with the load (slope and crossing "
    "unknown, flat priors, 95 % of the posterior), each stage counts by its effective sample size"
)
NOT_ALL_SEEN = "no stage can show whether all SLOs are met ({})"
WAITS = ("ttft", "first_answer", "e2e")  # metrics whose limit is a time that a request may spend waiting
NEAR = 0.2  # in ln(load): the distance over which the model is trusted to be a straight line
MEMORY = 3.0  # requests in a cluster, per rho / (1 - rho)^2; 2.7 to 3.7 in an M/M/1 queue at rho 0.5 to 0.85
START_UP = 10.0  # clusters that a stage must last to count half: it starts idle, what is cut of it is a guess
SPREAD = 0.05  # s.d. of a stage's log-odds beyond its sample: runs differ, clustering is an estimate
SLOPES = np.exp(np.linspace(math.log(2.0), math.log(200.0), 16))
UNSTABLE_SLOPE = 60.0  # log-odds that a stage has no steady state, per ln(load) above x*
MISTAKEN = 0.02  # chance that a stage below x* is taken for unstable; up to half where it is short
FILLING = 0.1  # a stage that is blind to smaller overloads than this may be filling up only
MAY_BE_FIRST = 0.1  # chance of breaking first, below which an SLO is not named
_GRID = 61


@dataclass(frozen=True)
class Posterior:
    """Of x*, the log of the usable rate: grid points and their cumulative probability."""

    x: Floats
    cumulative: Floats
    slope: float = 0.0  # b, its geometric mean

    def at(self, probability: float) -> float:
        """The value below which x* lies with this probability."""
        return float(np.interp(probability, self.cumulative, self.x))


@dataclass(frozen=True)
class Estimate:
    """Usable requests/s and C_max with 95 % intervals, from all stages."""

    usable_rps: float
    usable_rps_ci: tuple[float, float]
    c_max: float | None
    c_max_ci: tuple[float, float] | None
    binding: tuple[Slo, ...]  # the SLO that breaks first, then those that may as well be the first
    slope: float  # of the SLO with the lowest x*: by how much the log-odds of a miss rise with ln(load)

    @property
    def relative_error(self) -> float:
        """Half the interval over its figure."""
        return (self.usable_rps_ci[1] - self.usable_rps_ci[0]) / 2 / self.usable_rps


def judged_open(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Open stages that are findings, in order of load: not cut short, not limited by the client, with an answer."""
    kept = [
        s for s in stages
        if s["kind"] == "open" and s["offered_rps"] and s["requests"] and s["slo_verdicts"]
        and not s["client_limited"] and not s["ended_early"] and not all_failed(s)
    ]  # fmt: skip
    return sorted(kept, key=lambda s: float(s["offered_rps"]))


def is_over(stage: Mapping[str, Any]) -> bool:
    """Whether a stage looks to be above the limit: a share within the limit below its SLO, or no steady state.

    A stage that is short against what is in it fills up, which looks like an overload: there only misses count.
    """
    slos = [parse_slo(v["slo"]) for v in stage["slo_verdicts"]]
    if stage["stable"] is False and all(blind(stage, slo) <= FILLING for slo in slos):
        return True
    return any(
        v["attainment"] is not None and v["attainment"] < slo.quantile
        for v, slo in zip(stage["slo_verdicts"], slos, strict=True)
    )


def verdict_of(stage: Mapping[str, Any], slo: Slo) -> dict[str, Any] | None:
    """What a stage says of an SLO."""
    return next((v for v in stage["slo_verdicts"] if v["slo"] == slo.text), None)


def together(stage: Mapping[str, Any], slo: Slo) -> float:
    """Requests that share one fate: those in flight, and those that arrive within the limit."""
    waits_s = slo.limit_s if slo.metric in WAITS else 0.0
    return float(stage["concurrency"]) + waits_s * float(stage["offered_rps"])


def blind(stage: Mapping[str, Any], slo: Slo) -> float:
    """The overload, as a share of the load, that a stage is too short to show in the waits of its requests.

    0 where the SLO limits no wait: an overload never shows in it, so the steady state alone has to tell.
    """
    if slo.metric not in WAITS:
        return 0.0
    return together(stage, slo) / max(int(stage["requests"] + stage["window"]["warmup_requests"]), 1)


def estimate(stages: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> Estimate | None:
    """Pooled estimate, or None unless loads on both sides of the limit have been tried, and every SLO has been seen."""
    judged = judged_open(stages)
    over = [is_over(s) for s in judged]
    if not slos or all(over) or not any(over) or unseen(judged, slos):
        return None
    found = {slo: post for slo in slos if (post := _pooled(judged, slo)) is not None}
    lowest, tightest = _lowest(list(found.values())), min(found.values(), key=lambda post: post.at(0.5))
    low, middle, high = (math.exp(lowest.at(p)) for p in (0.025, 0.5, 0.975))
    c_max, binding = _concurrency(judged, lowest), _binding(judged, found)
    return Estimate(
        middle, (low, high), c_max and c_max[1], c_max and (c_max[0], c_max[2]), binding, tightest.slope
    )


def unseen(judged: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> str | None:
    """The first SLO that no stage says anything of, and why: as long as there is one, no load is shown to keep all of them."""
    for slo in slos:
        if judged and not len(_looks(judged, slo).x):
            verdict = verdict_of(judged[-1], slo)
            return f"{slo.text}: {(verdict and verdict.get('reason')) or 'no stage measured it'}"
    return None


@dataclass(frozen=True)
class _Looks:
    """What each stage says of one SLO, shape (stages,): ln(load), samples, share of misses, samples per effective one."""

    x: Floats
    n: Floats
    share: Floats
    clustering: Floats
    together: Floats  # samples of the requests that share one fate
    per_request: float  # samples of a request: gaps, for a metric that is judged by them

    def clusters(self, centre: float, weight: Floats, quantile: float) -> Floats:
        """Mean size of the cluster that a miss is in, shape (slopes, stages), when x* is about ``centre``.

        Misses come in clusters that few stages see enough of, and a stage that happens to see few of them
        takes its sample for a large one. So the clustering is pooled over all misses near the limit, and no
        less than what goes with the slope: in a queue with P[wait > D] = e^(-theta D) near saturation,
        b = ln(1/(1-q)) rho/(1-rho), and its memory is of the order of rho/(1-rho)^2 requests, which grows with
        the load by the power (1+rho)/(1-rho).
        """
        r = SLOPES / math.log(1 / (1 - quantile))  # rho / (1 - rho)
        scale = np.exp(np.clip(np.outer(1 + 2 * r, np.clip(self.x - centre, -NEAR, NEAR)), -1.5, 1.5))
        seen = weight * self.share * self.n
        pooled = (self.clustering / scale) @ seen / max(float(seen.sum()), 1e-9)
        return np.asarray(np.maximum(pooled, MEMORY * r * (1 + r) * self.per_request)[:, None] * scale)


def _looks(judged: Sequence[Mapping[str, Any]], slo: Slo) -> _Looks:
    rows = []
    for stage in judged:
        verdict = verdict_of(stage, slo)
        if verdict is None or verdict["attainment"] is None or verdict["requests_effective"] < 1:
            continue
        n = float(stage[f"{slo.metric}_s"]["n"] if slo.metric in GAP_METRICS else stage["requests"])
        clustering = max(1.0, n / verdict["requests_effective"])
        rows.append(
            (math.log(stage["offered_rps"]), n, 1 - verdict["attainment"], clustering, together(stage, slo))
        )
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    requests = sum(s["requests"] for s in judged) if slo.metric in GAP_METRICS else table[:, 1].sum()
    load, samples, share, clustering, fate = table.T
    per_request = float(samples.sum() / max(requests, 1))
    return _Looks(load, samples, share, clustering, fate * per_request, per_request)


def _pooled(judged: Sequence[Mapping[str, Any]], slo: Slo) -> Posterior | None:
    """Posterior of x* for one SLO; far stages count less, by their distance from where x* may be."""
    looks = _looks(judged, slo)
    x = looks.x
    if not len(x):
        return None
    unstable = np.array([(math.log(s["offered_rps"]), blind(s, slo)) for s in judged if s["stable"] is False])
    weight, centre = np.ones(len(x)), float(np.median(x))
    for step in range(3):
        found = _posterior(
            looks, looks.clusters(centre, weight, slo.quantile), weight, unstable, slo.quantile
        )
        centre = found.at(0.5)
        # far from the interval: inside it nobody knows yet what is far; the nearest on both sides always count
        off = np.abs(x - np.clip(x, found.at(0.025), found.at(0.975)))
        reach = max(NEAR, *(float(off[side].min(initial=1.0)) for side in (x <= centre, x >= centre)))
        if step < 2:
            weight = np.exp(-((off / min(reach, 1.0)) ** 2) / 2)
    return found


def _posterior(
    looks: _Looks, clusters: Floats, weight: Floats, unstable: Floats, quantile: float
) -> Posterior:
    """Sum over slopes on a grid of x*, drawn in three times around where the probability is."""
    odds, kept = math.log((1 - quantile) / quantile), weight > 1e-3
    x, n, misses = looks.x[kept], looks.n[kept], (looks.n * looks.share)[kept]
    least, seen, share = looks.together[kept], looks.clustering[kept], looks.share[kept]
    beyond = SLOPES[:, None, None] / math.log(1 / (1 - quantile))  # times the rise: 1 at saturation
    # the same under every hypothesis: one that could make a stage count less would explain it away
    power = weight[kept] / (1 + START_UP * np.maximum(least, seen) / n)
    clusters = clusters[:, None, kept]
    load, mistaken = unstable.reshape(-1, 2).T
    mistaken = np.clip(mistaken / 2, MISTAKEN, 0.5)
    low, high = float(looks.x.min()) - math.log(4.0), float(looks.x.max()) + math.log(2.0)
    for _ in range(3):
        grid = np.linspace(low, high, _GRID)
        rise = np.expm1(np.clip(x - grid[:, None], -50, 3))
        logit = odds + SLOPES[:, None, None] * rise  # slopes, grid, looks
        expected = n / (1 + np.exp(-np.clip(logit, -50, 50)))
        # far beyond saturation the queue does not come back: no clusters there, whatever the slope
        size = np.maximum(clusters / np.maximum(beyond * rise - 1, 1) ** 2, least)
        size = np.minimum(size, n) + SPREAD**2 * n * share * (1 - share)  # a stage is one cluster at most
        likelihood = (_log_density(misses, 2 * expected / size, size / 2) * power).sum(axis=2)
        above = 1 / (1 + np.exp(-UNSTABLE_SLOPE * np.clip(load - grid[:, None], -0.5, 0.5)))
        likelihood += np.log(mistaken + (1 - mistaken) * above).sum(axis=1)
        mass = np.exp(likelihood - likelihood.max())
        cumulative = np.cumsum(mass.sum(axis=0))
        cumulative /= cumulative[-1]
        first, last = np.searchsorted(cumulative, [1e-4, 1 - 1e-4])
        low, high = float(grid[max(first - 1, 0)]), float(grid[min(last + 1, _GRID - 1)])
    slope = math.exp(float(np.log(SLOPES) @ mass.sum(axis=1)) / float(mass.sum()))
    return Posterior(grid, cumulative, slope)


def _log_density(misses: Floats, number: Floats, size: Floats) -> Floats:
    """ln of the density of ``misses`` that come in Poisson(``number``) clusters of exponential sizes of mean ``size``.

    P[0] = e^-number, else e^(-number - m/size) sqrt(number/(size m)) I_1(z), z = 2 sqrt(number m/size), the Bessel
    function to within 10 % by its two limits. The variance is number 2 size^2: a miss is in a cluster of mean 2 size.
    """
    some = np.maximum(misses, 0.5)
    z = 2 * np.sqrt(number * some / size)
    bessel = -np.log(2 / z + np.sqrt(2 * np.pi * z))  # ln(e^-z I_1(z))
    density = -((np.sqrt(number) - np.sqrt(some / size)) ** 2) + 0.5 * np.log(number / (size * some)) + bessel
    return np.where(misses < 0.5, -number, density)


def _above(posteriors: Sequence[Posterior]) -> tuple[Floats, Floats]:
    """A grid for all, and P[x_i > x] on it, shape (posteriors, grid)."""
    grid = np.unique(np.concatenate([p.x for p in posteriors]))
    return grid, np.array([1 - np.interp(grid, p.x, p.cumulative, left=0.0, right=1.0) for p in posteriors])


def _lowest(posteriors: Sequence[Posterior]) -> Posterior:
    """Of the smallest of independent x*: P[min > x] = product of P[x_i > x]."""
    if len(posteriors) == 1:
        return posteriors[0]
    grid, above = _above(posteriors)
    return Posterior(grid, 1 - above.prod(axis=0))


def _binding(judged: Sequence[Mapping[str, Any]], found: Mapping[Slo, Posterior]) -> tuple[Slo, ...]:
    """The SLOs that break first with a chance of ``MAY_BE_FIRST`` at least: the mass of x_i times P[all others > x_i].

    The first of them was seen over its limit at the lowest load; where that says nothing it is the likeliest.
    """
    _, above = _above(list(found.values()))
    mass, middle = -np.diff(above, axis=1), (above[:, 1:] + above[:, :-1]) / 2
    first = {slo: float(mass[i] @ np.delete(middle, i, axis=0).prod(axis=0)) for i, slo in enumerate(found)}

    def seen_over(slo: Slo) -> float:
        over = [
            s["offered_rps"] for s in judged for v in s["slo_verdicts"]
            if v["slo"] == slo.text and is_figure(s) and v["attainment"] is not None and v["attainment"] < slo.quantile
        ]  # fmt: skip
        return min(over, default=math.inf)

    able = [slo for slo, p in first.items() if p >= MAY_BE_FIRST]
    return tuple(sorted(able, key=lambda slo: (seen_over(slo), -first[slo])))


def _concurrency(judged: Sequence[Mapping[str, Any]], x_star: Posterior) -> tuple[float, float, float] | None:
    """(low, middle, high) of the requests in flight at x*: log-log line through the stable stages near it."""
    centre = x_star.at(0.5)
    stable = [s for s in judged if s["stable"] is not False and s["concurrency"] > 0]
    if not stable:
        return None
    x = np.array([math.log(s["offered_rps"]) for s in stable]) - centre
    y = np.log([s["concurrency"] for s in stable])
    reach = max(NEAR, float(np.sort(np.abs(x))[:2][-1]))
    weight = np.exp(-((x / reach) ** 2) / 2) * np.array([s["requests"] for s in stable])
    weight /= weight.sum()
    mean_x, mean_y = float(weight @ x), float(weight @ y)
    spread = float(weight @ (x - mean_x) ** 2)
    slope = max(1.0, float(weight @ ((x - mean_x) * (y - mean_y))) / spread) if spread > 1e-6 else 2.0
    residual = y - mean_y - slope * (x - mean_x)
    used = 1 / float(weight @ weight)  # stages that count
    error = max(0.02, math.sqrt(float(weight @ residual**2) / max(used - 1, 1)))
    low, high = (mean_y + slope * (x_star.at(p) - centre - mean_x) for p in (0.025, 0.975))
    middle = mean_y - slope * mean_x
    down, up = (math.hypot(1.96 * error, end - middle) for end in (low, high))
    return math.exp(middle - down), math.exp(middle), math.exp(middle + up)
