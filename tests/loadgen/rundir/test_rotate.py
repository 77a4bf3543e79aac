"""Records with a file for each stage: what a run that goes on keeps of what was there."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ampacity.loadgen.rundir.files import load_run, read_server
from ampacity.loadgen.rundir.records import RequestRecord
from ampacity.loadgen.rundir.rotate import RotatingWriter, keep_part
from ampacity.loadgen.rundir.write import Held, take_up

SOAK = {"rate_rps": 2.0, "duration_s": 2.0, "window_s": 1.0}
META: dict[str, Any] = {"run_id": "r", "status": "running", "soak": SOAK, "stages": []}
SEAM = {"after_stage": 0, "reason": "killed", "resumed_utc": "", "gap_s": 1, "wall_gap_s": 1}
SEAM |= {"in_flight": 0}


def samples(first: int, count: int) -> pa.Table:
    """Return samples of the server: more than a page of memory where there are many."""
    at_ns = list(range(first, first + count))
    return pa.table({"at_ns": pa.array(at_ns, pa.int64()), "running": [float(x) for x in at_ns]})


def play(run: Path, meta: dict[str, Any], held: Held | None, stage: int, new: pa.Table) -> None:
    """Record one stage of two requests, and end as a kill does: nothing is finished."""
    meta["stages"] = [*meta["stages"], {"start_ns": stage, "end_ns": stage + 1, "index": stage}]
    writer = RotatingWriter(run, meta, held)
    for k in range(2):
        writer.append(RequestRecord(2 * stage + k, stage, stage, "ok"))
    asyncio.run(writer.end_stage(stage, new))
    writer.wait()
    writer.close()
    writer.raise_failed()


@pytest.mark.parametrize("count", [1, 700, 100_000])
def test_a_run_that_goes_on_keeps_the_samples_that_it_replaces(tmp_path: Path, count: int) -> None:
    """They are mapped from the very file: emptied, writing them fails with "Bad address"."""
    run = tmp_path / "run"
    play(run, META, None, 0, samples(0, count))
    with take_up(run) as held:
        play(run, held.run.meta | {"seams": [SEAM]}, held, 1, samples(count, 3))
    kept = read_server(run)
    assert kept["at_ns"].to_pylist() == list(range(count + 3))
    for stage in range(2):
        keep_part(run, stage)
    assert load_run(run).requests["request_id"].to_pylist() == [0, 1, 2, 3]
