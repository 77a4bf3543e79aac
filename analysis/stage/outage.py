"""Outages: times in which an endpoint gave no sign of life while requests failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampacity.analysis.contract.stage import OutagePeriod, OutageSeries
from ampacity.analysis.metrics.kinds import FAILED_KINDS, REFUSED
from ampacity.analysis.metrics.requests import Bools, Floats, Requests

REQUESTS_MIN = 5  # that fail in it
LONGER = 5.0  # times what is silent at other times, at p95
CHANCE = 1e-3  # of so many failures in a row somewhere in the stage, where requests fail at random
SAME_S = 1e-3  # signs of life that are nearer are one
BINS = 60
DOWN = FAILED_KINDS - {"shed", *REFUSED}
_NS = 1e-9


@dataclass(frozen=True)
class Outage:
    """Times in s on the clock of the requests; ``end_s`` is None if no sign of life came after."""

    start_s: float
    end_s: float | None
    failed: Bools  # shape (n,): requests that failed in it
    touched: Bools  # shape (n,): requests that were due or in flight in it


def find_outages(requests: Requests) -> list[Outage]:
    """Return silences in which requests failed, in order of time.

    Of first attempts of one stage, shape (n,). A sign of life is a token or the end of a good
    answer. At least ``REQUESTS_MIN`` requests fail between two of them, in a silence ``LONGER``
    than others, and more than chance explains by the share p that fails at other times: n p^k <=
    ``CHANCE``. Where nothing is answered any more, most must have failed otherwise than by the
    client's own time limit: an overloaded server looks like that.
    """
    r, n = requests, len(requests)
    down = np.any([r.has_status(status) for status in DOWN], axis=0)
    ok = r.has_status("ok")
    life = np.concatenate([r.first_token_ns, r.last_token_ns, r.ended_ns[ok]]) * _NS
    life = np.unique(life[~np.isnan(life)])
    if np.count_nonzero(down) < REQUESTS_MIN or not len(life):
        return []
    began_s, ended_s = _began_ns(r) * _NS, r.ended_ns * _NS
    # number of the silence in which each failed
    silence = np.where(down, np.searchsorted(life, ended_s, "right"), -1)
    failures = np.bincount(silence[down], minlength=len(life) + 1)
    lasts_s = np.diff(np.concatenate([[began_s.min()], life, [max(ended_s[down].max(), life[-1])]]))
    many = failures >= REQUESTS_MIN
    others = lasts_s[1:-1][~many[1:-1] & (lasts_s[1:-1] > SAME_S)]
    usual_s = float(np.quantile(others, 0.95)) if len(others) else SAME_S
    elsewhere, rest = int(failures[~many].sum()), n - int(failures[many].sum())
    by_chance = n * ((elsewhere + 0.5) / (rest + 1.0)) ** failures
    found = []
    for k in np.flatnonzero(many & (lasts_s > LONGER * usual_s) & (by_chance <= CHANCE)):
        failed = silence == k
        late = failed & r.has_status("timeout")
        if k == len(life) and 2 * np.count_nonzero(late) > np.count_nonzero(failed):
            continue
        end_s = np.inf
        if k < len(life):
            # back when a request began that was answered; the answer may come much later
            after = ok & (began_s > began_s[failed].max())
            end_s = float(min(began_s[after].min(initial=np.inf), life[k]))
        # requests in flight when it went down may have been answered while others were refused
        began_before_end = began_s < end_s
        since = began_s > began_s[ok & began_before_end].max(initial=-np.inf)
        failed |= down & since & began_before_end
        late = failed & r.has_status("timeout")
        seen_s = np.where(late, np.fmax(began_s, r.last_token_ns * _NS), ended_s)
        start_s = float(seen_s[failed].min())
        over = np.isnan(ended_s) | (ended_s >= start_s)
        known_end_s = float(end_s) if np.isfinite(end_s) else None
        found.append(Outage(start_s, known_end_s, failed, over & began_before_end))
    return found


def _began_ns(r: Requests) -> Floats:
    """Return when each was sent, or should have been."""
    return np.where(np.isnan(r.started_ns), r.scheduled_ns, r.started_ns)


def periods_after(zero_s: float, outages: Sequence[Outage]) -> list[OutagePeriod]:
    """Return the outages with their times after ``zero_s``."""
    return [
        OutagePeriod(
            start_s=o.start_s - zero_s,
            end_s=None if o.end_s is None else o.end_s - zero_s,
            failed=int(np.count_nonzero(o.failed)),
        )
        for o in outages
    ]


def outage_text(periods: Sequence[OutagePeriod], failed: int, requests: int) -> str:
    """Return ``down from 14.2 s to 18.3 s: 64 of 303 requests failed``."""

    def time(at_s: float) -> str:
        return f"{at_s:.1f}".removesuffix(".0")

    spans = [
        f"from {time(p.start_s)} s {'on' if p.end_s is None else f'to {time(p.end_s)} s'}"
        for p in periods
    ]
    return f"down {' and '.join(spans)}: {failed} of {requests} requests failed"


def outage_series(requests: Requests, zero_s: float) -> OutageSeries:
    """Return answers and failures per second in ``BINS`` spans, by the end of the request."""
    ends_s = requests.ended_ns * _NS - zero_s
    edges = np.linspace(0.0, float(np.nanmax(ends_s)), BINS + 1)
    ok, failed = (
        (np.histogram(ends_s[which], edges)[0] / float(edges[1])).tolist()
        for which in (requests.has_status("ok"), requests.failed)
    )
    return OutageSeries(end_s=edges[1:].tolist(), answered_rps=ok, failed_rps=failed)
