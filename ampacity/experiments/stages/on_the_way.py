"""Judge a stage while it runs, from the records flushed so far."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import analyse_stage
from ampacity.loadgen.rundir.files import read_streams
from ampacity.loadgen.rundir.records import SCHEMA, RequestRecord, to_batch
from ampacity.workloads.schedule import Schedule

AGE = 1 / 3  # of the time passed: ages of younger requests show no steady state
PATIENCE = 0.5  # of the time passed: if requests last longer, percentiles must wait


def judge_so_far(
    path: Path, schedule: Schedule, meta: Mapping[str, Any], slos: Sequence[Slo], warmup: int | None
) -> Stage | None:
    """Return the stage judged so far, or None if there is nothing to judge yet.

    A request in flight has no record, so SLOs are judged by what was due before the oldest of
    them. The steady state is judged by ages too, without the last third of the time, because the
    age of a young request shows nothing.
    """
    now_ns = time.monotonic_ns()
    table = read_streams(path)
    table = table.filter(pc.equal(table["stage"], meta["index"]))
    if not table.num_rows:
        return None
    start_ns = int(meta["start_ns"])
    owed = _in_flight(table, schedule, int(meta["index"]), start_ns, now_ns)
    whole = pa.concat_tables([table, pa.Table.from_batches([to_batch(owed)], schema=SCHEMA)])

    def up_to(end_ns: int) -> Stage:
        due = whole.filter(pc.less(whole["scheduled_ns"], end_ns))
        so_far = {
            **meta,
            "end_ns": end_ns,
            "drained_ns": now_ns,
            "scheduled_requests": due.num_rows,
        }
        return analyse_stage(due, so_far, slos, warmup)

    judged = up_to(now_ns - round(AGE * (now_ns - start_ns)))
    all_ended_ns = min((record.scheduled_ns for record in owed), default=now_ns)
    known = up_to(all_ended_ns)
    if judged.stable is False:
        return structs.replace(judged, slo_verdicts=known.slo_verdicts)
    if now_ns - all_ended_ns > PATIENCE * (now_ns - start_ns):
        return structs.replace(judged, slo_verdicts=[])
    return known


def _in_flight(
    table: pa.Table, schedule: Schedule, stage: int, start_ns: int, now_ns: int
) -> list[RequestRecord]:
    """Return records for due requests without one; of those that wait for others none is known."""
    due_ns = start_ns + np.round(schedule.scheduled_s * 1e9).astype(np.int64)
    first = schedule.first_requests()
    recorded = set(table["request_id"].to_pylist())
    owed = [
        i for i in first[due_ns[first] <= now_ns].tolist() if schedule.request_id(i) not in recorded
    ]
    return [
        RequestRecord(
            request_id=schedule.request_id(i),
            stage=stage,
            scheduled_ns=int(due_ns[i]),
            status="unfinished",
            dispatched_ns=int(due_ns[i]),
            started_ns=int(due_ns[i]),
            ended_ns=now_ns,
        )
        for i in owed
    ]
