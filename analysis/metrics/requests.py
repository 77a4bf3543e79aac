"""Per-request vectors and chunk times from the records; the definitions of TTFT, TPOT and E2E.

ITL and ICL are defined in gaps.py. Times are float64 nanoseconds after
``origin_ns`` (exact below 104 days), NaN where something did not happen. No Python loop runs over
requests or gaps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ampacity.loadgen.rundir.records import FAILED_KINDS, KINDS, LEFT_OUT, STATUSES, kind_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_CODE = {kind: code for code, kind in enumerate(KINDS)}
_FAILED = np.array([kind in FAILED_KINDS for kind in KINDS])
_NS = 1e-9
PART_CHUNKS = 1 << 21
CHUNKS_ARE_TOKENS = 0.99  # of the answers whose length is known by the plan
PARTS = {"cached_tokens": "input_tokens", "reasoning_tokens": "output_tokens"}
"""Counts that are part of another: a larger one is wrong."""


class RecordsError(ValueError):
    """Records that this version cannot read."""


@dataclass(frozen=True)
class Requests:
    """Columns of the records as vectors, one entry per row (all attempts), in scheduled order."""

    row: Ints  # row of the table
    stage: Ints
    attempt: Ints
    status: Ints  # index into KINDS
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
    worker: Ints
    class_: npt.NDArray[np.object_]  # the workload's class of each request
    uncounted: Bools  # nobody counted its tokens: of a good answer their number is not known
    stopped: Bools  # finish_reason "stop": the model ended by itself, with a token that has no text

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: npt.NDArray[Any] | slice) -> Requests:
        """Return the entries at an index array, mask or slice, in that order."""
        if not isinstance(which, slice) and which.dtype == np.bool_ and which.all():
            return self
        return Requests(**{f.name: getattr(self, f.name)[which] for f in fields(self)})

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


def read_requests(table: pa.Table, origin_ns: int) -> Requests:
    """Return vectors of a table with the columns of ``ampacity.loadgen.rundir.records.SCHEMA``.

    Raises RecordsError.
    """
    scheduled = _times(table, "scheduled_ns", origin_ns)
    order = np.argsort(scheduled, kind="stable")
    columns: dict[str, npt.NDArray[Any]] = {
        "row": np.arange(table.num_rows, dtype=np.int64),
        **{
            name: np.asarray(pc.fill_null(table[name], 0).to_numpy(), dtype=np.int64)
            for name in ("stage", "attempt", "worker")
        },
        "status": _kinds(table),
        "class_": _classes(table),
        "uncounted": _equals(table["token_source"], "chunks"),
        "stopped": _equals(table["finish_reason"], "stop"),
    }
    for f in fields(Requests):
        if f.name.endswith("_ns"):
            columns[f.name] = _times(table, f.name, origin_ns)
        elif f.name not in columns:
            columns[f.name] = np.asarray(table[f.name].cast(pa.float64()).to_numpy())
    for part, of_all in PARTS.items():
        columns[part] = np.where(columns[part] > columns[of_all], np.nan, columns[part])
    _leave_out_chunks(columns)
    found = Requests(**columns)
    wrong = contradicted(table, found)
    left = np.where(wrong, np.nan, found.output_tokens)
    return replace(found, output_tokens=left, uncounted=found.uncounted | wrong).take(order)


def contradicted(table: pa.Table, requests: Requests) -> Bools:
    """Return which good answers of ``table`` came in as many chunks as tokens were asked for, and
    have another count of tokens: it is wrong, shape (n,).
    """
    chunks = pc.fill_null(pc.list_value_length(table["chunk_at_us"]), 0).to_numpy()
    as_asked = pc.is_null(table["chunk_tokens"]).to_numpy(zero_copy_only=False)
    as_asked &= (
        requests.has_status("ok") & (chunks > 0) & (chunks == requests.output_tokens_planned)
    )
    counted = visible_tokens(requests)
    as_asked &= ~np.isnan(counted) & (counted != chunks) & (requests.output_tokens != chunks)
    return np.asarray(as_asked & ~(requests.stopped & (counted == chunks + 1)), dtype=np.bool_)


def _equals(column: pa.ChunkedArray, value: str) -> Bools:
    return np.asarray(pc.fill_null(pc.equal(column, value), False).to_numpy(), dtype=np.bool_)


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
    return np.asarray(shifted.cast(pa.float64(), safe=False).to_numpy(), dtype=np.float64)


def _classes(table: pa.Table) -> npt.NDArray[np.object_]:
    """Return the class of each row, one Python string per name however many rows."""
    column = pc.fill_null(table["class"], "default").combine_chunks().dictionary_encode()
    names = np.array(column.dictionary.to_pylist(), dtype=np.object_)
    return np.asarray(names[column.indices.to_numpy()] if len(names) else names, dtype=np.object_)


def _kinds(table: pa.Table) -> Ints:
    """Return the kind of each row as an index into ``KINDS``."""
    found = pc.fill_null(pc.index_in(table["status"], value_set=pa.array(STATUSES)), -1)
    kinds = np.array(found.to_numpy(), dtype=np.int64)
    if (kinds < 0).any():
        unknown = next(s for s in pc.unique(table["status"]).to_pylist() if s not in STATUSES)
        raise RecordsError(
            f"requests.parquet: column status holds {unknown!r}, which this version does not know"
        )
    errors = np.flatnonzero(kinds == _CODE["http_error"])
    codes = pc.fill_null(table["http_status"].take(pa.array(errors)), 0).to_numpy()
    each, which = np.unique(codes, return_inverse=True)
    of_each = [_CODE[kind_of("http_error", int(code))] for code in each]
    kinds[errors] = np.array(of_each, dtype=np.int64)[which]
    return kinds


@dataclass(frozen=True)
class Chunks:
    """Token-bearing chunks of n requests, flat, with the tokens in each."""

    starts: Ints  # shape (n + 1,): chunks of request i are [starts[i], starts[i + 1])
    at_us: npt.NDArray[np.uint32]  # after the request's started_ns
    tokens: npt.NDArray[np.int32] | None  # as long as at_us; None: one token per chunk everywhere
    known: Bools  # shape (n,): the tokens of each chunk of this request are known

    @cached_property
    def count(self) -> Ints:
        """Return chunks per request."""
        return np.diff(self.starts)

    @cached_property
    def owner(self) -> npt.NDArray[np.int32]:
        """Return the request of each chunk."""
        return np.repeat(np.arange(len(self.known), dtype=np.int32), self.count)

    def take(self, which: Bools) -> Chunks:
        """Return the chunks of the requests under a mask."""
        if which.all():
            return self
        kept = np.repeat(which, self.count)
        starts = np.concatenate([[0], np.cumsum(self.count[which])]).astype(np.int64)
        tokens = None if self.tokens is None else self.tokens[kept]
        return Chunks(starts, self.at_us[kept], tokens, self.known[which])

    def between(self, low: int, high: int) -> Chunks:
        """Return the chunks of requests low ... high - 1, not copied."""
        a, b = int(self.starts[low]), int(self.starts[high])
        tokens = None if self.tokens is None else self.tokens[a:b]
        return Chunks(
            self.starts[low : high + 1] - a, self.at_us[a:b], tokens, self.known[low:high]
        )

    def parts(self) -> Iterator[tuple[slice, Chunks]]:
        """Yield slices of the requests with their chunks, so that arrays per chunk stay small."""
        low, n = 0, len(self.known)
        while low < n:
            within = np.searchsorted(self.starts, self.starts[low] + PART_CHUNKS, side="right") - 1
            high = min(n, max(low + 1, int(within)))
            yield slice(low, high), self.between(low, high)
            low = high

    def tokens_in(self) -> Floats:
        """Return tokens in the chunks of each request, a chunk of unknown size taken as one."""
        if self.tokens is None:
            return self.count.astype(np.float64)
        total, has = np.zeros(len(self.known)), self.count > 0
        if has.any():
            total[has] = np.add.reduceat(self.tokens, self.starts[:-1][has], dtype=np.int64)
        return total

    def last_us(self) -> Floats:
        """Return the arrival of the last chunk of each request, 0 where there is none."""
        last, has = np.zeros(len(self.known)), self.count > 0
        last[has] = self.at_us[self.starts[1:][has] - 1]
        return last

    def first_tokens(self) -> Floats:
        """Return tokens in the first chunk, NaN where unknown or where there is no chunk."""
        first = np.where(self.known & (self.count > 0), 1.0, np.nan)
        if self.tokens is not None:
            has = np.flatnonzero(~np.isnan(first))
            first[has] = self.tokens[self.starts[has]]
        return first


def read_chunks(table: pa.Table, requests: Requests) -> Chunks:
    """Return the chunks of ``requests`` (rows of ``table``)."""
    at = _lists(table["chunk_at_us"], requests.row)
    tokens = _lists(table["chunk_tokens"], requests.row)
    count = np.asarray(pc.fill_null(pc.list_value_length(at), 0), dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(count)]).astype(np.int64)
    at_us = np.asarray(at.flatten().to_numpy(zero_copy_only=False), dtype=np.uint32)
    listed = np.asarray(pc.is_valid(tokens))
    visible = visible_tokens(requests)
    one_each = ~listed & ((count == visible) | (requests.stopped & (count + 1 == visible)))
    return Chunks(starts, at_us, _tokens_in_each(tokens, listed, count), listed | one_each)


def _tokens_in_each(
    tokens: pa.ListArray, listed: Bools, count: Ints
) -> npt.NDArray[np.int32] | None:
    """Return the tokens of every chunk, 1 where not listed; None if all are 1, as mostly."""
    values = np.asarray(tokens.flatten(), dtype=np.int32)  # of a null list it has none
    if np.all(values == 1):
        return None
    if listed.all():
        return values
    flat = np.ones(int(count.sum()), dtype=np.int32)
    flat[np.repeat(listed, count)] = values
    return flat


def _lists(column: pa.ChunkedArray, rows: Ints) -> pa.ListArray:
    if not len(rows):
        return pa.array([], type=column.type)
    low, high = int(rows.min()), int(rows.max()) + 1
    part = column.slice(low, high - low)
    # one chunk is taken as it lies; what combine_chunks gives back depends on pyarrow's version
    part = part.chunk(0) if part.num_chunks == 1 else pa.concat_arrays(part.chunks)
    if len(rows) == len(part) and np.array_equal(rows, np.arange(low, high)):
        return part
    return part.take(pa.array(rows - low))


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


def tpot_s(requests: Requests, chunks: Chunks) -> tuple[Floats, Bools]:
    """Return TPOT per request (NaN where undefined), and where it is an estimate.

    (last token - first token) / (tokens - tokens in the first chunk). Where the first chunk's
    tokens are unknown they are taken as the request's mean tokens per chunk; as 1 where no chunk
    has a time.
    """
    visible, first = visible_tokens(requests), chunks.first_tokens()
    tokens = np.where(np.isnan(visible) & chunks.known, chunks.tokens_in(), visible)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_chunk = np.where(chunks.count > 0, visible / chunks.count, 1.0)
    untimed = (chunks.count == 0) & (requests.last_token_ns > requests.first_token_ns)
    estimated = np.isnan(first) & ((chunks.count > 1) | untimed) & (visible > 0)
    divisor = tokens - np.where(estimated, mean_chunk, first)
    defined = divisor > 0
    span_s = (requests.last_token_ns - requests.first_token_ns) * _NS
    value = np.full(len(requests), np.nan)
    value[defined] = span_s[defined] / divisor[defined]
    return value, estimated & defined


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
