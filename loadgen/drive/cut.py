"""Account for a stage that was cut off without its own account: by a kill, or a dead worker."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ampacity.loadgen.plan import StagePlan, record_of
from ampacity.loadgen.rundir.records import RequestRecord


def owed_by(
    plan: StagePlan, start_ns: int, now_ns: int, recorded: Mapping[int, int | None]
) -> list[RequestRecord]:
    """Return records for the requests of an open stage that were due by ``now_ns`` and have none.

    ``recorded``: the end of each recorded request. A dependent request was due if all that it
    depends on are recorded. Of a closed stage nothing is known.
    """
    schedule, rows = plan.schedule, list[RequestRecord]()
    after, after_start, think_s = schedule.after, schedule.after_start, schedule.think_s
    if plan.kind == "closed":
        return rows
    scheduled_ns = start_ns + np.round(schedule.scheduled_s * 1e9).astype(np.int64)
    lacking = (scheduled_ns <= now_ns) & ~np.isin(schedule.ids, list(recorded))
    for i in np.flatnonzero(lacking).tolist():  # of dependent ones it is the earliest time
        due_ns = int(scheduled_ns[i])
        if after is not None and after_start is not None and think_s is not None:
            waited = map(schedule.request_id, after[after_start[i] : after_start[i + 1]].tolist())
            ends = [recorded.get(number) for number in waited]
            if None in ends:
                continue
            ended_ns = [end for end in ends if end is not None]
            due_ns = max(ended_ns) + round(float(think_s[i]) * 1e9) if ends else due_ns
        if due_ns <= now_ns:
            record = record_of(plan, i, due_ns)
            record.ended_ns = now_ns
            rows.append(record)
    return rows


def sessions_of(
    plan: StagePlan, ended: Collection[int], owed: Collection[str | None]
) -> dict[str, Any]:
    """Return the ``sessions`` of a stage in run.json; incomplete ones were cut.

    ``ended``: the requests that have ended; ``owed``: the sessions of those cut off.
    """
    schedule = plan.schedule
    assert schedule.session is not None
    has = np.isin(schedule.ids, list(ended))
    begun = set(schedule.session[has].tolist())
    lacking = {*schedule.session[~has].tolist(), *schedule.shortened}
    begun_ids = {f"{plan.index}-{session}" for session in begun} | set(map(str, owed))
    return {
        "begun": len(begun_ids),
        "cut": sorted(name for name in begun_ids if int(name.split("-")[1]) in lacking),
    }


def rest_of(plan: StagePlan, gone: Sequence[int], elapsed_s: float) -> StagePlan | None:
    """Return what is left of a stage after ``elapsed_s``; None if that is nothing.

    ``gone``: ids of the requests that have a record. A session that has begun is not continued,
    because the answers in its history are lost.
    """
    schedule = plan.schedule
    out = np.isin(schedule.ids, gone)
    length_s = plan.duration_s - elapsed_s
    if plan.kind == "closed":  # users take one request after the other, and start once more
        out |= schedule.ids <= max(gone)
        length_s = plan.ramp_s + plan.duration_s - max(elapsed_s, plan.ramp_s)
    left = schedule.without(out)
    if not len(left) or (length_s <= 0 and not plan.whole):
        return None
    due_s = np.maximum(left.scheduled_s - elapsed_s, 0.0)
    return replace(
        plan,
        index=plan.index + 1,
        schedule=replace(left, scheduled_s=due_s),
        duration_s=max(length_s, 1e-3),
    )
