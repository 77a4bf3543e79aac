"""Arrival processes of an open loop.

A process is a stationary renewal process, optionally time-rescaled by a rate curve (see
``ampacity.workloads.arrivals.rates``).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.durations import read_duration
from ampacity.workloads.arrivals.rates import (
    CHANGES_MAX,
    MEASURED_DAY,
    Bursts,
    Curve,
    Ramp,
    Steps,
    Switching,
)
from ampacity.workloads.errors import WorkloadError, did_you_mean
from ampacity.workloads.lengths.parse import number, pairs

MAX_PLANNED_REQUESTS = 50_000_000
"""A stage of more requests is refused before it eats the memory."""

_GAPS = ("poisson", "constant", "gamma", "weibull")
_NEEDED = {
    "gamma": ("cv",),
    "weibull": ("cv",),
    "onoff": ("on", "off"),
    "mmpp": ("rates", "stay"),
    "ramp": ("from", "to"),
    "steps": ("rates",),
    "burst": ("factor", "length"),
}
_OPTIONAL = {
    "onoff": ("cv",),
    "mmpp": ("cv",),
    "ramp": ("cv",),
    "steps": ("lengths", "cv"),
    "diurnal": ("weights", "trace", "step", "cv"),
    "burst": ("at", "every", "cv"),
}
_EXAMPLES = {
    "gamma": "gamma:cv=3",
    "weibull": "weibull:cv=2",
    "onoff": "onoff:on=10s,off=50s",
    "mmpp": "mmpp:rates=1/8,stay=60s/5s",
    "ramp": "ramp:from=0.2,to=1.8",
    "steps": "steps:rates=1/2/4",
    "diurnal": "diurnal",
    "burst": "burst:factor=5,length=10s",
}
ARRIVALS = (*_GAPS, *_OPTIONAL)

Draw = Callable[[np.random.Generator, int], Any]


@dataclass(frozen=True)
class Gaps:
    """Renewal process; ``kind`` is exponential, constant, gamma or weibull (with ``cv``)."""

    kind: str = "exponential"
    cv: float = 1.0

    def draws(self) -> tuple[Callable[[np.random.Generator], float], Draw]:
        """Return (draw of the time to the first event, draw of n gaps), with mean gap 1.

        The first event of a stationary renewal process comes after a uniform part of a
        length-biased gap; anything else would bias the number of events (Cox, Renewal Theory,
        1962).
        """
        if self.kind == "gamma":
            k = self.cv**-2
            return (
                lambda rng: rng.random() * rng.standard_gamma(k + 1) / k,
                lambda rng, n: rng.standard_gamma(k, n) / k,
            )
        k = _weibull_shape(self.cv)
        mean = math.gamma(1 + 1 / k)
        return (
            lambda rng: rng.random() * rng.standard_gamma(1 + 1 / k) ** (1 / k) / mean,
            lambda rng, n: rng.weibull(k, n) / mean,
        )


@dataclass(frozen=True)
class Arrivals:
    """A parsed arrival process."""

    gaps: Gaps
    curve: Curve | None = None


def arrival_times(
    spec: str,
    rate_rps: float,
    duration_s: float,
    rng: np.random.Generator,
    *,
    one_of_many: bool = False,
) -> NDArray[np.float64]:
    """Return sorted offsets in s, float64, in [0, duration_s), at a mean rate of ``rate_rps``.

    ``poisson``: exponential gaps, the first one before the first request; the number of requests is
    random (mean rate x duration). ``constant``: k / rate for k = 0, 1, ..., shifted by a random
    part of a gap for a stream that is ``one_of_many``. Further forms: docs/workloads.md. The same
    random state gives the same pattern at every rate, stretched; parameters in seconds are not
    stretched. Raises WorkloadError.
    """
    process = parse_arrivals(spec)
    _check_size(rate_rps, duration_s)
    if process.curve is None:
        return _renewal(process.gaps, rate_rps, duration_s, rng, one_of_many)
    horizon_s, times = process.curve.rescaling(duration_s, rng.spawn(1)[0])
    found = times(_renewal(process.gaps, rate_rps, horizon_s, rng, one_of_many))
    return found[found < duration_s]


def check_stage(spec: str, rate_rps: float, duration_s: float) -> None:
    """Raise WorkloadError where ``arrival_times`` would."""
    _check_size(rate_rps, duration_s)
    curve = parse_arrivals(spec).curve
    if curve is not None:
        curve.rescaling(duration_s, np.random.default_rng(0))


def _check_size(rate_rps: float, duration_s: float) -> None:
    for name, value, unit in (
        ("rate", rate_rps, "requests/s"),
        ("duration", duration_s, "seconds"),
    ):
        if not (math.isfinite(value) and value > 0):
            raise WorkloadError(f"{name} is {value!r} {unit}: give a finite number above 0")
    if rate_rps * duration_s > MAX_PLANNED_REQUESTS:
        raise WorkloadError(
            f"{rate_rps:g} requests/s for {duration_s:g} s is more than {MAX_PLANNED_REQUESTS} "
            "requests: lower one"
        )


def _renewal(
    gaps: Gaps, rate_rps: float, horizon_s: float, rng: np.random.Generator, shifted: bool
) -> NDArray[np.float64]:
    expected = rate_rps * horizon_s
    if gaps.kind == "constant":
        phase = rng.random() if shifted else 0.0
        times = (np.arange(math.ceil(expected) + 1, dtype=np.float64) + phase) / rate_rps
        return times[times < horizon_s]
    # of a Poisson process enough but once in 10^9
    block = math.ceil(expected + 6 * gaps.cv * math.sqrt(expected)) + 16
    if gaps.kind == "exponential":
        drawn = rng.standard_exponential(block)
        draw: Draw = np.random.Generator.standard_exponential
    else:
        first, draw = gaps.draws()
        drawn = np.concatenate([[first(rng)], draw(rng, block)])
    while (times := np.cumsum(drawn) / rate_rps)[-1] < horizon_s:
        drawn = np.concatenate([drawn, draw(rng, len(drawn))])
    return times[: np.searchsorted(times, horizon_s, side="left")]


def _weibull_shape(cv: float) -> float:
    """Solve CV^2 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2 - 1 for k, by bisection of ln k."""
    low, high = math.log(0.05), math.log(1000)
    for _ in range(60):
        k = math.exp((low + high) / 2)
        found = math.expm1(math.lgamma(1 + 2 / k) - 2 * math.lgamma(1 + 1 / k))
        low, high = (math.log(k), high) if found > cv**2 else (low, math.log(k))
    return math.exp((low + high) / 2)


def arrivals_text(spec: object) -> str:
    """Return the inline form: ``{gamma: {cv: 3}}`` is ``gamma:cv=3``, lists are joined by ``/``.

    Raises WorkloadError.
    """
    if isinstance(spec, Mapping):
        if len(spec) != 1 or not isinstance(next(iter(spec.values())), Mapping):
            raise WorkloadError(
                f"arrivals {dict(spec)!r:.80}: write {{gamma: {{cv: 3}}}} or gamma:cv=3"
            )
        ((kind, values),) = spec.items()
        joined = (
            f"{name}={'/'.join(map(str, value)) if isinstance(value, list | tuple) else value}"
            for name, value in values.items()
        )
        spec = f"{kind}:{','.join(joined)}" if values else kind
    parse_arrivals(str(spec))
    return str(spec)


def arrivals_notes(specs: Iterable[str]) -> tuple[str, ...]:
    """Return notes on the files that arrival processes are read from, one line each."""
    curves = (parse_arrivals(spec).curve for spec in specs)
    return tuple(
        dict.fromkeys(note for curve in curves if isinstance(curve, Steps) for note in curve.notes)
    )


def shaped(spec: str) -> bool:
    """Return whether the rate follows a curve over the stage (ramp, steps, diurnal, burst)."""
    return isinstance(parse_arrivals(spec).curve, Ramp | Steps | Bursts)


@lru_cache(maxsize=256)
def parse_arrivals(spec: str) -> Arrivals:
    """Parse ``poisson``, ``gamma:cv=3``, ``onoff:on=10s,off=50s``, ... Raises WorkloadError."""
    kind, _, rest = spec.partition(":")
    kind = kind.strip().lower()
    if kind not in ARRIVALS:
        raise WorkloadError(
            f"arrivals {spec!r} are not known{did_you_mean(kind, ARRIVALS)}: "
            f"use {', '.join(ARRIVALS[:-1])} or {ARRIVALS[-1]}"
        )
    try:
        given = pairs(rest, _EXAMPLES.get(kind, kind)) if rest.strip() else {}
        known = _NEEDED.get(kind, ()) + _OPTIONAL.get(kind, ())
        for name in given:
            if name not in known:
                takes = f"it takes {', '.join(known) or 'none'}"
                raise WorkloadError(
                    f"{kind} has no parameter {name!r}{did_you_mean(name, known)}: {takes}"
                )
        for name in _NEEDED.get(kind, ()):
            if name not in given:
                raise WorkloadError(f"{kind} lacks {name}: write {_EXAMPLES[kind]}")
        values = {name: _READ[name](name, text) for name, text in given.items()}
        return Arrivals(_gaps(kind, values), None if kind in _GAPS else _curve(kind, values))
    except WorkloadError as error:
        raise WorkloadError(f"arrivals {spec!r:.80}: {error}") from None


def _gaps(kind: str, values: Mapping[str, Any]) -> Gaps:
    cv = values.get("cv", 1.0)
    if kind == "constant" or (kind not in _GAPS and _at_least("cv", cv) == 0):
        return Gaps("constant", 0.0)
    if not 0.01 <= cv <= 100:
        raise WorkloadError(f"cv is {cv:g}: give a number from 0.01 to 100")
    # both families are exponential at 1
    return Gaps() if cv == 1 else Gaps("weibull" if kind == "weibull" else "gamma", cv)


def _curve(kind: str, values: Mapping[str, Any]) -> Curve:
    if kind == "onoff":
        return Switching((1.0, 0.0), (values["on"], values["off"]))
    if kind == "mmpp":
        return Switching(*_as_many(values, "rates", "stay"))
    if kind == "ramp":
        if values["from"] + values["to"] == 0:
            raise WorkloadError("both ends of the ramp are 0: give one of them a rate")
        return Ramp(values["from"], values["to"])
    if kind == "burst":
        if values["length"] >= values.get("every", math.inf):
            raise WorkloadError("length is not below every: there is nothing between the bursts")
        return Bursts(values["factor"], values["length"], values.get("at"), values.get("every"))
    if kind == "diurnal":
        return _day(values)
    rates, lengths = _as_many(
        {"lengths": (1.0,) * len(values["rates"]), **values}, "rates", "lengths"
    )
    if min(lengths) <= 0:
        raise WorkloadError("a step of length 0: leave it out")
    return Steps(rates, lengths)


def _day(values: Mapping[str, Any]) -> Steps:
    if "trace" not in values:
        if "step" in values:
            raise WorkloadError("step goes with trace")
        weights = values.get("weights", MEASURED_DAY)
        return Steps(weights, (1.0,) * len(weights))
    if "weights" in values:
        raise WorkloadError("weights and trace exclude each other: give one")
    from ampacity.workloads.traces.read import read_trace
    from ampacity.workloads.traces.times import length_text

    trace = read_trace(Path(values["trace"]))
    arrival_s = trace.arrival_s
    step_s = values.get("step", 3600.0)
    if arrival_s[-1] / step_s > CHANGES_MAX:
        raise WorkloadError(
            f"trace {values['trace']} lasts {length_text(arrival_s[-1])}, "
            f"more than {CHANGES_MAX} steps of {step_s:g} s: give a longer step"
        )
    edges = np.append(np.arange(0.0, arrival_s[-1], step_s), arrival_s[-1])
    if len(edges) < 2:
        raise WorkloadError(f"trace {values['trace']} has no length in time")
    counts, lengths = np.histogram(arrival_s, edges)[0], np.diff(edges)
    return Steps(tuple((counts / lengths).tolist()), tuple(lengths.tolist()), trace.notes)


def _at_least(name: str, text: object) -> float:
    value = number(name, text)
    if not 0 <= value <= 1e9:
        raise WorkloadError(f"{name} is {value:g}: give a number of at least 0")
    return value


def _list(name: str, text: str) -> tuple[float, ...]:
    values = tuple(_at_least(name, part.strip()) for part in text.split("/"))
    if not any(values):
        raise WorkloadError(f"{name} are all 0: give at least one above 0")
    return values


def _as_many(values: Mapping[str, Any], a: str, b: str) -> tuple[Any, Any]:
    if len(values[a]) != len(values[b]):
        raise WorkloadError(f"{len(values[a])} {a} and {len(values[b])} {b}: give as many of each")
    return values[a], values[b]


def _duration(name: str, text: str, *, zero: bool = False) -> float:
    seconds = read_duration(text if text.strip()[-1:].isalpha() else f"{text}s")
    if seconds is None or seconds > 1e9 or not (seconds or zero):
        raise WorkloadError(f"{name} is {text!r}: give a time such as 10s, 2m or 1h")
    return seconds


# How the value of a parameter is read: reader(name, text).
_READ: dict[str, Callable[[str, str], Any]] = {
    **dict.fromkeys(("on", "off", "length", "every", "step"), _duration),
    "at": partial(_duration, zero=True),
    **dict.fromkeys(("from", "to", "factor"), _at_least),
    **dict.fromkeys(("rates", "lengths", "weights"), _list),
    "stay": lambda name, text: tuple(_duration(name, part) for part in text.split("/")),
    "cv": number,
    "trace": lambda name, text: text,
}
