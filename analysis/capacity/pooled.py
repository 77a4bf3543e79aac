"""Where the SLOs stop to hold, from all stages together, and which load to try next. Pure; no clock, no load.

Model: near the limit the share of misses rises exponentially with the load, as it does in a queue,

    ln p(x) = ln(1 - q) + b (e^(x - x*) - 1),   x = ln(requests/s),  b > 0,

beside those that miss at any load, so that every stage says something about x*, where exactly a share q is within the limit. The misses of a stage
come in clusters. Flat priors on x* and ln b, summed over a grid, give the posterior of x*; of several SLOs the
lowest x* counts. An unstable stage lies above x*, unless it was taken for one by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.slo import GAP_METRICS, Slo, parse_slo
from ampacity.analysis.stage.throughput import all_failed, is_figure
from ampacity.analysis.stats.intervals import prob_at_least

POOLED = (
    "all open stages together: near the limit the share of misses rises exponentially with the load (slope and crossing "
    "unknown, flat priors, 95 % of the posterior), each stage counts by its effective sample size"
)
LONE_TELLS = (
    "at low loads requests miss {} nearly as often as it allows, so that the load hardly decides whether it is met: a "
    "laxer limit or shorter requests tell more"
)
NOT_ALL_SEEN = "no stage can show whether all SLOs are met ({})"
WAITS = (
    "ttft",
    "first_answer",
    "e2e",
)  # metrics whose limit is a time that a request may spend waiting
NEAR = 0.2  # in ln(load): the distance over which the model is trusted to be a straight line
MEMORY = 3.0  # requests in a cluster, per rho / (1 - rho)^2; 2.7 to 3.7 in an M/M/1 queue at rho 0.5 to 0.85
FILLS = 0.5  # requests in which an idle queue fills to its mean, per rho / (1 - rho)^2; 0.4 to 0.7 measured
SAME_LOAD = 0.02  # in ln(load)
COARSE = math.log(1.5)  # in ln(load): a gap between two loads that no model is trusted to fill
FITS = 4  # of C_max, each weighted by the one before
START_UP = 5.0  # clusters that a stage must last to count half: it starts idle, what is cut of it is a guess
FIRST_LOOKS = 40  # stages by which it is found which are near the limit
RISE = 0.3  # of 1/(1 - rho), at least, from x* to a stage above it: near saturation nobody knows it
SPREAD = (
    0.05  # s.d. of a stage's log-odds beyond its sample: runs differ, clustering is an estimate
)
ALL_LATE = 0.98  # share that misses beyond saturation, in a stage that ends
SLOPES = np.exp(np.linspace(math.log(2.0), math.log(200.0), 16))
FLOORS = np.array(
    [0.0, 0.1, 0.4, 0.7, 0.9, 0.98]
)  # share of the allowed misses that come at any load
FLOOR_CHANCES = np.array([0.35, 0.2, 0.15, 0.1, 0.1, 0.1])
OVERLOADED = 1.05  # offered over answered, from which on a stage without a steady state shows what the server can do
SLOPE_SD = 0.4  # of ln b around that of a queue
ANY_SLOPE = 0.1  # chance that it is no queue's
UNSTABLE_SLOPE = 60.0  # log-odds that a stage has no steady state, per ln(load) above x*
MISTAKEN = 0.02  # chance that a stage below x* is taken for unstable; up to half where it is short
FILLING = 0.1  # a stage that is blind to smaller overloads than this may be filling up only
PEAK_STEPS = 3  # from the SLO to the share that meets it at the peak
SURE = 0.005  # chance that a stage which surely violates an SLO is just within it
LONE = 0.9  # share of the allowed misses, from which on they are those of a lone request
MAY_BE_LONE = 0.3  # chance of it from which on no load is named
MAY_BE_FIRST = 0.1  # chance of breaking first, below which an SLO is not named
_GRID = 41


@dataclass(frozen=True)
class Posterior:
    """Of x*, the log of the capacity: grid points and their cumulative probability."""

    x: Floats
    cumulative: Floats
    slope: float = 0.0  # b, its geometric mean
    mass: Floats | None = None  # of slopes, floors, grid
    allowed: float = 0.0  # share of misses at x*

    def at(self, probability: float) -> float:
        """The value below which x* lies with this probability."""
        return float(np.interp(probability, self.cumulative, self.x))

    def below(self, most: float) -> Posterior:
        """The same where x* is known to be at most ``most``."""
        total = float(np.interp(most, self.x, self.cumulative))
        if total < 1e-9:
            return Posterior(np.array([most - NEAR, most]), np.array([0.0, 1.0]))
        kept = self.x < most
        return Posterior(
            np.append(self.x[kept], most), np.append(self.cumulative[kept] / total, 1.0)
        )

    @property
    def by_any_load(self) -> bool:
        """Whether nearly all of the misses that are allowed may come at any load, so that the load hardly decides."""
        return self.mass is not None and float(self.mass[:, FLOORS >= LONE].sum()) > MAY_BE_LONE


@dataclass(frozen=True)
class Estimate:
    """Usable requests/s and C_max with 95 % intervals, from all stages."""

    capacity_rps: float
    capacity_rps_ci: tuple[float, float]
    c_max: float | None
    c_max_ci: tuple[float, float] | None
    binding: tuple[Slo, ...]  # the SLO that breaks first, then those that may as well be the first
    slope: float  # of the SLO with the lowest x*: by how much the log-odds of a miss rise with ln(load)
    nearest: int | None  # index of the stage nearest to the capacity whose rates are figures
    lone: Slo | None = (
        None  # one that a lone request may miss nearly as often as is allowed: no load is known to meet it
    )

    @property
    def relative_error(self) -> float:
        """Half the interval over its figure."""
        return (self.capacity_rps_ci[1] - self.capacity_rps_ci[0]) / 2 / self.capacity_rps


def judged_open(stages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Open stages that are findings, in order of load: not cut short, nor limited by the client, nor broken by an outage, with an answer."""
    kept = [
        s
        for s in stages
        if s["kind"] == "open"
        and s["offered_rps"]
        and s["requests"]
        and s["slo_verdicts"]
        and not s["client_limited"]
        and not s["ended_early"]
        and not all_failed(s)
        and (s["slo_met"] or not s.get("outage"))
    ]
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
    return together(stage, slo) / max(
        int(stage["requests"] + stage["window"]["warmup_requests"]), 1
    )


def violations_above_met(judged: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The stages over the limit whose load is above every load that was shown to meet it.

    A few misses in a short stage far below are chance, or not the load's doing: they bound nothing from above.
    """
    held = max((float(s["offered_rps"]) for s in judged if s["slo_met"]), default=0.0)
    return [s for s in judged if is_over(s) and float(s["offered_rps"]) > held]


def clearly_violated(verdict: Mapping[str, Any], chance: float) -> bool:
    """Whether so many misses have less than this ``chance`` where the SLO is just kept: one-sided binomial test."""
    n = float(verdict["requests_effective"])
    if verdict["attainment"] is None or n < 1:
        return False
    return (
        prob_at_least((1 - verdict["attainment"]) * n, n, 1 - parse_slo(verdict["slo"]).quantile)
        <= chance
    )


def surely_violated(judged: Sequence[Mapping[str, Any]]) -> float | None:
    """ln of the lowest load, above all that were shown to meet the SLOs, whose own stage surely violates them."""
    loads = [
        math.log(s["offered_rps"])
        for s in violations_above_met(judged)
        if (
            s["stable"] is False
            and s["offered_rps"] > OVERLOADED * s["achieved_rps"]
            and s["achieved_rps"] > 0
        )
        or any(clearly_violated(v, SURE) for v in s["slo_verdicts"])
    ]
    return min(loads, default=None)


def estimate(stages: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> Estimate | None:
    """Pooled estimate, or None unless loads on both sides of the limit have been tried, and every SLO has been seen."""
    judged = judged_open(stages)
    if not _is_bracketed(judged, slos):
        return None
    found = {slo: post for slo in slos if (post := _pooled(judged, slo)) is not None}
    limits = list(found.values())
    if (
        not any(slo.metric in WAITS for slo in slos)
        and (steady := _steady_below(judged)) is not None
    ):
        limits.append(steady)
    lowest, tightest = _lowest(limits), min(found.values(), key=lambda post: post.at(0.5))
    contradicted = False
    if (most := surely_violated(judged)) is not None:
        contradicted = (
            lowest.at(0.025) > most
        )  # by what the other stages say: nothing is known from below
        lowest = lowest.below(most)
    low, middle, high = (math.exp(x) for x in _as_wide_as_the_gap(judged, lowest))
    lone = next(
        (slo for slo, p in found.items() if p.by_any_load and p.at(0.025) < lowest.at(0.5)), None
    )
    c_max, binding = _concurrency(judged, lowest), _binding(judged, found)
    figures = [s for s in judged if is_figure(s)]
    nearest = min(figures, key=lambda s: abs(math.log(s["offered_rps"] / middle)), default=None)
    return Estimate(
        middle,
        (0.0 if lone or contradicted else low, high),
        c_max and c_max[1],
        c_max and (c_max[0], c_max[2]),
        binding,
        tightest.slope,
        int(nearest["index"]) if nearest else None,
        lone,
    )


def _as_wide_as_the_gap(
    judged: Sequence[Mapping[str, Any]], found: Posterior
) -> tuple[float, float, float]:
    """(low, median, high) of x*; between loads that are far apart nothing was measured, so the interval spans the gap.

    Saturation is measured as well: it ends a gap from above.
    """
    low, middle, high = (found.at(p) for p in (0.025, 0.5, 0.975))
    loads = np.log([s["offered_rps"] for s in judged])
    below, above = (
        loads[loads <= middle].max(initial=-np.inf),
        loads[loads >= middle].min(initial=np.inf),
    )
    if (saturation := _saturation(judged)) is not None and saturation.x > below:
        above = min(above, max(saturation.x + 2 * saturation.sd, high))
    if not COARSE < above - below < math.inf:
        return low, middle, high
    return min(low, float(below)), middle, max(high, float(above))


def _is_bracketed(judged: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> bool:
    over = violations_above_met(judged)
    return bool(slos and over) and len(over) < len(judged) and not unseen(judged, slos)


def unseen(judged: Sequence[Mapping[str, Any]], slos: Sequence[Slo]) -> str | None:
    """The first SLO that no stage says anything of, and why: as long as there is one, no load is shown to keep all of them."""
    for slo in slos:
        if judged and not len(_looks(judged, slo).x):
            verdict = verdict_of(judged[-1], slo)
            return f"{slo.text}: {(verdict and verdict.get('reason')) or 'no stage measured it'}"
    return None


@dataclass(frozen=True)
class _Looks:
    """What each stage says of one SLO, shape (stages,)."""

    x: Floats  # ln(requests/s)
    n: Floats  # samples
    share: Floats  # of misses
    clustering: Floats  # samples per effective one
    together: Floats  # samples of the requests that share one fate
    cut: Floats  # samples before them that were cut as warm-up
    steady: Floats  # 0 where the stage has no steady state, else 1
    per_request: float  # samples of a request: gaps, for a metric that is judged by them


def _looks(judged: Sequence[Mapping[str, Any]], slo: Slo) -> _Looks:
    """Of the stages that say something of the SLO."""
    rows = []
    for stage in judged:
        verdict = verdict_of(stage, slo)
        if verdict is None or verdict["attainment"] is None or verdict["requests_effective"] < 1:
            continue
        n = float(stage[f"{slo.metric}_s"]["n"] if slo.metric in GAP_METRICS else stage["requests"])
        clustering = max(1.0, n / verdict["requests_effective"])
        rows.append(
            (
                math.log(stage["offered_rps"]),
                n,
                1 - verdict["attainment"],
                clustering,
                together(stage, slo),
                float(stage["window"]["warmup_requests"]),
                float(stage["stable"] is not False),
            )
        )
    table = np.array(rows, dtype=np.float64).reshape(-1, 7)
    requests = (
        sum(s["requests"] for s in judged) if slo.metric in GAP_METRICS else table[:, 1].sum()
    )
    load, samples, share, clustering, fate, cut, steady = table.T
    per_request = float(samples.sum() / max(requests, 1))
    return _Looks(
        load, samples, share, clustering, fate * per_request, cut * per_request, steady, per_request
    )


@dataclass(frozen=True)
class _Saturation:
    """ln of what the server ends per second while more arrives than it can do, and its standard deviation."""

    x: float
    sd: float


def _saturation(judged: Sequence[Mapping[str, Any]]) -> _Saturation | None:
    """From the stages that were offered more than they answered; None without one."""
    beyond = [
        s
        for s in judged
        if s["stable"] is False
        and s["achieved_rps"] > 0
        and s["offered_rps"] > OVERLOADED * s["achieved_rps"]
    ]
    if not beyond:
        return None
    ended = np.array(
        [s["achieved_rps"] * (s["window"]["end_s"] - s["window"]["start_s"]) for s in beyond]
    )
    x = np.log([s["achieved_rps"] for s in beyond])
    return _Saturation(
        float(ended @ x / ended.sum()), math.hypot(0.02, 1.2 / float(ended.sum()) ** 0.5)
    )


def _pooled(
    judged: Sequence[Mapping[str, Any]], slo: Slo, of_limit: bool = True
) -> Posterior | None:
    """Posterior of x* for one SLO (unless ``of_limit``, for a share that no limit was set for); far stages count less, by their distance from where x* may be."""
    looks = _looks(judged, slo)
    saturation = _saturation(judged) if slo.metric in WAITS else None
    x = looks.x
    if not len(x):
        return None
    waits = (
        slo.metric in WAITS
    )  # other metrics can be within their limits in a queue that grows without end
    unstable = np.array(
        [
            (math.log(s["offered_rps"]), blind(s, slo))
            for s in judged
            if s["stable"] is False and waits
        ]
    )
    weight, centre = np.zeros(len(x)), float(np.median(x))
    weight[:: math.ceil(len(x) / FIRST_LOOKS)] = 1.0  # of very many stages some tell which are near
    for step in range(3):
        found = _posterior(
            looks,
            weight,
            centre,
            unstable,
            saturation,
            slo.quantile,
            of_limit,
            3 if step == 2 else 2,
        )
        centre = found.at(0.5)
        # far from the interval: inside it nobody knows yet what is far; the nearest on both sides always count
        off = np.abs(x - np.clip(x, found.at(0.025), found.at(0.975)))
        reach = max(
            NEAR, *(float(off[side].min(initial=1.0)) for side in (x <= centre, x >= centre))
        )
        if step < 2:
            weight = np.exp(-((off / min(reach, 1.0)) ** 2) / 2)
    return found


def peak_goodput_rps(
    stages: Sequence[Mapping[str, Any]], slos: Sequence[Slo]
) -> tuple[float, tuple[float, float], float] | None:
    """(median, 95 % interval, its load) of the highest requests/s that meet every SLO, up to saturation.

    The share that meets them all is taken as one SLO more, at the strictest quantile: each curve of its posterior has
    its own maximum of load x share, and the medians of these are given: the mean curve is flatter than any of them. None
    where ``estimate`` gives none.
    """
    judged = judged_open(stages)
    if not _is_bracketed(judged, slos) or any(s.get("slo_attainment") is None for s in judged):
        return None
    by_request = [slo for slo in slos if slo.metric not in GAP_METRICS] or list(slos)
    first = min(by_request, key=lambda slo: (slo.metric not in WAITS, slo.limit_s))
    metric = first.metric if first.metric in WAITS else "tpot"  # of requests, not of their gaps
    quantile, found = max(slo.quantile for slo in slos), None
    for _ in range(PEAK_STEPS):
        joint = replace(first, metric=metric, quantile=quantile)
        post = _pooled(
            [{**s, "slo_verdicts": [_all_met(s, first, joint)]} for s in judged], joint, False
        )
        if post is None or post.mass is None:
            return None
        found = _peak(post, post.mass, judged)
        quantile = float(np.clip(found[0][1] / found[1], 0.5, 0.99))
    return found and (found[0][1], (found[0][0], found[0][2]), found[1])


def _peak(
    found: Posterior, mass: Floats, judged: Sequence[Mapping[str, Any]]
) -> tuple[list[float], float]:
    """((low, median, high) of the maximum of load x share within the limit over the curves, the median of its load)."""
    saturation = _saturation(judged)
    top = saturation.x if saturation else math.log(max(s["offered_rps"] for s in judged))
    x = np.linspace(min(top, found.at(0.5)) - 1.0, top, 101)  # of the loads
    rise = np.expm1(np.clip(x - found.x[:, None], -50, 3))
    idle = FLOORS[:, None, None] * found.allowed
    good = (
        np.exp(x) * (1 - idle) * (1 - _late(SLOPES[:, None, None, None], idle, found.allowed, rise))
    )
    most = _weighted(good.max(axis=-1).ravel(), mass.ravel(), (0.025, 0.5, 0.975))
    return most, math.exp(_weighted(x[good.argmax(axis=-1)].ravel(), mass.ravel(), (0.5,))[0])


def _weighted(values: Floats, mass: Floats, probabilities: tuple[float, ...]) -> list[float]:
    """Quantiles of ``values`` by their probability ``mass``."""
    order = np.argsort(values)
    return [float(q) for q in np.interp(probabilities, np.cumsum(mass[order]), values[order])]


def _all_met(stage: Mapping[str, Any], slo: Slo, joint: Slo) -> dict[str, Any]:
    """The verdict on the requests that met every SLO, as clustered as those on ``slo``."""
    verdict = verdict_of(stage, slo) or {}
    effective = min(verdict.get("requests_effective") or 0.0, stage["requests"])
    return {
        "slo": joint.text,
        "attainment": stage["slo_attainment"],
        "requests_effective": effective,
    }


def _clusters(looks: _Looks, centre: float, weight: Floats, r: Floats) -> tuple[Floats, Floats]:
    """(mean size of the cluster that a miss of the queue is in, requests that its memory spans), when x* is about
    ``centre``; shape (slopes, floors, 1, stages). ``r``: rho/(1 - rho), shape (slopes, floors).

    Misses come in clusters that few stages see enough of, and a stage that happens to see few of them
    takes its sample for a large one. So the clustering is pooled over all misses near the limit, and no
    less than what goes with the slope: the memory of a queue near saturation is of the order of rho/(1-rho)^2
    requests, which grows with the load by the power (1+rho)/(1-rho).
    """
    there = np.exp(np.clip(looks.x - centre, -NEAR, NEAR))  # over x*
    there = there / np.maximum(
        1 + r[..., None] * (1 - there), RISE
    )  # r of each stage, over that at x*
    scale = there * (1 + r[..., None] * there) / (1 + r[..., None])
    seen = weight * looks.share * looks.n * looks.steady  # a queue that only grows has no clusters
    pooled = (looks.clustering / scale) @ seen / max(float(seen.sum()), 1e-9)
    memory = MEMORY * r * (1 + r) * looks.per_request
    size = np.maximum(pooled, memory)[..., None] * scale
    return size[:, :, None, :], (memory[..., None] * scale)[:, :, None, :]


def _posterior(
    looks: _Looks,
    weight: Floats,
    centre: float,
    unstable: Floats,
    saturation: _Saturation | None,
    quantile: float,
    of_limit: bool,
    grids: int,
) -> Posterior:
    """Sum over slopes and floors on so many ``grids`` of x*, each drawn in around where the probability is."""
    allowed = 1 - quantile
    kept = weight > 1e-3
    looks = replace(
        looks,
        **{
            f: getattr(looks, f)[kept]
            for f in ("x", "n", "share", "clustering", "together", "cut", "steady")
        },
    )
    weight = weight[kept]
    n, misses, fate = looks.n, looks.n * looks.share, looks.together
    theta = np.log(1 / (allowed * (1 - FLOORS)))  # of the queue: P[wait > limit] = e^-theta at x*
    r = SLOPES[:, None] / theta
    clusters, memory = _clusters(looks, centre, weight, r)
    slopes, floors, r = SLOPES[:, None, None, None], FLOORS[:, None, None], r[:, :, None, None]
    # the same under every hypothesis: one that could make a stage count less would explain it away
    power = weight / (1 + START_UP * np.maximum(fate, looks.clustering) / n)
    load, mistaken = unstable.reshape(-1, 2).T
    mistaken = np.clip(mistaken / 2, MISTAKEN, 0.5)
    low, high = float(looks.x.min()) - math.log(4.0), float(looks.x.max()) + math.log(2.0)
    for _ in range(grids):
        grid = np.linspace(low, high, _GRID)
        rise = np.expm1(np.clip(looks.x - grid[:, None], -50, 3))  # grid, looks
        idle = floors * allowed
        queue = _late(slopes, idle, allowed, rise)  # slopes, floors, grid, looks
        # far beyond saturation the queue does not come back: no clusters there, whatever the slope
        back = np.maximum(r * rise - 1, 1) ** 2
        expected_queue = (
            n * (1 - idle) * queue * _begun(n, looks.cut, np.maximum(memory / back, 1e-9))
        )
        expected_idle = n * idle
        expected = expected_queue + expected_idle + 1e-9
        size = np.minimum(clusters / back, n)  # a stage is one cluster at most
        size = (size * expected_queue + looks.per_request * expected_idle) / expected
        size = np.maximum(size, looks.per_request) + SPREAD**2 * n * looks.share * (1 - looks.share)
        likelihood = (_log_density(misses, 2 * expected / size, size / 2) * power).sum(axis=-1)
        above = 1 / (1 + np.exp(-UNSTABLE_SLOPE * np.clip(load - grid[:, None], -0.5, 0.5)))
        likelihood += np.log(mistaken + (1 - mistaken) * above).sum(axis=1)
        likelihood += np.log(FLOOR_CHANCES)[:, None] + _log_prior(grid, theta, saturation, of_limit)
        mass = np.exp(likelihood - likelihood.max())
        cumulative = np.cumsum(mass.sum(axis=(0, 1)))
        cumulative /= cumulative[-1]
        first, last = np.searchsorted(cumulative, [1e-4, 1 - 1e-4])
        low, high = float(grid[max(first - 1, 0)]), float(grid[min(last + 1, _GRID - 1)])
    slope = math.exp(float(np.log(SLOPES) @ mass.sum(axis=(1, 2))) / float(mass.sum()))
    return Posterior(grid, cumulative, slope, mass / mass.sum(), allowed)


def _late(slopes: Floats, idle: Floats, allowed: float, rise: Floats) -> Floats:
    """Share that the queue makes late: exponential in the load, as in M/M/1, and ``allowed`` with the idle misses at x*."""
    at_limit = (allowed - idle) / (1 - idle)
    return np.minimum(at_limit * np.exp(np.clip(slopes * rise, -50, 50)), ALL_LATE)


def _begun(n: Floats, cut: Floats, memory: Floats) -> Floats:
    """Mean of 1 - e^(-t/memory) over the requests t of a stage that begins idle, after the ``cut`` ones: of the misses
    of a steady state so many come in it."""
    return np.asarray(1 - np.exp(-cut / memory) * -np.expm1(-n / memory) * memory / n)


def _log_prior(
    grid: Floats, theta: Floats, saturation: _Saturation | None, of_limit: bool
) -> Floats:
    """Of slope and x*, shape (slopes, floors, grid), where the saturation is known: x* lies below it,
    as a limit of any order of magnitude has it (flat in ln(rho/(1-rho)); unless ``of_limit`` flat in its log), and the
    slope is about theta rho/(1 - rho), as in a queue. Else x* is flat in its log, and the slope that of a queue at any rho.
    """
    if saturation is None:
        r = (SLOPES[:, None] / theta)[:, :, None]  # rho/(1 - rho)
        return np.asarray(np.log(r / (1 + r) ** 2))
    below = _log_below(grid, saturation)
    rho = np.clip(np.exp(grid - saturation.x), 0.05, 1 - max(saturation.sd, 0.02))
    off = np.log(SLOPES)[:, None, None] - np.log(theta[:, None] * rho / (1 - rho))
    spread = np.hypot(SLOPE_SD, saturation.sd / (1 - rho))
    like_a_queue = np.exp(-((off / spread) ** 2) / 2) / spread
    prior = below - np.log(1 - rho) if of_limit else below
    return np.asarray(prior + np.log((1 - ANY_SLOPE) * like_a_queue + ANY_SLOPE * 0.5))


def _log_below(grid: Floats, saturation: _Saturation) -> Floats:
    """ln of the chance that the saturation lies above each point: the normal distribution, nearly."""
    return np.asarray(-np.logaddexp(0, -1.7 * (saturation.x - grid) / saturation.sd))


def _steady_below(judged: Sequence[Mapping[str, Any]]) -> Posterior | None:
    """Of the highest load that has a steady state, which bounds what SLOs that limit no wait leave open."""
    saturation = _saturation(judged)
    if saturation is None:
        return None
    grid = saturation.x + saturation.sd * np.linspace(-4, 4, _GRID)
    return Posterior(grid, 1 - np.exp(_log_below(grid, saturation)))


def _log_density(misses: Floats, number: Floats, size: Floats) -> Floats:
    """ln of the density of ``misses`` that come in Poisson(``number``) clusters of exponential sizes of mean ``size``.

    P[0] = e^-number, else e^(-number - m/size) sqrt(number/(size m)) I_1(z), z = 2 sqrt(number m/size), the Bessel
    function to within 10 % by its two limits. The variance is number 2 size^2: a miss is in a cluster of mean 2 size.
    """
    some = np.maximum(misses, 0.5)
    z = 2 * np.sqrt(number * some / size)
    bessel = -np.log(2 / z + np.sqrt(2 * np.pi * z))  # ln(e^-z I_1(z))
    density = (
        -((np.sqrt(number) - np.sqrt(some / size)) ** 2)
        + 0.5 * np.log(number / (size * some))
        + bessel
    )
    return np.where(misses < 0.5, -number, density)


def _above(posteriors: Sequence[Posterior]) -> tuple[Floats, Floats]:
    """A grid for all, and P[x_i > x] on it, shape (posteriors, grid)."""
    grid = np.unique(np.concatenate([p.x for p in posteriors]))
    return grid, np.array(
        [1 - np.interp(grid, p.x, p.cumulative, left=0.0, right=1.0) for p in posteriors]
    )


def _lowest(posteriors: Sequence[Posterior]) -> Posterior:
    """Of the smallest of independent x*: P[min > x] = product of P[x_i > x]."""
    if len(posteriors) == 1:
        return posteriors[0]
    grid, above = _above(posteriors)
    return Posterior(grid, 1 - above.prod(axis=0))


def _binding(
    judged: Sequence[Mapping[str, Any]], found: Mapping[Slo, Posterior]
) -> tuple[Slo, ...]:
    """The SLOs that break first with a chance of ``MAY_BE_FIRST`` at least: the mass of x_i times P[all others > x_i].

    The first of them was seen over its limit at the lowest load; where that says nothing it is the likeliest.
    """
    _, above = _above(list(found.values()))
    mass, middle = -np.diff(above, axis=1), (above[:, 1:] + above[:, :-1]) / 2
    first = {
        slo: float(mass[i] @ np.delete(middle, i, axis=0).prod(axis=0))
        for i, slo in enumerate(found)
    }

    def seen_over(slo: Slo) -> float:
        over = [
            s["offered_rps"]
            for s in judged
            for v in s["slo_verdicts"]
            if v["slo"] == slo.text
            and is_figure(s)
            and v["attainment"] is not None
            and v["attainment"] < slo.quantile
        ]
        return min(over, default=math.inf)

    able = [slo for slo, p in first.items() if p >= MAY_BE_FIRST]
    return tuple(sorted(able, key=lambda slo: (seen_over(slo), -first[slo])))


def _concurrency(
    judged: Sequence[Mapping[str, Any]], x_star: Posterior
) -> tuple[float, float, float] | None:
    """(low, middle, high) of the requests in flight at x*, by the stable stages near it."""
    centre = x_star.at(0.5)
    stable = [s for s in judged if s["stable"] is not False and s["concurrency"] > 0]
    if not stable:
        return None
    x = np.array([math.log(s["offered_rps"]) for s in stable])
    n = np.array([float(s["requests"]) for s in stable])
    reach = max(NEAR, float(np.sort(np.abs(x - centre))[:2][-1]))
    weight = np.exp(-(((x - centre) / reach) ** 2) / 2) * n
    weight /= weight.sum()
    stay_s = np.array([s["concurrency"] for s in stable]) / np.exp(x)
    saturation = _saturation(judged)
    if saturation is not None:
        cut = np.array([float(s["window"]["warmup_requests"]) for s in stable])
        rho = np.clip(np.exp(x - saturation.x), 0.0, 1 - max(saturation.sd, 0.02))
        stay_s /= _begun(n, cut, np.maximum(FILLS * rho / (1 - rho) ** 2, 1e-9))
    curve = _stay(x, stay_s, weight, centre, saturation)
    residual = stay_s / np.exp(curve(x)) - 1
    used = 1 / float(weight @ weight)  # stages that count
    # what each stage's own mean may be off by, and what they scatter about the curve
    drawn = np.array([(s.get("concurrency_se") or 0.0) / s["concurrency"] for s in stable])
    scatter = math.sqrt(float(weight @ residual**2) / max(used - 1, 1))
    few = math.sqrt(float(weight**2 @ drawn**2))
    error = max(0.02, scatter, few)
    at = np.array([x_star.at(p) for p in (0.025, 0.5, 0.975)])
    # a mean over a few jams is skewed like a log-normal: it is mostly below what it is in the long run
    low, middle, high = (at + curve(at) + few**2 / 2).tolist()
    down, up = (math.hypot(1.96 * error, end - middle) for end in (low, high))
    return math.exp(middle - down), math.exp(middle), math.exp(middle + up)


def _stay(
    x: Floats, stay_s: Floats, weight: Floats, centre: float, saturation: _Saturation | None
) -> Callable[[Floats], Floats]:
    """ln of the time that a request stays, over ln(load): a + c/(1 - rho), as in a queue, neither part below 0. Where the
    saturation is not known a straight line takes the place of 1/(1 - rho); of one load alone it is a line through the origin.

    Errors are relative to the fit, not to what was seen: a stage that saw no jam would count most.
    """
    from scipy.optimize import nnls

    if float(np.ptp(x)) < SAME_LOAD:
        return lambda at: np.asarray(math.log(float(weight @ stay_s)) + at - float(x[0]))
    most = None if saturation is None else max(saturation.x, float(x.max()), centre) + 0.02

    def crowd(at: Floats) -> Floats:
        return (
            np.exp(at - centre)
            if most is None
            else 1 / -np.expm1(np.minimum(at, most - 0.02) - most)
        )

    of = np.stack([np.ones_like(x), crowd(x)], axis=1)
    fit = np.full_like(x, float(weight @ stay_s))
    for _ in range(FITS):
        each = np.sqrt(weight) / fit
        parts, _ = nnls(of * each[:, None], stay_s * each)
        fit = of @ parts
    return lambda at: np.asarray(np.log(parts[0] + parts[1] * crowd(at)))
