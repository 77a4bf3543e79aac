"""Effective bandwidth, compute and overhead of a roofline, fitted to measured latencies by concurrency."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.steptime import Roofline

Floats = NDArray[np.float64]
IDENTIFIED = 0.5  # a factor is called known when its relative standard error is below this
NAMES = ("bandwidth_bytes_s", "compute_flops", "overhead_s")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted step time and how far to trust it.

    relative_error: standard error of each fitted figure as a share of it, from the fit's curvature (infinite
    where the data do not depend on it). worst_residual: the largest |ln(measured / fitted)|, 0.05 is 5 %. r2_*:
    share of the variance of the measured values that the fit explains, NaN where they do not vary.
    """

    step_time: Roofline
    relative_error: dict[str, float]
    worst_residual: float
    r2_itl: float
    r2_ttft: float

    @property
    def unknown(self) -> list[str]:
        """Fitted figures that these measurements do not determine; as high as any (low, for the overhead) would do."""
        return [name for name in NAMES if not self.relative_error[name] < IDENTIFIED]


@dataclass(frozen=True, slots=True)
class Level:
    """One load level. `seen`: requests in flight as each of them sees it, itself included; at least 1."""

    seen: float
    input_tokens: float
    output_tokens: float
    waits_s: float  # share of the step under way that an arrival waits for on average: 0 to 1/2


def expected_latencies_s(
    step_time: Roofline, level: Level, budget_tokens: int
) -> tuple[float, float]:
    """(mean ITL, mean TTFT) in s at a load level, in the steady state.

    A request is in one of its m steps when its prompt is computed: so k of the c in flight are, binomial with
    c and 1/m, and the step is that of c - k decodings and k prompts. A gap is weighted by those that decode.
    A request's own prompt meets k of the c - 1 others; prompts beyond the token budget take further steps.
    An arrival waits for a share of the step under way: E[s^2]/E[s] is the length of the one that it meets.
    Between whole numbers of requests, the line between their figures.
    """
    low = math.floor(level.seen)
    if low != level.seen:
        below = expected_latencies_s(step_time, replace(level, seen=low), budget_tokens)
        above = expected_latencies_s(step_time, replace(level, seen=low + 1), budget_tokens)
        part = level.seen - low
        return below[0] + part * (above[0] - below[0]), below[1] + part * (above[1] - below[1])
    c, prompt = low, level.input_tokens
    context = prompt + level.output_tokens / 2
    share = 1 / max(level.output_tokens, 1.0)
    weights = weighted = mean = square = 0.0
    for k, probability in enumerate(_binomial(c, share)):
        step_s = _prompts_s(step_time, c - k, k, prompt, context, budget_tokens)
        weights += probability * (c - k)
        weighted += probability * (c - k) * step_s
        mean += probability * step_s
        square += probability * step_s**2
    own_s = sum(
        probability * _prompts_s(step_time, c - 1 - k, k + 1, prompt, context, budget_tokens)
        for k, probability in enumerate(_binomial(c - 1, share))
    )
    return weighted / weights if weights else math.nan, level.waits_s * square / mean + own_s


def _binomial(trials: int, probability: float) -> list[float]:
    """P[k] for k = 0, 1, ... as far as they matter. All on 1 for probability 1."""
    if probability >= 1:
        return [0.0] * trials + [1.0]
    found, term, k = [], (1 - probability) ** trials, 0
    while k <= trials and (term > 1e-6 or k < trials * probability):
        found.append(term)
        term *= (trials - k) / (k + 1) * probability / (1 - probability)
        k += 1
    return found


def _prompts_s(
    step_time: Roofline,
    decoding: int,
    prompts: int,
    prompt_tokens: float,
    context: float,
    budget: int,
) -> float:
    """The steps that compute so many prompts while the others decode; one step when there are none."""
    left = total = prompts * prompt_tokens
    seconds = 0.0
    while True:
        chunk = min(left, max(1, budget - decoding))
        part = chunk / total if total else 0.0
        seconds += step_time.seconds(
            decoding + prompts,
            round(decoding + chunk),
            round(decoding * context + chunk),
            decoding * context + part * prompts * 0.5 * prompt_tokens * (prompt_tokens + 1),
            prompts,
        )
        left -= chunk
        if left < 0.5:
            return seconds


def calibrate(
    nominal: Roofline,
    concurrency: ArrayLike,
    itl_s: ArrayLike,
    ttft_s: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    closed_loop: bool,
    max_num_batched_tokens: int = 8192,
) -> Calibration:
    """Fit `nominal`'s bandwidth, compute and overhead; its bytes and operations are taken as they are.

    Arrays over load levels: the set concurrency of a closed loop without think time, or the mean of an open one
    (whose requests see one more, themselves: arrivals see time averages); mean ITL and mean TTFT in s; mean
    prompt and answer tokens. Levels at which requests queued, for a slot, for KV
    blocks or for other prompts, must be left out: the model has no queue.
    Least squares of the logarithms, with a loss that single outliers do not dominate, from several starts.
    NaN in itl_s or ttft_s leaves that value out. Raises SimulatorError when fewer than three values are there.
    """
    from scipy.optimize import least_squares

    level, itl, ttft, prompt, answer = (
        np.asarray(values, dtype=np.float64)
        for values in (concurrency, itl_s, ttft_s, input_tokens, output_tokens)
    )
    if not len(level) == len(itl) == len(ttft) == len(prompt) == len(answer):
        raise SimulatorError("calibration: the arrays must have the same length")
    use_itl, use_ttft = np.isfinite(itl), np.isfinite(ttft)
    if use_itl.sum() + use_ttft.sum() < 3:
        raise SimulatorError("calibration: three factors need at least three measured values")
    if min([*level, *itl[use_itl], *ttft[use_ttft], *prompt]) <= 0:
        raise SimulatorError("calibration: concurrency, latencies and prompt tokens must be > 0")
    levels = [
        Level(max(c, 1.0), i, o, 0.0)
        if closed_loop
        else Level(c + 1, i, o, 0.5 * (1 - math.exp(-c)))
        for c, i, o in zip(level.tolist(), prompt.tolist(), answer.tolist(), strict=True)
    ]

    def model(logs: Sequence[float]) -> tuple[Floats, Floats]:
        step = _with(nominal, logs)
        pairs = [expected_latencies_s(step, each, max_num_batched_tokens) for each in levels]
        return np.array([itl for itl, _ in pairs]), np.array([ttft for _, ttft in pairs])

    def residuals(logs: Sequence[float]) -> Floats:
        fitted_itl, fitted_ttft = model(logs)
        return np.concatenate(
            [
                np.log(itl[use_itl] / fitted_itl[use_itl]),
                np.log(ttft[use_ttft] / fitted_ttft[use_ttft]),
            ]
        )

    shortest = min([*itl[use_itl], *ttft[use_ttft]])
    start = [math.log(nominal.bandwidth_bytes_s), math.log(nominal.compute_flops)]
    fits = [
        least_squares(
            residuals,
            [start[0] + b, start[1] + c, math.log(shortest * o)],
            loss="soft_l1",
            f_scale=0.1,
        )
        for b, c, o in ((0, 0, 0.2), (-1, 0, 0.02), (1, -1, 0.5), (0, -1, 0.05))
    ]
    best = min(fits, key=lambda fit: float(fit.cost))
    step_time = _with(nominal, best.x)
    fitted_itl, fitted_ttft = model(best.x)
    return Calibration(
        step_time=step_time,
        relative_error=_errors(best.jac, residuals(best.x)),
        worst_residual=float(np.abs(residuals(best.x)).max()),
        r2_itl=_r2(itl[use_itl], fitted_itl[use_itl]),
        r2_ttft=_r2(ttft[use_ttft], fitted_ttft[use_ttft]),
    )


def _with(nominal: Roofline, logs: Sequence[float]) -> Roofline:
    bandwidth, compute, overhead = (math.exp(value) for value in logs)
    return replace(nominal, bandwidth_bytes_s=bandwidth, compute_flops=compute, overhead_s=overhead)


def _errors(jacobian: Floats, residuals: Floats) -> dict[str, float]:
    """Standard errors of the logarithms: the diagonal of s^2 (J'J)^-1, s^2 = RSS / (n - 3)."""
    variance = float((residuals**2).sum()) / max(1, len(residuals) - len(NAMES))
    information = jacobian.T @ jacobian
    errors = {}
    for number, name in enumerate(NAMES):
        # What of this column the others do not explain
        others = np.delete(jacobian, number, axis=1)
        rest = (
            jacobian[:, number]
            - others @ np.linalg.lstsq(others, jacobian[:, number], rcond=None)[0]
        )
        own = float(rest @ rest)
        known = own > 1e-8 * max(1e-12, float(np.trace(information)))
        errors[name] = math.sqrt(variance / own) if known else math.inf
    return errors


def _r2(measured: Floats, fitted: Floats) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum()) if len(measured) else 0.0
    return 1.0 - float(((measured - fitted) ** 2).sum()) / spread if spread > 0 else math.nan
