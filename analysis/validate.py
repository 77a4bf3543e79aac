"""Check whether production meets the assumptions of a benchmark.

Production figures come from histograms, in which a percentile is somewhere in its bucket: an
assumption is violated (or met) only if every value in that bucket, and in the 95 % interval of the
percentile's rank, violates (or meets) it; else it is inconclusive.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from ampacity.analysis.contract.capacity import Capacity
from ampacity.analysis.contract.figures import Percentiles
from ampacity.analysis.contract.part import Part
from ampacity.analysis.contract.stage import Server, Stage
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.stats.intervals import order_statistic_ranks

TTFT_P99_FACTOR, TTFT_P95_FACTOR, ITL_P95_FACTOR = 1.3, 2.0, 3.0
SHARE_POINTS = 0.20
# of distributions of lengths and of gaps; smaller ones do not matter to capacity
KS_DISTANCE = 0.15
MEAN_SHARE = 0.1
CV_FACTOR = 1.5
LOAD_FACTOR = 1.2
FEWEST = 100  # requests
_KS_AT_1_PERCENT = 1.628  # Kolmogorov's distribution: P(sqrt(n) D > 1.628) = 1 %


class ValidateError(ValueError):
    """Production figures that cannot be compared with a run; one line."""


@dataclass(frozen=True)
class Histogram:
    """``counts[i]`` samples in (bounds[i - 1], bounds[i]], from 0 to a last bound of infinity."""

    bounds: Floats
    counts: Floats
    total: float | None = None  # sum of the samples

    @property
    def n(self) -> int:
        return round(float(self.counts.sum()))

    def at_rank(self, rank: int) -> tuple[float, float]:
        """Return the bucket that holds the sample of 1-based ``rank``: its bounds."""
        i = int(np.searchsorted(np.cumsum(self.counts), rank - 0.5))
        return (float(self.bounds[i - 1]) if i else 0.0), float(self.bounds[i])

    def quantile(self, q: float) -> tuple[float | None, float, float]:
        """Return (value, least, greatest) of a quantile.

        The value is interpolated in its bucket, as by Prometheus' histogram_quantile, and None in
        the last one, which has no upper bound. The others are the bucket's bounds, widened to the
        95 % interval of the rank.
        """
        rank = max(1, math.ceil(q * self.n - 1e-9))
        low, high = self.at_rank(rank)
        below = float(self.counts[self.bounds <= low].sum())
        inside = float(self.counts[self.bounds == high].sum())
        value = low + (high - low) * (q * self.n - below) / inside if math.isfinite(high) else None
        first, last = order_statistic_ranks(self.n, q)
        least = self.at_rank(first)[0] if first else 0.0
        return value, least, self.at_rank(last)[1] if last else math.inf


def of_samples(counts: Floats) -> Histogram:
    """Return whole numbers as a histogram with a bucket for each value."""
    values, n = np.unique(counts, return_counts=True)
    bounds = np.append(np.column_stack([values - 0.5, values]).ravel(), np.inf)
    return Histogram(
        bounds, np.append(np.column_stack([0 * n, n]).ravel(), 0.0), float(counts.sum())
    )


@dataclass(frozen=True)
class Production:
    """Figures of production, latencies in s; the rate is that of all replicas together."""

    source: str
    latencies: Mapping[str, Histogram] = field(default_factory=dict)  # ttft, itl, tpot, e2e
    lengths: Mapping[str, Histogram] = field(default_factory=dict)  # input_tokens, output_tokens
    # gpu_utilization, kv_cache_usage_max, prefix_hit_rate
    shares: Mapping[str, float] = field(default_factory=dict)
    rps: float | None = None
    gaps_s: Floats | None = None  # between arrivals
    notes: Sequence[str] = ()  # parts of a log that are left out or changed


@dataclass(frozen=True)
class Benchmark:
    """The stage that production is compared with, and the lengths that were sent in it."""

    stage: Stage
    input_tokens: Floats
    output_tokens: Floats
    gaps_s: Floats  # between scheduled arrivals; empty in a closed loop


class Finding(Part, frozen=True, kw_only=True):
    """A verdict (met | violated | inconclusive) on an assumption; figures as far as known."""

    name: str
    assumption: str
    verdict: str
    reason: str
    benchmark: float | None
    production: float | None
    production_bounds: tuple[float, float | None] | None
    limit: float | None


class Validation(Part, frozen=True, kw_only=True):
    """The result that ``ampacity validate --json`` prints."""

    stage: int
    production: str
    violated: list[str]
    findings: list[Finding]
    notes: list[str]


def validate(benchmark: Benchmark, production: Production, instances: int = 1) -> list[Finding]:
    """Return one finding per assumption: a verdict with both figures and the limit.

    Raises ValidateError where none can be compared.
    """
    stage, shares = benchmark.stage, ("gpu_utilization", "kv_cache_usage_max", "prefix_hit_rate")
    itl = stage.itl_s if stage.itl_s.n else stage.icl_s
    found = [
        _load(stage, production.rps, instances),
        _latency("ttft", 0.99, TTFT_P99_FACTOR, stage.ttft_s, production),
        _latency("ttft", 0.95, TTFT_P95_FACTOR, stage.ttft_s, production),
        _latency("itl", 0.95, ITL_P95_FACTOR, itl, production),
        *(_share(name, stage.server, production) for name in shares),
        _lengths("input_tokens", benchmark.input_tokens, production),
        _lengths("output_tokens", benchmark.output_tokens, production),
        _arrivals(benchmark.gaps_s, production.gaps_s),
    ]
    if all(f.verdict == "inconclusive" for f in found):
        reasons = "; ".join(f"{f.name}: {f.reason}" for f in found)
        raise ValidateError(
            f"nothing of {production.source} can be compared with this run: {reasons}"
        )
    return found


def choose_stage(stages: Sequence[Stage], capacity: Capacity, rps: float | None) -> Stage:
    """Return the stage nearest to production's rate per instance, without one the capacity's."""
    fit = [s for s in stages if s.ok and not s.client_limited]
    if not fit:
        raise ValidateError(
            "the run has no stage that was answered and not limited by its client: run it again"
        )
    if rps:
        return min(fit, key=lambda s: abs(math.log(max(s.achieved_rps, 1e-9) / rps)))
    return next((s for s in fit if s.index == capacity.stage), fit[-1])


ASSUMPTIONS = {
    "load": "production asks no more of an instance than this stage of the benchmark",
    "ttft_p99": "users wait for the first token no longer than in the benchmark, in the tail",
    "ttft_p95": "users wait for the first token no longer than in the benchmark",
    "itl_p95": "tokens follow each other as fast as in the benchmark",
    "gpu_utilization": "the GPUs are as busy as in the benchmark",
    "kv_cache_usage_max": "the KV cache is as full as in the benchmark",
    "prefix_hit_rate": "the prefix cache answers as much as in the benchmark",
    "input_tokens": "prompts are as long as those of the benchmark",
    "output_tokens": "answers are as long as those of the benchmark",
    "arrivals": "requests arrive as evenly as in the benchmark",
}


def _finding(name: str, verdict: str, reason: str, *figures: float | None) -> Finding:
    """Return a finding; ``figures``: benchmark, production, limit, as far as known."""
    benchmark, production, limit = (*figures, None, None, None)[:3]
    return Finding(
        name=name,
        assumption=ASSUMPTIONS[name],
        verdict=verdict,
        reason=reason,
        benchmark=benchmark,
        production=production,
        production_bounds=None,
        limit=limit,
    )


def _judge(
    name: str, low: float, high: float, benchmark: float, production: float | None, limit: float
) -> Finding:
    """Judge [low, high] against the limit: violated if all of it is above, met if none is."""
    if low >= limit:  # a bucket holds what is above its lower bound
        verdict, reason = "violated", "above the limit"
    elif high <= limit:
        verdict, reason = "met", "within the limit"
    else:
        verdict = "inconclusive"
        reason = (
            f"production is between {low:.4g} and {high:.4g} s, on both sides of the limit of "
            f"{limit:.4g} s: finer buckets or more requests would tell"
        )
    bounds = low, high if math.isfinite(high) else None
    found = _finding(name, verdict, reason, benchmark, production, limit)
    return replace(found, production_bounds=bounds)


def _latency(
    metric: str, q: float, factor: float, held: Percentiles, production: Production
) -> Finding:
    level = f"p{round(100 * q)}"
    name, histogram = f"{metric}_{level}", production.latencies.get(metric)
    base: float | None = getattr(held, level)
    if base is None:
        why = f"not in the benchmark: {getattr(held, f'{level}_reason') or held.reason}"
        return _finding(name, "inconclusive", why)
    if histogram is None or histogram.n < FEWEST:
        n = histogram.n if histogram else "no"
        why = f"{n} samples of it in production, {FEWEST} are needed"
        return _finding(name, "inconclusive", why, base)
    value, low, high = histogram.quantile(q)
    finding = _judge(name, low, high, base, value, factor * base)
    worst = (getattr(held, f"{level}_ci", None) or (None, None))[1]
    if finding.verdict == "violated" and worst and low < factor * worst:
        why = f"the benchmark's own {level} may be as high as {worst:.4g} s: measure it longer"
        return replace(finding, verdict="inconclusive", reason=why)
    return finding


def _load(stage: Stage, rps: float | None, instances: int) -> Finding:
    base = stage.achieved_rps
    if rps is None:
        why = "a rate needs two scrapes of pages that count requests (--over), or a log"
        return _finding("load", "inconclusive", why, base)
    each = rps / instances
    return _judge("load", each, each, base, each, LOAD_FACTOR * base)


def _share(name: str, server: Server | None, production: Production) -> Finding:
    base, value = getattr(server, name, None), production.shares.get(name)
    if base is None or value is None:
        why = f"not in the {'benchmark' if base is None else 'production figures'}"
        return _finding(name, "inconclusive", why, base, value)
    off = abs(value - base) > SHARE_POINTS + 1e-9
    reason = f"{round(100 * (value - base)) or 0:+} points, {100 * SHARE_POINTS:.0f} are allowed"
    return _finding(name, "violated" if off else "met", reason, base, value, SHARE_POINTS)


def _lengths(name: str, sent: Floats, production: Production) -> Finding:
    histogram = production.lengths.get(name)
    m = histogram.n if histogram else 0
    if histogram is None or min(len(sent), m) < FEWEST:
        why = f"{len(sent)} in the benchmark, {m} in production: {FEWEST} are needed"
        return _finding(name, "inconclusive", why)
    base, mean = float(sent.mean()), None if histogram.total is None else histogram.total / m
    distance = ks_distance(sent, histogram)
    limit = max(KS_DISTANCE, _KS_AT_1_PERCENT * math.sqrt((len(sent) + m) / (len(sent) * m)))
    reason = f"KS distance {distance:.2f}, {limit:.2f} is allowed"
    verdict = "violated" if distance > limit else "met"
    if verdict == "met" and (mean is None or abs(mean / base - 1) > MEAN_SHARE):
        means = "production's mean is not known" if mean is None else "the means differ"
        verdict = "inconclusive"
        reason += f"; but {means}: the tails may differ, or what is inside a bucket"
    return _finding(name, verdict, reason, base, mean, limit)


def ks_distance(values: Floats, histogram: Histogram) -> float:
    """Return the Kolmogorov-Smirnov distance at the buckets' bounds, at most the true one."""
    ours = np.searchsorted(np.sort(values), histogram.bounds, side="right") / len(values)
    return float(np.abs(ours - np.cumsum(histogram.counts) / histogram.counts.sum()).max())


def _arrivals(sent: Floats, gaps: Floats | None) -> Finding:
    """Compare the gaps' coefficient of variation: 0 constant, 1 Poisson, more in bursts."""
    if gaps is None:
        return _finding("arrivals", "inconclusive", "only a log has the times of arrivals")
    if min(len(sent), len(gaps)) < FEWEST or not sent.mean() or not gaps.mean():
        counts = f"{len(sent)} gaps in the benchmark's open loop, {len(gaps)} in production"
        return _finding("arrivals", "inconclusive", f"{counts}: {FEWEST} are needed")
    base, value = float(sent.std() / sent.mean()), float(gaps.std() / gaps.mean())
    limit = CV_FACTOR * max(base, 0.1)
    reason = f"coefficient of variation of the gaps {value:.2f}, {limit:.2f} is allowed"
    return _finding("arrivals", "violated" if value > limit else "met", reason, base, value, limit)
