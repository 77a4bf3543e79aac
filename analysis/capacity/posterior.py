"""The posterior of the load at which an SLO is no longer met, from all stages together.

Model: near the limit the share of misses rises exponentially with the load, as in a queue,

    ln p(x) = ln(1 - q) + b (e^(x - x*) - 1),   x = ln(requests/s),  b > 0,

plus a floor of misses that come at any load. Each stage is thus evidence about x*, where exactly
the share q is within the limit. Misses of a stage come in clusters. Flat priors on x* and ln b,
summed over a grid, give the posterior of x*. An unstable stage lies above x*, unless it was taken
for one by mistake.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from ampacity.analysis.capacity.levels import FILLING, Level
from ampacity.analysis.metrics.requests import Bools, Floats
from ampacity.analysis.slo import GAP_METRICS, WAITS, Slo

NEAR = 0.2  # in ln(load): the distance over which the model is trusted to be a straight line
# requests in a cluster, per rho / (1 - rho)^2; 2.7 to 3.7 in an M/M/1 queue at rho 0.5 to 0.85
MEMORY = 3.0
# Larger clusters speak against a slope: more than 5 times its memory, with an s.d. of 0.6 in ln
# (heavy-tailed service times have up to 3 times)
LARGE = (math.log(5.0), 0.6)
START_UP = 5.0  # clusters that a stage must last to count half: it starts idle
FIRST_LOOKS = 40  # stages by which it is found which are near the limit
RISE = 0.3  # least 1/(1 - rho) of a stage over that at x*: near saturation it is not known
SPREAD = 0.05  # s.d. of a stage's log-odds beyond its sample: runs differ
ALL_LATE = 0.98  # share that misses beyond saturation, in a stage that ends
SLOPES = np.exp(np.linspace(math.log(2.0), math.log(200.0), 16))
FLOORS = np.array([0.0, 0.1, 0.4, 0.7, 0.9, 0.98])  # share of the allowed misses at any load
FLOOR_CHANCES = np.array([0.35, 0.2, 0.15, 0.1, 0.1, 0.1])
SLOPE_SD = 0.4  # of ln b around those of queues
ANY_SLOPE = 0.1  # chance that b is no queue's
ANY_DENSITY = 0.2  # of its ln then: flat over the slopes
UNSTABLE_SLOPE = 60.0  # log-odds that a stage has no steady state, per ln(load) above x*
MISTAKEN = 0.02  # chance that a stage below x* is taken for unstable; up to half where it is short
RARELY = 2.58  # s.d. above its estimate at which a saturation ends: the posterior errs as well
LONE = 0.9  # share of the allowed misses above which they are those of a lone request
MAY_BE_LONE = 0.3  # chance of that above which no load is named
_GRID = 41


@dataclass(frozen=True)
class Posterior:
    """Posterior of x*, the log of the capacity: grid points and their cumulative probability."""

    x: Floats
    cumulative: Floats
    slope: float = 0.0  # b, its geometric mean
    mass: Floats | None = None  # of slopes, floors, grid
    allowed: float = 0.0  # share of misses at x*

    def at(self, probability: float) -> float:
        """Return the value below which x* lies with this probability."""
        return float(np.interp(probability, self.cumulative, self.x))

    def below(self, most: float) -> Posterior:
        """Return the posterior where x* is known to be at most ``most``."""
        total = float(np.interp(most, self.x, self.cumulative))
        if total < 1e-9:
            return Posterior(np.array([most - NEAR, most]), np.array([0.0, 1.0]))
        kept = self.x < most
        return Posterior(
            np.append(self.x[kept], most), np.append(self.cumulative[kept] / total, 1.0)
        )

    def up_to(self, most: float) -> Posterior:
        """Return the posterior with what lies above ``most`` put there."""
        return replace(self, x=np.minimum(self.x, most))

    @property
    def by_any_load(self) -> bool:
        """Return whether the allowed misses may nearly all come at any load."""
        return self.mass is not None and float(self.mass[:, FLOORS >= LONE].sum()) > MAY_BE_LONE


@dataclass(frozen=True)
class Looks:
    """Evidence of each stage about one SLO, shape (stages,)."""

    x: Floats  # ln(requests/s)
    n: Floats  # samples
    share: Floats  # of misses
    clustering: Floats  # samples per effective one
    together: Floats  # samples of the requests that share one fate
    cut: Floats  # samples before them that were cut as warm-up
    steady: Floats  # 0 where the stage has no steady state, else 1
    per_request: float  # samples of a request: gaps, for a metric that is judged by them

    def take(self, kept: Bools) -> Looks:
        """Return the stages under a mask."""
        columns = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "per_request"}
        return replace(self, **{name: values[kept] for name, values in columns.items()})


def looks_of(levels: Sequence[Level], slo: Slo) -> Looks:
    """Return what each stage shows of the SLO."""
    seen = [(level, v) for level in levels if (v := level.verdict(slo)) and v.is_known]
    samples = [float(level.samples(slo)) for level, _ in seen]
    rows = [
        (
            level.x,
            count,
            v.missed,
            max(1.0, count / v.effective),
            level.together(slo),
            float(level.warmup),
            float(level.stable is not False),
        )
        for (level, v), count in zip(seen, samples, strict=True)
    ]
    of_gaps = slo.metric in GAP_METRICS
    requests = sum(level.requests for level in levels) if of_gaps else sum(samples)
    per_request = sum(samples) / max(requests, 1)
    x, n, share, clustering, fate, cut, steady = np.array(rows, float).reshape(-1, 7).T
    fate, cut = fate * per_request, cut * per_request
    return Looks(x, n, share, clustering, fate, cut, steady, per_request)


@dataclass(frozen=True)
class Saturation:
    """ln of what the server ends per second while more arrives than it can do."""

    x: float
    sd: float  # of x
    most: float  # its upper end (99.5 %), by the stages' own intervals; inf: they may only fill up


def saturation_of(levels: Sequence[Level]) -> Saturation | None:
    """Return the rate answered by overloaded stages; None without one."""
    beyond = [level for level in levels if level.overloaded]
    if not beyond:
        return None
    rates = np.array([level.achieved_rps for level in beyond])
    length_s = np.array([level.window_s for level in beyond])
    ended = rates * length_s
    total = float(ended.sum())
    x, sd = float(ended @ np.log(rates) / total), math.hypot(0.02, 1.2 / total**0.5)
    ends = [ci[1] for level in beyond if (ci := level.figures.achieved_rps_ci)]
    most = x + RARELY * sd
    if len(ends) == len(beyond):
        up = np.array(ends, float) - rates
        most = x + RARELY / 1.96 * float(np.linalg.norm(up * length_s)) / total
    idle_s = min(level.concurrency / level.load for level in levels)
    return Saturation(x, sd, most if idle_s <= FILLING * float(length_s.min()) else math.inf)


def posterior_of(levels: Sequence[Level], slo: Slo, of_limit: bool = True) -> Posterior | None:
    """Return the posterior of x* for one SLO; stages far from x* count less.

    Unless ``of_limit`` it is that of a share for which no limit was set.
    """
    looks, waits = looks_of(levels, slo), slo.metric in WAITS
    x = looks.x
    if not len(x):
        return None
    # other metrics can be within their limits in a queue that grows without end
    growing = [level for level in levels if level.stable is False and waits]
    case = _Case(
        unstable=np.array([(level.x, level.blind(slo)) for level in growing]),
        saturation=saturation_of(levels) if waits else None,
        quantile=slo.quantile,
        of_limit=of_limit,
    )
    weight, centre = np.zeros(len(x)), float(np.median(x))
    weight[:: math.ceil(len(x) / FIRST_LOOKS)] = 1.0  # of very many stages some tell which are near
    for step in range(3):
        found = _posterior(looks, weight, centre, case, grids=3 if step == 2 else 2)
        centre = found.at(0.5)
        # far from the interval: inside it nobody knows yet what is far; the nearest on both sides
        # always count
        off = np.abs(x - np.clip(x, found.at(0.025), found.at(0.975)))
        nearest = (float(off[side].min(initial=1.0)) for side in (x <= centre, x >= centre))
        if step < 2:
            weight = np.exp(-((off / min(max(NEAR, *nearest), 1.0)) ** 2) / 2)
    return found


@dataclass(frozen=True)
class _Case:
    """Facts beside the looks."""

    unstable: Floats  # rows of (ln(load), overload to which the stage is blind)
    saturation: Saturation | None
    quantile: float
    of_limit: bool


def _clusters(
    looks: Looks, centre: float, weight: Floats, r: Floats
) -> tuple[Floats, Floats, Floats]:
    """Return (mean cluster size of the queue's misses, requests that its memory spans) near x*.

    Shape (slopes, floors, 1, stages). Third, ln of the chance of clusters as large as those seen,
    shape (slopes, floors, 1). ``r``: rho/(1 - rho), shape (slopes, floors).

    Misses come in clusters that few stages see enough of, and a stage that happens to see few of
    them takes its sample for a large one. So the clustering is pooled over all misses near the
    limit, and no less than what goes with the slope: the memory of a queue near saturation is of
    the order of rho/(1-rho)^2 requests, which grows with the load by the power (1+rho)/(1-rho).
    Clusters far larger than that are those of a queue nearer to saturation, with a steeper slope.
    """
    there = np.exp(np.clip(looks.x - centre, -NEAR, NEAR))  # over x*
    r = r[..., None]
    there = there / np.maximum(1 + r * (1 - there), RISE)  # r of each stage, over that at x*
    scale = there * (1 + r * there) / (1 + r)
    seen = weight * looks.share * looks.n * looks.steady  # a queue that only grows has no clusters
    pooled = (looks.clustering / scale) @ seen / max(float(seen.sum()), 1e-9)
    memory = MEMORY * r * (1 + r) * looks.per_request
    size = np.maximum(pooled[..., None], memory) * scale
    beyond = np.log(np.maximum(pooled[..., None], 1e-9) / memory) - LARGE[0]
    chance = -((np.maximum(beyond, 0) / LARGE[1]) ** 2) / 2
    return size[:, :, None, :], (memory * scale)[:, :, None, :], chance


def _posterior(looks: Looks, weight: Floats, centre: float, case: _Case, grids: int) -> Posterior:
    """Sum over slopes and floors on ``grids`` grids of x*, each narrowed to the probability."""
    allowed = 1 - case.quantile
    kept = weight > 1e-3
    looks, weight = looks.take(kept), weight[kept]
    theta = np.log(1 / (allowed * (1 - FLOORS)))  # of the queue: P[wait > limit] = e^-theta at x*
    queue = _Queue(looks, centre, weight, allowed, SLOPES[:, None] / theta)
    low, high = float(looks.x.min()) - math.log(4.0), float(looks.x.max()) + math.log(2.0)
    for _ in range(grids):
        grid = np.linspace(low, high, _GRID)
        likelihood = queue.log_likelihood(grid) + _log_unstable(grid, case.unstable)
        likelihood += np.log(FLOOR_CHANCES)[:, None] + _log_prior(grid, theta, case)
        mass = np.exp(likelihood - likelihood.max())
        cumulative = np.cumsum(mass.sum(axis=(0, 1)))
        cumulative /= cumulative[-1]
        first, last = np.searchsorted(cumulative, [1e-4, 1 - 1e-4])
        low, high = float(grid[max(first - 1, 0)]), float(grid[min(last + 1, _GRID - 1)])
    slope = math.exp(float(np.log(SLOPES) @ mass.sum(axis=(1, 2))) / float(mass.sum()))
    return Posterior(grid, cumulative, slope, mass / mass.sum(), allowed)


class _Queue:
    """The clustered misses that each slope and floor predicts for the stages."""

    def __init__(
        self, looks: Looks, centre: float, weight: Floats, allowed: float, r: Floats
    ) -> None:
        """Take the clustering near ``centre``; ``r``: rho/(1 - rho), shape (slopes, floors)."""
        self.looks = looks
        self.idle = FLOORS[:, None, None] * allowed
        self.allowed = allowed
        self.clusters, self.memory, self.chance = _clusters(looks, centre, weight, r)
        self.r = r[:, :, None, None]
        # equal under all hypotheses: one that made a stage count less would explain it away
        fate = np.maximum(looks.together, looks.clustering)
        self.power = weight / (1 + START_UP * fate / looks.n)

    def log_likelihood(self, grid: Floats) -> Floats:
        """Return ln of the likelihood of all misses and their clusters.

        Shape (slopes, floors, grid).
        """
        looks, n, share = self.looks, self.looks.n, self.looks.share
        rise = np.expm1(np.clip(looks.x - grid[:, None], -50, 3))  # grid, looks
        late = late_share(SLOPES[:, None, None, None], self.idle, self.allowed, rise)
        # far beyond saturation the queue does not come back: no clusters there, at any slope
        back = np.maximum(self.r * rise - 1, 1) ** 2
        begun = begun_share(n, looks.cut, np.maximum(self.memory / back, 1e-9))
        in_queue, at_idle = n * (1 - self.idle) * late * begun, n * self.idle
        expected = in_queue + at_idle + 1e-9
        size = np.minimum(self.clusters / back, n)  # a stage is one cluster at most
        size = (size * in_queue + looks.per_request * at_idle) / expected
        size = np.maximum(size, looks.per_request) + SPREAD**2 * n * share * (1 - share)
        density = _log_density(n * share, 2 * expected / size, size / 2)
        return np.asarray((density * self.power).sum(axis=-1) + self.chance)


def _log_unstable(grid: Floats, unstable: Floats) -> Floats:
    """Return ln of the chance that the unstable stages are so, for each x* of the grid."""
    load, mistaken = unstable.reshape(-1, 2).T
    mistaken = np.clip(mistaken / 2, MISTAKEN, 0.5)
    above = 1 / (1 + np.exp(-UNSTABLE_SLOPE * np.clip(load - grid[:, None], -0.5, 0.5)))
    return np.asarray(np.log(mistaken + (1 - mistaken) * above).sum(axis=1))


def late_share(slopes: Floats, idle: Floats, allowed: float, rise: Floats) -> Floats:
    """Return the share that the queue makes late.

    Exponential in the load, as in M/M/1, and ``allowed`` with the idle misses at x*.
    """
    at_limit = (allowed - idle) / (1 - idle)
    return np.minimum(at_limit * np.exp(np.clip(slopes * rise, -50, 50)), ALL_LATE)


def begun_share(n: Floats, cut: Floats, memory: Floats) -> Floats:
    """Return the share of a steady state's misses that a stage which begins idle shows.

    The mean of 1 - e^(-t/memory) over its requests t, after the ``cut`` ones.
    """
    return np.asarray(1 - np.exp(-cut / memory) * -np.expm1(-n / memory) * memory / n)


def _log_prior(grid: Floats, theta: Floats, case: _Case) -> Floats:
    """Return ln of the prior of slope and x*, shape (slopes, floors, grid).

    With a known saturation x* lies below it, flat in ln(rho/(1-rho)) (unless ``of_limit``: flat in
    its log), and the slope is that of a queue whose service times have a tail between a light one,
    theta rho/(1 - rho), and a heavy one, 1/(1 - rho) (there P[wait > t] is rho/(1 - rho) times a
    function of t). Else x* is flat in its log and the slope that of a queue at any rho.
    """
    saturation = case.saturation
    if saturation is None:
        r = (SLOPES[:, None] / theta)[:, :, None]  # rho/(1 - rho)
        return np.asarray(np.log(r / (1 + r) ** 2))
    below = _log_below(grid, saturation)
    rho = np.clip(np.exp(grid - saturation.x), 0.05, 1 - max(saturation.sd, 0.02))
    light = np.log(theta[:, None] * rho / (1 - rho))
    heavy = -np.log(1 - rho) if case.of_limit else light  # the misses at the peak are no tail
    low, width = np.minimum(light, heavy), np.maximum(np.abs(light - heavy), 0.05)
    spread = np.hypot(SLOPE_SD, saturation.sd / (1 - rho))
    off = np.log(SLOPES)[:, None, None] - low
    like_a_queue = (_normal(off / spread) - _normal((off - width) / spread)) / width
    prior = below - np.log(1 - rho) if case.of_limit else below
    return np.asarray(prior + np.log((1 - ANY_SLOPE) * like_a_queue + ANY_SLOPE * ANY_DENSITY))


def _normal(z: Floats) -> Floats:
    """Return the normal distribution function, nearly."""
    return np.asarray(1 / (1 + np.exp(-1.7 * np.clip(z, -20, 20))))


def _log_below(grid: Floats, saturation: Saturation) -> Floats:
    """Return ln of the chance that the saturation lies above each point.

    The normal distribution, nearly.
    """
    return np.asarray(-np.logaddexp(0, -1.7 * (saturation.x - grid) / saturation.sd))


def steady_limit(levels: Sequence[Level]) -> Posterior | None:
    """Return the posterior of the highest steady load, which limits SLOs that bound no wait."""
    saturation = saturation_of(levels)
    if saturation is None:
        return None
    grid = saturation.x + saturation.sd * np.linspace(-4, 4, _GRID)
    return Posterior(grid, 1 - np.exp(_log_below(grid, saturation)))


def _log_density(misses: Floats, number: Floats, size: Floats) -> Floats:
    """Return ln of the density of ``misses`` that come in Poisson(``number``) clusters of
    exponential sizes of mean ``size``.

    P[0] = e^-number, else e^(-number - m/size) sqrt(number/(size m)) I_1(z), z = 2 sqrt(number
    m/size), the Bessel function to within 10 % by its two limits. The variance is number 2 size^2:
    a miss is in a cluster of mean 2 size.
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
