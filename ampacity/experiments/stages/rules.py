"""Rules of a stage: how long it waits, how it plays sessions, when it is the last one."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ampacity.analysis.slo import WAITS, Slo
from ampacity.reports.render.figures import count, ended_otherwise, failures
from ampacity.workloads.profile import Workload
from ampacity.workloads.replay import Replayed
from ampacity.workloads.schedule import Schedule

DRAIN_MIN_S = 5.0
DRAIN_DEFAULT_S = 30.0
SLOWED = 5.0  # factor on an answer's duration under load
REPLAY_FINISH_S = 1e6  # a trace's sessions are played to their end, however slow the server


def drain_s(slos: Sequence[Slo], typical_e2e_s: float) -> float:
    """Return how long to wait for answers, so that what is cut off has missed its SLO."""
    limits = [slo.limit_s for slo in slos if slo.metric in WAITS]
    if limits:
        return max(DRAIN_MIN_S, 1.5 * max(limits), 2 * typical_e2e_s)
    return max(DRAIN_MIN_S if slos else DRAIN_DEFAULT_S, 3 * typical_e2e_s)


def answering_s(workload: Workload, typical_e2e_s: float, schedule: Schedule) -> float:
    """Estimate the longest answer's duration: the median request's, scaled, SLOWED by load."""
    median = max(workload.output_tokens.quantile(0.5), 1.0)
    longest = float(schedule.output_tokens.max(initial=1))
    return SLOWED * typical_e2e_s * max(longest / median, 1.0)


def answers_in_history(workload: Workload) -> bool:
    """Return whether histories contain what the server answered."""
    return workload.sessions is None or workload.sessions.history == "answers"


def session_rules(workload: Workload, trace: Replayed | None) -> dict[str, Any]:
    """Return the fields of StagePlan about sessions."""
    sessions = workload.sessions
    if sessions is not None:
        return {
            "finish_s": sessions.finish_s,
            "end_on_failure": sessions.on_failed_turn == "end",
            "keep_reasoning": sessions.keep_reasoning,
        }
    if trace is not None and (trace.schedule.session is not None or not trace.says_arrivals):
        return {"finish_s": REPLAY_FINISH_S, "whole": True}
    return {}


def all_failed(table: pa.Table, stage: int) -> tuple[str, str] | None:
    """Return ("aborted", reason) if no request was answered: more load would show nothing."""
    statuses = table["status"].to_pylist()
    if not statuses or "ok" in statuses:
        return None
    counts = Counter(statuses)
    parts = ended_otherwise(counts)
    if failed := failures(counts):
        first = next(i for i, status in enumerate(statuses) if failures({status: 1}))
        error = f"{statuses[first]}: {table['error'][first].as_py()}"
        parts.append(f"{count(failed)} failed, the first with {error}")
    return "aborted", f"no request of stage {stage} was answered: {'; '.join(parts)}"
