"""The requests that a stage is judged by, and the samples of each metric over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ampacity.analysis.metrics.chunks import Chunks, tpot_s
from ampacity.analysis.metrics.fluidity import needed_pace_s
from ampacity.analysis.metrics.gaps import GapSeries, chunk_gaps
from ampacity.analysis.metrics.observations import GapObservations, Observations, Queue
from ampacity.analysis.metrics.requests import (
    UNCOUNTED,
    Bools,
    Floats,
    Requests,
    e2e_s,
    first_answer_s,
    ttft_s,
    uncounted_share,
    unseen,
    visible_tokens,
    zero_ns,
)
from ampacity.analysis.slo import GAP_METRICS, Slo, SloError
from ampacity.loadgen.rundir.records import came_together

# ITL is given when the tokens of each chunk are known for at least this share of the answers
MIN_KNOWN_SHARE = 0.99
BUNCHED_SHARE = 0.9  # of chunks coalesced with the previous one: above it there are no gaps
LONG = 10  # fewer tokens of a fast answer may share a read by chance
READS_APART_US = 2000  # most reads nearer than this: a fast engine, nothing holds tokens back
READS_FEW = 3.0  # an answer in so few reads has no TPOT
IN_ONE_PIECE = "answers came in one piece"
HELD_BACK = "something on the way holds them back"
ONE_PIECE_SHARE = 0.5  # of answers with several tokens: above it the first token has no own time


@dataclass(frozen=True)
class Cohort:
    """Requests scheduled in a window (attempt 0) with their chunks.

    ``missing`` counts the rows that were lost in a kill.
    """

    requests: Requests
    chunks: Chunks
    missing: int
    now_ns: float  # when the last thing that we know of happened, for ages
    in_flight: Floats | None = None  # shape (n,): requests of the stage in flight when each was due
    # requests over which the in-flight count of an open stage stays alike
    memory: float | None = None
    rate_rps: float = 0.0  # requests of all classes that arrived per second
    # SLO metrics on which no verdict can rest, and why
    spoilt: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def cut_ns(self) -> Floats:
        """Return when an unfinished request was given up."""
        ended = self.requests.ended_ns
        return np.where(np.isnan(ended), self.now_ns, ended)

    def per_request(
        self,
        values: Floats,
        zero_ns: Floats | None,
        assumption: str | None = None,
        memory: float | None = None,
        queue: Queue | None = None,
    ) -> Observations:
        """Return observations of a metric with one value per request; ages count from ``zero_ns``.

        ``memory``: of the queue, for a metric that includes the wait in it; ``queue``: for one that
        is little else.
        """
        r = self.requests
        failed, unfinished = r.failed, r.has_status("unfinished")
        finite = ~np.isnan(values) & (r.has_status("ok") | unfinished)
        age = np.zeros(len(r)) if zero_ns is None else np.nan_to_num((self.cut_ns - zero_ns) * 1e-9)
        # of an answer without a visible token the first one is later than its end
        pending = unfinished if zero_ns is None else unfinished | unseen(r)
        censored = np.where(pending & ~finite, np.maximum(age, 0.0), np.nan)
        owner = np.flatnonzero(finite)
        infinite, censored = self._with_lost(failed.astype(np.float64), censored)
        return Observations(
            "requests",
            values[finite],
            owner,
            None,
            infinite,
            censored,
            assumption=assumption,
            memory=memory,
            queue=queue,
        )

    @cached_property
    def observed(self) -> dict[str, Observations]:
        """Return every latency, by the name that its percentiles have in a stage."""
        return {
            "ttft_s": self.ttft(from_schedule=False),
            "ttft_from_schedule_s": self.ttft(from_schedule=True),
            "first_answer_s": self.first_answer(from_schedule=False),
            "itl_s": self.itl,
            "icl_s": self.icl,
            "tpot_s": self.tpot,
            "e2e_s": self.e2e(from_schedule=False),
            "e2e_from_schedule_s": self.e2e(from_schedule=True),
        }

    @property
    def in_flight_se(self) -> float | None:
        """Return the standard error of the mean in flight of an open stage.

        Samples that are ``memory`` requests apart are independent.
        """
        if self.in_flight is None or self.memory is None or not len(self.in_flight):
            return None
        return float(np.sqrt(self.in_flight.var() * self.memory / len(self.in_flight)))

    def of_class(self, name: str | None) -> Cohort:
        """Return the requests of one class (None: all); lost records have no known class."""
        return self if name is None else self.part(self.in_class(name))

    def part(self, which: Bools) -> Cohort:
        """Return the requests under a mask, without the lost ones."""
        share = float(np.count_nonzero(which)) / max(len(which), 1)
        memory = None if self.memory is None else share * self.memory
        in_flight = None if self.in_flight is None else self.in_flight[which]
        requests, chunks = self.requests.take(which), self.chunks.take(which)
        return replace(
            self, requests=requests, chunks=chunks, missing=0, in_flight=in_flight, memory=memory
        )

    def in_class(self, name: str | None) -> Bools:
        """Return which requests are of a class (None: all), shape (n,)."""
        return np.asarray((self.requests.class_ == name) | (name is None), dtype=np.bool_)

    def errors(self) -> Observations:
        """Return 0 for every answer, infinity for every failure; unfinished ones are censored."""
        ok = self.requests.has_status("ok")
        return self.per_request(np.where(ok, 0.0, np.nan), None)

    def meeting(self, meets: Bools) -> Observations:
        """Return 0 for every request that meets all SLOs, shape (n,), infinity for the others."""
        ok = self.requests.has_status("ok")
        values = np.where(meets, 0.0, np.where(ok, np.inf, np.nan))
        return self.per_request(values, None, memory=self.memory)

    def fluidity(self, first_s: float) -> Observations:
        """Return the pace in s per token that each request kept (analysis/metrics/fluidity.py)."""
        unknown = self._chunks_unknown()
        if unknown:
            return _unknown("requests", unknown)
        pace = needed_pace_s(self.requests, self.chunks, first_s)
        return self.per_request(np.where(self.requests.has_status("ok"), pace, np.nan), None)

    def ttft(self, *, from_schedule: bool) -> Observations:
        if self._in_one_piece:
            return _unknown("requests", self._in_one_piece)
        return self.per_request(
            ttft_s(self.requests, from_schedule=from_schedule),
            zero_ns(self.requests, from_schedule),
            memory=self.memory,
            queue=None if self.in_flight is None else Queue(self.in_flight, self.rate_rps),
        )

    def first_answer(self, *, from_schedule: bool) -> Observations:
        if unknown := self._in_one_piece or self._still_thinking:
            return _unknown("requests", unknown)
        return self.per_request(
            first_answer_s(self.requests, from_schedule=from_schedule),
            zero_ns(self.requests, from_schedule),
            memory=self.memory,
        )

    def e2e(self, *, from_schedule: bool) -> Observations:
        values = e2e_s(self.requests, from_schedule=from_schedule)
        # the last token of an unfinished one is not its last
        values = np.where(self.requests.has_status("unfinished"), np.nan, values)
        return self.per_request(values, zero_ns(self.requests, from_schedule), memory=self.memory)

    @cached_property
    def tpot(self) -> Observations:
        values, estimated = tpot_s(self.requests, self.chunks)
        ok = self.requests.has_status("ok")
        n = int(np.count_nonzero(estimated & ok))
        taken = (
            "tokens of the first chunk taken as the mean tokens per chunk, or as one where no "
            "chunk has a time"
        )
        if uncounted_share(self.requests) > 1 - MIN_KNOWN_SHARE:
            return _unknown("requests", UNCOUNTED)
        coalesced, reads = self._coalesced
        if unknown := (coalesced if reads < READS_FEW else None) or self._in_one_piece:
            return _unknown("requests", unknown)
        return self.per_request(
            np.where(ok, values, np.nan), None, f"{n} answers: {taken}" if n else None
        )

    @cached_property
    def icl(self) -> Observations:
        unknown = self._without_chunk_times() or self._coalesced[0] or self._in_one_piece
        return _unknown("gaps", unknown) if unknown else self._of_gaps(per_token=False)

    @cached_property
    def itl(self) -> Observations:
        unknown = self._coalesced[0] or self._in_one_piece or self._chunks_unknown()
        if unknown:
            return _unknown("gaps", unknown)
        if self.chunks.one_each and np.all(self.chunks.known | (self.chunks.count == 0)):
            return self.icl  # every chunk is one token: the same gaps, which are many
        return self._of_gaps(per_token=True)

    def _chunks_unknown(self) -> str | None:
        """Return why there are no figures per token."""
        r, chunks = self.requests, self.chunks
        untimed = self._without_chunk_times()
        if untimed:
            return untimed
        one_token = (visible_tokens(r) == 1) & (chunks.count == 1)
        answers = r.has_status("ok") & (chunks.count > 0) & ~one_token
        n, known = int(np.count_nonzero(answers)), int(np.count_nonzero(answers & chunks.known))
        if not n or known >= MIN_KNOWN_SHARE * n:
            return None
        return (
            f"tokens per chunk unknown in {n - known} of {n} answers (the server sends chunks, "
            "not tokens, and does not say how many tokens each holds): see "
            f"icl_s{' and tpot_s' if self.tpot.n else ''}"
        )

    def _without_chunk_times(self) -> str | None:
        """Return why there are no gaps: records of another tool may lack the times of chunks."""
        r = self.requests
        answers = (
            r.has_status("ok") & ~np.isnan(r.first_token_ns) & (r.last_token_ns > r.first_token_ns)
        )
        untimed = int(np.count_nonzero(answers & (self.chunks.count == 0)))
        n = int(np.count_nonzero(answers))
        if not untimed or n - untimed >= MIN_KNOWN_SHARE * n:
            return None
        return (
            f"{untimed} of {n} answers have no times of their chunks, only of the first and the "
            "last token: see tpot_s"
        )

    @cached_property
    def _still_thinking(self) -> str | None:
        """Return why the time to the first answer is not known.

        Answers that ended while the model thought would be left out of it.
        """
        r = self.requests
        streamed = r.has_status("ok") & ~np.isnan(r.first_token_ns)
        n = int(np.count_nonzero(streamed))
        without = int(np.count_nonzero(streamed & np.isnan(r.first_answer_ns)))
        if n - without >= MIN_KNOWN_SHARE * n:
            return None
        return (
            f"{without} of {n} answers ended while the model was still thinking, so how long a "
            "reader waits for its answer is not known: plan longer answers"
        )

    @cached_property
    def _in_one_piece(self) -> str | None:
        """Return why the first token of the answers has no time of its own."""
        r = self.requests
        tokens = np.where(r.uncounted, r.output_tokens_planned, visible_tokens(r))
        several = r.has_status("ok") & ~np.isnan(r.first_token_ns) & (tokens != 1)
        lasted_s, span_s = (
            (r.last_token_ns - since_ns)[several] * 1e-9
            for since_ns in (r.started_ns, r.first_token_ns)
        )
        n = len(lasted_s)
        whole = came_together(span_s, lasted_s, np.fmax(tokens[several], 2.0))
        together = int(np.count_nonzero(whole))
        if together <= ONE_PIECE_SHARE * n:
            return None
        if np.median(lasted_s) < READS_APART_US * 1e-6 and np.median(tokens[several]) < LONG:
            return None
        return (
            f"{together} of {n} {IN_ONE_PIECE}: they were not streamed, or something on the way "
            "held them back, and their first token has no time of its own: see e2e_s"
        )

    @cached_property
    def _coalesced(self) -> tuple[str | None, float]:
        """Return (why gaps do not show the engine, reads of an answer with several chunks)."""
        ok, apart, well_apart, apart_us = self.requests.has_status("ok"), 0, 0, 0
        answers = ok & (self.chunks.count > 1)
        n, chunks = int(np.count_nonzero(answers)), int((self.chunks.count[answers] - 1).sum())
        for _, some in self.chunks.take(ok | (self.chunks.count == 0)).parts():
            gap_us = chunk_gaps(some).gap_us
            apart += int(np.count_nonzero(gap_us))
            well_apart += int(np.count_nonzero(gap_us >= READS_APART_US))
            apart_us += int(gap_us.sum(dtype=np.int64))
        together, reads = chunks - apart, apart / n + 1 if n else 0.0
        if together <= BUNCHED_SHARE * chunks or 2 * well_apart < apart:
            return None, reads
        apart_text = f", {apart_us / apart / 1e3:.3g} ms apart" if apart else ""
        return (
            f"{together / chunks:.1%} of the chunks came together with the one before "
            f"({reads:.1f} reads an answer{apart_text}): {HELD_BACK}, and "
            "these times are not the engine's (see: ampacity doctor)"
        ), reads

    def _of_gaps(self, *, per_token: bool) -> Observations:
        r, chunks = self.requests, self.chunks
        unfinished = r.has_status("unfinished")
        counted = r.has_status("ok") | r.failed | unfinished
        series = GapSeries(chunks, counted, per_token)
        received = np.where(np.isnan(r.output_tokens), chunks.count, r.output_tokens)
        missing = np.maximum(np.nan_to_num(r.output_tokens_planned) - received, 1.0)
        has, last_us = chunks.count > 0, chunks.last_us()
        since = np.where(np.isnan(r.started_ns), r.scheduled_ns, r.started_ns) + last_us * 1e3
        waited = np.maximum((self.cut_ns - since) * 1e-9, 0.0)
        # before the first token no gap has begun
        censored = np.where(unfinished, np.where(has, waited, 0.0), np.nan)
        values, weights = series.distinct()
        infinite, censored = self._with_lost(np.where(r.failed, missing, 0.0), censored)
        return GapObservations(
            "gaps", values, np.empty(0, np.int64), weights, infinite, censored, series=series
        )

    def _with_lost(self, infinite: Floats, censored: Floats) -> tuple[Floats, Floats]:
        """Add the requests lost in a kill, as unfinished at age zero."""
        lost = np.zeros(self.missing)
        return np.concatenate([infinite, lost]), np.concatenate([censored, lost])


def _unknown(unit: str, reason: str) -> Observations:
    empty = np.empty(0)
    return Observations(unit, empty, empty.astype(np.int64), None, empty, empty, reason=reason)


def observations_for_slo(cohort: Cohort, slo: Slo) -> Observations:
    """Return the observations that an SLO is judged by.

    TTFT, first answer, fluidity and E2E count from the schedule. Raises SloError for a metric that
    has no observations.
    """
    cohort = cohort.of_class(slo.class_)
    if slo.metric in cohort.spoilt:
        unit = "gaps" if slo.metric in GAP_METRICS else "requests"
        return _unknown(unit, cohort.spoilt[slo.metric])
    match slo.metric:
        case "error_rate":
            return cohort.errors()
        case "fluidity":
            return cohort.fluidity(slo.first_s or 0.0)
        case "ttft":
            return cohort.ttft(from_schedule=True)
        case "first_answer":
            return cohort.first_answer(from_schedule=True)
        case "e2e":
            return cohort.e2e(from_schedule=True)
        case "tpot":
            return cohort.tpot
        case "itl":
            return cohort.itl
        case "icl":
            return cohort.icl
    raise SloError(f"{slo.text}: no observations are defined for {slo.metric}")
