"""The quota that an endpoint enforces: what it lets through once its allowance is used up.

Nothing of an allowance is left just after the first request that is let through when others were
refused. Between two such moments as much is let through as comes in, so that the amount between the
first and the last of them, over the time, is the quota, to about one request. That holds for a
bucket that refills evenly and for windows that begin anew or slide.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.capacity.levels import QUOTA_SHARE, number_text, refused_share
from ampacity.analysis.contract.limits import Quota
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.metrics.requests import Floats
from ampacity.loadgen.rundir.lists import LISTS

REQUESTS_MIN = 34  # let through in the span: one more or less is 3 % of them
MOMENTS_MIN = 2  # at which the allowance was used up
LONG = 0.5  # of the longest wait for a request that is let through: another such moment
SAME_RATE = 1.1  # highest over lowest rate of the stages that are refused: one quota
_TOKENS = re.compile(r"tokens?\b.{0,20}\b(per|limit)|\bTPM\b|input.token|output.token", re.I)


@dataclass(frozen=True)
class _Span:
    """The accepted load between two moments at which nothing was left."""

    amount: float
    lasts_s: float
    requests: int


def find_quota(table: pa.Table, stages: Sequence[Stage]) -> Quota | None:
    """Return the quota; None where hardly a request is refused with 429 at any load.

    ``table``: the records of the run; ``stages``: its stage objects.
    """
    hit = [s for s in stages if refused_share(s) >= QUOTA_SHARE]  # by when they were really sent
    if not hit:
        return None
    columns = table.select([n for n in table.column_names if n not in LISTS])
    known = pc.and_(pc.is_valid(columns["http_status"]), pc.is_valid(columns["started_ns"]))
    answered = columns.filter(known)
    refused = answered.filter(pc.equal(answered["http_status"], 429))
    if not refused.num_rows:
        return None
    unit = _unit(refused)
    spans = [_span(answered.filter(pc.equal(answered["stage"], s.index)), unit) for s in hit]
    known = [span for span in spans if span is not None]
    per_min, reason = _together(known)
    stated, window_s = (_last(answered, name) for name in (f"quota_{unit}", "quota_window_s"))
    return Quota(
        text=_text(per_min, unit, stated, window_s, _most_within(answered, window_s or 0.0)),
        unit=unit,
        per_min=per_min,
        reason=reason,
        stated=stated,
        stated_window_s=window_s,
        refused=refused.num_rows,
        binds=_binds(hit, stages),
    )


def _unit(refused: pa.Table) -> Literal["requests", "tokens"]:
    """Return what is limited: by the headers of the refusals, else by their texts."""
    left = {}
    for unit in ("requests", "tokens"):
        limit, rest = (_column(refused, f"quota_{unit}{end}") for end in ("", "_left"))
        share = rest / np.where(limit > 0, limit, np.nan)
        left[unit] = (
            float(np.median(share[np.isfinite(share)])) if np.isfinite(share).any() else inf
        )
    if left["requests"] != left["tokens"]:
        return "tokens" if left["tokens"] < left["requests"] else "requests"
    texts = [text for text in refused["error"].to_pylist() if text]
    return "tokens" if 2 * sum(bool(_TOKENS.search(t)) for t in texts) > len(texts) else "requests"


def _span(stage: pa.Table, unit: str) -> _Span | None:
    """Return the span of a stage; None where it has not enough moments and requests in it."""
    stage = stage.take(pc.sort_indices(stage["started_ns"]))
    refused = stage["http_status"].to_numpy() == 429
    at_s = stage["started_ns"].to_numpy() * 1e-9
    begins = np.flatnonzero(refused & ~np.append(False, refused[:-1]))
    ends = np.flatnonzero(~refused & np.append(False, refused[:-1]))
    if len(ends) < MOMENTS_MIN:
        return None
    waits_s = at_s[ends] - at_s[begins[: len(ends)]]  # of what is refused in a row
    # a window that slides refuses single requests too, before all of it is used up
    moments = ends[waits_s >= LONG * waits_s.max()]
    first, last = int(moments[0]), int(moments[-1])
    through = np.flatnonzero(~refused[first:last]) + first
    if len(through) < REQUESTS_MIN:
        return None
    amounts = np.ones(stage.num_rows)
    if unit == "tokens":
        sides = (
            (_column(stage, f"{side}_tokens"), _column(stage, f"{side}_tokens_planned"))
            for side in ("input", "output")
        )
        used = [np.where(np.isnan(real), planned, real) for real, planned in sides]
        amounts = used[0] + used[1]
    amount = float(np.nansum(amounts[through]))
    return _Span(amount, float(at_s[last] - at_s[first]), len(through))


def _together(spans: Sequence[_Span]) -> tuple[float | None, str | None]:
    """Return the quota per minute, and why it is not known."""
    if not spans:
        return None, "no stage is long enough: the allowance must be used up for two windows"
    rates = [span.amount / span.lasts_s for span in spans]
    if max(rates) > SAME_RATE * min(rates):
        ends = " to ".join(number_text(60 * rate) for rate in (min(rates), max(rates)))
        return (
            None,
            f"what is let through differs between loads ({ends} a minute): no quota by time",
        )
    return 60 * sum(s.amount for s in spans) / sum(s.lasts_s for s in spans), None


def _most_within(answered: pa.Table, window_s: float) -> int:
    """Return the most requests that were let through within a window; 0 if it has no length."""
    through = answered.filter(pc.not_equal(answered["http_status"], 429))["started_ns"]
    at_s = np.sort(through.to_numpy() * 1e-9)
    before = np.searchsorted(at_s, at_s - window_s, "right")  # what is no longer within it
    return int(np.max(np.arange(1, len(at_s) + 1) - before, initial=0))


def _text(
    per_min: float | None, unit: str, stated: float | None, window_s: float | None, most: int
) -> str:
    header = ""
    if stated is not None:
        within = f" in {window_s:g} s" if window_s and window_s != 60 else ""
        # twice the quota comes through where two windows meet, or with a bucket that was full
        wrong = f", which is wrong: {most} got through in that time"
        doubt = wrong if unit == "requests" and most > 2 * stated else ""
        header = f" (header says {stated:,.0f}{within}{doubt})"
    if per_min is None:
        return f"quota of unknown size{header}"
    return f"quota {float(f'{per_min:.3g}'):,.10g} {unit}/min{header}"


def _column(table: pa.Table, name: str) -> Floats:
    return np.asarray(table[name].cast(pa.float64()).to_numpy())


def _last(table: pa.Table, name: str) -> float | None:
    known = pc.drop_null(table[name])
    return float(known[-1].as_py()) if len(known) else None


def _binds(hit: Sequence[Stage], stages: Sequence[Stage]) -> bool:
    """Return whether the quota is met at a lower load than the limit of the SLOs."""

    def lowest(of: Sequence[Stage]) -> float:
        return min((s.offered_rps or s.concurrency_set or 0.0 for s in of), default=inf)

    others = [s for s in stages if s not in hit and not s.client_limited]
    violated = [s for s in others if s.slo_met is False]
    return lowest(hit) <= lowest(violated)
