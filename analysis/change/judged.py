"""A run that is fit to be compared, and its load levels."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ampacity.analysis.change import samples
from ampacity.analysis.contract.stage import Stage
from ampacity.analysis.contract.summary import Summary
from ampacity.analysis.metrics.requests import Floats
from ampacity.analysis.next_run import resume_command
from ampacity.analysis.slo import Slo
from ampacity.analysis.stage.analyse import RunRecords, read_records
from ampacity.analysis.summary import summarise
from ampacity.analysis.warnings import ERROR_SHARE
from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.meta import ClientAudit, StageMeta

DONE = ("complete", "budget", "errors")  # a user's own limit ends a run cleanly
CUT_OFF = ("running", "interrupted")


class CompareError(ValueError):
    """Runs cannot be compared; one line with the reason and the remedy."""


@dataclass(frozen=True)
class Judged:
    """A run fit to be compared; ``labels``: request_id to accepted, if the answers were judged."""

    run: Run
    summary: Summary
    records: RunRecords
    labels: Mapping[int, bool] | None = None

    @property
    def meta(self) -> dict[str, Any]:
        return self.run.meta

    def levels(self) -> dict[str, Stage]:
        """Return the summary of each load level; repeated levels once."""
        repeated = self.summary.audit.repeated_stages
        return {level_name(s): s for s in self.summary.stages if s.index not in repeated}

    def meta_of(self, stage: Stage) -> StageMeta:
        """Return the stage's entry in run.json."""
        return next(m for m in self.run.stages if m.index == stage.index)

    def read(self, stage: Stage, skipped: int = 0) -> samples.LevelRecords:
        """Return the records of a stage without its first ``skipped`` requests."""
        meta = self.meta_of(stage)
        drained_ns = meta.drained_ns or meta.end_ns
        now_ns = float(drained_ns - self.records.origin_ns)
        return samples.level_records(self.records, stage.index, skipped, now_ns)

    def schedule(self, stage: Stage, records: samples.LevelRecords) -> str | None:
        """Return an id, equal in runs whose blocks hold the same requests; None if closed."""
        if stage.kind == "closed":
            return None
        meta = self.meta_of(stage)
        number = meta.index if meta.schedule is None else meta.schedule
        return f"{records.schedule}-{self.meta.get('seed')}-{number}"

    def realised(self) -> dict[str, Any]:
        """Return the share of cached input tokens, and for each side the realised lengths.

        These are the mean, the tokens per planned token (None where the plan is not known) and the
        relative standard error of that ratio, else of the mean.
        """
        first = self.records.requests.take(self.records.requests.attempt == 0)
        answers = first.take(first.has_status("ok"))
        found = self.summary.workload["realised"]
        result = {"cached_token_share": found["cached_token_share"]}
        for side, kind, r in (("input", "sent", first), ("output", "received", answers)):
            name = f"{side}_tokens"
            result[name] = found[name][kind]["mean"]
            ratio, se = _per_planned(getattr(r, name), getattr(r, f"{name}_planned"))
            result |= {f"{name}_per_planned": ratio, f"{name}_relative_se": se}
        return result

    def client_delay_s(self, stage: Stage) -> float:
        """Return the client's own delay at p99: of starts, and of reads not kernel-timed."""
        audit = self.meta_of(stage).audit or ClientAudit()
        read_s = 0.0 if audit.dated_by_kernel else audit.receive_delay_p99_s
        return (audit.slip_p99_s or 0.0) + (read_s or 0.0)

    def origin(self) -> dict[str, Any]:
        """Return which run it is, and on what it ran."""
        locked = self.meta.get("locked") or {}
        names = ("engine", "engine_version", "quantization", "hardware")
        found = {name: self.meta.get(name) for name in ("run_id", "started_utc", "seed")}
        found["requests"] = self.summary.requests
        return found | {name: locked.get(name) for name in names}


def warmup_of(stage: Stage) -> int:
    return stage.window.warmup_requests


def carried(stage: Stage) -> bool:
    """Return True if its latencies are those of its load.

    Where a steady state cannot be determined, signs of overload decide.
    """
    if stage.stable is not None:
        return stage.stable
    unfinished = stage.errors["unfinished"] > ERROR_SHARE * stage.requests
    return bool(stage.window.settled) and stage.slo_met is not False and not unfinished


def level_name(stage: Stage) -> str:
    """Return ``4/s`` or ``16 in flight``."""
    if stage.kind == "closed":
        return f"{stage.concurrency_set} in flight"
    return f"{stage.offered_rps:.6g}/s"


def prepare(
    run: Run,
    slos: list[Slo] | None = None,
    labels: Mapping[int, bool] | None = None,
    *,
    limited_too: bool = False,
) -> Judged:
    """Judge a run, with other SLOs than its own where given.

    Raises CompareError where it is no evidence. ``limited_too``: accept client-limited stages,
    which the caller leaves out.
    """
    if why := _no_evidence(run):
        raise CompareError(f"{run.path} {why}")
    if slos is not None:
        run = replace(run, meta={**run.meta, "slos": [s.as_dict() for s in slos]})
    summary = summarise(run, labels)
    judged = Judged(run, summary, read_records(run.requests, run.origin_ns, run.meta), labels)
    _check_rows(judged)
    if summary.audit.client_limited and not limited_too:
        reason = next(s.client_limited_reason for s in summary.stages if s.client_limited)
        raise CompareError(
            f"{run.path} is limited by its client ({reason}): "
            "nothing in it is a finding; use a quieter or larger machine"
        )
    return judged


def _no_evidence(run: Run) -> str | None:
    status, words = run.meta.get("status"), run.meta.get("command_line") or ()
    resume = resume_command(words, str(run.path)) if status in CUT_OFF else None
    remedy = f"'{resume}' goes on with it" if resume else "run it again"
    if run.going_s is not None:
        return f"is still running, last written {run.going_s:.0f} s ago: wait for its end"
    if not run.complete:
        return f"was killed before it could finish: {remedy}"
    if status not in DONE:
        reason = run.meta.get("status_reason") or "it did not come to its end"
        return f"is {status or 'unfinished'}: {reason}: {remedy}"
    empty = not run.requests.num_rows or not run.stages
    return "is empty: it holds no request" if empty else None


def _check_rows(judged: Judged) -> None:
    """Check that the file has as many rows as requests were scheduled. Raises CompareError."""
    requests, path = judged.records.requests, judged.run.path
    first = requests.attempt == 0
    for stage in judged.run.stages:
        index, planned = stage.index, stage.scheduled_requests
        rows = int(np.count_nonzero(first & (requests.stage == index)))
        if planned is not None and rows != planned:
            word = "truncated" if rows < planned else "damaged"
            raise CompareError(
                f"{path} is {word}: stage {index} has {rows} of {planned} scheduled requests"
            )


def _per_planned(came: Floats, planned: Floats) -> tuple[float | None, float | None]:
    """Return the tokens per planned token and its relative standard error; in scheduled order.

    The error is by the delta method from sums of consecutive blocks, so neighbours may be
    correlated. Where the plan is unknown: (None, relative standard error of the mean);
    (None, None) where there are too few.
    """
    known = ~np.isnan(came)
    in_plan = bool(known.any()) and bool((planned[known] > 0).all())
    came, size = came[known], planned[known] if in_plan else np.ones(int(known.sum()))
    if len(came) < samples.BLOCKS or not came.sum():
        return None, None
    per_block = samples.Blocks(samples.in_blocks(came), samples.in_blocks(size), math.inf)
    residual = per_block.over / per_block.over.mean() - per_block.size / per_block.size.mean()
    se = float(residual.std(ddof=1)) / math.sqrt(samples.BLOCKS)
    return per_block.share if in_plan else None, se
