"""Prefix sharing that was planned beside what the server's cache found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from analysis.metrics import Requests


def compare_sharing(requests: Requests, metas: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    """For each stage: the share of input tokens that an infinite prefix cache would have found by the schedule, and the
    share that the server says it found, over its good answers. None where nothing was shared by design."""
    found = []
    for meta in metas:
        if meta.get("cached_share_planned") is None:
            continue
        here = requests.take((requests.stage == meta["index"]) & requests.has_status("ok"))
        said = ~np.isnan(here.cached_tokens) & (here.input_tokens > 0)
        row: dict[str, Any] = {
            "stage": meta["index"],
            "planned": meta["cached_share_planned"],
            "realised": None,
        }
        if said.any():
            row["realised"] = float(here.cached_tokens[said].sum() / here.input_tokens[said].sum())
        else:
            row["realised_reason"] = "the server does not report cached tokens"
        found.append(row)
    return found or None
