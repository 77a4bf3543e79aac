"""What a gate that works must turn red at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.loadgen.rundir.files import Run
from ampacity.loadgen.rundir.records import CHUNK_AT_MAX_US


def twice_as_slow(run: Run) -> Run:
    """The same requests, every answer taking twice its time."""
    table = run.requests
    for event in ("headers", "first_event", "first_token", "first_answer", "last_token", "ended"):
        name = f"{event}_ns"
        slower = pc.add(table[name], pc.subtract(table[name], table["started_ns"]))
        table = table.set_column(table.column_names.index(name), table.schema.field(name), slower)
    at = table["chunk_at_us"].combine_chunks()
    doubled = np.minimum(at.values.to_numpy().astype(np.uint64) * 2, CHUNK_AT_MAX_US).astype(
        np.uint32
    )
    lists = pa.ListArray.from_arrays(at.offsets, pa.array(doubled))
    table = table.set_column(
        table.column_names.index("chunk_at_us"), table.schema.field("chunk_at_us"), lists
    )
    ends = pc.max(table["ended_ns"]).as_py() or 0
    stages = [{**s, "drained_ns": max(s.get("drained_ns") or 0, ends)} for s in run.meta["stages"]]
    return replace(run, requests=table, meta={**run.meta, "stages": stages})
