"""Scan the lists of tokens in the records without holding them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

LISTS = ("chunk_at_us", "chunk_tokens")
_Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class ListScan:
    """Facts about the lists of n rows, each of shape (n,)."""

    count: npt.NDArray[np.int32]  # chunks
    listed: _Bools  # the tokens of each chunk are known
    several: _Bools  # and are not one each
    apart: _Bools  # and are not as many as the times
    negative: _Bools  # one of them is null or below zero
    falling: _Bools  # a time is before the one ahead of it

    def take(self, rows: npt.NDArray[Any]) -> ListScan:
        return ListScan(*(getattr(self, f.name)[rows] for f in fields(self)))


def scan_lists(batches: Iterable[pa.RecordBatch]) -> ListScan:
    """Return the facts about batches with the columns of ``LISTS``."""
    found = [_scan(*(batch[name] for name in LISTS)) for batch in batches]
    if not found:
        return ListScan(np.zeros(0, np.int32), *(np.zeros(0, np.bool_) for _ in range(5)))
    return ListScan(*(np.concatenate(parts) for parts in zip(*found, strict=True)))


def _scan(at: pa.ListArray, tokens: pa.ListArray) -> tuple[npt.NDArray[Any], ...]:
    at_n, tokens_n = pc.list_value_length(at), pc.list_value_length(tokens)
    count, listed = pc.fill_null(at_n, 0).to_numpy(), tokens.is_valid().to_numpy(False)
    ends, us = np.cumsum(count), at.flatten().to_numpy(zero_copy_only=False)
    falls = us[1:] < us[:-1]
    falls[ends[(ends > 0) & (ends < len(us))] - 1] = False  # the next request begins
    several = negative = np.zeros(len(at), np.bool_)
    if listed.any():
        held = tokens.flatten().to_numpy(zero_copy_only=False)
        token_ends = np.cumsum(pc.fill_null(tokens_n, 0))
        several = _rows_of(np.flatnonzero(held != 1), token_ends)
        negative = _rows_of(np.flatnonzero(~(held >= 0)), token_ends)
    apart = pc.fill_null(pc.not_equal(at_n, tokens_n), False).to_numpy(zero_copy_only=False)
    return count, listed, several, apart, negative, _rows_of(np.flatnonzero(falls) + 1, ends)


def _rows_of(elements: npt.NDArray[Any], ends: npt.NDArray[Any]) -> _Bools:
    """Return the rows that hold these elements; ``ends``: where the elements of each row end."""
    rows = np.zeros(len(ends), np.bool_)
    rows[np.searchsorted(ends, elements, "right")] = True
    return rows
