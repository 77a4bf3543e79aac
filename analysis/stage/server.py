"""The server's own metrics during a stage: samples of its /metrics inside the window."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from ampacity.analysis.contract.part import with_nulls
from ampacity.analysis.contract.stage import Server
from ampacity.analysis.metrics.requests import Floats

_MEANS = (
    *("running", "waiting", "prefix_hit_rate", "spec_acceptance_rate", "gpu_utilization"),
    *("tensor_active", "memory_active"),
)
_LARGEST = {
    "engines": "engines",
    "running_max": "running",
    "kv_cache_usage_max": "kv_cache_usage",
    "adapter_slots": "adapter_slots",
    "adapter_slots_used_max": "adapter_slots_used",
    "gpu_memory_used_bytes": "gpu_memory_used_bytes",
}
_GROWN = {"preemptions": "preemptions_total", "cached_tokens": "cached_tokens_total"}
_RATES = {  # the first counter's growth over the second's
    "prefix_hit_rate": ("prefix_cache_hits_total", "prefix_cache_queries_total"),
    "spec_acceptance_rate": ("spec_accepted_tokens_total", "spec_draft_tokens_total"),
    "kv_block_lifetime_s": ("kv_block_lifetime_s_total", "kv_blocks_evicted_total"),
}
SHARES = {
    "kv_cache_usage_max": "share of the KV cache",
    "prefix_hit_rate": "share of prefix hits",
    "spec_acceptance_rate": "share of accepted drafts",
    "gpu_utilization": "GPU utilization",
    "tensor_active": "share of the time of the tensor cores",
    "memory_active": "share of the time of the GPU's memory",
}
SHARE_MAX = 1.001  # with rounding
NO_SHARE = "not between 0 and 1, and left out"
ABSENT = "not on the server's /metrics, or a counter that went back"


def server_figures(samples: pa.Table | None, start_ns: int, end_ns: int) -> Server | None:
    """Return the server's figures over [``start_ns``, ``end_ns``), or None without a sample.

    Gauges are means over the samples (an acceptance of 0 by a gauge alone is that of an engine that
    drafts nothing: None) or the largest (``_LARGEST``), counters their growth. A counter that went
    back (a restarted server) says nothing: None.
    """
    if samples is None or not len(samples):
        return None
    at_ns = samples["at_ns"].to_numpy()
    inside = (at_ns >= start_ns) & (at_ns < end_ns)
    if not inside.any():
        return None

    def column(name: str) -> Floats:
        if name not in samples.column_names:  # a run directory of an older version
            return np.full(int(inside.sum()), np.nan)
        values = samples[name].to_numpy(zero_copy_only=False)[inside]
        return np.asarray(values, dtype=np.float64)

    found: dict[str, float | None] = dict.fromkeys(_RATES)
    found |= {name: _fold(column(name), np.mean) for name in _MEANS}
    found |= {name: _fold(column(of), np.max) for name, of in _LARGEST.items()}
    found |= {name: _growth(column(of)) for name, of in _GROWN.items()}
    found["spec_acceptance_rate"] = found["spec_acceptance_rate"] or None
    for name, (part, whole) in _RATES.items():
        grown, of = _growth(column(part)), _growth(column(whole))
        if grown is not None and of:
            found[name] = grown / of
    reasons = [ABSENT] if None in found.values() else []
    for name, what in SHARES.items():
        if (share := found[name]) is not None and not 0 <= share <= SHARE_MAX:
            reasons.append(f"{what} of {share:.4g}: {NO_SHARE}")
            found[name] = None
    return Server(samples=int(inside.sum()), reason="; ".join(reasons) or None, **found)


def without_figures(server: Server, reason: str) -> Server:
    """Return a server whose figures are left out, as those of other load than this run's."""
    return with_nulls(Server, samples=server.samples, reason=reason)


def _fold(values: Floats, how: Callable[[Floats], Any]) -> float | None:
    values = values[~np.isnan(values)]
    return float(how(values)) if len(values) else None


def _growth(values: Floats) -> float | None:
    values = values[~np.isnan(values)]
    if len(values) < 2 or (np.diff(values) < 0).any():
        return None
    return float(values[-1] - values[0])
