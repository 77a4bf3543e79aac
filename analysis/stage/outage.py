"""Outages: times in which an endpoint gave no sign of life while requests failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ampacity.analysis.metrics.requests import Bools, Floats, Requests

REQUESTS_MIN = 5  # that fail in it
LONGER = 5.0  # times what is silent at other times, at p95
CHANCE = 1e-3  # of so many failures in a row somewhere in the stage, where requests fail at random
SAME_S = 1e-3  # signs of life that are nearer are one
BINS = 60
DOWN = (
    "http_error",
    "stream_error",
    "truncated",
    "empty",
    "connect_error",
    "reset",
    "protocol_error",
    "timeout",
)
_NS = 1e-9


@dataclass(frozen=True)
class Outage:
    """Times in s on the clock of the requests.

    ``end_s`` is None where no sign of life came after it.
    """

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
    silence = np.where(
        down, np.searchsorted(life, ended_s, "right"), -1
    )  # number of the one that it failed in
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
        end_s = None
        if k < len(life):
            # back when a request began that was answered; the answer may come much later
            after = ok & (began_s > began_s[failed].max())
            end_s = float(min(began_s[after].min(initial=np.inf), life[k]))
        # what was under way when it went down may have been answered while others were refused
        before = ok & (began_s < (np.inf if end_s is None else end_s))
        since = began_s > began_s[before].max(initial=-np.inf)
        failed |= down & since & (began_s < (np.inf if end_s is None else end_s))
        late = failed & r.has_status("timeout")
        seen_s = np.where(late, np.fmax(began_s, r.last_token_ns * _NS), ended_s)
        start_s = float(seen_s[failed].min())
        over = np.isnan(ended_s) | (ended_s >= start_s)
        touched = over & (began_s < (np.inf if end_s is None else end_s))
        found.append(Outage(start_s, end_s, failed, touched))
    return found


def _began_ns(r: Requests) -> Floats:
    """Return when each was sent, or should have been."""
    return np.where(np.isnan(r.started_ns), r.scheduled_ns, r.started_ns)


def outage_text(periods: Sequence[Outage], zero_s: float, requests: int) -> str:
    """Return ``down from 14.2 s to 18.3 s: 64 of 303 requests failed``, times after ``zero_s``."""
    spans = [
        f"from {_time(o.start_s - zero_s)} s "
        + ("on" if o.end_s is None else f"to {_time(o.end_s - zero_s)} s")
        for o in periods
    ]
    failed = int(np.count_nonzero(np.any([o.failed for o in periods], axis=0)))
    return f"down {' and '.join(spans)}: {failed} of {requests} requests failed"


def _time(at_s: float) -> str:
    return f"{at_s:.1f}".removesuffix(".0")


def describe_outages(
    periods: Sequence[Outage], requests: Requests, zero_s: float, missing: int
) -> dict[str, Any] | None:
    """Return the ``outage`` object of a stage but for ``outside``; None where there was none.

    Times after ``zero_s``.
    """
    if not periods:
        return None
    n, ends_s = len(requests) + missing, requests.ended_ns * _NS - zero_s
    edges = np.linspace(0.0, float(np.nanmax(ends_s)), BINS + 1)
    good = requests.has_status("ok")
    width_s = float(edges[1])
    return {
        "text": outage_text(periods, zero_s, n),
        "requests": n,
        "failed": int(np.count_nonzero(np.any([o.failed for o in periods], axis=0))),
        "periods": [
            {
                "start_s": o.start_s - zero_s,
                "end_s": None if o.end_s is None else o.end_s - zero_s,
                "failed": int(np.count_nonzero(o.failed)),
            }
            for o in periods
        ],
        "series": {
            "end_s": edges[1:],
            "answered_rps": np.histogram(ends_s[good], edges)[0] / width_s,
            "failed_rps": np.histogram(ends_s[requests.failed], edges)[0] / width_s,
        },
    }
