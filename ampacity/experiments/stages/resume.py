"""Go on with a run that was cut off: its stages come from their records, the rest is played.

The experiment begins anew, and each stage that it asks for and that is recorded is taken from its
records. So it decides as it did, and plays on where the records end.
"""

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import ampacity
from ampacity.experiments.stages.context import BEYOND, CLIPPED
from ampacity.experiments.stages.provenance import utc_now
from ampacity.loadgen.drive.cut import owed_by, rest_of, sessions_of
from ampacity.loadgen.plan import StagePlan
from ampacity.loadgen.rundir.files import (
    CUT_OFF,
    Run,
    RunDirError,
    json_text,
)
from ampacity.loadgen.rundir.meta import fault_of
from ampacity.loadgen.rundir.write import RunWriter

# entries of run.json that stay as they were, and those that must be found again
KEPT = (
    *("run_id", "command_line", "started_utc", "clock", "endpoint", "salt", "workers"),
    *("stages", "spent_usd", "diagnosis"),
)
SAME = ("experiment", "seed", "slos", "warmup_requests", "locked", "fleet_inputs")
MEASURED = ("tokenizer", CLIPPED, BEYOND)  # of the workload's entry: known once it is played
KILLED = "killed"
AHEAD_NS = 10**9  # so long before its start, at most, a stage is written down


def is_over(run: Run) -> bool:
    """Return whether a run has come to its end, so that nothing of its load is left."""
    from ampacity.analysis.change.judged import DONE

    status, stages = str(run.meta.get("status")), run.meta.get("stages") or []
    cut = bool(stages and stages[-1].get("ended_early"))
    return run.complete and (status in DONE or (status == "aborted" and not cut))


def check_resumable(run: Run) -> None:
    """Raise RunDirError if there is nothing to resume, or if it cannot be resumed."""
    from ampacity.analysis.metrics.impossible import check_records

    check_records(run)  # before the load: what is added to it cannot be taken apart again
    meta, path = run.meta, run.path
    if is_over(run):
        why = f" ({meta['status_reason']})" if meta.get("status_reason") else ""
        raise RunDirError(f"{path} is over{why}, nothing is left to resume: ampacity report {path}")
    version = (meta.get("tool") or {}).get("version")
    known = meta.get("clock") and "answer_s" in (meta.get("endpoint") or {})
    if version != ampacity.__version__ or not known:
        raise RunDirError(
            f"{path} was made by ampacity {version} and this is {ampacity.__version__}, or an "
            "earlier state of it: only the version that began a run can resume it"
        )
    if last_ns(run) - AHEAD_NS > time.monotonic_ns():
        raise RunDirError(
            f"{path} cannot be resumed: this machine was started again since, and its clock counts "
            "from there; start a new run"
        )


def last_ns(run: Run) -> int:
    """Return the last moment of a run that is recorded, monotonic."""
    ended = pc.max(run.requests["ended_ns"]).as_py()
    began = int(run.meta["clock"]["monotonic_ns"])  # all there is before the first stage
    return max([ended or 0, began, *(int(stage["start_ns"]) for stage in run.meta["stages"])])


def resumed_meta(run: Run, new: Mapping[str, Any]) -> dict[str, Any]:
    """Return run.json of a run that goes on. Raises RunDirError if it would be another run."""
    old, now = run.meta, json.loads(json_text(new))
    changed = [name for name in SAME if now[name] != old.get(name)]
    load, before = _described(now["workload"]), _described(old["workload"])
    changed += [f"workload.{k}" for k in {**before, **load} if load.get(k) != before.get(k)]
    for name in ("url", "api", "model"):
        if now["endpoint"][name] != old["endpoint"].get(name):
            changed.append(f"endpoint.{name}")
    if changed:
        raise RunDirError(
            f"{run.path} cannot be resumed: {', '.join(changed)} would not be as run.json has it; "
            "put back what was changed since, or start a new run"
        )
    killed = old["status"] == "running"
    if stages := old["stages"]:
        last = stages[-1]
        cut = not last.get("drained_ns") if killed else bool(last.get("ended_early"))
        last["interrupted"] = bool(cut or last.get("interrupted"))
    now_ns, seams = time.monotonic_ns(), list(old.get("seams", ()))
    ended_ns = min(last_ns(run), now_ns)
    gap_s = (now_ns - ended_ns) / 1e9
    # a resume with nothing behind it was refused, and only wrote run.json
    again = seams.pop() if ended_ns < old.get("resumed_ns", 0) else {}
    seam = {
        "after_stage": len(stages) - 1,
        "reason": again.get("reason") or (not killed and old["status_reason"]) or KILLED,
        "resumed_utc": utc_now(),
        "gap_s": gap_s,
        # differs where a clock was set, or in suspend; file times would be those of a copy
        "wall_gap_s": gap_s
        + _clock_moved_s(old["clock"], now_ns)
        - sum(s["wall_gap_s"] - s["gap_s"] for s in seams),
        "in_flight": again.get("in_flight", 0),
    }
    meta = {
        **new,
        **{name: old[name] for name in KEPT if name in old},
        "notes": list(dict.fromkeys([*old["notes"], *new["notes"]])),
        "events": events_of(run),
        "seams": [*seams, seam],
        "resumed_ns": now_ns,
    }
    if fault := fault_of(meta):  # a mistake of ours: the directory stays as readable as it was
        raise AssertionError(f"{run.path / 'run.json'}: {fault}")
    return meta


def events_of(run: Run) -> list[str]:
    """Return what has happened in a run, and which of its records cannot be read."""
    return list(dict.fromkeys([*run.meta.get("events", ()), *filter(None, [run.damage])]))


def _clock_moved_s(began: Mapping[str, Any], now_ns: int) -> float:
    """Return how far the wall clock has left the monotonic one since the run began."""
    wall_s = time.time() - datetime.fromisoformat(began["utc"]).timestamp()
    return float(wall_s - (now_ns - began["monotonic_ns"]) / 1e9)


def _described(workload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in workload.items() if name not in MEASURED}


class Recorded:
    """The recorded stages of a run that is resumed; none of a new run."""

    def __init__(self, writer: RunWriter) -> None:
        self._writer = writer
        self._stages: list[dict[str, Any]] = writer.meta["stages"]
        self._count = len(self._stages)

    def planned_s(self, index: int) -> float | None:
        """Return the length that a recorded stage was to have; None if it is not recorded."""
        return float(self._stages[index]["planned_s"]) if index < self._count else None

    def took_s(self, index: int) -> float:
        """Return the time from a recorded stage's start to the next one's, its drain included."""
        stage = self._stages[index]
        end_ns = stage["drained_ns"]
        if index + 1 < self._count and not stage.get("interrupted"):
            end_ns = self._stages[index + 1]["start_ns"]
        return float(end_ns - stage["start_ns"]) / 1e9

    def recall(self, plan: StagePlan) -> tuple[dict[str, Any], pa.Table] | None:
        """Return the entry in run.json and the records of a stage; None if it must be played.

        Raises RunDirError if they are not of this plan.
        """
        if plan.index >= self._count:
            return None
        meta, table = self._stages[plan.index], self._writer.stage_table(plan.index)
        self._check(plan, meta, table)
        open_ = meta.get("interrupted") or meta["drained_ns"] is None
        if open_ and "cut_ns" not in meta:
            last = plan.index == self._count - 1
            if last and not table.num_rows:  # nothing is lost: it is played as if it had not begun
                del self._stages[plan.index :]
                self._count = plan.index
                return None
            table = self._cut(plan, meta, table)
        return meta, table

    def rest(self, plan: StagePlan, table: pa.Table) -> StagePlan | None:
        """Return what is left to play of a stage that was interrupted.

        A burst is played again from its start: across a gap there is no recovery to measure.
        """
        meta = self._writer.meta["stages"][plan.index]
        if not meta.get("interrupted") or "burst" in self._writer.meta:
            return None
        elapsed_s = (meta["cut_ns"] - meta["start_ns"]) / 1e9
        return rest_of(plan, table["request_id"].to_numpy(), elapsed_s)

    def _check(self, plan: StagePlan, meta: Mapping[str, Any], table: pa.Table) -> None:
        first = table.filter(pc.equal(table["attempt"], 0))
        ids, schedule = first["request_id"].to_numpy(), plan.schedule
        at = np.minimum(np.searchsorted(schedule.ids, ids), len(schedule) - 1)
        known = ((name, getattr(schedule, f"{name}_tokens")) for name in ("input", "output"))
        same = (
            meta["kind"] == plan.kind
            and meta["concurrency"] == plan.concurrency
            and (plan.whole or meta["offered_rps"] == plan.offered_rps)
            and np.array_equal(schedule.ids[at], ids)
            and all(
                np.array_equal(tokens[at], first[f"{name}_tokens_planned"].to_numpy())
                for name, tokens in known
            )
        )
        if not same:
            raise RunDirError(
                f"{self._writer.path} cannot be resumed: stage {plan.index} has other requests than "
                "its command would send now (was a workload, trace or prompt file changed?)"
            )

    def _cut(self, plan: StagePlan, meta: dict[str, Any], table: pa.Table) -> pa.Table:
        """End a stage where its records end; what was in flight then is unfinished.

        Where the next one had begun, all of it was sent.
        """
        start_ns, drained = int(meta["start_ns"]), meta["drained_ns"] is not None
        cut_ns = pc.max(table["scheduled_ns" if drained else "ended_ns"]).as_py() or start_ns
        after = self._stages[plan.index + 1 : plan.index + 2]
        cut_ns = max([cut_ns, *(int(stage["start_ns"]) for stage in after)])
        columns = (table[name].to_pylist() for name in ("request_id", "ended_ns", "status"))
        rows = zip(*columns, strict=True)
        recorded = {n: None if how == "unfinished" else ended for n, ended, how in rows}
        for record in owed_by(plan, start_ns, cut_ns, recorded):
            record.error = CUT_OFF
            self._writer.append(record)
        table = self._writer.stage_table(plan.index)
        ids = pc.unique(table["request_id"])
        span = pc.max(ids).as_py() - pc.min(ids).as_py() + 1
        meta |= {
            "cut_ns": cut_ns,
            "end_ns": min(int(meta["end_ns"]), max(cut_ns, start_ns + 1)),
            "drained_ns": meta["drained_ns"] or cut_ns,
            "scheduled_requests": span if plan.kind == "closed" else len(ids),
            "ended_early": meta["ended_early"] or (None if after else KILLED),
            "interrupted": not after,
        }
        unfinished = table.filter(pc.equal(table["status"], "unfinished"))
        if plan.schedule.session is not None and not drained:
            ended = {number for number, ended_ns in recorded.items() if ended_ns is not None}
            sessions = unfinished["session_id"].to_pylist()
            meta["sessions"] = sessions_of(plan, ended, sessions)
        self._writer.meta["seams"][-1]["in_flight"] += unfinished.num_rows
        self._writer.write_meta()
        return table
