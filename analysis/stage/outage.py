"""Outages: times in which an endpoint gave no sign of life while requests failed or waited."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ampacity.analysis.contract.stage import OutagePeriod, OutageSeries
from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.metrics.gaps import GapSeries, chunk_gaps
from ampacity.analysis.metrics.requests import Bools, Floats, Requests
from ampacity.analysis.stage.steady import in_flight_at
from ampacity.loadgen.rundir.records import FAILED_KINDS, REFUSED

REQUESTS_MIN = 5  # that fail in it
LONGER = 5.0  # times what is silent at other times, at p95
CHANCE = 1e-3  # of so many failures in a row somewhere in the stage, where requests fail at random
SAME_S = 1e-3  # signs of life that are nearer are one
SILENT_S = 2.0  # without a token for any request: the shortest that is one without failures
STUCK_MIN = 4  # requests that stood still in it
# of the stage: a server that is silent longer, in several pieces, answers in turns
SILENT_SHARE = 0.5
BINS = 60
DOWN = FAILED_KINDS - {"shed", *REFUSED}
_NS = 1e-9
_APART_S = SILENT_S / LONGER  # shorter silences of the stage are none


@dataclass(frozen=True)
class Outage:
    """Times in s on the clock of the requests; ``end_s`` is None if no sign of life came after."""

    start_s: float
    end_s: float | None
    hit: Bools  # shape (n,): requests that failed in it or, where it is silent, waited
    touched: Bools  # shape (n,): requests that were due or in flight in it, or in its backlog


def find_outages(requests: Requests, chunks: Chunks, now_s: float) -> list[Outage]:
    """Return the outages of one stage, in order of time.

    Of its first attempts and their chunks, shape (n,), up to ``now_s``, its last known event.
    """
    down = _find_down(requests)
    return sorted([*down, *_find_silent(requests, chunks, now_s, down)], key=lambda o: o.start_s)


def _find_down(requests: Requests) -> list[Outage]:
    """Return silences in which requests failed.

    A sign of life is a token or the end of a good
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
        if k == len(life) and began_s[failed].max() < life[-1]:  # nobody was left to be answered
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
        if end_s <= start_s:  # who came later was answered before
            continue
        over = np.isnan(ended_s) | (ended_s >= start_s)
        known_end_s = float(end_s) if np.isfinite(end_s) else None
        found.append(Outage(start_s, known_end_s, failed, over & began_before_end))
    return found


@dataclass(frozen=True)
class _Silence:
    start_s: float
    end_s: float
    lasts_s: float  # while somebody waits
    waits: Bools  # shape (n,): requests that waited in it
    stops_all: bool


def _find_silent(
    requests: Requests, chunks: Chunks, now_s: float, down: Sequence[Outage]
) -> list[Outage]:
    """Return silences in which requests waited: of a server that froze and went on, or hangs.

    For ``SILENT_S`` or more, and ``LONGER`` than in any other silence in which somebody waited, at
    least ``STUCK_MIN`` requests stood still. The backlog lasts until no more are in flight than
    usual.
    """
    began_s = _began_ns(requests) * _NS
    ended_s = np.where(requests.has_status("unfinished"), np.inf, requests.ended_ns * _NS)
    silences = [
        s
        for s in _silences(requests, chunks, now_s, began_s, ended_s)
        if not any(o.start_s < s.end_s and s.start_s < (o.end_s or np.inf) for o in down)
    ]
    silences.sort(key=lambda s: (not s.stops_all, -s.lasts_s))
    frozen: list[_Silence] = []
    for k, silence in enumerate(s for s in silences if s.stops_all):  # these come first
        others_s = max((s.lasts_s for s in silences[k + 1 :]), default=0.0)
        if silence.lasts_s >= LONGER * others_s:
            frozen = silences[: k + 1]
    ended = [s.lasts_s for s in frozen if s.end_s < now_s]
    if len(ended) > 1 and sum(ended) > SILENT_SHARE * (now_s - began_s.min(initial=now_s)):
        return []
    usual = float(np.median(in_flight_at(began_s, began_s, ended_s))) if frozen else 0.0
    found = []
    for s in frozen:
        later = np.sort(began_s[began_s >= s.end_s])
        settled_s = later[in_flight_at(later, began_s, ended_s) <= usual].min(initial=np.inf)
        backlog = (began_s >= s.end_s) & (began_s < settled_s)
        end_s = s.end_s if s.end_s < now_s else None
        found.append(Outage(s.start_s, end_s, s.waits, s.waits | backlog))
    return found


def _silences(
    r: Requests, chunks: Chunks, now_s: float, began_s: Floats, ended_s: Floats
) -> list[_Silence]:
    """Return the silences that may be an outage or show that another one is none.

    A request stands still in one that is ``LONGER`` than the median gap between two chunks, or than
    the median time to a first token of the others: requests that come in step wait together, and
    always as long.
    """
    ok = r.has_status("ok")
    first_s = r.first_token_ns * _NS
    first_s[np.isnan(first_s) & np.isinf(ended_s)] = np.inf  # cut off by the end of the stage
    # a good answer waits for no token after its last
    answered_s = np.where(ok & ~np.isnan(r.last_token_ns), r.last_token_ns * _NS, ended_s)
    usual_gap_s = None  # of fifty million gaps only where it decides
    found = []
    for start_s, end_s in _gaps_between(r, chunks, np.append(ended_s[ok], now_s)):
        waits = (began_s < end_s) & (answered_s > start_s + SAME_S)
        if not waits.any():
            continue
        if usual_gap_s is None:
            usual_gap_s = _median_gap_s(chunks)
        others_s = (first_s - began_s)[~waits & ~np.isnan(first_s)]
        usual_s = float(np.median(others_s)) if len(others_s) else np.inf
        waited_s = end_s - np.maximum(start_s, began_s)
        began_late = (first_s > start_s) & (waited_s > LONGER * usual_s)
        went_on_late = (first_s <= start_s) & (end_s - start_s > LONGER * usual_gap_s)
        stuck = waits & (began_late | went_on_late)
        lasts_s = float(waited_s[waits].max(initial=0.0))
        stops_all = int(np.count_nonzero(stuck)) >= STUCK_MIN and lasts_s >= SILENT_S
        found.append(_Silence(start_s, end_s, lasts_s, waits, stops_all))
    return found


def _median_gap_s(chunks: Chunks) -> float:
    counted = np.ones(len(chunks.known), dtype=np.bool_)
    values, weights = GapSeries(chunks, counted, per_token=False).distinct()
    ranks, n = np.cumsum(weights), weights.sum()
    middle = values[np.searchsorted(ranks, (n / 2, n / 2 + 0.5))] if n else np.inf
    return float(np.mean(middle))


def _gaps_between(r: Requests, chunks: Chunks, others_s: Floats) -> list[tuple[float, float]]:
    """Return start and end of each gap of ``_APART_S`` in tokens and ``others_s`` together.

    In such a gap no request has a token, so each request counts as the spans between its own gaps
    that are as long: few times instead of all tokens.
    """
    begins_s, ends_s = [others_s], [others_s]
    for where, part in chunks.parts():
        gaps = chunk_gaps(part)
        new = gaps.gap_us >= _APART_S * 1e6
        new[gaps.firsts] = True
        begin = np.flatnonzero(new)
        end = np.append(begin[1:], len(new)) - 1 if len(begin) else begin
        started_s = r.started_ns[where][np.searchsorted(part.starts, begin, "right") - 1] * _NS
        begins_s.append(started_s + part.at_us[begin] * 1e-6)
        ends_s.append(started_s + part.at_us[end] * 1e-6)
    begin_s, end_s = np.concatenate(begins_s), np.concatenate(ends_s)
    known = np.isfinite(begin_s)
    order = np.argsort(begin_s[known])
    begin_s, end_s = begin_s[known][order], np.maximum.accumulate(end_s[known][order])
    apart = np.flatnonzero(begin_s[1:] - end_s[:-1] > _APART_S)
    return list(zip(end_s[apart].tolist(), begin_s[apart + 1].tolist(), strict=True))


def _began_ns(r: Requests) -> Floats:
    """Return when each was sent, or should have been."""
    return np.where(np.isnan(r.started_ns), r.scheduled_ns, r.started_ns)


def periods_after(
    zero_s: float, outages: Sequence[Outage], requests: Requests
) -> list[OutagePeriod]:
    """Return the outages with their times after ``zero_s``."""
    return [
        OutagePeriod(
            start_s=o.start_s - zero_s,
            end_s=None if o.end_s is None else o.end_s - zero_s,
            failed=int(np.count_nonzero(o.hit & requests.failed)),
            waited=int(np.count_nonzero(o.hit & ~requests.failed)),
        )
        for o in outages
    ]


def outage_text(periods: Sequence[OutagePeriod], requests: int) -> str:
    """Return ``down from 14.2 s to 18.3 s: 64 of 303 requests failed``.

    Or ``silent, no token from 14.2 s to 18.3 s: 64 of 303 requests waited``, or both.
    """
    parts = []
    for words, what, waited in (("down", "failed", False), ("silent, no token", "waited", True)):
        if of := [p for p in periods if bool(p.waited) is waited]:
            spans = " and ".join(_span_text(p) for p in of)
            hit = sum(p.failed + p.waited for p in of)
            parts.append(f"{words} {spans}: {hit} of {requests} requests {what}")
    return "; ".join(parts)


def _span_text(period: OutagePeriod) -> str:
    start, end = (
        None if at_s is None else f"{at_s:.1f}".removesuffix(".0")
        for at_s in (period.start_s, period.end_s)
    )
    return f"from {start} s {'on' if end is None else f'to {end} s'}"


def outage_series(requests: Requests, zero_s: float) -> OutageSeries:
    """Return answers and failures per second in ``BINS`` spans, by the end of the request."""
    ends_s = requests.ended_ns * _NS - zero_s
    edges = np.linspace(0.0, float(np.nanmax(ends_s)), BINS + 1)
    ok, failed = (
        (np.histogram(ends_s[which], edges)[0] / float(edges[1])).tolist()
        for which in (requests.has_status("ok"), requests.failed)
    )
    return OutageSeries(end_s=edges[1:].tolist(), answered_rps=ok, failed_rps=failed)
