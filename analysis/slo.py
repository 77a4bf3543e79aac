"""Service level objectives as text: ``ttft_p99=2s``, ``chat:itl_p99=50ms``, ``error_rate=1%``."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple

from ampacity.durations import exact_text, read_duration


class Metric(NamedTuple):
    """A latency that an SLO may limit."""

    label: str
    stage_field: str | None  # its percentiles in a stage of summary.json; None: only an attainment
    of_gaps: bool = False  # a percentile over gaps; the others have one value per request
    waits: bool = False  # its limit includes the time spent waiting
    first_token: bool = False  # unknown of an answer of which no token was seen
    rests_on: tuple[str, ...] = ()  # further metrics of the probe's diagnosis that spoil it


METRICS: Mapping[str, Metric] = {
    "ttft": Metric("TTFT", "ttft_from_schedule_s", waits=True, first_token=True),
    "itl": Metric("ITL", "itl_s", of_gaps=True),
    "icl": Metric("ICL", "icl_s", of_gaps=True),
    "tpot": Metric("TPOT", "tpot_s"),
    "e2e": Metric("E2E", "e2e_from_schedule_s", waits=True),
    "first_answer": Metric(
        "first answer", "first_answer_s", waits=True, first_token=True, rests_on=("ttft",)
    ),
    "fluidity": Metric("fluidity", None, first_token=True, rests_on=("ttft", "itl")),
}
"""All that a new metric needs but its observations (analysis/metrics/cohort.py)."""
GAP_METRICS = frozenset(name for name, metric in METRICS.items() if metric.of_gaps)
WAITS = frozenset(name for name, metric in METRICS.items() if metric.waits)
FIRST_TOKEN = frozenset(name for name, metric in METRICS.items() if metric.first_token)
EXTREMES: dict[float, str] = {0.0: "min", 1.0: "max"}
"""The smallest and the largest sample, as quantiles: facts of one run, not of an endpoint."""
ERROR_RATE, GOODPUT = "error_rate", "goodput"
SHARES: frozenset[str] = frozenset({ERROR_RATE, GOODPUT})
"""Metrics whose limit is a share of requests, not a time."""
_MLPERF = "MLPerf Inference, Server scenario, mlperf.conf of 2026-08-20 (mlcommons/inference)"
SLO_SETS: dict[str, tuple[tuple[str, ...], str]] = {
    **{
        f"mlperf-{name}": ((f"ttft_p99={ttft}ms", f"tpot_p99={tpot}ms"), _MLPERF)
        for name, ttft, tpot in (
            ("llama2-70b", 2000, 200),
            ("llama2-70b-interactive", 450, 40),
            ("mixtral-8x7b", 2000, 200),
            ("llama3.1-8b", 2000, 100),
            ("llama3.1-8b-interactive", 500, 30),
            ("llama3.1-405b", 6000, 175),
            ("llama3.1-405b-interactive", 4500, 80),
            ("deepseek-r1", 2000, 80),
            ("deepseek-r1-interactive", 1500, 15),
            ("gpt-oss-120b", 3000, 80),
            ("gpt-oss-120b-interactive", 2000, 15),
        )
    },
    "mlperf-gptj": (("e2e_p99=20s",), _MLPERF),
    "mlperf-qwen3-vl-235b": (("e2e_p99=12s",), _MLPERF),
    "interactive": (
        ("ttft_p99=2s", "tpot_p99=100ms"),
        "people: attention holds for 1 to 10 s (Nielsen 1993), and 10 tokens/s is faster than "
        "reading (4 words/s)",
    ),
    "batch": (
        ("error_rate=1%",),
        "offline work: no latency matters, the answers must come and the queue must not grow",
    ),
}
"""Named sets for ``--slo``: (SLOs, where the limits come from)."""

_EXAMPLE = "for example ttft_p99=2s or itl_p99=50ms"


class SloError(ValueError):
    """A text that is no SLO; the message is one line and says what is allowed."""


def _refused(text: str, why: str) -> SloError:
    return SloError(f"SLO {text!r}{why}, {_EXAMPLE}")


@dataclass(frozen=True)
class Slo:
    """At least a share ``quantile`` of the samples of ``metric`` is within ``limit_s`` seconds.

    Quantile 1 (``max``) is every sample of the run, 0 (``min``) at least one.
    ``class_``: of the requests of that class only. ``first_s`` (fluidity): the first token is due
    so long after the schedule, every further one ``limit_s`` later. ``error_rate`` and ``goodput``
    have no ``limit_s``: ``quantile`` is the share of requests that must be answered, or that must
    meet every other SLO.
    """

    metric: str
    quantile: float
    limit_s: float
    class_: str | None = None
    first_s: float | None = None
    source: str | None = field(default=None, compare=False)

    @property
    def percentile(self) -> str:
        """Return ``p99``, ``p99.9``, ``min`` or ``max``."""
        return (
            EXTREMES.get(self.quantile) or f"p{(Decimal(repr(self.quantile)) * 100).normalize():f}"
        )

    @property
    def name(self) -> str:
        """Return ``ttft_p99``, ``chat:ttft_p99``, ``error_rate``."""
        bare = self.metric if self.metric in SHARES else f"{self.metric}_{self.percentile}"
        return f"{self.class_}:{bare}" if self.class_ else bare

    @property
    def limit_text(self) -> str:
        """Return ``2s``, ``2s+50ms`` (fluidity) or ``1%``."""
        if self.metric == GOODPUT:
            return f"{(Decimal(repr(self.quantile)) * 100).normalize():f}%"
        if self.metric == ERROR_RATE:
            return f"{((1 - Decimal(repr(self.quantile))) * 100).normalize():f}%"
        first = f"{exact_text(self.first_s)}+" if self.first_s is not None else ""
        return first + exact_text(self.limit_s)

    @property
    def limit_for_people(self) -> str:
        """Return ``2 s``, ``2 s + 50 ms``, ``95 %``."""
        parts = self.limit_text.split("+")
        return " + ".join(re.sub(r"^([\d.]+)", r"\1 ", part) for part in parts)

    @property
    def bound_text(self) -> str:
        """Return ``ttft_p99 ≤ 2 s`` or ``goodput ≥ 95 %``."""
        return f"{self.name} {'≥' if self.metric == GOODPUT else '≤'} {self.limit_for_people}"

    @property
    def text(self) -> str:
        """Return the canonical form, which ``parse_slo`` reads back: ``ttft_p99=2s``."""
        return f"{self.name}={self.limit_text}"

    def as_dict(self) -> dict[str, Any]:
        """Return the entry in run.json and summary.json; a share's ``limit_s`` is null."""
        limit_s = None if self.metric in SHARES else self.limit_s
        known = {"metric": self.metric, "quantile": self.quantile, "limit_s": limit_s}
        extra = {"class": self.class_, "first_s": self.first_s, "source": self.source}
        given = {name: value for name, value in extra.items() if value is not None}
        return known | {"text": self.text} | given


def parse_duration(text: str, what: str = "a duration") -> float:
    """Return the seconds of ``500ms``, ``2s``, ``1.5m``. Raises SloError, also for 0."""
    if not (seconds := read_duration(text)):
        raise SloError(
            f"{what}: {text!r} is no limit: write a number above 0 and its unit (us, ms, s, m), "
            f"{_EXAMPLE}"
        )
    return seconds


def parse_slo(text: str) -> Slo:
    """Read ``[class:]metric_pQQ=limit``, ``fluidity_pQQ=first+each`` or ``error_rate=N%``.

    Instead of pQQ: ``min`` or ``max``.
    Raises SloError with one line that says what is allowed.
    """
    name, equals, limit = text.strip().partition("=")
    if not equals:
        raise _refused(text, " has no '=': write metric_pQQ=limit")
    class_, colon, bare = name.strip().rpartition(":")
    if colon and not class_.strip():
        raise _refused(text, " names no class before ':': write chat:ttft_p99=2s")
    slo = _parse_bare(text, bare.strip(), limit.strip())
    return replace(slo, class_=class_.strip() or None)


def _parse_bare(text: str, name: str, limit: str) -> Slo:
    if name == ERROR_RATE:
        return Slo(ERROR_RATE, _answered_share(text, limit), 1.0)
    if name == GOODPUT:
        return Slo(GOODPUT, _good_share(text, limit), 1.0)
    named = re.fullmatch(r"(.*)_(?:p(\S*)|(min|max))", name)
    if not named:
        known = f"write {name}_p99={limit}"
        hint = known if name in METRICS else f"metrics are {', '.join(METRICS)}"
        raise _refused(text, f" names no percentile: {hint}")
    metric, percentile, extreme = named.groups()
    if metric not in METRICS:
        allowed = ", ".join((*METRICS, ERROR_RATE, GOODPUT))
        raise _refused(text, f": unknown metric {metric!r}: allowed are {allowed}")
    quantile = next((q for q, word in EXTREMES.items() if word == extreme), 0.0)
    if not extreme:
        if not re.fullmatch(r"\d{1,2}(\.\d{1,3})?", percentile) or not float(percentile):
            why = f"p{percentile} is not above p0 and below p100 (the extremes are min and max)"
            raise _refused(text, f": percentile {why}")
        quantile = float(Decimal(percentile) / 100)
    where = f"SLO {text!r}"
    if metric != "fluidity":
        return Slo(metric, quantile, parse_duration(limit, where))
    first, plus, each = limit.partition("+")
    if not plus:
        why = "write fluidity_p99=2s+50ms (first token + each further one)"
        raise _refused(text, f": fluidity needs two limits: {why}")
    return Slo(metric, quantile, parse_duration(each, where), first_s=parse_duration(first, where))


def _answered_share(text: str, limit: str) -> float:
    match = re.fullmatch(r"(\d{1,2}(?:\.\d{1,3})?)\s*%", limit)
    if not match or not Decimal("0.1") <= Decimal(match[1]) <= 50:
        raise _refused(text, ": an error rate is a share from 0.1% to 50%: write error_rate=1%")
    return float(1 - Decimal(match[1]) / 100)


def _good_share(text: str, limit: str) -> float:
    match = re.fullmatch(r"(\d{2}(?:\.\d{1,3})?)\s*%", limit)
    if not match or not 50 <= Decimal(match[1]) <= Decimal("99.9"):
        raise _refused(text, ": goodput is a share from 50% to 99.9%: write goodput=95%")
    return float(Decimal(match[1]) / 100)


def verdict_word(verdict: str | bool | None) -> str:
    """Return met | violated | inconclusive for a verdict of ``slo_verdicts`` or a ``slo_met``."""
    if verdict in (True, "met"):
        return "met"
    return "violated" if verdict in (False, "violated") else "inconclusive"


def parse_slos(texts: Iterable[str]) -> list[Slo]:
    """Parse SLOs or names of ``SLO_SETS``; duplicates count once, two limits are refused."""
    slos: dict[str, Slo] = {}
    for slo in (slo for text in texts for slo in _expand(text)):
        known = slos.setdefault(slo.name, slo)
        if known != slo:
            raise SloError(
                f"SLO {slo.name} is given as {known.limit_text} and as {slo.limit_text}: keep one"
            )
    found = list(slos.values())
    if found and all(slo.metric == GOODPUT for slo in found):
        raise SloError("goodput counts requests that meet the other SLOs: give one, as ttft_p99=2s")
    return found


def _expand(text: str) -> list[Slo]:
    class_, colon, name = text.strip().rpartition(":")
    if "=" in text or (name not in SLO_SETS and "_" in name):
        return [parse_slo(text)]
    if name not in SLO_SETS or (colon and not class_):
        raise _refused(text, f" has no '=' and is no named set ({', '.join(SLO_SETS)})")
    texts, source = SLO_SETS[name]
    return [replace(parse_slo(one), class_=class_ or None, source=source) for one in texts]


def slo_from_dict(value: Mapping[str, Any]) -> Slo:
    """Read an entry of run.json's ``slos``, as ``Slo.as_dict`` gives it. Raises SloError."""
    try:
        slo = replace(parse_slo(value["text"]), source=value.get("source"))
    except (KeyError, AttributeError, SloError) as error:
        raise SloError(
            f"run.json: slos holds {value!r}, which has no SLO as its text: {error}"
        ) from error
    if not slo.as_dict().items() <= value.items():
        raise SloError(
            f"run.json: slos holds {value!r}, whose text is another SLO: the file was changed "
            "or is damaged"
        )
    return slo
