"""HdrHistogram, three significant digits, in its V2 compressed base64 form (hdrhistogram.org).

Any HdrHistogram library reads the text back. Values are whole microseconds, 1 or more.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

_DIGITS, _HALF_BITS = (
    3,
    10,
)  # 2 x 1024 sub-buckets: the smallest power of two that resolves 1 in 1000
_HIGHEST_US = (1 << 32) - 1  # 71 minutes, as far as chunk times go
_COOKIE, _COMPRESSED_COOKIE = 0x1C849313, 0x1C849314
_HEADER = struct.Struct(">IIIIQQd")


def encode_seconds(values_s: Floats, weights: Floats | None = None) -> str:
    """Finite values in seconds, with how often each counts; rounded to whole counts."""
    us = np.clip(np.round(values_s * 1e6), 1, _HIGHEST_US).astype(np.int64)
    bucket = np.maximum(np.frexp(us.astype(np.float64))[1] - (_HALF_BITS + 1), 0)
    index = (bucket << _HALF_BITS) + (us >> bucket)
    counts = np.round(np.bincount(index, weights=weights)).astype(np.int64)
    payload = _zigzag(counts)
    header = _HEADER.pack(_COOKIE, len(payload), 0, _DIGITS, 1, _HIGHEST_US, 1.0)
    packed = zlib.compress(header + payload, 9)
    return base64.b64encode(struct.pack(">II", _COMPRESSED_COOKIE, len(packed)) + packed).decode()


def _zigzag(counts: Counts) -> bytes:
    """LEB128 of zigzag integers: a count, or minus the length of a run of zeros."""
    out, filled, last = bytearray(), np.flatnonzero(counts), -1
    for index, count in zip(filled.tolist(), counts[filled].tolist(), strict=True):
        if index - last > 1:
            _append(out, (index - last - 1) * 2 - 1)
        _append(out, count * 2)
        last = index
    return bytes(out)


def _append(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
