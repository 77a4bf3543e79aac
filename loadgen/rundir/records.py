"""The record of one request: the contract between load generator and analysis.

Times are integers, ns of CLOCK_MONOTONIC (``time.monotonic_ns``). What did not happen is ``None``,
never 0. Every scheduled request ends as exactly one record with attempt 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

import pyarrow as pa

from ampacity.loadgen.rundir import arrow as arrow  # starts it

SCHEMA_VERSION = 1

STATUSES: tuple[str, ...] = (
    "ok",
    "http_error",  # a status code of 400 or more
    "stream_error",  # an error object inside a 200 stream, whatever follows it
    "truncated",  # no proper end of the HTTP body, or neither a finish reason nor [DONE]
    "empty",  # a proper end, and no token by any count
    "timeout",  # the client's own limit (total, or between tokens)
    "connect_error",  # no connection: refused, DNS, TLS, out of ports or descriptors
    "reset",  # the connection broke before the response headers were complete
    "protocol_error",  # not HTTP, or not JSON where JSON is expected
    "shed",  # never sent: --max-in-flight was reached
    "unfinished",  # in flight at cutoff: end of the run, Ctrl-C or a lost worker
    "cancelled",  # by the workload: the user left
    "too_long",  # refused: prompt and answer exceed the context
)

LEFT_OUT: tuple[str, ...] = ("cancelled", "too_long")
"""Statuses without information on the server: in no percentile or share."""
FAILED_STATUSES: frozenset[str] = frozenset(STATUSES) - {"ok", "unfinished", *LEFT_OUT}
"""Statuses that count as infinitely slow in every percentile judged against an SLO."""

_BY_CODE = dict.fromkeys((429, 529), "rate_limited") | dict.fromkeys((401, 403, 407), "auth")
_BY_CODE[503] = "overloaded"
_BY_CLASS = {3: "redirect", 4: "bad_request", 5: "upstream"}  # of all other codes
HTTP_KINDS = tuple(dict.fromkeys((*_BY_CODE.values(), *_BY_CLASS.values())))
KINDS = (*STATUSES, *HTTP_KINDS)
FAILED_KINDS = FAILED_STATUSES.union(HTTP_KINDS)
REFUSED = {"rate_limited", "auth", "bad_request"}
"""Kinds that are answers of an endpoint that is alive."""


def kind_of(status: str, http_status: int | None) -> str:
    """Return the status of a record, that of an HTTP error by its code if that is known."""
    if status != "http_error" or http_status is None:
        return status
    return _BY_CODE.get(http_status) or _BY_CLASS.get(http_status // 100, status)


TOKEN_SOURCES: tuple[str, ...] = ("usage", "usage_per_chunk", "logprobs", "tokenizer", "chunks")

CACHE = "a cache"
"""``answered_by`` where a header of the answer reports a hit in a cache of whole answers."""
THEN = ", then "  # in ``answered_by`` where the model changed within the answer

CHUNK_AT_MAX_US = 2**32 - 1
"""``chunk_at_us`` is a uint32: times over 71 minutes after the start saturate."""


TOGETHER_SHARE = 0.1  # of an answer's time
TOGETHER_TOKEN_S = 0.0001  # per token: 10,000 tokens/s for one user, which no engine makes


def came_together(span_s: Any, lasts_s: Any, tokens: Any) -> Any:
    """Tell whether answers of several tokens came in one piece, of numbers or arrays.

    ``span_s``: from the first token to the last. A gateway that asks for the whole answer and cuts
    it up itself sends the pieces faster than any engine makes tokens.
    """
    at_once = span_s <= TOGETHER_TOKEN_S * (tokens - 1)
    return (tokens > 1) & at_once & (span_s <= TOGETHER_SHARE * lasts_s)


@dataclass(slots=True)
class RequestRecord:
    """One row of requests.parquet: ``*_ns`` are monotonic, ``*_at_us`` µs after started_ns."""

    request_id: int  # number in the global schedule
    stage: int  # index into run.json's "stages"
    scheduled_ns: int
    status: str
    attempt: int = 0
    class_: str = "default"  # column "class"
    session_id: str | None = None
    turn: int | None = None
    worker: int = 0
    target: str | None = None
    dispatched_ns: int | None = None  # released by the pacer
    connected_ns: int | None = None  # the socket was connected, TLS included
    started_ns: int | None = None  # first byte handed to that socket
    sent_ns: int | None = None  # when the call began that handed the last byte to that socket
    headers_ns: int | None = None  # response headers complete
    first_event_ns: int | None = None  # first SSE event of any kind
    first_token_ns: int | None = None
    first_answer_ns: int | None = None  # first token that is not reasoning
    last_token_ns: int | None = None
    ended_ns: int | None = None  # the response ended or was given up
    http_status: int | None = None
    error: str | None = None
    finish_reason: str | None = None
    input_tokens_planned: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens_planned: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    token_source: str | None = None
    chunk_at_us: Sequence[int] = field(default_factory=list)  # token-bearing chunks only
    chunk_tokens: Sequence[int] | None = None  # as long as chunk_at_us, or None where unknown
    retry_after_s: float | None = None
    server_request_id: str | None = None
    # rate limits as the answer's headers state them; reset: s until all of the limit is back
    quota_requests: float | None = None
    quota_requests_left: float | None = None
    quota_requests_reset_s: float | None = None
    quota_tokens: float | None = None
    quota_tokens_left: float | None = None
    quota_tokens_reset_s: float | None = None
    quota_window_s: float | None = None
    answered_by: str | None = None  # the model that the answer names, or CACHE


def _arrow_type(name: str, annotation: str) -> pa.DataType:
    if name == "request_id" or name.endswith("_ns"):
        return pa.int64()
    if name == "chunk_at_us":
        return pa.list_(pa.uint32())
    kinds = {"str": pa.string(), "float": pa.float64(), "Sequence[int]": pa.list_(pa.int32())}
    return kinds.get(annotation.removesuffix(" | None"), pa.int32())


_NAMES = [f.name for f in fields(RequestRecord)]
_values = attrgetter(*_NAMES)
SCHEMA: pa.Schema = pa.schema(
    [pa.field(f.name.rstrip("_"), _arrow_type(f.name, str(f.type))) for f in fields(RequestRecord)],
    metadata={"ampacity_schema_version": str(SCHEMA_VERSION)},
)


def complete(table: pa.Table, names: Sequence[str] = _NAMES) -> pa.Table:
    """Return a table with the columns of ``names`` that older runs lack, as nulls.

    Raises ArrowInvalid where a damaged file left texts or lists that are none.
    """
    table.validate(full=True)
    for name in names:
        if name.startswith(("quota_", "answered_")) and name not in table.column_names:
            nulls = pa.nulls(table.num_rows, SCHEMA.field(name).type)
            table = table.append_column(SCHEMA.field(name), nulls)
    return table


def to_batch(records: Sequence[RequestRecord]) -> pa.RecordBatch:
    """Return the records as one Arrow batch of ``SCHEMA``, in their order."""
    columns = zip(*map(_values, records), strict=True) if records else [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [
            _lists(values, kind) if pa.types.is_list(kind) else pa.array(values, type=kind)
            for values, kind in zip(columns, SCHEMA.types, strict=True)
        ],
        schema=SCHEMA,
    )


def earlier(batch: pa.RecordBatch, by_ns: int) -> pa.RecordBatch:
    """Return a batch with all its times earlier by ``by_ns``: those of another machine's clock."""
    if not by_ns:
        return batch
    import pyarrow.compute as pc  # slow to import

    columns = [
        pc.subtract(column, by_ns) if field.name.endswith("_ns") else column
        for field, column in zip(batch.schema, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _lists(values: Sequence[Sequence[int] | None], kind: pa.ListType) -> pa.ListArray:
    """Build a list column from one flat array: 100 times as fast as from nested lists."""
    offsets: list[int | None] = []
    flat = array("I" if kind.value_type == pa.uint32() else "i")  # 32 bits each
    for value in values:
        offsets.append(None if value is None else len(flat))  # a null offset makes a null list
        flat.extend(value or ())
    items = pa.Array.from_buffers(kind.value_type, len(flat), [None, pa.py_buffer(flat)])
    return pa.ListArray.from_arrays(
        pa.array([*offsets, len(flat)], type=pa.int32()), items, type=kind
    )
