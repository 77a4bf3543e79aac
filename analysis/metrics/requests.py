"""Per-request vectors from the records; the definitions of TTFT and E2E.

TPOT is defined in chunks.py, ITL and ICL in gaps.py. Times are float64 nanoseconds after
``origin_ns`` (exact below 104 days), NaN where something did not happen. No Python loop runs over
requests or gaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.loadgen.rundir.parquet import scan_of
from ampacity.loadgen.rundir.records import FAILED_KINDS, KINDS, LEFT_OUT, STATUSES, kind_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_FAILED = np.array([kind in FAILED_KINDS for kind in KINDS])
_NS = 1e-9
FITS_SHARE = 0.9  # of the listed context, as prompts are planned with an error
CHUNKS_ARE_TOKENS = 0.99  # of the answers whose length is known by the plan
PARTS = {"cached_tokens": "input_tokens", "reasoning_tokens": "output_tokens"}
"""Counts that are part of another: a larger one is wrong."""


class RecordsError(ValueError):
    """Records that this version cannot read."""


@dataclass(frozen=True)
class Requests:
    """Columns of the records as vectors, one entry per row (all attempts), in scheduled order."""

    row: Ints  # row of the table
    stage: npt.NDArray[np.int32]
    attempt: npt.NDArray[np.int32]
    status: npt.NDArray[np.int8]  # index into KINDS
    scheduled_ns: Floats
    dispatched_ns: Floats
    started_ns: Floats
    first_token_ns: Floats
    first_answer_ns: Floats
    last_token_ns: Floats
    ended_ns: Floats
    input_tokens_planned: Floats
    input_tokens: Floats
    cached_tokens: Floats
    output_tokens_planned: Floats
    output_tokens: Floats
    reasoning_tokens: Floats
    worker: npt.NDArray[np.int32]
    class_: npt.NDArray[np.object_]  # the workload's class of each request
    chunks: npt.NDArray[np.int32]  # with tokens
    listed: Bools  # the tokens of each chunk are known
    several: Bools  # and are not one each
    uncounted: Bools  # nobody counted its tokens: of a good answer their number is not known
    stopped: Bools  # finish_reason "stop": the model ended by itself, with a token that has no text

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: npt.NDArray[Any] | slice) -> Requests:
        """Return the entries at an index array, mask or slice, in that order."""
        if isinstance(which, slice) or which.dtype != np.bool_:
            return _Selected(self, which)
        at = np.flatnonzero(which)
        if len(at) == len(which):
            return self
        together = len(at) and len(at) == at[-1] - at[0] + 1
        return _Selected(self, slice(int(at[0]), int(at[-1]) + 1) if together else at)

    def changed(self, **columns: Floats) -> Requests:
        """Return the same requests with other columns."""
        found = copy(self)
        found.__dict__.update(columns)
        return found

    def has_status(self, kind: str) -> Bools:
        return np.asarray(self.status == _CODE[kind])

    @property
    def left_out(self) -> Bools:
        """Return the requests without information on the server: cancelled, or too long."""
        return np.isin(self.status, [_CODE[status] for status in LEFT_OUT])

    @property
    def failed(self) -> Bools:
        """Return which requests count as infinitely slow."""
        return np.asarray(_FAILED[self.status], dtype=np.bool_)

    def cached_share(self) -> float | None:
        """Return the share of input tokens from the prefix cache, over the rows that have it."""
        known = ~np.isnan(self.cached_tokens) & (self.input_tokens > 0)
        if not known.any():
            return None
        return float(self.cached_tokens[known].sum() / self.input_tokens[known].sum())

    def status_counts(self) -> dict[str, int]:
        counts = np.bincount(self.status, minlength=len(KINDS))
        return {kind: int(n) for kind, n in zip(KINDS, counts, strict=True)}


class _Selected(Requests):
    """Some entries of other requests; a column is selected when it is first asked for."""

    def __init__(self, of: Requests, which: npt.NDArray[Any] | slice) -> None:
        self.__dict__.update(_of=of, _which=which)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.__dict__.setdefault(name, getattr(self._of, name)[self._which])


def read_requests(
    table: pa.Table, origin_ns: int, meta: Mapping[str, Any] | None = None
) -> Requests:
    """Return vectors of a table with the columns of ``ampacity.loadgen.rundir.records.SCHEMA``.

    ``meta`` (run.json) has the context that the server lists. Raises RecordsError.
    """
    scan = scan_of(table)
    columns: dict[str, npt.NDArray[Any]] = {
        "row": np.arange(table.num_rows, dtype=np.int64),
        **{
            name: np.asarray(pc.fill_null(table[name], 0).to_numpy(), dtype=np.int32)
            for name in ("stage", "attempt", "worker")
        },
        "status": _kinds(table),
        "class_": _classes(table),
        "chunks": scan.count,
        "listed": scan.listed,
        "several": scan.several,
        "uncounted": _equals(table["token_source"], "chunks"),
        "stopped": _equals(table["finish_reason"], "stop"),
    }
    for f in fields(Requests):
        if f.name.endswith("_ns"):
            columns[f.name] = _times(table, f.name, origin_ns)
        elif f.name not in columns:
            columns[f.name] = np.array(table[f.name].cast(pa.float64()).to_numpy())
    for part, of_all in PARTS.items():
        columns[part][columns[part] > columns[of_all]] = np.nan
    _leave_out_chunks(columns)
    found = Requests(**columns)
    wrong = contradicted(found)
    found.output_tokens[wrong] = np.nan
    found.uncounted[wrong] = True
    listed = ((meta or {}).get("locked") or {}).get("max_model_len")
    context = listed if isinstance(listed, int) else 0  # --lock may name another, as a text
    found.status[_refused_though_fitting(found, context)] = _CODE["bad_request"]
    if np.all(np.diff(found.scheduled_ns) >= 0):  # as a run mostly writes them
        return found
    return found.take(np.argsort(found.scheduled_ns, kind="stable"))


def contradicted(requests: Requests) -> Bools:
    """Return which good answers came in more chunks than they have tokens, or in as many as tokens
    were asked for and have another count: it is wrong, shape (n,).
    """
    r, chunks = requests, requests.chunks
    counted = visible_tokens(r)
    more = ~np.isnan(counted) & (counted != chunks) & (r.output_tokens > chunks)
    more &= (chunks == r.output_tokens_planned) & ~(r.stopped & (counted == chunks + 1))
    wrong = ~r.listed & r.has_status("ok") & (chunks > 0) & ((r.output_tokens < chunks) | more)
    return np.asarray(wrong, dtype=np.bool_)


def _refused_though_fitting(requests: Requests, context: int) -> Bools:
    """Return which requests the server called too long although the context that it lists holds
    them and it answered as long ones, by plan, shape (n,).
    """
    r, ok = requests, requests.has_status("ok")
    planned = r.input_tokens_planned + r.output_tokens_planned
    longest = min(float(planned[ok].max(initial=0.0)), FITS_SHARE * context)
    return np.asarray(r.has_status("too_long") & (planned <= longest), dtype=np.bool_)


def _equals(column: pa.ChunkedArray, value: str) -> Bools:
    return np.array(pc.fill_null(pc.equal(column, value), False).to_numpy(), dtype=np.bool_)


def _leave_out_chunks(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Set ``output_tokens`` of good answers that nobody counted to NaN, in place.

    They stay, as counted, where the answers that did not stop by themselves have as many chunks as
    tokens were planned.
    """
    ok = columns["uncounted"] & (columns["status"] == _CODE["ok"])
    by_length = ok & ~columns["stopped"] & (columns["output_tokens_planned"] > 0)
    as_planned = columns["output_tokens"] == columns["output_tokens_planned"]
    if by_length.any() and np.mean(as_planned[by_length]) >= CHUNKS_ARE_TOKENS:
        columns["uncounted"] &= ~ok
    else:
        columns["output_tokens"] = np.where(ok, np.nan, columns["output_tokens"])


def _times(table: pa.Table, name: str, origin_ns: int) -> Floats:
    shifted = pc.subtract(table[name], pa.scalar(origin_ns, pa.int64()))
    return np.array(shifted.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _classes(table: pa.Table) -> npt.NDArray[np.object_]:
    """Return the class of each row, one Python string per name however many rows."""
    column = pc.fill_null(table["class"], "default").combine_chunks().dictionary_encode()
    names = np.array(column.dictionary.to_pylist(), dtype=np.object_)
    return np.asarray(names[column.indices.to_numpy()] if len(names) else names, dtype=np.object_)


def _kinds(table: pa.Table) -> npt.NDArray[np.int8]:
    """Return the kind of each row as an index into ``KINDS``."""
    found = pc.fill_null(pc.index_in(table["status"], value_set=pa.array(STATUSES)), -1)
    kinds = np.array(found.to_numpy(), dtype=np.int8)
    if (kinds < 0).any():
        unknown = next(s for s in pc.unique(table["status"]).to_pylist() if s not in STATUSES)
        raise RecordsError(
            f"requests.parquet: column status holds {unknown!r}, which this version does not know"
        )
    errors = np.flatnonzero(kinds == _CODE["http_error"])
    codes = pc.fill_null(table["http_status"].take(pa.array(errors)), 0).to_numpy()
    each, which = np.unique(codes, return_inverse=True)
    of_each = [_CODE[kind_of("http_error", int(code))] for code in each]
    kinds[errors] = np.array(of_each, dtype=np.int8)[which]
    return kinds


UNCOUNTED = (
    "the server does not say how many tokens its answers have (no usage), or its chunks contradict "
    "it: give its vocabulary to --tokenizer"
)


def uncounted_share(requests: Requests) -> float:
    """Return the share of good answers whose tokens nobody counted."""
    ok = requests.has_status("ok")
    return float(np.mean(requests.uncounted[ok])) if ok.any() else 0.0


def visible_tokens(requests: Requests) -> Floats:
    """Return output tokens in the stream: without reasoning that is counted but not sent."""
    hidden = (requests.reasoning_tokens > 0) & (requests.first_answer_ns == requests.first_token_ns)
    return requests.output_tokens - np.where(hidden, requests.reasoning_tokens, 0.0)


def unseen(requests: Requests) -> Bools:
    """Return which good answers have several tokens, none of which was sent, shape (n,)."""
    none_sent = np.isnan(requests.first_token_ns) & (requests.output_tokens > 1)
    return requests.has_status("ok") & none_sent


def ttft_s(requests: Requests, *, from_schedule: bool) -> Floats:
    """Return the time to the first token, from the scheduled time or from the first byte sent."""
    return (requests.first_token_ns - zero_ns(requests, from_schedule)) * _NS


def first_answer_s(requests: Requests, *, from_schedule: bool) -> Floats:
    """Return the time to the first token that is no thinking."""
    return (requests.first_answer_ns - zero_ns(requests, from_schedule)) * _NS


def e2e_s(requests: Requests, *, from_schedule: bool) -> Floats:
    """Return the time to the last token; a good answer without text ends with its response."""
    no_text = np.isnan(requests.last_token_ns) & requests.has_status("ok")
    end = np.where(no_text, requests.ended_ns, requests.last_token_ns)
    return (end - zero_ns(requests, from_schedule)) * _NS


def zero_ns(requests: Requests, from_schedule: bool) -> Floats:
    return requests.scheduled_ns if from_schedule else requests.started_ns
