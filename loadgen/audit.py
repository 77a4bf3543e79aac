"""Audit the load generator itself, so that a busy client is never taken for a slow server."""

from __future__ import annotations

import gc
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from types import TracebackType
from typing import Any

import numpy as np

from ampacity.loadgen.rundir.lateness import (
    FROM_SCHEDULE,
    LATENESS_MAX_S,
    lateness_limit_s,
    left_late,
)
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.sleeper import Sleeper

TROUBLES = ("shortages", "resent", "unsolicited")
"""Counts of a client that are those of an Audit."""
_HEARTBEAT_NS = 20_000_000
STALL_NS = 2_000_000  # event loop delays above this are kept with their time ...
STALLS_MAX = 4000  # ... the longest of a stage
CPU_FRACTION_MAX = 0.9  # of one core: beyond it the event loop has no slack left
BUSY_CPU_FRACTION = 0.75  # above this CPU fraction ...
COALESCED_SHARE_MAX = 0.05  # ... this share of coalesced tokens means that the client fell behind


@dataclass(frozen=True)
class WorkerAudit:
    """One of several workers in one stage."""

    worker: int
    node: str  # of a Ray cluster
    requests: int
    cpu_fraction: float
    rss_bytes: int
    slip_p99_s: float | None
    loop_lag_p99_s: float | None

    def text(self) -> str:
        """Return its name and figures in words."""
        where = f" on {self.node}" if self.node else ""
        late_ms = 1e3 * (self.slip_p99_s or 0.0)
        return (
            f"worker {self.worker}{where}: {self.cpu_fraction:.0%} of its core, requests "
            f"{late_ms:.1f} ms late at p99"
        )


@dataclass(frozen=True)
class Audit:
    """The client's own delays in one stage: seconds, and fractions of one core."""

    slip_p50_s: float | None
    slip_p99_s: float | None
    slip_max_s: float | None
    loop_lag_p99_s: float | None
    loop_lag_max_s: float | None
    receive_delay_p50_s: float | None  # read time − kernel time on the audited connections
    receive_delay_p99_s: float | None
    dated_by_kernel: bool  # then all times exclude these delays
    coalesced_share: float | None  # token events that shared their read with the one before
    cpu_fraction: float
    gc_pause_max_s: float
    rss_bytes: int  # memory of the largest process at the end of the stage
    stalls: list[tuple[int, int, int]]  # worker, due and actual time of its heartbeat, ns
    shortages: int  # connections that failed for lack of descriptors or ports on this machine
    resent: int  # requests sent twice: their reused connection was closed without an answer
    unsolicited: int  # times that bytes came on an idle connection
    client_limited: bool
    client_limited_reason: str | None
    workers: list[WorkerAudit] = field(default_factory=list)  # where there are several


@dataclass
class Measures:
    """The measurements of one process about itself in one stage."""

    slips_s: array[float] = field(default_factory=lambda: array("d"))  # dispatched − scheduled
    receive_delays_s: array[float] = field(default_factory=lambda: array("d"))
    dated_by_kernel: bool = False  # the reads of all connections
    loop_lags_s: array[float] = field(default_factory=lambda: array("d"))
    stalls: list[tuple[int, int, int]] = field(default_factory=list)  # as in an Audit, all of them
    worker: int = 0
    node: str = ""
    each: list[WorkerAudit] = field(default_factory=list)  # of those that were merged
    cpu_fraction: float = 0.0
    gc_pause_max_s: float = 0.0
    rss_bytes: int = 0
    shortages: int = 0  # as in an Audit
    resent: int = 0  # as in an Audit
    unsolicited: int = 0  # as in an Audit
    events: int = 0  # token events after the first of their request ...
    merged: int = 0  # ... and those that shared a read with the previous one

    def add(self, record: RequestRecord, merged_events: int) -> None:
        """Add a request that has ended, and its number of coalesced token events."""
        if record.attempt == 0:
            slip_ns = (record.dispatched_ns or record.scheduled_ns) - record.scheduled_ns
            self.slips_s.append(slip_ns / 1e9)
        self.events += max(len(record.chunk_at_us) - 1, 0)
        self.merged += merged_events

    def merge(self, other: Measures) -> None:
        """Add another process: pool its samples, keep the larger CPU fraction, pause, memory."""
        self.each.append(other.alone())
        for name in ("slips_s", "receive_delays_s", "loop_lags_s", "stalls"):
            getattr(self, name).extend(getattr(other, name))
        for name in ("cpu_fraction", "gc_pause_max_s", "rss_bytes"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in (*TROUBLES, "events", "merged"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.dated_by_kernel = self.dated_by_kernel and other.dated_by_kernel

    def alone(self) -> WorkerAudit:
        """Return the audit of this process."""
        return WorkerAudit(
            self.worker,
            self.node,
            len(self.slips_s),
            self.cpu_fraction,
            self.rss_bytes,
            *_quantiles(self.slips_s, 0.99),
            *_quantiles(self.loop_lags_s, 0.99),
        )


@dataclass(frozen=True)
class Tolerance:
    """Allowed lateness of sending (adds to TTFT, E2E) and of the loop's reads (to gaps too)."""

    slip_s: float = LATENESS_MAX_S
    lag_s: float = LATENESS_MAX_S

    @classmethod
    def for_limits(cls, limits_s: dict[str, list[float]]) -> Tolerance:
        """Derive it from the SLO limits by metric: a slip affects TTFT and E2E, a lag all."""
        from_schedule = [limit for metric in FROM_SCHEDULE for limit in limits_s.get(metric, [])]
        return cls(
            lateness_limit_s(from_schedule),
            lateness_limit_s(chain.from_iterable(limits_s.values())),
        )


def judge(measures: Measures, tolerance: Tolerance) -> Audit:
    """Return the audit of a stage from the measurements of its processes."""
    slip = _quantiles(measures.slips_s, 0.5, 0.99, 1.0)
    delay = _quantiles(measures.receive_delays_s, 0.5, 0.99)
    lag = _quantiles(measures.loop_lags_s, 0.99, 1.0)
    audit = Audit(
        slip_p50_s=slip[0],
        slip_p99_s=slip[1],
        slip_max_s=slip[2],
        loop_lag_p99_s=lag[0],
        loop_lag_max_s=lag[1],
        receive_delay_p50_s=delay[0],
        receive_delay_p99_s=delay[1],
        dated_by_kernel=measures.dated_by_kernel,
        stalls=sorted(sorted(measures.stalls, key=lambda s: s[1] - s[2])[:STALLS_MAX]),
        coalesced_share=measures.merged / measures.events if measures.events else None,
        cpu_fraction=measures.cpu_fraction,
        gc_pause_max_s=measures.gc_pause_max_s,
        rss_bytes=measures.rss_bytes,
        shortages=measures.shortages,
        resent=measures.resent,
        unsolicited=measures.unsolicited,
        client_limited=False,
        client_limited_reason=None,
        workers=measures.each,
    )
    reason = limited_reason(audit, tolerance)
    if reason and (worst := max(measures.each, key=_lateness, default=None)):
        reason += f"; the worst is {worst.text()}"
    return replace(audit, client_limited=reason is not None, client_limited_reason=reason)


def _lateness(one: WorkerAudit) -> tuple[float, float]:
    return max(one.slip_p99_s or 0.0, one.loop_lag_p99_s or 0.0), one.cpu_fraction


def _quantiles(values: array[float], *levels: float) -> list[float | None]:
    if not len(values):
        return [None] * len(levels)
    return [float(v) for v in np.quantile(values, levels)]


def limited_reason(audit: Audit, tolerance: Tolerance) -> str | None:
    """Return why this stage's figures are invalid, or None if they are valid.

    ``ampacity.analysis.stage.client`` judges the effect of stalls.
    """
    late_s, merged = audit.receive_delay_p99_s or 0.0, audit.coalesced_share or 0.0
    lag_s = max(audit.loop_lag_p99_s or 0.0, 0.0 if audit.dated_by_kernel else late_s)
    if audit.shortages:
        return (
            f"{audit.shortages} connections failed for want of file descriptors or ports "
            "on this machine (see ulimit -n and --source-address)"
        )
    if audit.cpu_fraction >= CPU_FRACTION_MAX:
        return f"the generator used {audit.cpu_fraction:.0%} of its core"
    if late := left_late(audit.slip_p99_s, tolerance.slip_s):
        return late
    # with kernel time stamps a late loop only delays requests
    lag_max_s = tolerance.slip_s if audit.dated_by_kernel else tolerance.lag_s
    if lag_s > lag_max_s:
        late_ms, most_ms = lag_s * 1e3, lag_max_s * 1e3
        return f"the event loop was {late_ms:.1f} ms late at p99, more than {most_ms:.1f} ms"
    if audit.cpu_fraction >= BUSY_CPU_FRACTION and merged > COALESCED_SHARE_MAX:
        return f"{merged:.0%} of the token events were read together with others by a busy client"
    return None


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM; where that is not known its peak."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


class StageWatch:
    """Measures loop lag, CPU share, GC pauses and TROUBLES of this process while it is entered.

    Objects that exist before the first of several that overlap are left out of the collections.
    """

    entered = 0  # in this process

    def __init__(
        self, sleeper: Sleeper, measures: Measures, clients: Sequence[object] = ()
    ) -> None:
        self._sleeper, self._measures, self._clients = sleeper, measures, clients
        self._gc_began_ns = 0

    def __enter__(self) -> StageWatch:
        if not StageWatch.entered:
            gc.collect()
            gc.freeze()
        StageWatch.entered += 1
        self._count_troubles(-1)
        self._cpu_s, self._began_s = time.process_time(), time.monotonic()
        gc.callbacks.append(self._on_gc)
        self._due_ns = time.monotonic_ns() + _HEARTBEAT_NS
        self._sleeper.call_at(self._due_ns, self._beat)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sleeper.close()
        gc.callbacks.remove(self._on_gc)
        elapsed_s = max(time.monotonic() - self._began_s, 1e-9)
        self._measures.cpu_fraction = (time.process_time() - self._cpu_s) / elapsed_s
        self._measures.rss_bytes = resident_bytes()
        self._count_troubles(1)
        StageWatch.entered -= 1
        if not StageWatch.entered:
            gc.unfreeze()

    def _count_troubles(self, sign: int) -> None:
        for name in TROUBLES:
            counted = sum(getattr(client, name) for client in self._clients)
            setattr(self._measures, name, getattr(self._measures, name) + sign * counted)

    def _beat(self) -> None:
        now_ns = time.monotonic_ns()
        self._measures.loop_lags_s.append((now_ns - self._due_ns) / 1e9)
        if now_ns - self._due_ns > STALL_NS:
            self._measures.stalls.append((self._measures.worker, self._due_ns, now_ns))
        self._due_ns = max(self._due_ns + _HEARTBEAT_NS, now_ns)
        self._sleeper.call_at(self._due_ns, self._beat)

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self._gc_began_ns = time.monotonic_ns()
        else:
            pause_s = (time.monotonic_ns() - self._gc_began_ns) / 1e9
            self._measures.gc_pause_max_s = max(self._measures.gc_pause_max_s, pause_s)
