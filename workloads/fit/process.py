"""Select the arrival process of a log by held-out likelihood.

Candidates: independent gaps (Poisson or gamma), two alternating rates (MMPP, or on and off), and,
for a day or more, hourly weights with gamma gaps. The log is split into blocks; each process is
fitted to every other block and scored on the rest, then vice versa.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.arrivals.processes import check_stage
from ampacity.workloads.errors import WorkloadError
from ampacity.workloads.fit.lengths import rounded

Floats = NDArray[np.float64]
POISSON_CV = (0.85, 1.2)  # gaps with a CV in this range are called Poisson
CONSTANT_CV = 0.02
_CALM = 1.5  # at most this index of dispersion at every scale: no other process is tried
REQUESTS_MAX = 30_000  # of a longer log a random part of this size is fitted: a thinned MMPP is one
_BLOCKS = 10
DAY_S = 86_400.0
# from which on a log is one of a day: its last request comes before midnight
LEAST_DAY_S = 23 * 3600.0
_SHORTEST = 1e-4  # of the mean gap: shorter ones count as anything between 0 and this
_OFF = 0.01  # of the other rate: a state with less is called off
# nats in all, and a request, by which a process of more parameters has to be better
_BETTER, _BETTER_EACH = (10.0, 0.005)
_STATE_GAPS = 1e-3  # mean gaps that a state lasts at least
_HOUR_S, _HOURS = 3600.0, 24
_LEAST_WEIGHT = 0.02  # of the mean, of an hour that the other blocks have no request in


@dataclass(frozen=True)
class Process:
    """An arrival process in inline form, and its held-out log likelihood in nats per request."""

    text: str
    nats: float


def gaps_text(cv: float) -> str:
    """Return the process of independent gaps with this coefficient of variation."""
    low, high = POISSON_CV
    if cv < CONSTANT_CV:
        return "constant"
    return "poisson" if low <= cv <= high else f"gamma:cv={min(cv, 100):.3g}"


def choose_process(
    arrival_s: Floats, dispersion: Sequence[float], rng: np.random.Generator
) -> list[Process]:
    """Return the candidates for sorted times from 0, the best first.

    Only one where the others need not be tried. ``dispersion``: indices of dispersion by window.
    Scores are relative to a Poisson process of the same rate.
    """
    cv = gap_cv(np.diff(arrival_s))
    plain = gaps_text(cv)
    span_s, thinning = float(arrival_s[-1]), max(len(arrival_s) / REQUESTS_MAX, 1.0)
    calm = plain == "poisson" and max(dispersion, default=1.0) < _CALM
    if plain == "constant" or (calm and span_s < LEAST_DAY_S):
        return [Process(plain, 0.0)]
    if thinning > 1:
        arrival_s = arrival_s[np.sort(rng.choice(len(arrival_s), REQUESTS_MAX, replace=False))]
        arrival_s = arrival_s - arrival_s[0]
    block_s = (
        DAY_S
        if span_s > DAY_S + LEAST_DAY_S
        else 600.0
        if span_s >= LEAST_DAY_S
        else span_s / _BLOCKS
    )
    fold = (arrival_s[1:] // block_s).astype(np.int64) % 2
    gaps = np.diff(arrival_s)
    poisson = _held_out(gaps, fold, _poisson)
    scores = {plain: _held_out(gaps, fold, _renewal)}
    if not calm:
        scores[fit_mmpp(gaps).faster(thinning).text()] = _held_out(
            gaps, fold, lambda train: fit_mmpp(train).score
        )
    if span_s >= LEAST_DAY_S:
        weights, cv = fit_hours(arrival_s, np.ones(len(gaps), dtype=np.bool_), block_s)
        scores[hours_text(weights, cv)] = _held_out_hours(arrival_s, fold, block_s)
    usable = {
        text: score
        for text, score in scores.items()
        if text == plain or _is_usable(text, arrival_s)
    }
    found = [Process(text, rounded(score - poisson)) for text, score in usable.items()]
    return _best_first(found, plain, len(gaps))


def _is_usable(text: str, arrival_s: Floats) -> bool:
    """Return whether a workload file accepts the process for a stage as long as the log."""
    span_s = float(arrival_s[-1])
    try:
        check_stage(text, len(arrival_s) / span_s, span_s)
    except WorkloadError:
        return False
    return True


def _best_first(found: list[Process], plain: str, requests: float) -> list[Process]:
    margin = max(_BETTER / requests, _BETTER_EACH)
    best = max(found, key=lambda process: process.nats - (process.text != plain) * margin)
    return sorted(found, key=lambda process: (process != best, -process.nats))


def gap_cv(gaps: Floats) -> float:
    """Return the coefficient of variation of gaps whose mean is above 0."""
    return float(gaps.std() / gaps.mean())


Score = Callable[[Floats], float]  # mean log density of gaps
Fit = Callable[[Floats], Score]


def _held_out(gaps: Floats, fold: NDArray[np.int64], fit: Fit) -> float:
    """Return the mean log density of gaps under the process fitted to the other fold."""
    total = 0.0
    for part in (0, 1):
        test, train = gaps[fold == part], gaps[fold != part]
        if len(test) and len(train) > 10 and train.mean() > 0:
            total += fit(train)(test) * len(test)
    return total / len(gaps)


def _poisson(gaps: Floats) -> Score:
    mean = float(gaps.mean())
    return lambda g: float(-g.mean() / mean - math.log(mean))


def _renewal(gaps: Floats) -> Score:
    mean, cv = float(gaps.mean()), gap_cv(gaps)
    if POISSON_CV[0] <= cv <= POISSON_CV[1]:
        return _poisson(gaps)
    return lambda g: float(gamma_log_density(g / mean, cv).mean() - math.log(mean))


def gamma_log_density(u: Floats, cv: float) -> Floats:
    """Return log densities of gaps with mean 1; below ``_SHORTEST`` the mean density there."""
    from scipy.special import gammainc, gammaln

    k = 1 / max(cv, 0.01) ** 2
    log_density = k * math.log(k) - gammaln(k) + (k - 1) * np.log(np.maximum(u, _SHORTEST)) - k * u
    shortest = math.log(max(float(gammainc(k, k * _SHORTEST)), 1e-300) / _SHORTEST)
    return np.where(u < _SHORTEST, shortest, log_density)


@dataclass(frozen=True)
class Mmpp:
    """Two states with ``rates`` in 1/s, left at ``leave`` in 1/s."""

    rates: tuple[float, float]
    leave: tuple[float, float]

    def faster(self, factor: float) -> "Mmpp":
        """Return the same states with ``factor`` times the requests."""
        return Mmpp((self.rates[0] * factor, self.rates[1] * factor), self.leave)

    def text(self) -> str:
        """Return the inline form: ``onoff`` where one state is nearly silent."""
        stay = [f"{_plain(1 / rate)}s" for rate in self.leave]
        on = int(self.rates[1] > self.rates[0])
        if self.rates[1 - on] < _OFF * self.rates[on]:
            return f"onoff:on={stay[on]},off={stay[1 - on]}"
        return (
            f"mmpp:rates={_plain(self.rates[0])}/{_plain(self.rates[1])},stay={stay[0]}/{stay[1]}"
        )

    def score(self, gaps: Floats) -> float:
        """Return the mean log density of gaps, by the forward algorithm with pairwise products.

        The density of a gap t is exp((Q - L) t) L with generator Q and rates L (Fischer and
        Meier-Hellstern 1993); for two states the exponential is e^(-m t) (cosh(d t) I + sinh(d t)/d
        (A + m I)).
        """
        (a, b), (p, q) = self.rates, self.leave
        alpha, beta = p + a, q + b
        m, h = (alpha + beta) / 2, (beta - alpha) / 2
        d = math.sqrt(h * h + p * q)
        grow = np.exp((d - m) * gaps)  # e^(-m t) cosh and sinh, without overflow
        shrink = np.exp(-2 * d * gaps)
        c, s = grow * (1 + shrink) / 2, grow * (1 - shrink) / (2 * d)
        held = np.stack(
            [np.maximum(c + s * h, 0) * a, s * p * b, s * q * a, np.maximum(c - s * h, 0) * b]
        )
        scale = 0.0
        while held.shape[1] > 1:
            pairs = held.shape[1] // 2 * 2
            left, right, odd = held[:, 0:pairs:2], held[:, 1:pairs:2], held[:, pairs:]
            # rows of the 2 by 2 products: (11, 12, 21, 22)
            held = (
                left[[0, 0, 2, 2]] * right[[0, 1, 0, 1]] + left[[1, 1, 3, 3]] * right[[2, 3, 2, 3]]
            )
            norm = np.maximum(held.max(axis=0), 1e-300)
            scale += float(np.log(norm).sum())
            held = np.concatenate([held / norm, odd], axis=1)
        m11, m12, m21, m22 = held[:, 0]
        at = np.array([q * a, p * b]) / (q * a + p * b)  # the state after an arrival
        total = at[0] * (m11 + m12) + at[1] * (m21 + m22)
        return (scale + math.log(max(float(total), 1e-300))) / len(gaps)


def _plain(value: float) -> str:
    """Format four digits without an exponent."""
    return f"{value:.{max(3 - math.floor(math.log10(value)), 0)}f}" if value > 0 else "0"


# (low rate, high rate relative to the mean; mean gaps per state, below 1 a share of the log)
_BEGINNINGS = ((0.3, 3.0, 30.0), (0.5, 1.5, 0.1), (0.02, 10.0, 10.0), (0.05, 3.0, 0.05))


def fit_mmpp(gaps: Floats) -> Mmpp:
    """Fit by maximum likelihood, from starts at several time scales."""
    from scipy.optimize import minimize

    mean = float(gaps.mean())
    unit = gaps / mean
    bounds = [
        (-12.0, 12.0),
        (-12.0, 12.0),
        (-12.0, -math.log(_STATE_GAPS)),
        (-12.0, -math.log(_STATE_GAPS)),
    ]

    def negative(x: Floats) -> float:
        a, b, p, q = np.exp(x)
        return -Mmpp((a, b), (p, q)).score(unit)

    def climb(x: Floats, steps: int) -> Any:
        return minimize(negative, x, method="L-BFGS-B", bounds=bounds, options={"maxiter": steps})

    tried = []
    for low, high, stay in _BEGINNINGS:
        cycle = 2 * (stay if stay >= 1 else max(stay * len(gaps), 2.0))
        share = (1 - low) / (high - low)  # of the time at the high rate
        tried.append(climb(np.log([low, high, 1 / (cycle * (1 - share)), 1 / (cycle * share)]), 10))
    best = climb(min(tried, key=lambda found: float(found.fun)).x, 60)
    a, b, p, q = np.exp(best.x) / mean
    return Mmpp((float(a), float(b)), (float(p), float(q)))


def fit_hours(
    arrival_s: Floats,
    train: NDArray[np.bool_],
    block_s: float,
    blocks: NDArray[np.int64] | None = None,
) -> tuple[Floats, float]:
    """Return (weights of the 24 hours, float64[24] with mean 1; CV of the rescaled gaps).

    ``train`` bool[n - 1]: the gaps that count, by where they end; ``blocks``: numbers of the blocks
    of ``block_s`` seconds to use (None: all).
    """
    span_s = float(arrival_s[-1])
    edges = np.append(np.arange(0.0, span_s, min(block_s, 600.0)), span_s)
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    seen = (
        np.ones(len(middle), dtype=np.bool_)
        if blocks is None
        else np.isin(middle // block_s, blocks)
    )
    exposure = np.bincount(_hour(middle[seen]), width[seen], minlength=_HOURS)
    counts = np.bincount(_hour(arrival_s[1:][train]), minlength=_HOURS)
    rate = np.divide(counts, exposure, out=np.zeros(_HOURS), where=exposure > 0)
    rate = np.where(exposure > 0, rate, counts.sum() / exposure.sum())
    weights = np.maximum(rate / rate.mean(), _LEAST_WEIGHT)
    weights /= weights.mean()
    return weights, gap_cv(np.diff(_operational(arrival_s, weights))[train])


def _hour(time_s: Floats) -> NDArray[np.int64]:
    return (time_s // _HOUR_S).astype(np.int64) % _HOURS


def _operational(arrival_s: Floats, weights: Floats) -> Floats:
    """Return times rescaled to rate 1 under the hourly weights: their integral."""
    hours = (arrival_s // _HOUR_S).astype(np.int64)
    before = np.concatenate([[0.0], np.cumsum(weights)]) * _HOUR_S
    day = before[-1] * (hours // _HOURS)
    return np.asarray(
        day + before[hours % _HOURS] + weights[hours % _HOURS] * (arrival_s - hours * _HOUR_S)
    )


def _held_out_hours(arrival_s: Floats, fold: NDArray[np.int64], block_s: float) -> float:
    """Return the score of ``_held_out`` for hourly weights with independent rescaled gaps."""
    total = 0.0
    count = int(arrival_s[-1] // block_s) + 1
    for part in (0, 1):
        train, test = fold != part, fold == part
        if not test.any() or train.sum() <= 10 or np.diff(arrival_s)[train].mean() <= 0:
            continue
        weights, cv = fit_hours(
            arrival_s, train, block_s, np.flatnonzero(np.arange(count) % 2 != part)
        )
        gaps = np.diff(_operational(arrival_s, weights))
        mean = float(gaps[train].mean())
        low, high = POISSON_CV
        u = gaps[test] / mean
        log_density = -u if low <= cv <= high else gamma_log_density(u, cv)
        total += float((log_density + np.log(weights[_hour(arrival_s[1:][test])] / mean)).sum())
    return total / len(fold)


def hours_text(weights: Floats, cv: float) -> str:
    """Return the inline form of a day's curve."""
    low, high = POISSON_CV
    gaps = "" if low <= cv <= high else f",cv={min(max(cv, 0.01), 100):.3g}"
    return f"diurnal:weights={'/'.join(f'{weight:.3g}' for weight in weights)}{gaps}"


def choose_windows(counts: Floats, width_s: float, cv: float) -> list[Process]:
    """Choose a process for counts (float[n]) in windows of ``width_s``, gaps having ``cv``.

    Each window is predicted from the others: by their mean (steady rate), by its two neighbours
    (weights by window), or by two alternating rates. Scores are Poisson log likelihoods of counts.
    """
    plain, n = gaps_text(cv), len(counts)
    gaps = "" if plain == "poisson" else f",cv={min(max(cv, 0.01), 100):.3g}"
    if n < 3:
        return [Process(plain, 0.0)]
    total = float(counts.sum())
    steady = (total - counts) / (n - 1)
    before, after = np.append(counts[1:2], counts[:-1]), np.append(counts[1:], counts[-2:-1])
    beside = np.logaddexp(
        _poisson_counts(counts, before), _poisson_counts(counts, after)
    ) - math.log(2)
    low = _poisson_counts(counts, steady)
    scores = {plain: low.sum(), _steps_text(counts, gaps): beside.sum()}
    # half of the rate that a request meets on average
    on = counts > float(counts @ counts) / total / 2
    if 1 < on.sum() < n - 1:
        text, score = _turns(counts, on, width_s, gaps)
        scores[text] = score
    found = [
        Process(text, rounded((float(score) - float(low.sum())) / total))
        for text, score in scores.items()
    ]
    return _best_first(found, plain, total)


def _poisson_counts(counts: Floats, mean: Floats) -> Floats:
    """Return Poisson log likelihoods up to a constant; means are at least 0.5."""
    floor = np.maximum(mean, 0.5)
    return np.asarray(counts * np.log(floor) - floor)


WINDOWS_MAX = 336  # of a curve that a workload file holds: hours of two weeks


def _steps_text(counts: Floats, gaps: str) -> str:
    together = math.ceil(len(counts) / WINDOWS_MAX)
    parts = [float(counts[i : i + together].mean()) for i in range(0, len(counts), together)]
    mean = sum(parts) / len(parts)
    return f"steps:rates={'/'.join(f'{part / mean:.3g}' if part else '0' for part in parts)}{gaps}"


def _turns(counts: Floats, on: NDArray[np.bool_], width_s: float, gaps: str) -> tuple[str, float]:
    """Return (text, leave-one-out score) of two alternating rates."""
    score, n = 0.0, len(counts)
    state = on.astype(int)
    moves = np.full((2, 2), 0.5)
    np.add.at(moves, (state[:-1], state[1:]), 1)
    odds = moves / moves.sum(axis=1, keepdims=True)
    for i in range(n):
        p = np.array([1.0, 1.0])
        if i:
            p = p * odds[state[i - 1]]
        if i < n - 1:
            p = p * odds[:, state[i + 1]]
        p = p / p.sum()
        others = [
            (counts[on == s].sum() - counts[i] * (on[i] == s))
            / max((on == s).sum() - (on[i] == s), 1)
            for s in (False, True)
        ]
        score += float(
            np.logaddexp(
                *(
                    math.log(p[s]) + _poisson_counts(counts[i : i + 1], np.array([others[s]]))[0]
                    for s in (0, 1)
                )
            )
        )
    changes = int(np.abs(np.diff(state)).sum())
    stay = [float((state == s).sum()) * width_s / max((changes + 1) / 2, 1) for s in (0, 1)]
    means = [float(counts[state == s].mean()) / width_s for s in (0, 1)]
    return Mmpp((means[0], means[1]), (1 / stay[0], 1 / stay[1])).text() + gaps, score
