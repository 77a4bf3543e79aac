"""The chunks of the requests, with the times and tokens of each; the definition of TPOT."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ampacity.analysis.metrics.requests import Bools, Floats, Ints, Requests, visible_tokens
from ampacity.loadgen.rundir.parquet import lists_between
from ampacity.loadgen.rundir.records import SCHEMA

PART_CHUNKS = 1 << 18  # of which the arrays stay in the caches of a core
_NS = 1e-9


@dataclass(frozen=True)
class Chunks:
    """Token-bearing chunks of n requests; their times are read when they are asked for.

    Of many requests they take gigabytes: ``parts`` gives some at a time.
    """

    count: npt.NDArray[np.integer[Any]]  # shape (n,)
    known: Bools  # shape (n,): the tokens of each chunk of this request are known
    one_each: bool  # every chunk holds one token, as far as that is known
    # (times in us after started_ns, tokens or None with ``one_each``) of requests low ... high - 1
    read: Callable[[int, int], tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32] | None]]

    @cached_property
    def starts(self) -> Ints:
        """Return where the chunks of each request begin, shape (n + 1,)."""
        return np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)

    @property
    def at_us(self) -> npt.NDArray[np.uint32]:
        """Return the time of every chunk after the ``started_ns`` of its request."""
        return self._read[0]

    @property
    def tokens(self) -> npt.NDArray[np.int32] | None:
        """Return the tokens in every chunk; None: one each."""
        return self._read[1]

    @cached_property
    def _read(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32] | None]:
        return self.read(0, len(self.known))

    @cached_property
    def owner(self) -> npt.NDArray[np.int32]:
        """Return the request of each chunk."""
        return np.repeat(np.arange(len(self.known), dtype=np.int32), self.count)

    def take(self, which: Bools) -> Chunks:
        """Return the chunks of the requests under a mask."""
        rows = np.flatnonzero(which)
        if len(rows) == len(which):
            return self
        if len(rows) and len(rows) == rows[-1] - rows[0] + 1:
            return self.between(int(rows[0]), int(rows[-1]) + 1)

        def read(low: int, high: int) -> Any:
            if low == high:
                return self.read(0, 0)
            first, last = int(rows[low]), int(rows[high - 1]) + 1
            at_us, tokens = self.read(first, last)
            kept = np.repeat(which[first:last], self.count[first:last])
            return at_us[kept], None if tokens is None else tokens[kept]

        return Chunks(self.count[rows], self.known[rows], self.one_each, read)

    def between(self, low: int, high: int) -> Chunks:
        """Return the chunks of requests low ... high - 1."""
        return replace(
            self,
            count=self.count[low:high],
            known=self.known[low:high],
            read=lambda a, b: self.read(low + a, low + b),
        )

    def parts(self) -> Iterator[tuple[slice, Chunks]]:
        """Yield slices of the requests with their chunks, so that arrays per chunk stay small."""
        low, n = 0, len(self.known)
        while low < n:
            within = np.searchsorted(self.starts, self.starts[low] + PART_CHUNKS, side="right") - 1
            high = min(n, max(low + 1, int(within)))
            yield slice(low, high), self.between(low, high)
            low = high

    @cached_property
    def _of_each(self) -> tuple[Floats, Floats, Floats]:
        """Return (tokens in all chunks, tokens in the first, time of the last in us) by request."""
        n = len(self.known)
        total, first, last = self.count.astype(np.float64), np.ones(n), np.zeros(n)
        for where, part in self.parts():
            has = np.flatnonzero(part.count > 0)
            begins, ends = part.starts[has], part.starts[has + 1] - 1
            last[where][has] = part.at_us[ends]
            if part.tokens is not None and len(has):
                total[where][has] = np.add.reduceat(part.tokens, begins, dtype=np.int64)
                first[where][has] = part.tokens[begins]
        return total, first, last

    def tokens_in(self) -> Floats:
        """Return tokens in the chunks of each request, a chunk of unknown size taken as one."""
        return self.count.astype(np.float64) if self.one_each else self._of_each[0]

    def first_tokens(self) -> Floats:
        """Return tokens in the first chunk, NaN where unknown or where there is no chunk."""
        first = 1.0 if self.one_each else self._of_each[1]
        return np.where(self.known & (self.count > 0), first, np.nan)

    def last_us(self) -> Floats:
        """Return the arrival of the last chunk of each request, 0 where there is none."""
        return self._of_each[2]


def read_chunks(table: pa.Table, requests: Requests) -> Chunks:
    """Return the chunks of ``requests`` (rows of ``table``)."""
    r, rows, one_each = requests, requests.row, not requests.several.any()
    visible = visible_tokens(r)
    as_counted = (r.chunks == visible) | (r.stopped & (r.chunks + 1 == visible))
    span = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)

    def lists(name: str, low: int, high: int) -> pa.ListArray:
        return _lists(table, name, rows[low:high], span)

    def read(low: int, high: int) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32] | None]:
        flat = lists("chunk_at_us", low, high).flatten().to_numpy(zero_copy_only=False)
        at_us = np.asarray(flat, dtype=np.uint32)
        if one_each:
            return at_us, None
        tokens = np.ones(len(at_us), dtype=np.int32)
        # of a null list it has none
        values = lists("chunk_tokens", low, high).flatten().to_numpy(zero_copy_only=False)
        tokens[np.repeat(r.listed[low:high], r.chunks[low:high])] = values
        return at_us, tokens

    return Chunks(r.chunks, r.listed | as_counted, one_each, read)


def _lists(table: pa.Table, name: str, rows: Ints, span: tuple[int, int]) -> pa.ListArray:
    if not len(rows):
        return pa.array([], type=SCHEMA.field(name).type)
    low, high = int(rows.min()), int(rows.max()) + 1
    part = lists_between(table, name, low, high, span)
    # one chunk is taken as it lies; what combine_chunks gives back depends on pyarrow's version
    part = part.chunk(0) if part.num_chunks == 1 else pa.concat_arrays(part.chunks)
    if len(rows) == len(part) and np.array_equal(rows, np.arange(low, high)):
        return part
    return part.take(pa.array(rows - low))


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
