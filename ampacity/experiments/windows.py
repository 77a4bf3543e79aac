"""The summary of a soak's run directory: each window is judged once, and the result kept."""

import contextlib
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pyarrow as pa

from ampacity.analysis.contract.part import ContractError
from ampacity.analysis.contract.summary import Summary, read_summary, to_json
from ampacity.analysis.soak.summarise import join_windows
from ampacity.analysis.summary import summarise
from ampacity.loadgen.rundir.files import Run, load_run, write_json
from ampacity.loadgen.rundir.rotate import keep_part, part_summary


def summarise_soak(path: Path, meta: dict[str, Any]) -> tuple[Run, Summary]:
    """Return (the run with the records of its last window, its summary); ``meta``: run.json.

    Raises RunDirError, RecordsError.
    """
    part_summary(path, 0).parent.mkdir(exist_ok=True)
    parts = []
    for stage in meta["stages"]:
        kept = part_summary(path, stage["index"])
        over = bool(stage.get("drained_ns"))
        if (part := _read(kept)) is None:
            part = summarise(_window(path, meta["stages"], stage))
            if over:
                write_json(kept, to_json(part))
        if over:
            keep_part(path, stage["index"])
        if part.stages and part.requests:
            parts.append(part)
    run = load_run(path, meta["stages"][-1]["index"]) if meta["stages"] else load_run(path)
    return run, join_windows(parts, run) if parts else summarise(run)


def _read(path: Path) -> Summary | None:
    with contextlib.suppress(OSError, ContractError):
        return read_summary(path)
    return None


def _window(path: Path, stages: list[dict[str, Any]], stage: dict[str, Any]) -> Run:
    """Return a run of this window alone; only the first one has a start-up."""
    run = load_run(path, stage["index"])
    going = [s for s in stages[: stage["index"]] if _ends_ns(s) > stage["start_ns"]]
    rows = [load_run(path, s["index"]).requests.select(["started_ns", "ended_ns"]) for s in going]
    own = {**run.meta, "stages": [stage], "seams": []}
    if stage["index"] and own.get("warmup_requests") is None:
        own["warmup_requests"] = 0
    over = bool(stage.get("drained_ns"))
    status = {"status": "complete", "status_reason": None} if over else {}
    before = pa.concat_tables(rows) if rows else None
    return replace(run, meta=own | status, complete=over, before=before)


def _ends_ns(stage: dict[str, Any]) -> float:
    return float(stage.get("drained_ns") or inf)
