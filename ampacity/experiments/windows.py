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
from ampacity.loadgen.rundir.files import (
    PARQUETS,
    Run,
    damage_of,
    explained,
    load_run,
    part_of,
    write_json,
)
from ampacity.loadgen.rundir.rotate import keep_part, part_summary


def summarise_soak(path: Path, meta: dict[str, Any], *, keep: bool = True) -> tuple[Run, Summary]:
    """Return (the run with the records of its last window, its summary); ``meta``: run.json.

    ``keep``: what is found of a window is written to its directory. Raises RunDirError, RecordsError.
    """
    if keep:
        with explained(f"{path / 'windows'} cannot be made"):
            part_summary(path, 0).parent.mkdir(exist_ok=True)
    parts, damage = [], list(filter(None, [damage_of(path)]))
    damaged = bool(damage)  # its streams stay as they are
    for stage in meta["stages"]:
        kept = part_summary(path, stage["index"])
        over, lacking = bool(stage.get("drained_ns")), _lacking(path, stage)
        damage += lacking
        if (part := _read(kept, stage["index"])) is None:
            if lacking:
                continue
            part = summarise(_window(path, meta["stages"], stage))
            if over and keep:
                write_json(kept, to_json(part))
        if over and keep and not damaged:
            keep_part(path, stage["index"])
        if part.stages and part.requests:
            parts.append(part)
    run = load_run(path, meta["stages"][-1]["index"]) if meta["stages"] else load_run(path)
    run = replace(run, damage="; ".join(damage) or None)
    return run, join_windows(parts, run) if parts else summarise(run)


def _read(path: Path, index: int) -> Summary | None:
    """Return the kept summary of a window; None where there is none, or that of another."""
    with contextlib.suppress(OSError, ContractError):
        found = read_summary(path)
        return found if all(stage.index == index for stage in found.stages) else None
    return None


def _lacking(path: Path, stage: dict[str, Any]) -> list[str]:
    """Return the file of a window that is over where there is none."""
    part = part_of(path, stage["index"])
    there = (path / PARQUETS[0]).is_file() or any(path.glob(f"{part.stem}*.*"))
    sent = stage.get("drained_ns") and stage.get("scheduled_requests")
    return [f"{part} is missing"] if sent and not there else []


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
