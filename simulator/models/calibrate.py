"""Fit a roofline's effective bandwidth, compute and overhead to latencies by concurrency."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ampacity.simulator import SimulatorError
from ampacity.simulator.engine.steptime import Roofline

Floats = NDArray[np.float64]
IDENTIFIED = 0.5  # a fitted value counts as known if its relative standard error is below this
NAMES = ("bandwidth_bytes_s", "compute_flops", "overhead_s")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted step time and its quality.

    relative_error: relative standard error of each fitted value, from the curvature of the fit
    (infinite if the data do not depend on it). worst_residual: the largest |ln(measured / fitted)|;
    0.05 is 5 %. r2_*: share of the variance of the measured values that the fit explains, NaN if
    they do not vary.
    """

    step_time: Roofline
    relative_error: dict[str, float]
    worst_residual: float
    r2_itl: float
    r2_ttft: float

    @property
    def unknown(self) -> list[str]:
        """Fitted values that these measurements do not determine."""
        return [name for name in NAMES if not self.relative_error[name] < IDENTIFIED]


@dataclass(frozen=True, slots=True)
class Level:
    """One load level. `seen`: requests in flight as a request sees them, itself included; >= 1."""

    seen: float
    input_tokens: float
    output_tokens: float
    waits_s: float  # mean share of the current step that an arrival waits for: 0 to 1/2


def expected_latencies_s(
    step_time: Roofline, level: Level, budget_tokens: int
) -> tuple[float, float]:
    """Return (mean ITL, mean TTFT) in s at a load level, in the steady state.

    One of the m steps of a request computes its prompt. So k of the c requests in flight are in
    prefill, k binomial with c and 1/m; the step decodes c - k requests and computes k prompts. A
    gap counts once for each request that decodes. A request's own prompt meets those of k of the
    c - 1 others; prompts beyond the token budget take further steps. An arrival waits for a share
    of the current step, whose mean length is E[s^2]/E[s]. Interpolates linearly between whole
    numbers of requests.
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
    """Return P[k] for k = 0, 1, ... up to a negligible tail."""
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
    """Return the time to compute prompts while the others decode; one step without prompts."""
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
    """Fit bandwidth, compute and overhead; bytes and operations are those of `nominal`.

    Arrays over load levels: the concurrency of a closed loop without think time, or the mean of an
    open one (arrivals see time averages, and themselves: one more); mean ITL and TTFT in s, NaN if
    unknown; mean prompt and output tokens. Leave out levels at which requests queued for a slot,
    for KV blocks or for other prompts: the model has no queue. Least squares of the logarithms,
    with a loss that is robust to outliers, from several starts. Raises SimulatorError for fewer
    than three values.
    """
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

    def logs_of(values: Sequence[tuple[float, float]]) -> Floats:
        itls, ttfts = np.array(values, dtype=np.float64).T
        logs: Floats = np.log(np.concatenate([itls[use_itl], ttfts[use_ttft]]))
        return logs

    def fitted(logs: Sequence[float]) -> Floats:
        step = _with(nominal, logs)
        return logs_of([expected_latencies_s(step, x, max_num_batched_tokens) for x in levels])

    measured = logs_of(list(zip(itl, ttft, strict=True)))
    best = _best_fit(nominal, lambda logs: measured - fitted(logs), measured.min())
    residuals, n_itl = measured - fitted(best.x), int(use_itl.sum())
    predicted = np.exp(fitted(best.x))
    return Calibration(
        step_time=_with(nominal, best.x),
        relative_error=_errors(best.jac, residuals),
        worst_residual=float(np.abs(residuals).max()),
        r2_itl=_r2(itl[use_itl], predicted[:n_itl]),
        r2_ttft=_r2(ttft[use_ttft], predicted[n_itl:]),
    )


def _best_fit(nominal: Roofline, residuals: Callable[[Sequence[float]], Floats], low: float) -> Any:
    """Return the best of several fits; ``low``: logarithm of the shortest measured time."""
    from scipy.optimize import least_squares

    bandwidth, compute = math.log(nominal.bandwidth_bytes_s), math.log(nominal.compute_flops)
    starts = ((0, 0, 0.2), (-1, 0, 0.02), (1, -1, 0.5), (0, -1, 0.05))
    fits = [
        least_squares(
            residuals,
            [bandwidth + b, compute + c, low + math.log(share)],
            loss="soft_l1",
            f_scale=0.1,
        )
        for b, c, share in starts
    ]
    return min(fits, key=lambda fit: float(fit.cost))


def _with(nominal: Roofline, logs: Sequence[float]) -> Roofline:
    bandwidth, compute, overhead = (math.exp(value) for value in logs)
    return replace(nominal, bandwidth_bytes_s=bandwidth, compute_flops=compute, overhead_s=overhead)


def _errors(jacobian: Floats, residuals: Floats) -> dict[str, float]:
    """Return standard errors of the logarithms: diagonal of s^2 (J'J)^-1, s^2 = RSS / (n - 3)."""
    variance = float((residuals**2).sum()) / max(1, len(residuals) - len(NAMES))
    information = jacobian.T @ jacobian
    errors = {}
    for number, name in enumerate(NAMES):
        # the part of this column that the others do not explain
        others = np.delete(jacobian, number, axis=1)
        column = jacobian[:, number]
        rest = column - others @ np.linalg.lstsq(others, column, rcond=None)[0]
        own = float(rest @ rest)
        known = own > 1e-8 * max(1e-12, float(np.trace(information)))
        errors[name] = math.sqrt(variance / own) if known else math.inf
    return errors


def _r2(measured: Floats, fitted: Floats) -> float:
    spread = float(((measured - measured.mean()) ** 2).sum()) if len(measured) else 0.0
    return 1.0 - float(((measured - fitted) ** 2).sum()) / spread if spread > 0 else math.nan
