"""Latency histograms in HdrHistogram's V2 compressed base64 form (hdrhistogram.org)."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from ampacity.analysis.metrics.requests import Floats

if TYPE_CHECKING:
    from hdrh.histogram import HdrHistogram

SIGNIFICANT_DIGITS = 3
_US_PER_MS = 1000.0
_HALF_BITS = 10  # values below 2^11 have a bucket each, every further doubling has 2^10 of them
_HIGHEST_US = (1 << 32) - 1  # 71 minutes, the range of chunk times


def encode_seconds(values_s: Floats, weights: Floats | None = None) -> str:
    """Return the encoded ``histogram_of`` the values."""
    return str(histogram_of(values_s, weights).encode().decode())


def percentile_text(values_s: Floats, weights: Floats | None = None) -> bytes:
    """Return the percentile distribution of ``histogram_of`` the values, in ms (a .hgrm file)."""
    text, histogram = io.BytesIO(), histogram_of(values_s, weights)
    histogram.output_percentile_distribution(text, _US_PER_MS)
    # the library's own end does not scale the deviation, and plotters do not read its last line
    mean, deviation, most = (
        us / _US_PER_MS
        for us in (
            histogram.get_mean_value(),
            histogram.get_stddev(),
            histogram.get_max_value(),
        )
    )
    end = (
        f"#[Mean    = {mean:12.3f}, StdDeviation   = {deviation:12.3f}]\n"
        f"#[Max     = {most:12.3f}, Total count    = {histogram.get_total_count():12}]\n"
        f"#[Buckets = {histogram.bucket_count:12}, SubBuckets     = {histogram.sub_bucket_count:12}]\n"
    )
    return text.getvalue().partition(b"#[")[0] + end.encode()


def histogram_of(values_s: Floats, weights: Floats | None = None) -> HdrHistogram:
    """Return the histogram of finite values in seconds, recorded in whole microseconds >= 1.

    ``weights``: how often each value counts; a bucket's sum is rounded to a whole count.
    """
    from hdrh.histogram import HdrHistogram

    us = np.clip(np.round(values_s * 1e6), 1, _HIGHEST_US).astype(np.int64)
    # the library records one value per call, so values are binned first
    shift = np.maximum(np.frexp(us.astype(np.float64))[1] - (_HALF_BITS + 1), 0)
    counts = np.round(np.bincount((shift << _HALF_BITS) + (us >> shift), weights)).astype(np.int64)
    filled = np.flatnonzero(counts)
    shift = np.maximum((filled >> _HALF_BITS) - 1, 0)
    bucket_us = (filled - (shift << _HALF_BITS)) << shift
    histogram = HdrHistogram(1, _HIGHEST_US, SIGNIFICANT_DIGITS)
    for value_us, count in zip(bucket_us.tolist(), counts[filled].tolist(), strict=True):
        histogram.record_value(value_us, count)
    return histogram
