"""Prepare a workload for plotting: quantiles, spikes and histograms of its lengths."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ampacity.workloads.archetypes import ARCHETYPES
from ampacity.workloads.fit.lengths import SHOWN, quantile, spikes
from ampacity.workloads.lengths.parse import Lengths
from ampacity.workloads.profile import Workload, read_yaml
from ampacity.workloads.schedule import closed_schedule

_DRAWS = 50_000
_BINS = 24


def view(
    workload: Workload, measured: dict[str, Any] | None = None, seed: int = 1
) -> dict[str, Any]:
    """Return JSON-able lengths by ``_DRAWS`` draws, and ``measured`` as in the profile."""
    rng = np.random.default_rng(seed)
    sides = {
        side: _side(lengths, rng)
        for side, lengths in (("input", workload.input_tokens), ("output", workload.output_tokens))
    }
    lone = workload.prefixes is not None and workload.sessions is None
    shared = closed_schedule(workload, requests=_DRAWS, seed=seed, stage=0).shared if lone else None
    return {
        "name": workload.name,
        "source": workload.source,
        "sides": sides,
        "described": workload.describe(),
        "measured": measured or {},
        "note": shared and shared.note,
    }


def read_measured(name_or_path: str) -> dict[str, Any]:
    """Return ``measured`` of a profile, empty where it has none. Raises WorkloadError."""
    held = None if name_or_path in ARCHETYPES else read_yaml(Path(name_or_path))
    measured = held.get("measured") if isinstance(held, dict) else None
    return measured if isinstance(measured, dict) else {}


def _side(lengths: Lengths, rng: np.random.Generator) -> dict[str, Any]:
    drawn = lengths.sample(rng, _DRAWS)
    found, counts = np.unique(drawn, return_counts=True)
    values, share = found.astype(float), counts / _DRAWS
    return {
        "text": lengths.describe()["text"],
        "mean": float(lengths.mean()),
        "quantiles": {f"p{q * 100:g}": quantile(values, share, q) for q in SHOWN},
        "spikes": spikes(values, share, _DRAWS),
        "bins": _bins(drawn),
        "curve": np.quantile(drawn, np.linspace(0, 1, 101), method="inverted_cdf").tolist(),
    }


def _bins(drawn: NDArray[np.int64]) -> list[dict[str, float]]:
    """Return shares in bins of equal log width, from the smallest to the largest length."""
    low, high = max(float(drawn.min()), 1.0), float(drawn.max())
    edges = np.unique(np.rint(np.geomspace(low, high + 1, _BINS + 1)))
    shares = np.histogram(drawn, bins=edges)[0] / len(drawn)
    return [
        {"low": float(a), "high": float(b) - 1, "share": float(s)}
        for a, b, s in zip(edges, edges[1:], shares, strict=False)
    ]
