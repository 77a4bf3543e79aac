"""Judge a stage while it runs, from the records flushed so far."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from msgspec import structs

from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import analyse_stage, read_records
from ampacity.loadgen.drive.cut import owed_by
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.files import read_streams
from ampacity.loadgen.rundir.meta import read_stage
from ampacity.loadgen.rundir.records import SCHEMA, to_batch
from ampacity.loadgen.rundir.write import RunWriter

AGE = 1 / 3  # of the time passed: ages of younger requests show no steady state
PATIENCE = 0.5  # of the time passed: if requests last longer, percentiles must wait
SILENCE = 0.1  # of the time passed, and twice the longest request: if nothing ended, it may hang


def judge_so_far(
    writer: RunWriter,
    plan: StagePlan,
    meta: Mapping[str, Any],
    slos: Sequence[Slo],
    warmup: int | None,
) -> Stage | None:
    """Return the stage judged so far, or None if there is nothing to judge yet.

    A request in flight has no record, so SLOs are judged by what was due before the oldest of
    them; not at all while nothing ends any more, for before that all went well. The steady state
    is judged by ages too, without the last third of the time, because the age of a young request
    shows nothing.
    """
    now_ns = time.monotonic_ns()
    writer.wait()
    table = read_streams(writer.path)
    table = table.filter(pc.equal(table["stage"], meta["index"]))
    if not table.num_rows:
        return None
    start_ns = int(meta["start_ns"])
    recorded = dict(zip(*(table[n].to_pylist() for n in ("request_id", "ended_ns")), strict=True))
    owed = owed_by(plan, start_ns, now_ns, recorded)
    for record in owed:
        record.dispatched_ns = record.started_ns = record.scheduled_ns
    whole = pa.concat_tables([table, pa.Table.from_batches([to_batch(owed)], schema=SCHEMA)])

    def up_to(end_ns: int) -> Stage:
        due = whole.filter(pc.less(whole["scheduled_ns"], end_ns))
        so_far = {
            **meta,
            "end_ns": end_ns,
            "drained_ns": now_ns,
            "scheduled_requests": due.num_rows,
        }
        return analyse_stage(read_records(due, start_ns, meta), read_stage(so_far), slos, warmup)

    judged = up_to(now_ns - round(AGE * (now_ns - start_ns)))
    all_ended_ns = min((record.scheduled_ns for record in owed), default=now_ns)
    known = up_to(all_ended_ns)
    if judged.stable is False:
        return structs.replace(judged, slo_verdicts=known.slo_verdicts)
    if now_ns - all_ended_ns > PATIENCE * (now_ns - start_ns):
        return structs.replace(judged, slo_verdicts=[])
    longest_ns = pc.max(pc.subtract(table["ended_ns"], table["scheduled_ns"])).as_py()
    silent_ns = now_ns - max(pc.max(table["ended_ns"]).as_py(), all_ended_ns)
    hangs = silent_ns > max(2 * longest_ns, SILENCE * (now_ns - start_ns))
    return structs.replace(judged, slo_verdicts=[]) if hangs else known
