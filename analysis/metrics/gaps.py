"""Gaps between chunks or tokens, computed from the chunk times slice by slice when needed.

All gaps of a large run at once would take many times the memory of its chunk times. Chunk times are
whole microseconds, so a count of each length that occurs holds every percentile exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.requests import Bools, Chunks, Floats

_US = 1e-6
_COUNTED_US = 1 << 22  # gaps below are counted in a table, the few of 4 s and more are sorted
_TOKEN_BITS = 31


@dataclass(frozen=True)
class Gaps:
    """Gap ``i`` ends with a chunk of k = ``tokens[i]`` tokens of request ``owner[i]``.

    It counts as k samples of gap / k.
    """

    gap_us: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.int32] | None  # None: one each
    owner: npt.NDArray[np.integer[Any]]

    @property
    def value_s(self) -> Floats:
        each = 1.0 if self.tokens is None else self.tokens
        return np.asarray(self.gap_us * _US / each, dtype=np.float64)

    def of(self, which: Bools) -> Gaps:
        """Return the gaps of the requests under a mask."""
        keep = which[self.owner]
        return Gaps(
            self.gap_us[keep], None if self.tokens is None else self.tokens[keep], self.owner[keep]
        )


def chunk_gaps(chunks: Chunks) -> Gaps:
    """Return the gaps between chunks (ICL): n - 1 for n chunks, without the time to the first."""
    owner = chunks.owner
    inside = owner[1:] == owner[:-1]
    return Gaps((chunks.at_us[1:] - chunks.at_us[:-1])[inside], None, owner[1:][inside])


def token_gaps(chunks: Chunks) -> Gaps:
    """Return the gaps between tokens (ITL) of requests whose chunk tokens are known.

    A chunk of k tokens that comes g after the last one gives k samples of g / k. The time of a
    chunk without a token, by the server's count, is added to the next one's.
    """
    if chunks.tokens is None:
        return chunk_gaps(chunks).of(chunks.known)
    owner = chunks.owner
    first = np.zeros(len(owner), dtype=np.bool_)
    first[chunks.starts[:-1][chunks.count > 0]] = True
    keep = chunks.known[owner] & (first | (chunks.tokens > 0))
    owner, at_us, tokens = owner[keep], chunks.at_us[keep], chunks.tokens[keep]
    inside = owner[1:] == owner[:-1]
    return Gaps((at_us[1:] - at_us[:-1])[inside], tokens[1:][inside], owner[1:][inside])


@dataclass(frozen=True)
class GapSeries:
    """The gaps of n requests between chunks, or (``per_token``) tokens.

    ``counted``, shape (n,): the requests whose gaps count.
    """

    chunks: Chunks
    counted: Bools
    per_token: bool

    def _parts(self) -> Iterator[tuple[slice, Gaps]]:
        """Return (requests, their gaps, owners counted from the first of them)."""
        for where, part in self.chunks.parts():
            gaps = token_gaps(part) if self.per_token else chunk_gaps(part)
            counted = self.counted[where]
            yield where, gaps if counted.all() else gaps.of(counted)

    def sizes(self) -> Floats:
        """Return gaps of each request, shape (n,)."""
        found = np.zeros(len(self.counted))
        for where, gaps in self._parts():
            found[where] = np.bincount(gaps.owner, gaps.tokens, where.stop - where.start)
        return found

    def over(self, limits_s: Floats) -> Floats:
        """Return gaps of each request that are longer than each of k limits, shape (k, n)."""
        found = np.zeros((len(limits_s), len(self.counted)))
        for where, gaps in self._parts():
            for row, limit_s in enumerate(limits_s):
                over = np.flatnonzero(_longer(gaps, limit_s))
                weights = None if gaps.tokens is None else gaps.tokens[over]
                found[row, where] = np.bincount(gaps.owner[over], weights, where.stop - where.start)
        return found

    def distinct(self) -> tuple[Floats, Floats]:
        """Return every length that occurs in s, ascending, and how many samples have it."""
        table = np.zeros(_COUNTED_US, dtype=np.int64)
        most = 0
        rest = [np.zeros((2, 0), dtype=np.int64)]
        for _, gaps in self._parts():
            plain = gaps.gap_us < _COUNTED_US
            if gaps.tokens is not None:
                plain &= gaps.tokens == 1
            short = gaps.gap_us if plain.all() else gaps.gap_us[plain]
            times = np.bincount(short)
            table[: len(times)] += times
            most = max(most, len(times))
            if len(short) < len(plain):
                tokens = np.ones(len(plain), dtype=np.int64) if gaps.tokens is None else gaps.tokens
                keys = (gaps.gap_us[~plain].astype(np.int64) << _TOKEN_BITS) | tokens[~plain]
                rest.append(np.stack(np.unique(keys, return_counts=True)))
        found = np.flatnonzero(table[:most])
        keys, many = np.concatenate(rest, axis=1)
        tokens = keys & ((1 << _TOKEN_BITS) - 1)
        values = np.concatenate([found * _US, (keys >> _TOKEN_BITS) * _US / tokens])
        counts = np.concatenate([table[found], many * tokens]).astype(np.float64)
        order = np.argsort(values, kind="stable")
        return values[order], counts[order]


def _longer(gaps: Gaps, limit_s: float) -> Bools:
    """Return ``value_s > limit_s``, compared in whole µs where each gap is one sample."""
    if gaps.tokens is not None:
        return np.asarray(gaps.value_s > limit_s)
    if not np.isfinite(limit_s) or limit_s < 0:
        return np.full(len(gaps.gap_us), limit_s < 0)
    most = int(limit_s / _US)
    most += int((most + 1) * _US <= limit_s) - int(most * _US > limit_s)
    return np.asarray(gaps.gap_us > min(most, 2**32 - 1))
