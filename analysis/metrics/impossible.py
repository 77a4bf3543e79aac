"""Records that no run writes: refused before anything is computed from them."""

import reprlib
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.analysis.metrics.requests import Bools, RecordsError
from ampacity.loadgen.rundir.files import PARQUETS, Run, part_of, streams_of
from ampacity.loadgen.rundir.lists import LISTS, ListScan
from ampacity.loadgen.rundir.meta import StageMeta
from ampacity.loadgen.rundir.parquet import scan_of
from ampacity.loadgen.rundir.records import SCHEMA

_NEVER_NULL = ("request_id", "stage", "attempt", "scheduled_ns")
_ORDER = (
    ("scheduled_ns", "started_ns"),
    ("started_ns", "first_token_ns"),
    ("first_token_ns", "last_token_ns"),
    ("last_token_ns", "ended_ns"),
    ("started_ns", "ended_ns"),
)
_TOKENS = [name for name in SCHEMA.names if "_tokens" in name and name not in LISTS]
_CHECKED = list(dict.fromkeys((*_NEVER_NULL, *chain(*_ORDER), *_TOKENS)))
_CLOCKS_APART_NS = 1_000_000  # one of two times may be the kernel's
LOST_MOST, LOST_FACTOR = 1_000_000, 100  # requests without a record, and of those with one
_Fault = tuple[str, Any, str]  # column, mask of the rows, what is wrong with its value


def check_records(run: Run) -> None:
    """Raise RecordsError on the first record that no run writes, with row, column and value."""
    table = run.requests.select(_CHECKED)
    known = (
        {s.index for s in run.stages} if run.complete else set()
    )  # a kill may come before a stage is written
    # other tools end their clocks in their own ways
    times = () if run.meta.get("imported") else _times(table)
    chunks = _chunks(scan_of(run.requests))
    for column, mask, why in chain(_values(table, known), times, chunks, _twice(table)):
        nullable = isinstance(mask, pa.ChunkedArray)
        rows: Bools = np.asarray(pc.fill_null(mask, False)) if nullable else mask
        if rows.any():
            row = int(np.argmax(rows))
            held = run.requests.slice(row, 1).to_pylist()[0]
            said = f"{column} is {reprlib.repr(held[column])}, {why.format_map(held)}"
            stored = _parquets(run)
            files = [f for f in stored if f.is_file()] or streams_of(run.path) or stored[:1]
            raise RecordsError(
                f"{', '.join(map(str, files))}: row {row}: {said}; no run writes that: the "
                "file was changed or is damaged"
            )


def check_losses(run: Run, metas: Sequence[StageMeta]) -> None:
    """Raise RecordsError for a stage of far more requests than a loss explains: each takes memory.

    ``metas``: entries of run.json's stages.
    """
    recorded = run.requests["stage"].to_numpy()
    for meta in metas:
        planned = meta.scheduled_requests or 0
        held = int(np.count_nonzero(recorded == meta.index))
        if planned > LOST_MOST + LOST_FACTOR * held:
            raise RecordsError(
                f"{run.path / 'run.json'}: stage {meta.index} has {planned:,} scheduled requests, "
                f"of which {held:,} are recorded; no run loses that many: the file was changed or "
                "is damaged"
            )


def _parquets(run: Run) -> list[Path]:
    """Return the files of all records, or of a soak's windows, of which ``run`` may be one."""
    return [run.path / PARQUETS[0], *(part_of(run.path, stage.index) for stage in run.stages)]


def _values(table: pa.Table, stages: Collection[int]) -> Iterator[_Fault]:
    for name in _NEVER_NULL:
        yield name, pc.is_null(table[name]), "which every record has"
    if stages:
        known = pa.array(sorted(stages), type=table["stage"].type)
        unknown = pc.invert(pc.is_in(table["stage"], value_set=known))
        yield "stage", unknown, "which run.json does not have"
    for name in ("request_id", "attempt", *_TOKENS):
        yield name, pc.less(table[name], 0), "below zero"


def _times(table: pa.Table) -> Iterator[_Fault]:
    for earlier, later in _ORDER:
        by = pc.add(table[later], _CLOCKS_APART_NS)
        yield later, pc.less(by, table[earlier]), f"before {earlier}, {{{earlier}}}"


def _chunks(scan: ListScan) -> Iterator[_Fault]:
    yield "chunk_tokens", scan.apart, "of another length than chunk_at_us"
    yield "chunk_tokens", scan.negative, "a count below zero or none"
    yield "chunk_at_us", scan.falling, "a time before the one ahead of it"


def _twice(table: pa.Table) -> Iterator[_Fault]:
    keys = [table[name].to_numpy() for name in ("attempt", "request_id", "stage")]
    again = np.zeros(table.num_rows, dtype=np.bool_)
    step = np.diff(keys[1])
    in_order = (step > 0) | ((step == 0) & (np.diff(keys[0]) > 0))  # as a run mostly writes them
    if not in_order.all():
        order = np.lexsort(keys)
        again[order[1:]] = np.all([np.diff(key[order]) == 0 for key in keys], axis=0)
    yield "request_id", again, "with attempt {attempt} of stage {stage} for the second time"
