"""Gaps between chunks or tokens, computed from the chunk times slice by slice when needed.

All gaps of a large run at once would take many times the memory of its chunk times. Chunk times are
whole microseconds, so a count of each length that occurs holds every percentile exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ampacity.analysis.metrics.chunks import Chunks
from ampacity.analysis.metrics.requests import Bools, Floats, Ints

_US = 1e-6
_COUNTED_US = 1 << 22  # gaps below are counted in a table, the few of 4 s and more are sorted
_TOKEN_BITS = 31


@dataclass(frozen=True)
class Gaps:
    """The gap before each of the chunks of n requests, 0 before the first of a request.

    Gap ``i`` counts as k = ``tokens[i]`` samples of gap / k, that before a first chunk as none.
    """

    gap_us: npt.NDArray[np.uint32]
    tokens: npt.NDArray[np.int32] | None  # None: one each
    starts: Ints  # shape (n + 1,): those of request i are [starts[i], starts[i + 1])

    @property
    def firsts(self) -> Ints:
        """Return where the gaps of each request that has chunks begin."""
        return self.starts[:-1][np.diff(self.starts) > 0]

    def sizes(self) -> Floats:
        """Return the samples of each request, shape (n,)."""
        count = np.diff(self.starts)
        found: Floats = np.maximum(count - 1.0, 0.0)
        if self.tokens is None:
            return found
        found = np.zeros(len(count))
        if len(self.firsts):
            found[count > 0] = np.add.reduceat(self.tokens, self.firsts, dtype=np.int64)
        return found

    def over(self, limits_s: Sequence[float]) -> list[Floats]:
        """Return the samples of each request, shape (n,), over each of some ascending limits."""
        found, longest = [], self
        at: npt.NDArray[Any] = np.zeros(0)
        for limit_s in limits_s:
            if limit_s < 0:
                found.append(self.sizes())
                continue
            over = np.flatnonzero(longest._longer(limit_s))
            at = over if longest is self else at[over]
            tokens = None if longest.tokens is None else longest.tokens[over]
            longest = Gaps(longest.gap_us[over], tokens, self.starts)
            ends = np.searchsorted(at, self.starts)
            if tokens is not None:
                ends = np.concatenate([[0], np.cumsum(tokens)])[ends]
            found.append(np.diff(ends).astype(np.float64))
        return found

    def _longer(self, limit_s: float) -> Bools:
        """Return which gaps have longer samples than a limit, of one sample each in whole µs."""
        if self.tokens is not None:
            return np.asarray(self.gap_us * _US / np.maximum(self.tokens, 1) > limit_s)
        if not np.isfinite(limit_s):
            return np.zeros(len(self.gap_us), dtype=np.bool_)
        most = int(limit_s / _US)
        most += int((most + 1) * _US <= limit_s) - int(most * _US > limit_s)
        return np.asarray(self.gap_us > min(most, 2**32 - 1))


def chunk_gaps(chunks: Chunks) -> Gaps:
    """Return the gaps between chunks (ICL): n - 1 for n chunks, without the time to the first."""
    return _gaps(chunks.at_us, None, chunks.starts)


def token_gaps(chunks: Chunks) -> Gaps:
    """Return the gaps between tokens (ITL) of requests whose chunk tokens are known.

    A chunk of k tokens that comes g after the last one gives k samples of g / k. The time of a
    chunk without a token, by the server's count, is added to the next one's.
    """
    chunks = chunks.take(chunks.known | (chunks.count == 0))
    if chunks.tokens is None:
        return chunk_gaps(chunks)
    kept = chunks.tokens > 0
    kept[chunks.starts[:-1][chunks.count > 0]] = True
    starts = np.concatenate([[0], np.cumsum(kept)])[chunks.starts]
    return _gaps(chunks.at_us[kept], chunks.tokens[kept], starts)


def _gaps(
    at_us: npt.NDArray[np.uint32], tokens: npt.NDArray[np.int32] | None, starts: Ints
) -> Gaps:
    gap_us = np.diff(at_us, prepend=at_us[:1])
    found = Gaps(gap_us, tokens, starts)
    gap_us[found.firsts] = 0
    if tokens is not None:
        tokens[found.firsts] = 0
    return found


@dataclass(frozen=True)
class GapSeries:
    """The gaps of n requests between chunks, or (``per_token``) tokens.

    ``counted``, shape (n,): the requests whose gaps count.
    """

    chunks: Chunks
    counted: Bools
    per_token: bool

    @cached_property
    def _kept(self) -> Bools:
        """Return the requests that are looked at: without chunks they do no harm."""
        known = self.chunks.known if self.per_token else True
        return np.asarray((self.counted & known) | (self.chunks.count == 0), dtype=np.bool_)

    @cached_property
    def _over(self) -> dict[float, Floats]:
        return {}

    def _parts(self) -> Iterator[tuple[slice, Gaps]]:
        """Yield (places among the requests that are looked at, their gaps)."""
        for where, part in self.chunks.take(self._kept).parts():
            yield where, token_gaps(part) if self.per_token else chunk_gaps(part)

    def _of_all(self, kept: Floats) -> Floats:
        """Return figures of all n requests: 0 for those that are not looked at."""
        if self._kept.all():
            return kept
        found = np.zeros(len(self._kept))
        found[self._kept] = kept
        return found

    def sizes(self) -> Floats:
        """Return gaps of each request, shape (n,)."""
        parts = [gaps.sizes() for _, gaps in self._parts()]
        return self._of_all(np.concatenate([np.zeros(0), *parts]))

    def over(self, limits_s: Floats) -> Floats:
        """Return gaps of each request that are longer than each of k limits, shape (k, n)."""
        new = sorted({*limits_s.tolist()} - self._over.keys())
        parts = [gaps.over(new) for _, gaps in self._parts()] if new else []
        for k, limit_s in enumerate(new):
            each = np.concatenate([np.zeros(0), *(part[k] for part in parts)])
            self._over[limit_s] = self._of_all(each)
        return np.stack([self._over[limit_s] for limit_s in limits_s.tolist()])

    def distinct(self) -> tuple[Floats, Floats]:
        """Return every length that occurs in s, ascending, and how many samples have it."""
        table = np.zeros(_COUNTED_US, dtype=np.int64)
        most = 0
        rest = [np.zeros((2, 0), dtype=np.int64)]
        for _, gaps in self._parts():
            gap_us, tokens = gaps.gap_us, gaps.tokens
            if tokens is not None:
                one = tokens == 1
                rest.append(_pairs(gap_us[tokens > 1], tokens[tokens > 1]))
                gap_us = gap_us[one]
            if gap_us.max(initial=0) >= _COUNTED_US:
                long = gap_us >= _COUNTED_US
                rest.append(_pairs(gap_us[long], np.ones(1, dtype=np.int32)))
                gap_us = gap_us[~long]
            times = np.bincount(gap_us)
            table[: len(times)] += times
            most = max(most, len(times))
            if tokens is None:
                table[0] -= len(gaps.firsts)
        found = np.flatnonzero(table[:most])
        keys, many = np.concatenate(rest, axis=1)
        tokens = keys & ((1 << _TOKEN_BITS) - 1)
        values = np.concatenate([found * _US, (keys >> _TOKEN_BITS) * _US / tokens])
        counts = np.concatenate([table[found], many * tokens]).astype(np.float64)
        order = np.argsort(values, kind="stable")
        return values[order], counts[order]


def _pairs(gap_us: npt.NDArray[np.uint32], tokens: npt.NDArray[np.int32]) -> Ints:
    """Return the pairs of gap and tokens that occur, in one number each, and how often."""
    keys = (gap_us.astype(np.int64) << _TOKEN_BITS) | tokens
    return np.stack(np.unique(keys, return_counts=True))
